//! `torchao.optim.CPUOffloadOptimizer`: copies of parameters and gradients on the host, where an optimizer for
//! each of them keeps its state and steps. Small parameters have one on the device.

use engine::Tensor;
use ledger::Category;

use super::{Form, Kind, Optimizer, OptimizerImpl};

/// Parameters of fewer elements stay on the device (`minimal_size`).
const MINIMAL_SIZE: u64 = 4096;

/// An optimizer on the host.
pub(crate) struct Offloaded {
    on_device: Optimizer,
    on_host: Vec<Optimizer>,
    offloaded: Vec<Tensor>,
}

impl Offloaded {
    /// Makes the copies of `parameters`.
    pub(crate) fn new(form: Form, parameters: &[Tensor]) -> Self {
        // AdamW is fused where nothing else is asked for, on the host and on the device.
        let with = |usual| Form {
            implementation: if form.kind == Kind::AdamW { OptimizerImpl::Fused } else { usual },
            ..form
        };
        let (small, large): (Vec<Tensor>, Vec<Tensor>) =
            parameters.iter().cloned().partition(|parameter| parameter.numel() < MINIMAL_SIZE);
        let on_host = large.iter().map(|parameter| {
            let copy = parameter.host_companion("host", Category::MasterWeight);
            copy.set_grad(Some(parameter.host_companion("host", Category::Gradient)));
            Optimizer::new(with(OptimizerImpl::ForLoop), std::slice::from_ref(&copy))
        });
        Self {
            on_host: on_host.collect(),
            on_device: Optimizer::new(with(OptimizerImpl::Foreach), &small),
            offloaded: large,
        }
    }

    /// `optimizer.step()`.
    pub(crate) fn step(&mut self) {
        self.on_device.step();
        self.on_host.iter_mut().for_each(Optimizer::step);
        // Gradients go to the host, and parameters come back.
        for parameter in &self.offloaded {
            parameter.session().add_traffic(parameter.nbytes(), parameter.nbytes());
        }
    }

    /// `optimizer.zero_grad()`: the gradients on the device die, those of small parameters last.
    pub(crate) fn zero_grad(&self) {
        self.offloaded.iter().for_each(|parameter| parameter.set_grad(None));
        self.on_device.zero_grad();
    }
}
