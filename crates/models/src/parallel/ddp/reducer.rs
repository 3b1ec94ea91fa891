//! The reducer: gradients are copied into buckets as they come, and a bucket whose gradients are all there is summed
//! over the ranks. The first backward pass has one bucket a dtype; what comes after it, buckets in the order in which
//! gradients came.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use engine::{Collective, Scope, Session, Tensor, release};
use ledger::{Category, Dtype};

use super::buckets::{assign, assign_in_order};
use super::{Ddp, sync};
use crate::network::Built;
use crate::parallel::Ranks;

/// A model whose ranks sum their gradients.
pub(crate) struct Reducer {
    session: Rc<Session>,
    options: Ddp,
    scope: Scope,
    parameters: Vec<Tensor>,
    /// The dtype and bytes of each buffer of the model.
    buffers: Vec<(Dtype, u64)>,
    buckets: RefCell<Vec<Bucket>>,
    /// The bucket of each parameter, and the element at which its gradient begins there.
    places: RefCell<Vec<(usize, u64)>>,
    /// Buckets that the running backward pass has summed.
    summed: Cell<usize>,
    /// Parameters in the order in which their gradients came, until buckets are made in that order.
    arrived: RefCell<Vec<usize>>,
    rebuilt: Cell<bool>,
    /// Which parameters had a gradient, where that is asked.
    used: RefCell<Option<Tensor>>,
    /// Whether the micro-batch that runs sums its gradients.
    sums: Cell<bool>,
    /// Whether the forward pass that comes sends the buffers: the first does, and each after one that summed.
    sends_buffers: Cell<bool>,
}

/// Gradients that are summed together.
struct Bucket {
    elements: u64,
    dtype: Dtype,
    /// Where it is made as gradients come, none between.
    memory: Option<Tensor>,
    /// Parameters.
    members: Vec<usize>,
    /// Gradients that have not come.
    pending: usize,
}

impl Reducer {
    /// `DistributedDataParallel(model)` among `world` ranks.
    pub(crate) fn new(session: &Rc<Session>, options: &Ddp, model: &Built, world: u32) -> Rc<Self> {
        let of = |tensor: &Tensor| (tensor.dtype(), tensor.nbytes());
        let buffers: Vec<(Dtype, u64)> = model.buffers.iter().map(of).collect();
        let reducer = Rc::new(Self {
            session: Rc::clone(session),
            options: options.clone(),
            scope: session.scoped("ddp", || session.scope()),
            parameters: model.trainable.clone(),
            buffers,
            buckets: RefCell::default(),
            places: RefCell::new(vec![(0, 0); model.trainable.len()]),
            summed: Cell::new(0),
            arrived: RefCell::default(),
            rebuilt: Cell::new(options.find_unused_parameters),
            used: RefCell::default(),
            sums: Cell::new(true),
            sends_buffers: Cell::new(true),
        });
        session.in_scope(reducer.scope, || reducer.construct(&model.states, world));
        for (index, parameter) in reducer.parameters.iter().enumerate() {
            let reducer: Weak<Self> = Rc::downgrade(&reducer);
            parameter.after_accumulator(Rc::new(move || {
                if let Some(reducer) = reducer.upgrade() {
                    reducer.gradient_came(index);
                }
            }));
        }
        reducer
    }

    fn construct(&self, states: &[(Dtype, u64)], world: u32) {
        if self.options.init_sync {
            sync::verify(&self.session, &self.parameters, world);
            let all: Vec<(Dtype, u64)> = states.iter().chain(&self.buffers).copied().collect();
            sync::broadcast(&self.session, &all);
        }
        let looks = self.options.find_unused_parameters;
        let caps = if looks { self.options.caps() } else { [u64::MAX; 2] };
        let mut buckets = assign_in_order(&self.sizes(0..self.parameters.len()), &caps);
        buckets.reverse();
        self.make(buckets);
        if looks {
            let count = self.parameters.len() as u64;
            self.used.replace(Some(sync::buffer(&self.session, "used_parameters", count, Dtype::Int32)));
        }
    }

    fn sizes(&self, parameters: impl IntoIterator<Item = usize>) -> Vec<(Dtype, u64)> {
        let size = |index: usize| (self.parameters[index].dtype(), self.parameters[index].nbytes());
        parameters.into_iter().map(size).collect()
    }

    /// Buckets of these parameters.
    fn make(&self, buckets: Vec<Vec<usize>>) {
        for members in buckets {
            let dtype = self.parameters[members[0]].dtype();
            let at = self.buckets.borrow().len();
            let mut elements = 0;
            for index in &members {
                self.places.borrow_mut()[*index] = (at, elements);
                elements += self.parameters[*index].numel();
            }
            let pending = members.len();
            let mut bucket = Bucket { elements, dtype, memory: None, members, pending };
            if !self.options.lazy_bucket_allocation {
                self.allocate(&mut bucket);
            }
            self.buckets.borrow_mut().push(bucket);
        }
    }

    /// Memory for a bucket, to which the gradients that are there already move where they lie in buckets.
    fn allocate(&self, bucket: &mut Bucket) {
        let make = || sync::buffer(&self.session, "bucket", bucket.elements, bucket.dtype);
        let memory = self.session.in_scope(self.scope, make);
        for index in &bucket.members {
            if self.parameters[*index].grad().is_some() {
                self.hold_gradient(*index, &memory);
            }
        }
        bucket.memory = Some(memory);
    }

    /// The gradient of a parameter lies in its bucket from here on, where gradients do.
    fn hold_gradient(&self, index: usize, memory: &Tensor) {
        let parameter = &self.parameters[index];
        let here = parameter.grad().is_some_and(|grad| grad.shares_memory(memory));
        if here || !self.options.gradient_as_bucket_view {
            return;
        }
        memory.become_category(Category::Gradient);
        let (_, start) = self.places.borrow()[index];
        parameter.set_grad(Some(memory.window(start, parameter.shape())));
    }

    /// After the gradient of a parameter has been accumulated.
    fn gradient_came(self: &Rc<Self>, index: usize) {
        if !self.sums.get() {
            return;
        }
        if !self.rebuilt.get() {
            self.arrived.borrow_mut().push(index);
        }
        let mut buckets = self.buckets.borrow_mut();
        let (at, _) = self.places.borrow()[index];
        let bucket = &mut buckets[at];
        if bucket.memory.is_none() {
            self.allocate(bucket);
        }
        if let Some(memory) = &bucket.memory {
            self.hold_gradient(index, memory);
        }
        bucket.pending -= 1;
        // Buckets are summed in their order.
        while let Some(bucket) = buckets.get(self.summed.get()).filter(|bucket| bucket.pending == 0) {
            self.session.collective(Collective::AllReduce, bucket.elements * bucket.dtype.size());
            self.summed.set(self.summed.get() + 1);
        }
        if self.summed.get() < buckets.len() {
            return;
        }
        if let Some(used) = &*self.used.borrow() {
            self.session.collective(Collective::AllReduce, used.nbytes());
        }
        if self.options.lazy_bucket_allocation {
            let this = Rc::clone(self);
            self.session.after_backward(move || this.let_go());
        }
    }

    /// Gradients are summed and back in their places: lazy buckets die.
    fn let_go(&self) {
        for bucket in &mut *self.buckets.borrow_mut() {
            let memory = bucket.memory.take();
            drop(memory);
        }
    }

    /// Buckets in the order in which gradients came, once they have.
    fn rebuild(&self) {
        let arrived = self.arrived.take();
        if self.rebuilt.get() || arrived.is_empty() {
            return;
        }
        self.rebuilt.set(true);
        let buckets = assign(&self.sizes(arrived.iter().copied()), &self.options.caps());
        sync::tell_buckets(&self.session, buckets.len(), arrived.len());
        release!(self.buckets.take());
        let of_parameters = |members: Vec<usize>| members.into_iter().map(|member| arrived[member]).collect();
        self.make(buckets.into_iter().map(of_parameters).collect());
    }
}

impl Ranks for Reducer {
    fn begin(&self, last: bool) {
        self.sums.set(last || !self.options.no_sync);
    }

    fn before_forward(&self) {
        self.session.in_scope(self.scope, || {
            self.rebuild();
            if self.sends_buffers.replace(self.sums.get()) {
                sync::broadcast(&self.session, &self.buffers);
            }
        });
        self.summed.set(0);
        for bucket in &mut *self.buckets.borrow_mut() {
            bucket.pending = bucket.members.len();
        }
    }
}
