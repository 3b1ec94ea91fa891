//! The allocator as a replay asks for it: one device after another, event after event.

use ledger::{Bytes, DeviceId, Event, Meter, ObjectId, Oom, Pool, Reading, Stream};

use crate::blocks::{BlockId, State};
use crate::device::{Action, DeviceAllocator, DeviceMemory, Shortage, TieRule};
use crate::layout::SegmentLayout;
use crate::settings::Settings;
use crate::stats::Stats;

/// PyTorch's CUDA caching allocator, following a tape of requested bytes.
///
/// The tape's own segment events are passed over: which segments there are is what this predicts.
/// Where the tape records that an allocation failed, it is tried here too, and given back at once
/// if it succeeds: the object never was.
///
/// Left out, because a tape does not tell it: while a CUDA graph is captured PyTorch gives no cached
/// memory back, and what the program itself gave back with `torch.cuda.empty_cache()`, unless the
/// caller says so with [`CachingAllocator::empty_cache`].
#[derive(Clone, Debug)]
pub struct CachingAllocator {
    /// By the tape's device; none for host memory.
    devices: Vec<Option<DeviceAllocator>>,
    /// By the tape's object.
    objects: Vec<Holder>,
    last: DeviceId,
    failure: Option<OutOfMemory>,
    recorded_ooms_avoided: usize,
}

/// Where an object lives.
#[derive(Clone, Copy, Debug)]
struct Holder {
    device: DeviceId,
    /// None for an object that is not alive, or has no bytes and therefore no block.
    block: BlockId,
    alive: bool,
}

const NOWHERE: Holder = Holder { device: DeviceId(0), block: BlockId::NONE, alive: false };

/// A request of the tape that found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The event of the tape.
    pub event: usize,
    /// The object that was to be made; none where the tape itself records the failure.
    pub object: Option<ObjectId>,
    /// The device without room.
    pub device: DeviceId,
    /// What was asked for and what there was.
    pub shortage: Shortage,
}

impl CachingAllocator {
    /// An allocator with nothing allocated on each device that has a [`DeviceMemory`].
    pub fn new(settings: &Settings, tie: TieRule, devices: &[Option<DeviceMemory>]) -> Self {
        let device =
            |memory: &Option<_>| memory.map(|memory| DeviceAllocator::new(settings.clone(), tie, memory));
        Self {
            devices: devices.iter().map(device).collect(),
            objects: Vec::new(),
            last: DeviceId(0),
            failure: None,
            recorded_ooms_avoided: 0,
        }
    }

    /// What `device` counted; none for one it does not keep books of.
    pub fn stats(&self, device: DeviceId) -> Option<&Stats> {
        self.device(device).map(|device| &device.stats)
    }

    /// The most that may be reserved on `device`: what the device has for the allocator, or what a
    /// memory fraction allows; none where it has no known limit.
    pub fn limit(&self, device: DeviceId) -> Option<Bytes> {
        self.device(device)?.limit().map(Bytes::new)
    }

    /// What the last event did to its device, in order.
    pub fn actions(&self) -> &[Action] {
        self.device(self.last).map_or(&[], |device| &device.actions)
    }

    /// The first request that failed.
    pub fn failure(&self) -> Option<&OutOfMemory> {
        self.failure.as_ref()
    }

    /// How many failures that the tape records would not have happened here.
    pub fn recorded_ooms_avoided(&self) -> usize {
        self.recorded_ooms_avoided
    }

    /// The segments of `device` by address, with their blocks: what pins a segment that is mostly
    /// free. Made anew at each call.
    pub fn layout(&self, device: DeviceId) -> Vec<SegmentLayout> {
        self.device(device).map(DeviceAllocator::layout).unwrap_or_default()
    }

    /// The address of the block that holds `object`, counted from the first that the device hands
    /// out: a trace with addresses checks the prediction, and the tie rule, against it.
    pub fn block_address(&self, object: ObjectId) -> Option<u64> {
        let holder = self.objects.get(object.0 as usize)?;
        Some(self.device(holder.device)?.blocks[holder.block.some()?].address)
    }

    /// Gives the cached memory of `device` back, as `torch.cuda.empty_cache()` does.
    pub fn empty_cache(&mut self, device: DeviceId) {
        self.begin(device);
        if let Some(allocator) = self.device_mut(device) {
            allocator.release_cached_blocks();
        }
        self.forget_awaited(device);
    }

    /// The private `pool` never splits its blocks from now on (`torch.cuda.MemPool(no_split=True)`).
    pub fn set_no_split(&mut self, device: DeviceId, pool: Pool) {
        if let Some(allocator) = self.device_mut(device) {
            allocator.set_no_split(pool);
        }
    }

    /// Nobody uses the private `pool` any more (its CUDA graph is gone): its cached memory may be
    /// given back from now on.
    pub fn release_pool(&mut self, device: DeviceId, pool: Pool) {
        if let Some(allocator) = self.device_mut(device) {
            allocator.release_pool(pool);
        }
    }

    fn device(&self, device: DeviceId) -> Option<&DeviceAllocator> {
        self.devices.get(usize::from(device.0))?.as_ref()
    }

    fn device_mut(&mut self, device: DeviceId) -> Option<&mut DeviceAllocator> {
        self.devices.get_mut(usize::from(device.0))?.as_mut()
    }

    /// Starts the books of an event on `device`.
    fn begin(&mut self, device: DeviceId) {
        self.last = device;
        if let Some(allocator) = self.device_mut(device) {
            allocator.actions.clear();
            allocator.reserved_high = 0;
        }
    }

    /// Objects whose blocks were waited for in a retry are free; the tape frees them later.
    fn forget_awaited(&mut self, device: DeviceId) {
        if let Some(allocator) = self.devices[usize::from(device.0)].as_mut() {
            for object in allocator.waited_for.drain(..) {
                self.objects[object as usize].block = BlockId::NONE;
            }
        }
    }

    fn allocate(
        &mut self,
        event: usize,
        object: ObjectId,
        bytes: Bytes,
        device: DeviceId,
        stream: Stream,
        pool: Pool,
    ) -> Result<(), Oom> {
        self.begin(device);
        let index = object.0 as usize;
        if index >= self.objects.len() {
            self.objects.resize(index + 1, NOWHERE);
        }
        let Some(allocator) = self.device_mut(device) else { return Ok(()) };
        let mut block = BlockId::NONE;
        if bytes > Bytes::ZERO {
            let outcome = allocator.allocate(object.0, bytes.get(), stream, pool);
            if !allocator.waited_for.is_empty() {
                self.forget_awaited(device);
            }
            block = outcome.map_err(|shortage| {
                self.fail(OutOfMemory { event, object: Some(object), device, shortage });
                let device_request = shortage.segment;
                Oom { event, object, device, requested: bytes, device_request }
            })?;
        }
        self.objects[index] = Holder { device, block, alive: true };
        Ok(())
    }

    /// Tries what the tape says had failed.
    fn retry_failure(&mut self, event: usize, bytes: Bytes, device: DeviceId, stream: Stream) {
        self.begin(device);
        let Some(allocator) = self.device_mut(device).filter(|_| bytes > Bytes::ZERO) else { return };
        let outcome = allocator.allocate(u32::MAX, bytes.get(), stream, Pool(0));
        if let Ok(block) = outcome {
            allocator.free(block);
        }
        self.forget_awaited(device);
        match outcome {
            Ok(_) => self.recorded_ooms_avoided += 1,
            Err(shortage) => self.fail(OutOfMemory { event, object: None, device, shortage }),
        }
    }

    fn fail(&mut self, failure: OutOfMemory) {
        self.failure.get_or_insert(failure);
    }

    fn free(&mut self, object: ObjectId, requested_only: bool) {
        let Some(&holder) = self.objects.get(object.0 as usize).filter(|holder| holder.alive) else { return };
        self.begin(holder.device);
        if let (Some(block), Some(allocator)) = (holder.block.some(), self.device_mut(holder.device)) {
            if requested_only {
                if allocator.blocks[block].state == State::Allocated {
                    allocator.request_free(block);
                }
            } else {
                allocator.free(block);
            }
        }
        if !requested_only {
            self.objects[object.0 as usize] = NOWHERE;
        }
    }
}

impl Meter for CachingAllocator {
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom> {
        // What the event before did is over, whatever this one is.
        self.begin(self.last);
        match event {
            Event::Alloc { object, bytes, device, stream, pool } => {
                return self.allocate(index, object, bytes, device, stream, pool);
            }
            Event::FreeRequested(object) => self.free(object, true),
            Event::Free(object) => self.free(object, false),
            Event::Oom { bytes, device, stream } => self.retry_failure(index, bytes, device, stream),
            Event::SegmentAlloc(_)
            | Event::SegmentFree(_)
            | Event::SegmentMap(_)
            | Event::SegmentUnmap(_)
            | Event::Relabel(..)
            | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        let allocator = self.device(device)?;
        let stats = &allocator.stats;
        let reserved = stats.reserved_bytes.all.current;
        Some(Reading {
            allocated: Bytes::new(stats.allocated_bytes.all.current),
            active: Bytes::new(stats.active_bytes.all.current),
            reserved: Bytes::new(reserved),
            reserved_high: Bytes::new(reserved.max(allocator.reserved_high)),
        })
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        let holder = self.objects.get(object.0 as usize).filter(|holder| holder.alive)?;
        let allocator = self.device(holder.device)?;
        Some(Bytes::new(holder.block.some().map_or(0, |block| allocator.blocks[block].size)))
    }
}
