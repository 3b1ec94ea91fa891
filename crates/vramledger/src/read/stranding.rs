//! What is reserved and in no block, and what keeps it.

use std::collections::BTreeMap;

use allocator::{SegmentLayout, State};
use ledger::{DeviceId, LabelId};
use wire::{Pin, Stranded, Stranding};

use super::recorded::Run;
use super::shots::Shot;

/// The stranded memory of `device` in `shot`.
pub(super) fn stranding(run: &Run, at: &str, device: DeviceId, shot: &Shot) -> Stranding {
    let layout = shot.layouts.get(usize::from(device.0)).map(Vec::as_slice).unwrap_or_default();
    let reading = shot.readings.get(usize::from(device.0)).copied().flatten().unwrap_or_default();
    let mut segments: Vec<Stranded> = layout.iter().filter_map(|segment| stranded(run, segment)).collect();
    segments.sort_by(|a, b| b.free_bytes.cmp(&a.free_bytes).then(a.address.cmp(&b.address)));
    let free = |whole: bool| -> u64 {
        let rows = segments.iter().filter(|segment| segment.pins.is_empty() == whole);
        rows.map(|segment| segment.free_bytes).sum()
    };
    Stranding {
        at: at.into(),
        device: device.0,
        event: shot.event as u64,
        reserved_bytes: reading.reserved.get(),
        active_bytes: reading.active.get(),
        stranded_bytes: reading.reserved.saturating_sub(reading.active).get(),
        whole_bytes: free(true),
        pinned_bytes: free(false),
        largest_free_block_bytes: segments.iter().map(|row| row.largest_free_block_bytes).max().unwrap_or(0),
        segments,
    }
}

/// What is free in `segment`, and what keeps it; none where nothing is free.
fn stranded(run: &Run, segment: &SegmentLayout) -> Option<Stranded> {
    let free =
        || segment.blocks.iter().filter(|block| block.state == State::Free).map(|block| block.size.get());
    let free_bytes: u64 = free().sum();
    if free_bytes == 0 {
        return None;
    }
    let tape = &run.taped.tape;
    let mut pins: BTreeMap<LabelId, Pin> = BTreeMap::new();
    for block in &segment.blocks {
        let Some((object, _)) = block.object else { continue };
        let label = tape.object(object).label;
        let since_step = run.births[object.0 as usize];
        let pin = pins.entry(label).or_insert_with(|| {
            let label = tape.label(label);
            Pin {
                name: tape.name(label.name).to_owned(),
                category: wire::Category(label.category),
                bytes: 0,
                count: 0,
                since_step,
            }
        });
        pin.bytes += block.size.get();
        pin.count += 1;
        pin.since_step = pin.since_step.min(since_step);
    }
    let mut pins: Vec<Pin> = pins.into_values().collect();
    pins.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    Some(Stranded {
        address: segment.address,
        bytes: segment.reserved().get(),
        free_bytes,
        largest_free_block_bytes: free().max().unwrap_or(0),
        stream: segment.stream.0,
        pool: segment.pool.0,
        expandable: segment.expandable,
        pins,
    })
}
