//! `torch.optim.Adam` and `AdamW`: two moments, and with amsgrad the largest second one.

use engine::{Tensor, release};
use ledger::{Category, Dtype};

use super::{Form, List, Slot, scalar, temporary};
use crate::setup::{Optimizer, OptimizerImpl};

pub(super) fn step(form: Form, slots: &mut [Slot]) {
    if form.fp32_state {
        for slot in slots.iter_mut().filter(|slot| slot.state.is_empty()) {
            let shape = slot.parameter.shape();
            slot.keep("exp_avg", &shape, Dtype::Fp32);
            slot.keep("exp_avg_sq", &shape, Dtype::Fp32);
        }
        return;
    }
    for slot in slots.iter_mut().filter(|slot| slot.state.is_empty()) {
        if form.capturable || form.implementation == OptimizerImpl::Fused {
            slot.keep_step();
        }
        slot.keep_like("exp_avg");
        slot.keep_like("exp_avg_sq");
        if form.amsgrad {
            slot.keep_like("max_exp_avg_sq");
        }
    }
    // AdamW shrinks the weights themselves.
    let decays_grad = form.weight_decay && form.kind == Optimizer::Adam;
    match form.implementation {
        OptimizerImpl::Fused => {}
        OptimizerImpl::Foreach => {
            release!(decays_grad.then(|| List::like(slots, "optimizer.decayed_grad")));
            let corrections = form.capturable.then(|| {
                let first = List::scalars(slots, "optimizer.bias_correction1");
                (first, List::scalars(slots, "optimizer.bias_correction2"))
            });
            let root = List::like(slots, "optimizer.sqrt");
            release!(corrections, root);
        }
        OptimizerImpl::ForLoop => for_loop(form, decays_grad, slots),
    }
}

/// What the loop's names are bound to until the next parameter binds them anew.
#[derive(Default)]
struct Names {
    grad: Option<Tensor>,
    corrections: Option<Corrections>,
    denom: Option<Tensor>,
}

fn for_loop(form: Form, decays_grad: bool, slots: &[Slot]) {
    let mut names = Names::default();
    for Slot { parameter, .. } in slots {
        release!(names.grad.take());
        if decays_grad {
            names.grad = Some(temporary(parameter, "optimizer.decayed_grad"));
        }
        if form.capturable {
            Corrections::bind(&mut names.corrections, parameter);
            if form.amsgrad {
                release!(temporary(parameter, "optimizer.maximum"));
            }
            let root = temporary(parameter, "optimizer.sqrt");
            let factor = scalar(parameter, "optimizer.factor");
            let quotient = temporary(parameter, "optimizer.denom");
            release!(root, factor);
            release!(reciprocal_product(parameter));
            names.denom = Some(quotient);
        } else {
            let root = temporary(parameter, "optimizer.sqrt");
            let quotient = temporary(parameter, "optimizer.denom");
            release!(root);
            names.denom = Some(quotient);
        }
    }
    release!(names.grad, names.corrections, names.denom);
}

/// The values that a `step` on the device makes, a tensor each, in the order in which they are first named.
struct Corrections {
    bias_correction1: Tensor,
    bias_correction2: Tensor,
    step_size: Tensor,
    step_size_neg: Tensor,
    bias_correction2_sqrt: Tensor,
}

impl Corrections {
    /// Binds the names in turn: what one was bound to dies once its new value is there.
    fn bind(names: &mut Option<Self>, parameter: &Tensor) {
        let one = || scalar(parameter, "optimizer.correction");
        // The base of a power is brought to the device as fp64.
        let correction = || {
            let power = one();
            release!(parameter.beside("optimizer.base", Category::Temporary, [], Dtype::Fp64));
            let rest = one();
            release!(power);
            rest
        };
        match names {
            None => {
                *names = Some(Self {
                    bias_correction1: correction(),
                    bias_correction2: correction(),
                    step_size: reciprocal_product(parameter),
                    step_size_neg: one(),
                    bias_correction2_sqrt: one(),
                });
            }
            Some(names) => {
                names.bias_correction1 = correction();
                names.bias_correction2 = correction();
                names.step_size = reciprocal_product(parameter);
                names.step_size_neg = one();
                names.bias_correction2_sqrt = one();
            }
        }
    }
}

/// A number divided by a tensor: the product of its reciprocal.
fn reciprocal_product(parameter: &Tensor) -> Tensor {
    let reciprocal = scalar(parameter, "optimizer.reciprocal");
    let product = scalar(parameter, "optimizer.quotient");
    release!(reciprocal);
    product
}
