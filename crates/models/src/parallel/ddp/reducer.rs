//! The reducer: gradients are copied into buckets as they come, and a bucket whose gradients are all there is summed
//! over the ranks. The first backward pass has one bucket a dtype; what comes after it, buckets in the order in which
//! gradients came.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use engine::{Collective, Session, Tensor, release};
use ledger::{Category, Dtype};

use super::buckets::{assign, assign_in_order};
use super::{Ddp, sync};
use crate::network::Built;
use crate::parallel::Ranks;

/// A model whose ranks sum their gradients.
pub(crate) struct Reducer {
    session: Rc<Session>,
    options: Ddp,
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
    /// Whether the micro-batch that runs sums its gradients.
    sums: Cell<bool>,
    /// Whether the forward pass that comes sends the buffers: the first does, and each after one that summed.
    sends_buffers: Cell<bool>,
}

/// Gradients that are summed together.
struct Bucket {
    memory: Tensor,
    /// Gradients in it.
    members: usize,
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
            parameters: model.trainable.clone(),
            buffers,
            buckets: RefCell::default(),
            places: RefCell::new(vec![(0, 0); model.trainable.len()]),
            summed: Cell::new(0),
            arrived: RefCell::default(),
            rebuilt: Cell::new(false),
            sums: Cell::new(true),
            sends_buffers: Cell::new(true),
        });
        reducer.session.scoped("ddp", || reducer.construct(&model.states, world));
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
        let mut buckets = assign_in_order(&self.sizes(0..self.parameters.len()), &[u64::MAX]);
        buckets.reverse();
        self.make(buckets);
    }

    fn sizes(&self, parameters: impl IntoIterator<Item = usize>) -> Vec<(Dtype, u64)> {
        let size = |index: usize| (self.parameters[index].dtype(), self.parameters[index].nbytes());
        parameters.into_iter().map(size).collect()
    }

    /// Memory for `buckets` of parameters. Gradients that lie in older ones move.
    fn make(&self, buckets: Vec<Vec<usize>>) {
        for members in buckets {
            let of = |index: &usize| &self.parameters[*index];
            let elements = members.iter().map(|index| of(index).numel()).sum();
            let memory = sync::buffer(&self.session, "bucket", elements, of(&members[0]).dtype());
            let mut buckets = self.buckets.borrow_mut();
            let mut start = 0;
            for index in &members {
                if self.options.gradient_as_bucket_view && of(index).grad().is_some() {
                    self.move_gradient(*index, &memory, start);
                }
                self.places.borrow_mut()[*index] = (buckets.len(), start);
                start += of(index).numel();
            }
            buckets.push(Bucket { memory, members: members.len(), pending: members.len() });
        }
    }

    /// The gradient of a parameter lies in a bucket from here on.
    fn move_gradient(&self, index: usize, memory: &Tensor, start: u64) {
        let parameter = &self.parameters[index];
        memory.become_category(Category::Gradient);
        parameter.set_grad(Some(memory.window(start, parameter.shape())));
    }

    /// After the gradient of a parameter has been accumulated.
    fn gradient_came(&self, index: usize) {
        if !self.sums.get() {
            return;
        }
        if !self.rebuilt.get() {
            self.arrived.borrow_mut().push(index);
        }
        let mut buckets = self.buckets.borrow_mut();
        let (at, start) = self.places.borrow()[index];
        let bucket = &mut buckets[at];
        let here = self.parameters[index].grad().is_some_and(|grad| grad.shares_memory(&bucket.memory));
        if self.options.gradient_as_bucket_view && !here {
            self.move_gradient(index, &bucket.memory, start);
        }
        bucket.pending -= 1;
        // Buckets are summed in their order.
        while let Some(bucket) = buckets.get(self.summed.get()).filter(|bucket| bucket.pending == 0) {
            self.session.collective(Collective::AllReduce, bucket.memory.nbytes());
            self.summed.set(self.summed.get() + 1);
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
        self.session.scoped("ddp", || {
            self.rebuild();
            if self.sends_buffers.replace(self.sums.get()) {
                sync::broadcast(&self.session, &self.buffers);
            }
        });
        self.summed.set(0);
        for bucket in &mut *self.buckets.borrow_mut() {
            bucket.pending = bucket.members;
        }
    }
}
