//! What a replay asks of an allocator.

use thiserror::Error;

use crate::{Bytes, DeviceId, Event, ObjectId};

/// The allocator's view of one device, after an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of the blocks in use: what `memory_allocated` says.
    pub allocated: Bytes,
    /// `allocated` and the blocks that wait for other streams to be free.
    pub active: Bytes,
    /// Bytes of the segments held: what `memory_reserved` says.
    pub reserved: Bytes,
    /// The largest `reserved` within the last event: at least `reserved`, and more where the
    /// allocator took memory and gave some back in one event, as a retry may.
    pub reserved_high: Bytes,
}

/// An allocator that follows a tape.
///
/// The replay hands over every event in order, marks and the tape's own segment events included,
/// and then asks for the device the event spoke of. The first [`Oom`] ends the replay.
pub trait Meter {
    /// Follows the event at `index` of the tape.
    ///
    /// After an [`Oom`] the object does not exist, and [`Meter::reading`] tells what is left: the
    /// memory that was given back in the attempt is no longer reserved.
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom>;

    /// The view of `device` now; none for one it does not keep books of, such as host memory.
    fn reading(&self, device: DeviceId) -> Option<Reading>;

    /// The bytes of the block that holds `object`, which is alive. They stay the same as long as it lives.
    fn block_bytes(&self, object: ObjectId) -> Option<Bytes>;
}

/// The device had no room for an object of the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("out of memory at event {event}: {requested} asked for, {device_request} tried on the device")]
pub struct Oom {
    /// The event that failed.
    pub event: usize,
    /// The object that was to be made.
    pub object: ObjectId,
    /// Where there was no room.
    pub device: DeviceId,
    /// The bytes the program asked for.
    pub requested: Bytes,
    /// The bytes the allocator then asked of the device: the segment, the "Tried to allocate" of
    /// PyTorch's message.
    pub device_request: Bytes,
}
