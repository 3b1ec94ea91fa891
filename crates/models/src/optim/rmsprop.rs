//! `torch.optim.RMSprop`: the mean of squares, and a momentum buffer.

use engine::release;

use super::{Form, List, Slot, temporary};
use crate::setup::OptimizerImpl;

pub(super) fn step(form: Form, slots: &mut [Slot]) {
    for slot in slots.iter_mut().filter(|slot| slot.state.is_empty()) {
        if form.capturable {
            slot.keep_step();
        }
        slot.keep_like("square_avg");
        if form.momentum {
            slot.keep_like("momentum_buffer");
        }
    }
    if form.implementation == OptimizerImpl::Foreach {
        let decayed = form.weight_decay.then(|| List::like(slots, "optimizer.decayed_grad"));
        let root = List::like(slots, "optimizer.sqrt");
        release!(decayed, root);
        return;
    }
    let (mut grad, mut average) = (None, None);
    for Slot { parameter, .. } in slots {
        release!(grad.take());
        grad = form.weight_decay.then(|| temporary(parameter, "optimizer.decayed_grad"));
        average = Some(temporary(parameter, "optimizer.sqrt"));
    }
    release!(grad, average);
}
