//! The units of FSDP2: when one gathers its parameters, when it lets go of them, and how it reduces gradients.
//!
//! Units are served by streams of their own, whose memory the allocator keeps apart: one that gathers, one that
//! reduces, and where copies are replicated one that sums over these.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use engine::{Collective, Dims, Scope, Session, Tensor, release, with_backward};
use ledger::{Category, Dtype, Stream};

use super::collectives::{chunk_cat, split_copy};
use super::param::{Place, Shard};
use super::{Fsdp2, Reshard};

/// The stream on which shards are brought together for a gather.
const GATHER: Stream = Stream(1);
/// The stream on which gradients are reduced.
const REDUCE: Stream = Stream(2);
/// The stream on which reduced gradients are summed over the copies.
const ALL_REDUCE: Stream = Stream(3);

/// The training of a model whose units share their state.
pub(crate) struct Job {
    session: Rc<Session>,
    options: Fsdp2,
    /// Among the ranks that share a copy.
    place: Place,
    /// Copies of the parameters.
    copies: u64,
    on_host: bool,
    /// The root first, then the blocks.
    units: RefCell<Vec<Rc<Unit>>>,
    initialized: Cell<bool>,
    /// The last gather of the forward pass, which lives until the next one is brought together.
    last_gather: RefCell<Option<Tensor>>,
    /// What a reduction reads, which lives until the next one begins.
    reduced: RefCell<Vec<Tensor>>,
    /// Units in the order of their forward passes.
    order: RefCell<Vec<Rc<Unit>>>,
    callback_queued: Cell<bool>,
    reduces: Cell<bool>,
}

/// What a unit does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Idle,
    Forward,
    PreBackward,
    PostBackward,
}

/// What a unit holds of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Shard,
    /// Besides, the part of a smaller group of ranks.
    Part,
    Whole,
}

/// A gather under way: what it gathers into; nothing for a rank alone.
struct Gather(Option<Tensor>);

/// A module whose parameters are gathered together.
pub(crate) struct Unit {
    job: Weak<Job>,
    scope: Scope,
    is_root: bool,
    params: RefCell<Vec<Rc<Shard>>>,
    /// Of the module, whose backward lasts to the end of the pass.
    module: Cell<Activity>,
    /// Of the parameters.
    activity: Cell<Activity>,
    held: Cell<Held>,
    gather: RefCell<Option<Gather>>,
    /// The reduced gradients that are summed over the copies.
    all_reduced: RefCell<Option<Tensor>>,
    /// Its forward passes in the order of all.
    passes: RefCell<Vec<usize>>,
}

impl Job {
    pub(crate) fn new(
        session: &Rc<Session>,
        options: &Fsdp2,
        (rank, world): (u32, u32),
        on_host: bool,
    ) -> Rc<Self> {
        let shards = options.shards(world).max(1);
        let job = Rc::new(Self {
            session: Rc::clone(session),
            options: options.clone(),
            place: Place { rank: u64::from(rank % shards), ranks: u64::from(shards) },
            copies: u64::from(world / shards),
            on_host,
            units: RefCell::default(),
            initialized: Cell::new(false),
            last_gather: RefCell::default(),
            reduced: RefCell::default(),
            order: RefCell::default(),
            callback_queued: Cell::new(false),
            reduces: Cell::new(true),
        });
        job.unit(true);
        job
    }

    /// A unit of the current module.
    pub(crate) fn unit(self: &Rc<Self>, is_root: bool) -> Rc<Unit> {
        let unit = Rc::new(Unit {
            job: Rc::downgrade(self),
            scope: self.session.scope(),
            is_root,
            params: RefCell::default(),
            module: Cell::new(Activity::Idle),
            activity: Cell::new(Activity::Idle),
            held: Cell::new(Held::Shard),
            gather: RefCell::default(),
            all_reduced: RefCell::default(),
            passes: RefCell::default(),
        });
        self.units.borrow_mut().push(Rc::clone(&unit));
        unit
    }

    /// The unit of the whole model.
    pub(crate) fn root(&self) -> Rc<Unit> {
        Rc::clone(&self.units.borrow()[0])
    }

    /// Whether the micro-batch that begins reduces its gradients.
    pub(super) fn reduce_gradients(&self, last: bool) {
        self.reduces.set(last || !self.options.no_sync);
    }

    /// The first forward pass pads what `to_empty` has made.
    fn initialize(&self) {
        if self.initialized.replace(true) {
            return;
        }
        for unit in &*self.units.borrow() {
            unit.params.borrow().iter().for_each(|param| param.pad(self.on_host));
        }
    }

    fn release_last_gather(&self) {
        let last = self.last_gather.take();
        drop(last);
    }

    /// After the last node of backward.
    fn finish_backward(&self) {
        let units = self.units.borrow().clone();
        for unit in &units {
            if unit.activity.get() != Activity::PostBackward && !unit.is_empty() {
                unit.post_backward(self);
            }
            unit.activity.set(Activity::Idle);
            unit.module.set(Activity::Idle);
        }
        for unit in &units {
            release!(unit.all_reduced.take(), unit.gather.take());
            unit.passes.borrow_mut().clear();
        }
        self.release_last_gather();
        release!(self.order.take());
        for input in self.reduced.take() {
            drop(input);
        }
        self.callback_queued.set(false);
    }

    fn buffer(&self, what: &'static str, elements: u64, dtype: Dtype) -> Tensor {
        Tensor::of_category(&self.session, what, Category::CommunicationBuffer, [elements], dtype)
    }
}

impl Unit {
    /// A parameter of this unit.
    pub(crate) fn add(
        &self,
        name: &'static str,
        shape: Dims,
        (dtype, compute): (Dtype, Option<Dtype>),
    ) -> Option<Rc<Shard>> {
        let job = self.job.upgrade()?;
        let compute = compute.unwrap_or(dtype);
        let shard = Rc::new(Shard::new(&job.session, name, shape, (dtype, compute), job.on_host, job.place));
        self.params.borrow_mut().push(Rc::clone(&shard));
        Some(shard)
    }

    /// The forward pass of the module over `inputs`, whose results `forward` gives.
    pub(crate) fn run(
        self: &Rc<Self>,
        inputs: Vec<Tensor>,
        forward: impl FnOnce(&[Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let Some(job) = self.job.upgrade().filter(|job| !job.session.has_stopped()) else {
            return forward(&inputs);
        };
        let inputs = self.pre_forward(&job, inputs);
        let results = forward(&inputs);
        if !job.session.has_stopped() {
            self.post_forward(&job, &results);
        }
        results
    }

    fn pre_forward(self: &Rc<Self>, job: &Rc<Job>, inputs: Vec<Tensor>) -> Vec<Tensor> {
        // A recomputation: the hook of backward has gathered, or does so now.
        if self.module.get() == Activity::PreBackward {
            if self.held.get() != Held::Whole {
                self.unshard(job);
                self.wait_for_unshard(job);
            }
            return cast(job, inputs);
        }
        self.module.set(Activity::Forward);
        job.initialize();
        let inputs = cast(job, inputs);
        self.activity.set(Activity::Forward);
        self.unshard(job);
        self.wait_for_unshard(job);
        if !job.session.grad_enabled() || self.is_empty() {
            return inputs;
        }
        let wanted: Vec<Tensor> = inputs.iter().filter(|input| input.requires_grad()).cloned().collect();
        let unit = Rc::clone(self);
        let mut handed_on = with_backward(wanted, move || {
            if let Some(job) = unit.job.upgrade() {
                unit.post_backward(&job);
            }
        })
        .into_iter();
        let hand_on = |input: Tensor| match input.requires_grad() {
            true => handed_on.next().unwrap_or(input),
            false => input,
        };
        inputs.into_iter().map(hand_on).collect()
    }

    fn post_forward(self: &Rc<Self>, job: &Rc<Job>, results: &[Tensor]) {
        if self.module.get() == Activity::PreBackward {
            return;
        }
        if !job.session.is_in_backward() && !self.is_empty() {
            self.reshard(job);
            let mut order = job.order.borrow_mut();
            self.passes.borrow_mut().push(order.len());
            order.push(Rc::clone(self));
        }
        self.activity.set(Activity::Idle);
        if job.session.grad_enabled() {
            for result in results.iter().filter(|result| result.requires_grad()) {
                let unit = Rc::clone(self);
                result.on_gradient(move || unit.pre_backward());
            }
        }
        self.module.set(Activity::Idle);
        if self.is_root {
            job.release_last_gather();
        }
    }

    fn pre_backward(&self) {
        let Some(job) = self.job.upgrade() else { return };
        self.module.set(Activity::PreBackward);
        if !job.callback_queued.replace(true) {
            let job = Rc::clone(&job);
            let session = Rc::clone(&job.session);
            session.after_backward(move || job.finish_backward());
        }
        if self.activity.get() == Activity::PreBackward || self.is_empty() {
            return;
        }
        self.activity.set(Activity::PreBackward);
        self.unshard(&job);
        self.wait_for_unshard(&job);
        self.defer_upcast(&job);
        let pass = self.passes.borrow_mut().pop();
        let before = pass.and_then(|pass| Some(Rc::clone(job.order.borrow().get(pass.checked_sub(1)?)?)));
        if let Some(before) = before {
            let activity = before.activity.replace(Activity::PreBackward);
            before.unshard(&job);
            before.activity.set(activity);
        }
    }

    /// Whether the module has no parameters of its own.
    fn is_empty(&self) -> bool {
        self.params.borrow().is_empty()
    }

    /// A gradient that would be cast to a wider dtype stays in that of the pass until it is reduced, unless it
    /// begins to be kept over micro-batches.
    fn defer_upcast(&self, job: &Job) {
        for param in self.params.borrow().iter() {
            let dtype = self.dtype_of_gradient(job, param);
            let wider = dtype.size() > param.whole.dtype().size();
            let deferred = wider && (job.reduces.get() || param.whole.grad().is_some());
            param.whole.set_grad_dtype((!deferred).then_some(dtype));
        }
    }

    /// What was deferred and not reduced is cast now.
    fn upcast(&self, job: &Job) {
        for param in self.params.borrow().iter() {
            let dtype = self.dtype_of_gradient(job, param);
            if let Some(grad) = param.whole.grad().filter(|grad| grad.dtype() != dtype) {
                param.whole.set_grad(Some(grad.to(dtype)));
            }
        }
    }

    /// The dtype in which gradients are kept and reduced.
    fn dtype_of_gradient(&self, job: &Job, param: &Shard) -> Dtype {
        job.options.reduce_dtype.unwrap_or_else(|| param.sharded.dtype())
    }

    fn unshard(&self, job: &Job) {
        if self.gather.borrow().is_some() || self.held.get() == Held::Whole || self.is_empty() {
            return;
        }
        let ranks = self.ranks_of_gather(job);
        let gather = (ranks > 1).then(|| self.in_scope(job, || self.all_gather(job, ranks)));
        self.gather.replace(Some(Gather(gather)));
    }

    /// The ranks that bring the parameters together now.
    fn ranks_of_gather(&self, job: &Job) -> u64 {
        match (self.held.get(), job.options.reshard_after_forward) {
            (Held::Part, Reshard::Among(ranks)) => u64::from(ranks),
            _ => job.place.ranks,
        }
    }

    fn all_gather(&self, job: &Job, ranks: u64) -> Tensor {
        let params = self.params.borrow();
        job.session.on_stream(GATHER, || {
            let is_flat = |param: &Rc<Shard>| !job.on_host && param.sharded.dtype() != param.whole.dtype();
            let copied: Vec<Option<Tensor>> =
                params.iter().filter(|param| !is_flat(param)).map(|param| self.input(job, param)).collect();
            let flat = params.iter().filter(|param| is_flat(param));
            let elements: u64 = flat.clone().map(|param| param.source().0).sum();
            let dtype = flat.clone().next().map(|param| param.whole.dtype());
            let flat = dtype.map(|dtype| job.buffer("all_gather_input", elements, dtype));
            let bytes: u64 = params.iter().map(|param| param.source().0 * param.whole.dtype().size()).sum();
            let first = params.first().map_or(Dtype::Uint8, |param| param.whole.dtype());
            let dtype =
                if params.iter().all(|param| param.whole.dtype() == first) { first } else { Dtype::Uint8 };
            let output = job.buffer("all_gather_output", bytes / dtype.size() * ranks, dtype);
            job.session.collective(Collective::AllGather, bytes * ranks);
            release!(flat);
            for input in copied.into_iter().rev() {
                drop(input);
            }
            output
        })
    }

    /// What this rank brings of `param`, where it is not the shard itself.
    fn input(&self, job: &Job, param: &Shard) -> Option<Tensor> {
        let (elements, dtype) = param.source();
        let compute = param.whole.dtype();
        let on_device = (job.on_host && self.held.get() == Held::Shard).then(|| {
            job.session.add_traffic(0, elements * dtype.size());
            job.buffer("all_gather_input", elements, dtype)
        });
        if dtype == compute {
            return on_device;
        }
        let cast = job.buffer("all_gather_input", elements, compute);
        drop(on_device);
        Some(cast)
    }

    fn wait_for_unshard(&self, job: &Job) {
        let Some(Gather(output)) = self.gather.take() else { return };
        let forward = self.activity.get() == Activity::Forward;
        if forward {
            job.release_last_gather();
        }
        let ranks = self.ranks_of_gather(job);
        let params = self.params.borrow();
        match &output {
            None => {
                let mut input = None;
                for param in params.iter() {
                    // The name holds what it had until it is bound anew.
                    let new = self.in_scope(job, || self.input(job, param));
                    drop(std::mem::replace(&mut input, new));
                    param.allocate(1);
                }
                drop(input);
            }
            Some(_) => {
                params.iter().for_each(|param| param.allocate(ranks));
                let part = |param: &Rc<Shard>| param.source().0 * param.whole.dtype().size();
                let parts: Vec<u64> = params.iter().map(part).collect();
                self.in_scope(job, || split_copy(&job.session, &parts, ranks));
            }
        }
        params.iter().for_each(|param| param.gathered());
        self.held.set(Held::Whole);
        if forward && output.is_some() {
            job.last_gather.replace(output);
        }
    }

    fn reshard(&self, job: &Job) {
        if self.activity.get() == Activity::Forward {
            let kept = match (self.is_root, job.options.root_reshard_after_forward) {
                (true, None | Some(false)) => Reshard::Keep,
                (true, Some(true)) => Reshard::Free,
                (false, _) => job.options.reshard_after_forward,
            };
            match kept {
                Reshard::Keep => return,
                Reshard::Among(ranks) => {
                    let ranks = u64::from(ranks);
                    self.params.borrow().iter().for_each(|param| param.keep_part(job.place.ranks, ranks));
                    return self.held.set(Held::Part);
                }
                Reshard::Free => {}
            }
        }
        if self.held.get() != Held::Shard {
            self.params.borrow().iter().for_each(|param| param.free());
            self.held.set(Held::Shard);
        }
    }

    fn post_backward(&self, job: &Job) {
        self.activity.set(Activity::PostBackward);
        if !job.reduces.get() {
            self.upcast(job);
            return self.reshard(job);
        }
        let params = self.params.borrow();
        let (with_grad, grads): (Vec<&Rc<Shard>>, Vec<Tensor>) =
            params.iter().filter_map(|param| Some((param, param.whole.grad()?))).unzip();
        with_grad.iter().for_each(|param| param.whole.set_grad(None));
        self.reshard(job);
        for input in job.reduced.take() {
            drop(input);
        }
        if grads.is_empty() {
            return;
        }
        let old = self.all_reduced.take();
        drop(old);
        self.in_scope(job, || self.reduce(job, &with_grad, grads));
    }

    fn reduce(&self, job: &Job, params: &[&Rc<Shard>], mut grads: Vec<Tensor>) {
        let ranks = job.place.ranks;
        let dtype = self.dtype_of_gradient(job, params[0]);
        let elements: u64 = params.iter().map(|param| param.padded_whole(ranks)).sum();
        let input = job.buffer("reduce_scatter_input", elements, dtype);
        let wholes: Vec<u64> = params.iter().map(|param| param.padded_whole(ranks)).collect();
        chunk_cat(&job.session, &grads, &wholes, ranks, dtype);
        while let Some(grad) = grads.pop() {
            drop(grad);
        }
        let output =
            job.session.on_stream(REDUCE, || job.buffer("reduce_scatter_output", elements / ranks, dtype));
        if ranks > 1 {
            job.session.collective(Collective::ReduceScatter, input.nbytes());
        }
        let mut stream = REDUCE;
        if job.copies > 1 {
            job.session.collective(Collective::AllReduce, output.nbytes());
            self.all_reduced.replace(Some(output.clone()));
            stream = ALL_REDUCE;
        }
        job.session.on_stream(stream, || keep_gradients(job, params, output));
        job.reduced.borrow_mut().push(input);
    }

    fn in_scope<R>(&self, job: &Job, f: impl FnOnce() -> R) -> R {
        job.session.in_scope(self.scope, f)
    }
}

/// Each parameter's shard of `output` becomes its gradient, or is added to it.
fn keep_gradients(job: &Job, params: &[&Rc<Shard>], output: Tensor) {
    let of_shards = params[0].sharded.dtype();
    let output = if output.dtype() == of_shards {
        output
    } else {
        let cast = job.buffer("reduced_gradient", output.numel(), of_shards);
        drop(output);
        cast
    };
    let mut start = 0;
    for param in params {
        let mine = output.window(start, param.sharded.shape());
        start += param.padded_whole(1);
        let old = param.sharded.grad();
        if job.on_host {
            job.session.add_traffic(mine.nbytes(), 0);
            let copy = param.sharded.host_companion("grad", Category::Gradient);
            release!(mine);
            if old.is_none() {
                param.sharded.set_grad(Some(copy));
            }
            continue;
        }
        if old.is_none() {
            output.become_category(Category::Gradient);
            param.sharded.set_grad(Some(mine));
        }
    }
}

/// Inputs in the dtype of the pass.
fn cast(job: &Job, inputs: Vec<Tensor>) -> Vec<Tensor> {
    let Some(dtype) = job.options.param_dtype else { return inputs };
    inputs.into_iter().map(|input| if input.is_floating() { input.to(dtype) } else { input }).collect()
}
