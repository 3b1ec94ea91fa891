//! The optimizers of `torch.optim` and clip_grad_norm_, as far as they touch memory.
//!
//! State is made at the first step, parameter by parameter; `step` counters live on the host unless
//! the implementation is fused.

use engine::{Tensor, release};
use ledger::{Category, Dtype};

use crate::setup::{Optimizer as Kind, OptimizerImpl};

/// An optimizer over the parameters of a model.
pub(crate) struct Optimizer {
    kind: Kind,
    implementation: OptimizerImpl,
    momentum: bool,
    parameters: Vec<Tensor>,
    state: Vec<Vec<Tensor>>,
}

/// What the temporaries of one optimizer step are made of: a buffer like each parameter.
fn like(tensors: &[Tensor], what: &'static str) -> Vec<Tensor> {
    tensors.iter().map(|tensor| temporary(tensor, what)).collect()
}

fn temporary(tensor: &Tensor, what: &'static str) -> Tensor {
    Tensor::of_category(tensor.session(), what, Category::Temporary, tensor.shape(), tensor.dtype())
}

/// Lets go of a list as Python and C++ do: the last element first.
fn release_list(mut list: Vec<Tensor>) {
    while let Some(tensor) = list.pop() {
        drop(tensor);
    }
}

/// The implementation torch picks on CUDA.
pub(crate) const fn default_implementation(kind: Kind) -> OptimizerImpl {
    match kind {
        Kind::Adafactor => OptimizerImpl::ForLoop,
        _ => OptimizerImpl::Foreach,
    }
}

impl Optimizer {
    /// `torch.optim.NAME(parameters, …)`. Adagrad makes its state here.
    pub(crate) fn new(
        kind: Kind,
        implementation: OptimizerImpl,
        momentum: f64,
        parameters: Vec<Tensor>,
    ) -> Self {
        let mut optimizer =
            Self { kind, implementation, momentum: momentum != 0.0, parameters, state: Vec::new() };
        if kind == Kind::Adagrad {
            optimizer.make_state();
        }
        optimizer
    }

    fn make_state(&mut self) {
        let fused = self.implementation == OptimizerImpl::Fused;
        for parameter in &self.parameters {
            let state = |what, shape: &[u64], dtype| {
                parameter.companion(what, Category::OptimizerState, shape, dtype)
            };
            let same = |what| state(what, &parameter.shape(), parameter.dtype());
            let mut made = Vec::new();
            if fused && self.kind != Kind::Sgd {
                made.push(state("step", &[], Dtype::Fp32));
            }
            match self.kind {
                Kind::Sgd if self.momentum => made.push(same("momentum_buffer")),
                Kind::Sgd => {}
                Kind::Adam | Kind::AdamW => made.extend([same("exp_avg"), same("exp_avg_sq")]),
                Kind::RmsProp => {
                    made.push(same("square_avg"));
                    if self.momentum {
                        made.push(same("momentum_buffer"));
                    }
                }
                Kind::Adagrad => made.push(same("sum")),
                Kind::Adafactor if parameter.shape().len() > 1 => {
                    made.push(state("row_var", &rows_of(parameter), parameter.dtype()));
                    made.push(state("col_var", &columns_of(parameter), parameter.dtype()));
                }
                Kind::Adafactor => made.push(same("variance")),
            }
            self.state.push(made);
        }
    }

    /// `optimizer.step()`.
    pub(crate) fn step(&mut self) {
        if self.state.is_empty() {
            self.make_state();
        }
        match (self.kind, self.implementation) {
            (_, OptimizerImpl::Fused) | (Kind::Sgd, _) => {}
            (Kind::Adafactor, _) => self.adafactor(),
            (Kind::Adam | Kind::AdamW | Kind::RmsProp, OptimizerImpl::Foreach) => {
                release_list(like(&self.parameters, "optimizer.sqrt"));
            }
            (Kind::Adagrad, OptimizerImpl::Foreach) => {
                let root = like(&self.parameters, "optimizer.sqrt");
                let numerator = like(&self.parameters, "optimizer.numerator");
                release_list(root);
                release_list(numerator);
            }
            (Kind::Adam | Kind::AdamW, OptimizerImpl::ForLoop) => {
                let mut denominator = None;
                for parameter in &self.parameters {
                    let root = temporary(parameter, "optimizer.sqrt");
                    let quotient = temporary(parameter, "optimizer.denom");
                    release!(root);
                    denominator = Some(quotient);
                }
                release!(denominator);
            }
            (Kind::RmsProp | Kind::Adagrad, OptimizerImpl::ForLoop) => {
                let mut average = None;
                for parameter in &self.parameters {
                    average = Some(temporary(parameter, "optimizer.sqrt"));
                }
                release!(average);
            }
        }
    }

    /// The for-loop of Adafactor: its locals live until the next parameter rebinds them.
    fn adafactor(&self) {
        let mut row_mean = None;
        let mut column_mean = None;
        let mut squared = None;
        let mut update = None;
        for parameter in &self.parameters {
            let Some(grad) = parameter.grad() else { continue };
            release!(parameter.norm_all());
            let estimate = if parameter.shape().len() > 1 {
                let rows = grad.norm_dim(-1);
                row_mean = Some(rows);
                let columns = grad.norm_dim(-2);
                column_mean = Some(columns);
                let (row_var, column_var) = self.factors(parameter);
                let estimate = row_var.mm(&column_var);
                release!(row_var.mean_dim(-2));
                estimate
            } else {
                squared = Some(temporary(&grad, "optimizer.grad_squared"));
                temporary(&grad, "optimizer.variance")
            };
            update = Some(estimate);
            if let Some(update) = &update {
                release!(update.norm_all());
            }
        }
        release!(row_mean, column_mean, squared, update);
    }

    /// The row and column factors of a matrix, as handles without history.
    fn factors(&self, parameter: &Tensor) -> (Tensor, Tensor) {
        let index = self.parameters.iter().position(|other| other.same(parameter)).unwrap_or_default();
        (self.state[index][0].clone(), self.state[index][1].clone())
    }

    /// `optimizer.zero_grad(set_to_none=True)`: gradients die in parameter order.
    pub(crate) fn zero_grad(&self) {
        for parameter in &self.parameters {
            parameter.set_grad(None);
        }
    }

    /// `torch.nn.utils.clip_grad_norm_` with foreach.
    pub(crate) fn clip_grad_norm(&self) {
        let grads: Vec<Tensor> = self.parameters.iter().filter_map(Tensor::grad).collect();
        let Some(first) = grads.first() else { return };
        let session = first.session();
        let (count, dtype) = (grads.len() as u64, first.dtype());
        let bytes =
            |what, size| Tensor::of_category(session, what, Category::Temporary, [size], Dtype::Uint8);
        let chunks = grads.iter().map(|grad| grad.numel().div_ceil(65_536));
        let (addresses, partials) = if session.profile.listed_norms {
            let addresses = bytes("clip_grad_norm.addresses", (count + 1) * 8);
            (Some(addresses), bytes("clip_grad_norm.partials", 4 * chunks.sum::<u64>()))
        } else {
            (None, bytes("clip_grad_norm.partials", 4 * count * chunks.max().unwrap_or(0)))
        };
        let scalar = |what| Tensor::of_category(session, what, Category::Temporary, [], dtype);
        let norms: Vec<Tensor> = grads.iter().map(|_| scalar("clip_grad_norm.norm")).collect();
        release!(partials, addresses);
        let stacked =
            Tensor::of_category(session, "clip_grad_norm.stack", Category::Temporary, [count], dtype);
        let total = scalar("clip_grad_norm.total");
        release!(stacked);
        release_list(norms);
        let shifted = scalar("clip_grad_norm.coefficient");
        let reciprocal = scalar("clip_grad_norm.coefficient");
        let coefficient = scalar("clip_grad_norm.coefficient");
        release!(reciprocal, shifted);
        let clamped = scalar("clip_grad_norm.coefficient");
        release!(coefficient, clamped, total);
    }
}

fn rows_of(parameter: &Tensor) -> Vec<u64> {
    let mut shape = parameter.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    shape
}

fn columns_of(parameter: &Tensor) -> Vec<u64> {
    let mut shape = parameter.shape().to_vec();
    let index = shape.len().saturating_sub(2);
    shape[index] = 1;
    shape
}
