//! The ledger: what a replay of a tape tells.

use std::collections::BTreeMap;

use crate::{Bytes, Category, Device, DeviceId, Measure};

/// What was on the devices in each phase, and what made the peaks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// The devices of the tape; a [`DeviceId`] is an index into them.
    pub devices: Vec<Device>,
    /// A row for each phase in the order of the timeline, and in it one for each device.
    pub phases: Vec<PhaseRow>,
    /// The peaks of the GPU devices.
    pub peaks: Peaks,
    /// The request that found no room, where there was one; the books end there if it was the allocator's.
    pub oom: Option<Failure>,
}

/// A place on the timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1; none in load and update.
    pub micro_batch: Option<u32>,
    /// The name of the phase.
    pub phase: String,
}

/// One phase of the timeline on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseRow {
    /// The device.
    pub device: DeviceId,
    /// Which phase.
    pub at: Position,
    /// The largest totals in the phase. What is alive at its start is included.
    pub peak: Totals,
    /// The totals at the end of the phase.
    pub end: Totals,
    /// What is held at the end, in the tape's unit. Every category that occurs on the tape is there.
    pub end_by_category: BTreeMap<Category, Bytes>,
}

/// A total of each measure; none where it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes the program asked for.
    pub requested: Option<Bytes>,
    /// Bytes of the allocator's blocks.
    pub allocated: Option<Bytes>,
    /// Bytes of the allocator's segments.
    pub reserved: Option<Bytes>,
}

impl Totals {
    /// The total of `measure`.
    pub const fn get(&self, measure: Measure) -> Option<Bytes> {
        match measure {
            Measure::Requested => self.requested,
            Measure::Allocated => self.allocated,
            Measure::Reserved => self.reserved,
        }
    }
}

/// The measures at one instant, each at least the one before; none where it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ladder {
    /// Bytes the program asked for.
    pub requested: Option<Bytes>,
    /// Bytes of the allocator's blocks.
    pub allocated: Option<Bytes>,
    /// `allocated` and the blocks that wait for other streams to be free.
    pub active: Option<Bytes>,
    /// Bytes of the allocator's segments.
    pub reserved: Option<Bytes>,
    /// `reserved` and what the process holds outside the allocator.
    pub process: Option<Bytes>,
    /// All memory of the device.
    pub device: Option<Bytes>,
}

impl Ladder {
    /// These measures with the rungs above the allocator's, as far as `device` tells them.
    pub fn on(self, device: &Device) -> Self {
        let process =
            self.reserved.zip(device.context).and_then(|(reserved, context)| reserved.checked_add(context));
        Self { process, device: device.capacity, ..self }
    }
}

/// The peak of each measure; none where the measure is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Of the bytes asked for.
    pub requested: Option<Peak>,
    /// Of the allocator's blocks.
    pub allocated: Option<Peak>,
    /// Of the allocator's segments.
    pub reserved: Option<Peak>,
}

impl Peaks {
    /// The peak of `measure`.
    pub const fn get(&self, measure: Measure) -> Option<&Peak> {
        match measure {
            Measure::Requested => self.requested.as_ref(),
            Measure::Allocated => self.allocated.as_ref(),
            Measure::Reserved => self.reserved.as_ref(),
        }
    }
}

/// The largest total of one measure on any one GPU, at its earliest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The GPU.
    pub device: DeviceId,
    /// The total.
    pub bytes: Bytes,
    /// Where on the timeline; none before the first mark of the tape.
    pub at: Option<Position>,
    /// The event of the tape that brought the total there.
    pub event: usize,
    /// All measures at that instant.
    pub at_peak: Ladder,
    /// The contributors by category; they sum to `bytes`.
    pub by_category: BTreeMap<Category, Bytes>,
    /// What makes the peak, largest first, then by name; they sum to `bytes`.
    pub contributors: Vec<Contributor>,
}

/// The objects of one name and category that make a total, or an explicit remainder of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contributor {
    /// The name of the objects, the same for every layer.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// Their bytes in the measure of the total.
    pub bytes: Bytes,
    /// How many they are; 0 for a remainder that is no object.
    pub count: u64,
    /// How many of the bytes autograd keeps for the backward pass.
    pub saved: Bytes,
}

impl Contributor {
    /// The row of what blocks hold beyond the bytes asked for: rounding and remainders not split off.
    pub const ROUNDING: &str = "rounding";
    /// The row of blocks that were let go and wait for other streams.
    pub const AWAITING_FREE: &str = "awaiting free";
    /// The row of segment bytes in no block: the allocator keeps them for later.
    pub const CACHED: &str = "cached";
    /// The row of what nothing is known about.
    pub const UNATTRIBUTED: &str = "unattributed";
}

/// A request that found no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The device.
    pub device: DeviceId,
    /// Where on the timeline; none before the first mark of the tape.
    pub at: Option<Position>,
    /// The event of the tape.
    pub event: usize,
    /// The bytes the program asked for.
    pub requested: Bytes,
    /// The bytes the allocator then asked of the device, where known.
    pub device_request: Option<Bytes>,
    /// The object that was to be made, where known.
    pub object: Option<String>,
}
