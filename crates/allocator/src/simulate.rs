//! One tape under several settings, side by side.

use ledger::{ByteDelta, Bytes, DeviceId, DeviceKind, Event, Meter, Tape};

use crate::device::{Action, DeviceMemory, TieRule};
use crate::meter::{CachingAllocator, OutOfMemory};
use crate::settings::Settings;
use crate::stats::Stats;

/// What a tape needs under one choice of settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Whether everything found room; none where nothing failed but a device has no known limit.
    pub fits: Option<bool>,
    /// The first request that failed. What the tape holds after it was not replayed, unless the
    /// tape itself records the failure and goes on.
    pub failure: Option<OutOfMemory>,
    /// How many failures that the tape records would not have happened.
    pub recorded_ooms_avoided: usize,
    /// Each GPU of the tape.
    pub devices: Vec<DeviceReport>,
}

/// What a tape needs on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceReport {
    /// The device.
    pub device: DeviceId,
    /// The most block bytes handed out at once.
    pub peak_allocated: Bytes,
    /// The most segment bytes held at once.
    pub peak_reserved: Bytes,
    /// Of the peak of reserved bytes, when it was first reached: what was in no block in use.
    pub stranded_at_peak: Bytes,
    /// What the device could still have given at the peak of reserved bytes; after a failure, what
    /// was free less what was asked for, which is negative. None where the device has no known limit.
    pub headroom: Option<ByteDelta>,
    /// Requests that had to give back all cached blocks first.
    pub retries: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Everything the allocator counted.
    pub stats: Stats,
}

/// The memory of each device of `tape`, as the tape tells it; none for host memory.
pub fn memory_of(tape: &Tape) -> Vec<Option<DeviceMemory>> {
    let memory = |device: &ledger::Device| {
        let outside = device.context.unwrap_or_default();
        (device.kind == DeviceKind::Gpu).then_some(DeviceMemory { total: device.capacity, outside })
    };
    tape.devices.iter().map(memory).collect()
}

/// Replays `tape` under each of `settings` on devices with `memory` (see [`memory_of`]).
pub fn simulate(
    tape: &Tape,
    settings: &[Settings],
    tie: TieRule,
    memory: &[Option<DeviceMemory>],
) -> Vec<Report> {
    settings.iter().map(|settings| replay(tape, settings, tie, memory)).collect()
}

fn replay(tape: &Tape, settings: &Settings, tie: TieRule, memory: &[Option<DeviceMemory>]) -> Report {
    let mut allocator = CachingAllocator::new(settings, tie, memory);
    let gpus: Vec<DeviceId> = (0..memory.len())
        .filter(|index| memory[*index].is_some())
        .map(|index| DeviceId(index as u16))
        .collect();
    // For each GPU its highest reserved bytes so far and what of them was not in use then.
    let mut peaks = vec![(Bytes::ZERO, Bytes::ZERO); gpus.len()];
    for (index, event) in tape.events().enumerate() {
        let outcome = allocator.apply(index, event);
        if !allocator.actions().is_empty() {
            for (gpu, (peak, stranded)) in gpus.iter().zip(&mut peaks) {
                if let Some(reading) = allocator.reading(*gpu)
                    && reading.reserved_high > *peak
                {
                    *peak = reading.reserved_high;
                    *stranded = reading.reserved_high - reading.active;
                }
            }
        }
        if outcome.is_err() {
            break;
        }
    }

    let failure = allocator.failure().copied();
    let devices = gpus.iter().zip(peaks).filter_map(|(gpu, (peak_reserved, stranded_at_peak))| {
        let stats = *allocator.stats(*gpu)?;
        let headroom = match failure.filter(|failure| failure.device == *gpu) {
            None => allocator.limit(*gpu).map(|limit| limit.delta(peak_reserved)),
            Some(failure) => failure.shortage.headroom(),
        };
        Some(DeviceReport {
            device: *gpu,
            peak_allocated: Bytes::new(stats.allocated_bytes.all.peak),
            peak_reserved,
            stranded_at_peak,
            headroom,
            retries: stats.num_alloc_retries,
            ooms: stats.num_ooms,
            stats,
        })
    });
    let devices: Vec<DeviceReport> = devices.collect();
    let known = devices.iter().all(|device| device.headroom.is_some());
    Report {
        fits: if failure.is_some() { Some(false) } else { known.then_some(true) },
        failure,
        recorded_ooms_avoided: allocator.recorded_ooms_avoided(),
        devices,
    }
}

/// The first event of a recorded `tape` before which the segments taken and given back are not those
/// recorded; the length of the tape where the recording goes on after its last allocation; none where
/// all agree. The tie rule of a run whose software is not known is the one that agrees.
pub fn first_difference(
    tape: &Tape,
    settings: &Settings,
    tie: TieRule,
    memory: &[Option<DeviceMemory>],
) -> Option<usize> {
    let mut allocator = CachingAllocator::new(settings, tie, memory);
    // The recording has what was done for an allocation before it.
    let mut recorded = Vec::new();
    for (index, event) in tape.events().enumerate() {
        match event {
            Event::SegmentAlloc(segment) => recorded.push(Action::SegmentAlloc(segment.bytes)),
            Event::SegmentFree(segment) => recorded.push(Action::SegmentFree(segment.bytes)),
            Event::SegmentMap(segment) => recorded.push(Action::SegmentMap(segment.bytes)),
            Event::SegmentUnmap(segment) => recorded.push(Action::SegmentUnmap(segment.bytes)),
            Event::Relabel(..) | Event::Mark(_) => {}
            Event::Alloc { .. } | Event::FreeRequested(_) | Event::Free(_) | Event::Oom { .. } => {
                if let Event::Oom { bytes, .. } = event {
                    recorded.push(Action::Oom(bytes));
                }
                if allocator.apply(index, event).is_err() || allocator.actions() != recorded {
                    return Some(index);
                }
                recorded.clear();
            }
        }
    }
    (!recorded.is_empty()).then(|| tape.len())
}
