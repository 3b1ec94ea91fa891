//! The blocks of a run at chosen events.

use allocator::{BlockLayout, PlacedAllocator, SegmentLayout, State};
use ledger::{DeviceId, Event, MarkId, Meter as _, ObjectId, Reading};

use super::recorded::Run;

/// Everything that is there after one event.
pub(super) struct Shot {
    pub(super) event: usize,
    /// The last mark before it.
    pub(super) mark: Option<MarkId>,
    /// The segments of each device of the tape.
    pub(super) layouts: Vec<Vec<SegmentLayout>>,
    /// What the allocator says of each device.
    pub(super) readings: Vec<Option<Reading>>,
}

impl Run {
    /// What is there after each of `events`.
    pub(super) fn shots(&self, events: &[usize]) -> Vec<Shot> {
        let mut events = events.to_vec();
        events.sort_unstable();
        events.dedup();
        let mut waiting = events.into_iter().peekable();
        let tape = &self.taped.tape;
        let mut meter = PlacedAllocator::new(tape, &self.places, &self.settings);
        let (mut mark, mut shots) = (None, Vec::new());
        for (index, event) in tape.events().enumerate() {
            // Blocks that are followed never run out.
            let _ = meter.apply(index, event);
            if let Event::Mark(at) = event {
                mark = Some(at);
            }
            if waiting.next_if_eq(&index).is_some() {
                let devices = || (0..tape.devices.len()).map(|device| DeviceId(device as u16));
                shots.push(Shot {
                    event: index,
                    mark,
                    layouts: devices().map(|device| meter.layout(device)).collect(),
                    readings: devices().map(|device| meter.reading(device)).collect(),
                });
            }
            if waiting.peek().is_none() {
                break;
            }
        }
        shots
    }
}

impl Shot {
    /// The blocks in use or awaiting their free, of all devices, by address.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (u64, &BlockLayout)> {
        let blocks = self.layouts.iter().flatten().flat_map(addressed);
        blocks.filter(|(_, block)| block.object.is_some())
    }

    /// The objects that are held on `device`: handle, bytes asked for, block bytes.
    pub(super) fn held(&self, device: DeviceId) -> impl Iterator<Item = (ObjectId, u64, u64)> {
        let blocks = self.layouts.get(usize::from(device.0)).into_iter().flatten();
        let blocks = blocks.flat_map(|segment| &segment.blocks);
        blocks.filter(|block| block.state == State::Allocated).filter_map(|block| {
            let (object, requested) = block.object?;
            Some((object, requested.get(), block.size.get()))
        })
    }
}

/// The blocks of `segment` with their addresses.
pub(super) fn addressed(segment: &SegmentLayout) -> impl Iterator<Item = (u64, &BlockLayout)> {
    let mut next = segment.address;
    segment.blocks.iter().map(move |block| {
        let address = next;
        next = next.saturating_add(block.size.get());
        (address, block)
    })
}
