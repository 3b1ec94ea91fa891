//! `lion_pytorch.Lion` without Triton: one moment.

use engine::release;

use super::{Slot, temporary};

pub(super) fn step(slots: &mut [Slot]) {
    for slot in slots {
        if slot.state.is_empty() {
            slot.keep_like("exp_avg");
        }
        let scaled = temporary(&slot.parameter, "optimizer.scaled_exp_avg");
        let update = temporary(&slot.parameter, "optimizer.update");
        release!(scaled, update);
    }
}
