//! Stage 3 (`parameter_offload.py`, `partition_parameters.py`): a rank holds a part of every parameter, and all of
//! it while a module uses it.

mod coordinator;
mod optimizer;
mod reduction;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use engine::{Collective, Dims, Session, Tensor, release, with_backward};
use ledger::{Category, Dtype, Stream};

use super::{Job, Stage};
use crate::parallel::Parallel;
use crate::setup::Setup;
use coordinator::Coordinator;

pub(super) use optimizer::Gathered;

/// Where parameters are gathered, and where gradients are reduced, if they overlap with the computation.
const GATHER: Stream = Stream(1);
const REDUCTION: Stream = Stream(2);

/// How much of a parameter is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Part,
    /// All of it, once its gather is waited for.
    Inflight,
    Whole,
}

/// A parameter whose parts the ranks have.
struct Param {
    tensor: Tensor,
    numel: u64,
    /// Elements of a rank's part.
    part_numel: u64,
    /// This rank's part.
    part: RefCell<Option<Tensor>>,
    /// Small: it stays whole until the update.
    persists: bool,
    status: Cell<Status>,
    /// The modules that use it now.
    users: RefCell<Vec<usize>>,
    is_trained: Cell<bool>,
}

impl Param {
    /// Elements of all parts.
    const fn padded(&self, world: u64) -> u64 {
        self.part_numel * world
    }
}

/// The parameters of a model under stage 3.
pub(crate) struct Parts {
    job: Job,
    params: RefCell<Vec<Rc<Param>>>,
    /// The parameters of each module that has any, by index.
    modules: RefCell<Vec<Vec<usize>>>,
    coordinator: RefCell<Coordinator>,
    /// What a parameter that is not here lies in.
    nothing: Tensor,
    /// All parts of this rank, one after the other, once an optimizer has them.
    flat: RefCell<Option<Tensor>>,
}

/// A module that has parameters of its own.
pub(crate) struct Owner {
    parts: Rc<Parts>,
    module: usize,
}

impl Parts {
    /// Where the ranks of `setup` share the parameters so.
    pub(crate) fn new(session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Option<Rc<Self>> {
        let Some(Parallel::Zero(options)) = &setup.parallel else { return None };
        if options.stage != Stage::Three {
            return None;
        }
        let job = Job::new(session, options, setup, dtype);
        Some(Rc::new(Self {
            params: RefCell::default(),
            modules: RefCell::default(),
            coordinator: RefCell::default(),
            nothing: Tensor::without_storage(session, [0], dtype, false),
            flat: RefCell::default(),
            job,
        }))
    }

    /// Takes over a parameter that was made whole: this rank keeps its part of it.
    pub(crate) fn add(&self, tensor: &Tensor) {
        let (job, numel) = (&self.job, tensor.numel());
        let part_numel = numel.div_ceil(job.world);
        let persists = numel <= job.options.param_persistence_threshold;
        let category = Category::Parameter;
        let part = if job.offloads_parameters {
            Tensor::of_host(&job.session, "part", category, [part_numel], tensor.dtype())
        } else {
            tensor.companion("part", category, &[part_numel], tensor.dtype())
        };
        job.session.collective(Collective::Broadcast, tensor.nbytes());
        tensor.move_into(&self.nothing);
        self.params.borrow_mut().push(Rc::new(Param {
            tensor: tensor.clone(),
            numel,
            part_numel,
            part: RefCell::new(Some(part)),
            persists,
            status: Cell::new(Status::Part),
            users: RefCell::default(),
            is_trained: Cell::new(false),
        }));
    }

    /// The module whose own parameters are `tensors`.
    pub(crate) fn owner(self: &Rc<Self>, tensors: &[&Tensor]) -> Owner {
        let params = self.params.borrow();
        let index = |tensor: &&Tensor| params.iter().position(|param| param.tensor.same(tensor));
        let own = tensors.iter().filter_map(index).collect();
        let mut modules = self.modules.borrow_mut();
        modules.push(own);
        Owner { parts: Rc::clone(self), module: modules.len() - 1 }
    }

    /// A parameter that belongs to no module that brings its own together.
    pub(crate) fn unowned(&self) -> bool {
        let modules = self.modules.borrow();
        (0..self.params.borrow().len()).any(|index| !modules.iter().flatten().any(|own| *own == index))
    }

    fn param(&self, index: usize) -> Rc<Param> {
        Rc::clone(&self.params.borrow()[index])
    }

    fn on<R>(&self, stream: Stream, f: impl FnOnce() -> R) -> R {
        let stream = if self.job.options.overlaps() { stream } else { Stream(0) };
        self.job.session.on_stream(stream, f)
    }

    fn buffer(&self, what: &'static str, count: u64, dtype: Dtype) -> Tensor {
        Tensor::of_category(&self.job.session, what, Category::CommunicationBuffer, [count], dtype)
    }

    /// A copy of a part on the device, where it is on the host.
    fn part_on_device(&self, param: &Param) -> Option<Tensor> {
        self.job.offloads_parameters.then(|| {
            self.job.session.add_traffic(0, param.part_numel * param.tensor.dtype().size());
            self.buffer("part_on_device", param.part_numel, param.tensor.dtype())
        })
    }

    /// Gathers a parameter by itself: it lies in the buffer of the parts. What is sent of the host's part lives until
    /// the gather is waited for.
    fn gather_alone(&self, param: &Param) -> Option<Tensor> {
        let count = param.padded(self.job.world);
        let whole = self.buffer("gathered", count, param.tensor.dtype());
        let part = self.part_on_device(param);
        self.job.session.collective(Collective::AllGather, whole.nbytes());
        param.tensor.move_into(&whole);
        part
    }

    /// The only rank has all of it: its part on the device.
    fn take_part(&self, param: &Param) {
        match self.part_on_device(param) {
            Some(part) => param.tensor.move_into(&part),
            None => self.flat.borrow().iter().for_each(|flat| param.tensor.move_into(flat)),
        }
    }

    /// Lets go of all but the part of a parameter that nobody uses.
    fn free(&self, param: &Param) {
        // What computes may not have come to its end.
        if self.job.options.overlaps() {
            param.tensor.record_stream(Stream(0));
        }
        param.tensor.move_into(&self.nothing);
        param.status.set(Status::Part);
    }
}

impl Owner {
    /// The forward pass of the module over `input`, its parameters brought together around it.
    pub(crate) fn run(&self, input: &Tensor, forward: impl FnOnce(&Tensor) -> Tensor) -> Tensor {
        let session = &self.parts.job.session;
        if session.has_stopped() {
            return forward(input);
        }
        self.parts.fetch(self.module, true);
        let (parts, module) = (Rc::clone(&self.parts), self.module);
        let watched = input.requires_grad() && session.grad_enabled();
        let input = if watched {
            with_backward(vec![input.clone()], move || parts.release(module, false)).swap_remove(0)
        } else {
            input.clone()
        };
        let result = forward(&input);
        release!(input);
        if session.has_stopped() {
            return result;
        }
        self.parts.release(self.module, true);
        self.watched(result)
    }

    /// `result`, whose gradient brings the parameters together again.
    fn watched(&self, result: Tensor) -> Tensor {
        if !result.requires_grad() || !result.session().grad_enabled() {
            return result;
        }
        let (parts, module) = (Rc::clone(&self.parts), self.module);
        with_backward(vec![result], move || parts.fetch(module, false)).swap_remove(0)
    }
}

/// A module without parameters of its own: entering it, and the gradient of its result, bring those that come
/// next together.
#[derive(Default)]
pub(crate) struct Passage(pub(crate) Option<Owner>);

impl Passage {
    /// Before the forward pass of the module.
    pub(crate) fn enter(&self) {
        if let Some(owner) = self.0.as_ref().filter(|owner| !owner.parts.job.session.has_stopped()) {
            owner.parts.fetch(owner.module, true);
        }
    }

    /// After it: its result.
    pub(crate) fn leave(&self, result: Tensor) -> Tensor {
        match self.0.as_ref().filter(|owner| !owner.parts.job.session.has_stopped()) {
            Some(owner) => owner.watched(result),
            None => result,
        }
    }

    /// The input of the module, whose gradients come together before they leave it.
    pub(crate) fn over(&self, input: &Tensor) -> Tensor {
        let session = input.session();
        if self.0.is_none() || session.has_stopped() || !session.grad_enabled() || !input.requires_grad() {
            return input.clone();
        }
        with_backward(vec![input.clone()], || {}).swap_remove(0)
    }

    /// The forward pass of the module.
    pub(crate) fn run(&self, forward: impl FnOnce() -> Tensor) -> Tensor {
        self.enter();
        self.leave(forward())
    }
}

/// The forward pass of a module over `input`; `owner`: where ranks share its parameters.
pub(crate) fn run_gathered(
    owner: Option<&Owner>,
    input: &Tensor,
    forward: impl FnOnce(&Tensor) -> Tensor,
) -> Tensor {
    match owner {
        Some(owner) => owner.run(input, forward),
        None => forward(input),
    }
}

/// The extents of a list of elements.
fn list(count: u64) -> Dims {
    Dims::new(&[count])
}
