//! A request that found no room, told whole: where, for what, what there was and who holds it.

use allocator::OutOfMemory;
use ledger::{Bytes, Category, Contributor, Event, Ladder, Mark, Tape};
use wire::Oom;

/// `failure` of a replay of `tape`, which counts requested bytes.
pub(crate) fn oom(tape: &Tape, failure: &OutOfMemory) -> Oom {
    let (device, shortage) = (failure.device, &failure.shortage);
    let mut holders = match failure.event.checked_sub(1) {
        Some(before) => ledger::holders(tape, before, device),
        None => Vec::new(),
    };
    let requested = add_rounding(&mut holders, shortage.allocated);
    let held = Ladder {
        requested: Some(requested),
        allocated: Some(shortage.allocated),
        active: Some(shortage.active),
        reserved: Some(shortage.reserved),
        ..Ladder::default()
    };
    let at = mark_before(tape, failure.event);
    let object = failure.object.map(|object| {
        let label = tape.object(object).label;
        tape.name(tape.label(label).name).to_owned()
    });
    Oom {
        device: device.0,
        step: at.map(|at| at.step),
        micro_batch: at.and_then(|at| at.micro_batch),
        phase: at.map(|at| tape.phase_name(at.phase).to_owned()),
        event: failure.event as u64,
        requested_bytes: shortage.requested.get(),
        rounded_bytes: Some(shortage.rounded.get()),
        device_request_bytes: Some(shortage.segment.get()),
        largest_free_block_bytes: Some(shortage.largest_free_block.get()),
        device_free_bytes: shortage.device_free.map(Bytes::get),
        object,
        held: held.on(&tape.devices[usize::from(device.0)]).into(),
        holders: holders.iter().map(wire::Contributor::from).collect(),
    }
}

/// Adds to `holders`, in its place, what their blocks have beyond what was asked for, so that they sum to
/// `allocated`; answers what was asked for.
pub(crate) fn add_rounding(holders: &mut Vec<Contributor>, allocated: Bytes) -> Bytes {
    let requested: Bytes = holders.iter().map(|row| row.bytes).sum();
    let bytes = allocated.saturating_sub(requested);
    if bytes > Bytes::ZERO {
        let (name, category) = (Contributor::ROUNDING.into(), Category::Unattributed);
        let place = holders.partition_point(|holder| holder.bytes >= bytes);
        holders.insert(place, Contributor { name, category, bytes, count: 0, saved: Bytes::ZERO });
    }
    requested
}

/// Where on the timeline `event` is; none before the first mark.
fn mark_before(tape: &Tape, event: usize) -> Option<Mark> {
    (0..event).rev().find_map(|index| match tape.event(index) {
        Event::Mark(mark) => Some(tape.mark_of(mark)),
        _ => None,
    })
}
