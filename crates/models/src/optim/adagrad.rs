//! `torch.optim.Adagrad`: the sum of squares, made when the optimizer is.

use engine::release;

use super::{Form, List, Slot, temporary};
use crate::setup::OptimizerImpl;

pub(super) fn make_state(form: Form, slots: &mut [Slot]) {
    for slot in slots {
        if form.implementation == OptimizerImpl::Fused {
            slot.keep_step();
        }
        slot.keep_like("sum");
    }
}

pub(super) fn step(form: Form, slots: &[Slot]) {
    match form.implementation {
        OptimizerImpl::Fused => {}
        OptimizerImpl::Foreach => {
            // The decayed gradients become the numerators.
            let decayed = form.weight_decay.then(|| List::like(slots, "optimizer.decayed_grad"));
            let root = List::like(slots, "optimizer.sqrt");
            let numerator = decayed.unwrap_or_else(|| List::like(slots, "optimizer.numerator"));
            release!(root, numerator);
        }
        OptimizerImpl::ForLoop => {
            let (mut grad, mut root) = (None, None);
            for Slot { parameter, .. } in slots {
                release!(grad.take());
                grad = form.weight_decay.then(|| temporary(parameter, "optimizer.decayed_grad"));
                root = Some(temporary(parameter, "optimizer.sqrt"));
            }
            release!(grad, root);
        }
    }
}
