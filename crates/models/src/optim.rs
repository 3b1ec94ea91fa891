//! The optimizers, as far as they touch memory: state, temporaries of a step, and who dies when.
//!
//! State is made at the first step, parameter by parameter; `step` counters live on the host unless
//! the step is one kernel or can be captured in a CUDA graph.

mod adafactor;
mod adagrad;
mod adam;
mod clip;
mod lion;
mod low_bit;
mod masters;
mod muon;
mod offloaded;
mod rmsprop;
mod sgd;

use engine::Tensor;
use ledger::{Category, Dtype};

use crate::setup::{Offload, Optimizer as Kind, OptimizerImpl, Setup};

pub(crate) use clip::clip_grad_norm;
pub(crate) use masters::Masters;
pub(crate) use offloaded::Offloaded;

/// What of a setup an optimizer obeys.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    kind: Kind,
    implementation: OptimizerImpl,
    momentum: bool,
    nesterov: bool,
    weight_decay: bool,
    amsgrad: bool,
    capturable: bool,
    /// State in fp32, by one kernel of bitsandbytes a parameter.
    fp32_state: bool,
}

impl Form {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self {
            kind: setup.optimizer,
            implementation: match setup.optimizer_impl {
                Some(implementation) => implementation,
                None if setup.offloads(Offload::Parameters) || setup.offloads(Offload::Optimizer) => {
                    OptimizerImpl::ForLoop
                }
                None => setup.optimizer.default_implementation(),
            },
            momentum: setup.momentum != 0.0,
            nesterov: setup.nesterov,
            weight_decay: setup.weight_decay() != 0.0,
            amsgrad: setup.amsgrad,
            capturable: setup.capturable,
            fp32_state: setup.fp32_state,
        }
    }
}

/// A parameter and what the optimizer keeps of it.
struct Slot {
    parameter: Tensor,
    state: Vec<Tensor>,
}

impl Slot {
    /// State of a shape of its own.
    fn keep(&mut self, what: &str, shape: &[u64], dtype: Dtype) {
        self.state.push(self.parameter.companion(what, Category::OptimizerState, shape, dtype));
    }

    /// State like the parameter.
    fn keep_like(&mut self, what: &str) {
        let shape = self.parameter.shape();
        self.keep(what, &shape, self.parameter.dtype());
    }

    /// A counter of steps on the device.
    fn keep_step(&mut self) {
        self.keep("step", &[], Dtype::Fp32);
    }
}

/// A buffer like `tensor` that dies within the step.
fn temporary(tensor: &Tensor, what: &'static str) -> Tensor {
    tensor.beside(what, Category::Temporary, tensor.shape(), tensor.dtype())
}

/// One fp32 value beside `tensor`, as arithmetic on a `step` there makes.
fn scalar(tensor: &Tensor, what: &'static str) -> Tensor {
    tensor.beside(what, Category::Temporary, [], Dtype::Fp32)
}

/// A list of tensors, which dies as lists of Python and C++ do: the last element first.
pub(crate) struct List(Vec<Tensor>);

impl List {
    /// A buffer like each parameter.
    fn like(slots: &[Slot], what: &'static str) -> Self {
        slots.iter().map(|slot| temporary(&slot.parameter, what)).collect()
    }

    /// A value for each parameter.
    fn scalars(slots: &[Slot], what: &'static str) -> Self {
        slots.iter().map(|slot| scalar(&slot.parameter, what)).collect()
    }
}

impl FromIterator<Tensor> for List {
    fn from_iter<I: IntoIterator<Item = Tensor>>(tensors: I) -> Self {
        Self(tensors.into_iter().collect())
    }
}

impl std::ops::Deref for List {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.0
    }
}

impl Drop for List {
    fn drop(&mut self) {
        while let Some(tensor) = self.0.pop() {
            drop(tensor);
        }
    }
}

/// An optimizer over parameters.
pub(crate) struct Optimizer {
    form: Form,
    slots: Vec<Slot>,
}

impl Optimizer {
    /// `torch.optim.NAME(parameters, …)`. Adagrad makes its state here.
    pub(crate) fn new(form: Form, parameters: &[Tensor]) -> Self {
        let slots = parameters.iter().map(|tensor| Slot { parameter: tensor.clone(), state: Vec::new() });
        let mut slots: Vec<Slot> = slots.collect();
        if form.kind == Kind::Adagrad {
            adagrad::make_state(form, &mut slots);
        }
        Self { form, slots }
    }

    /// `optimizer.step()`.
    pub(crate) fn step(&mut self) {
        let slots = &mut self.slots;
        match self.form.kind {
            Kind::Sgd => sgd::step(self.form, slots),
            Kind::Adam | Kind::AdamW => adam::step(self.form, slots),
            Kind::RmsProp => rmsprop::step(self.form, slots),
            Kind::Adagrad => adagrad::step(self.form, slots),
            Kind::Adafactor => adafactor::step(self.form, slots),
            Kind::Adam8bit | Kind::AdamW8bit | Kind::Adam4bit | Kind::AdamW4bit => {
                low_bit::step(self.form, slots);
            }
            Kind::Lion => lion::step(slots),
            Kind::Muon => muon::step(slots),
        }
    }

    /// `optimizer.zero_grad(set_to_none=True)`: gradients die in parameter order.
    pub(crate) fn zero_grad(&self) {
        for slot in &self.slots {
            slot.parameter.set_grad(None);
        }
    }
}
