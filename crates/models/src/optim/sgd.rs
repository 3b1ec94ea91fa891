//! `torch.optim.SGD`: a momentum buffer, which begins as a copy of the first gradient.

use engine::release;

use super::{Form, List, Slot, temporary};
use crate::setup::OptimizerImpl;

pub(super) fn step(form: Form, slots: &mut [Slot]) {
    match form.implementation {
        OptimizerImpl::Foreach => {
            let decayed = form.weight_decay.then(|| List::like(slots, "optimizer.decayed_grad"));
            slots.iter_mut().for_each(|slot| keep_momentum(form, slot));
            release!(decayed);
        }
        OptimizerImpl::Fused => slots.iter_mut().for_each(|slot| keep_momentum(form, slot)),
        OptimizerImpl::ForLoop => for_loop(form, slots),
    }
}

fn keep_momentum(form: Form, slot: &mut Slot) {
    if form.momentum && slot.state.is_empty() {
        slot.keep_like("momentum_buffer");
    }
}

/// The name `grad` is bound to the gradient, what decay and Nesterov make of it, or the momentum.
fn for_loop(form: Form, slots: &mut [Slot]) {
    let mut grad = None;
    for slot in slots {
        release!(grad.take());
        if form.weight_decay {
            grad = Some(temporary(&slot.parameter, "optimizer.decayed_grad"));
        }
        keep_momentum(form, slot);
        if form.nesterov {
            grad = Some(temporary(&slot.parameter, "optimizer.nesterov_grad"));
        } else if form.momentum {
            release!(grad.take());
        }
    }
    release!(grad);
}
