//! The blocks of a recording that tells addresses: followed, not predicted.
//!
//! Where a request got its block is known, so that no rule of search is needed: only how large the
//! block is. That depends on whether the rest of the free block it was cut from was split off, and so
//! on what lay there, which the recording tells as well. A block that was there before the recording
//! began may hide a rest: a later request that begins behind it shows it.

use std::collections::BTreeMap;
use std::ops::Range;

use ledger::{
    Bytes, DeviceId, DeviceKind, Event, Meter, ObjectId, Oom, Pool, Reading, Segment, Stream, Tape,
};
use rustc_hash::FxHashMap;

use crate::blocks::State;
use crate::layout::{BlockLayout, SegmentLayout};
use crate::rules::{MIN_BLOCK, SMALL_LIMIT, SMALL_SEGMENT};
use crate::settings::Settings;

/// Where everything of a tape is.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The address of each object.
    pub objects: Vec<u64>,
    /// The address of each segment event, in the order of the tape.
    pub segments: Vec<u64>,
    /// The objects that no request of the tape's time made: they were there, or came unseen.
    pub found: Vec<bool>,
    /// The block bytes of objects, where they are known.
    pub blocks: FxHashMap<ObjectId, Bytes>,
}

/// PyTorch's blocks, following a tape of requested bytes and the places of everything on it.
#[derive(Clone, Debug)]
pub struct PlacedAllocator<'a> {
    places: &'a Places,
    settings: &'a Settings,
    devices: Vec<Option<Memory>>,
    /// By object.
    blocks: Vec<Block>,
    segments: usize,
    learnt: FxHashMap<ObjectId, Bytes>,
    hidden: Bytes,
    disagreements: u64,
}

/// The block of an object.
#[derive(Clone, Copy, Debug)]
struct Block {
    size: u64,
    requested: u64,
    segment: u32,
    device: DeviceId,
    state: State,
}

/// What has no block.
const NONE: Block =
    Block { size: 0, requested: 0, segment: NOWHERE, device: DeviceId(0), state: State::Free };
/// The segment of a block that is in none.
const NOWHERE: u32 = u32::MAX;

/// The memory of one device.
#[derive(Clone, Debug, Default)]
struct Memory {
    /// Free blocks by address.
    free: BTreeMap<u64, Free>,
    /// Blocks in use whose rest was not split off or may not have been, by where that begins: the
    /// object, and whether its rest counts as its own.
    rests: BTreeMap<u64, (u32, bool)>,
    /// The segments' ranges by where they begin.
    ranges: BTreeMap<u64, u64>,
    segments: FxHashMap<u32, Home>,
    reading: Reading,
}

/// A free block.
#[derive(Clone, Copy, Debug)]
struct Free {
    size: u64,
    segment: u32,
}

/// What a segment is for.
#[derive(Clone, Copy, Debug)]
struct Home {
    stream: Stream,
    pool: Pool,
    small: bool,
    expandable: bool,
}

impl<'a> PlacedAllocator<'a> {
    /// An allocator that has nothing yet, for `tape` and its `places`.
    pub fn new(tape: &Tape, places: &'a Places, settings: &'a Settings) -> Self {
        let memory = |device: &ledger::Device| (device.kind == DeviceKind::Gpu).then(Memory::default);
        Self {
            places,
            settings,
            devices: tape.devices.iter().map(memory).collect(),
            blocks: vec![NONE; tape.objects().len()],
            segments: 0,
            learnt: FxHashMap::default(),
            hidden: Bytes::ZERO,
            disagreements: 0,
        }
    }

    /// Block sizes that later requests showed to be others than was taken at first. A second walk
    /// that knows them from the start is right from the start.
    pub fn learnt(&self) -> &FxHashMap<ObjectId, Bytes> {
        &self.learnt
    }

    /// The most that blocks which were found may have had more than was taken: nothing showed whether
    /// what lay free behind them was theirs.
    pub fn hidden(&self) -> Bytes {
        self.hidden
    }

    /// How many events found no block where one should be: the recording has a gap, or other settings.
    pub fn disagreements(&self) -> u64 {
        self.disagreements
    }

    /// The segments of `device` by address, with their blocks, as they are now. Made anew at each call.
    pub fn layout(&self, device: DeviceId) -> Vec<SegmentLayout> {
        let Some(Some(memory)) = self.devices.get(usize::from(device.0)) else { return Vec::new() };
        let used = self
            .blocks
            .iter()
            .enumerate()
            .filter(|(_, block)| block.device == device && block.state != State::Free && block.size > 0);
        let used = used.map(|(object, block)| {
            let owner = Some((ObjectId(object as u32), Bytes::new(block.requested)));
            let layout = BlockLayout { size: Bytes::new(block.size), state: block.state, object: owner };
            (self.places.objects[object], block.segment, layout)
        });
        let free = memory.free.iter().map(|(address, free)| {
            let layout = BlockLayout { size: Bytes::new(free.size), state: State::Free, object: None };
            (*address, free.segment, layout)
        });
        let mut blocks: Vec<(u64, u32, BlockLayout)> = used.chain(free).collect();
        blocks.sort_unstable_by_key(|(address, _, _)| *address);
        let mut layout: Vec<SegmentLayout> = Vec::new();
        let mut last: Option<(u32, u64)> = None;
        for (address, segment, block) in blocks {
            if last != Some((segment, address)) || segment == NOWHERE {
                let home = memory.home(segment);
                layout.push(SegmentLayout {
                    address,
                    stream: home.stream,
                    pool: home.pool,
                    small: home.small,
                    expandable: home.expandable,
                    blocks: Vec::new(),
                });
            }
            last = Some((segment, address.saturating_add(block.size.get())));
            if let Some(segment) = layout.last_mut() {
                segment.blocks.push(block);
            }
        }
        layout
    }

    fn segment(&mut self, segment: Segment, takes: bool, expandable: bool) {
        let Some(start) = self.places.segments.get(self.segments).copied() else { return };
        self.segments += 1;
        let Some(Some(memory)) = self.devices.get_mut(usize::from(segment.device.0)) else { return };
        let range = start..start.saturating_add(segment.bytes.get());
        let whole = if takes {
            memory.reading.reserved += segment.bytes;
            memory.take(range, segment, expandable)
        } else {
            memory.reading.reserved -= segment.bytes;
            memory.give_back(&range)
        };
        memory.reading.reserved_high = memory.reading.reserved;
        self.disagreements += u64::from(!whole);
    }

    fn make(&mut self, object: ObjectId, requested: u64, device: DeviceId) {
        let index = object.0 as usize;
        let (address, found) = (self.places.objects[index], self.places.found[index]);
        let known = self.places.blocks.get(&object).map(|bytes| bytes.get());
        let Some(Some(memory)) = self.devices.get_mut(usize::from(device.0)) else { return };
        if requested == 0 {
            return;
        }
        let rounded = self.settings.round(requested);
        let mut agrees = true;
        let (mut size, mut segment) = (known.unwrap_or(rounded), NOWHERE);
        if let Some((object, owns)) = memory.rest_around(address, found) {
            let block = &mut self.blocks[object as usize];
            let start = self.places.objects[object as usize];
            let new = address - start;
            self.learnt.insert(ObjectId(object), Bytes::new(new));
            agrees = !owns;
            memory.resize(start, block, new, owns);
        }
        match memory.free_around(address) {
            Some((start, free)) => {
                segment = free.segment;
                if start < address && !found {
                    agrees = false;
                }
                let behind = start + free.size - address;
                let home = memory.home(segment);
                let splits = match home.small || home.expandable {
                    true => behind.saturating_sub(rounded) >= MIN_BLOCK,
                    false => {
                        let max_split = self.settings.max_split_size.map_or(u64::MAX, Bytes::get);
                        rounded < max_split && behind.saturating_sub(rounded) > SMALL_LIMIT
                    }
                };
                agrees &= rounded <= behind;
                size = match known {
                    Some(known) => known.min(behind),
                    // What lies behind an object that was found there is not known to be its rest.
                    None if splits || found => rounded.min(behind),
                    None => behind,
                };
                memory.free.remove(&start);
                if start < address {
                    memory.free.insert(start, Free { size: address - start, segment });
                }
                if behind > size {
                    memory.free.insert(address + size, Free { size: behind - size, segment });
                }
                let unknown = found && known.is_none() && !(home.small || home.expandable);
                if unknown {
                    memory.rests.insert(address + size, (object.0, false));
                } else if size > rounded {
                    memory.rests.insert(address + rounded, (object.0, true));
                }
            }
            None => agrees = false,
        }
        self.blocks[index] = Block { size, requested, segment, device, state: State::Allocated };
        memory.reading.allocated += Bytes::new(size);
        memory.reading.active += Bytes::new(size);
        self.disagreements += u64::from(!agrees);
    }

    fn let_go(&mut self, object: ObjectId, whole: bool) {
        let index = object.0 as usize;
        let block = self.blocks[index];
        let Some(Some(memory)) = self.devices.get_mut(usize::from(block.device.0)) else { return };
        if block.state == State::Free {
            return;
        }
        let size = Bytes::new(block.size);
        if block.state == State::Allocated {
            memory.reading.allocated -= size;
        }
        if !whole {
            self.blocks[index].state = State::Pending;
            return;
        }
        memory.reading.active -= size;
        self.blocks[index] = NONE;
        let address = self.places.objects[index];
        if block.segment == NOWHERE {
            return;
        }
        // The rest of a block begins behind what was asked for, or behind all of it.
        for at in [address + self.settings.round(block.requested), address + block.size] {
            if let Some((_, owns)) = memory.rests.get(&at).copied().filter(|(owner, _)| *owner == object.0) {
                memory.rests.remove(&at);
                let behind = memory.free.get(&at).filter(|free| free.segment == block.segment);
                if let Some(free) = behind.filter(|free| !owns && free.size <= SMALL_LIMIT) {
                    self.hidden += Bytes::new(free.size);
                }
            }
        }
        if block.size > 0 {
            memory.merge(address, Free { size: block.size, segment: block.segment });
        }
    }
}

impl Meter for PlacedAllocator<'_> {
    fn apply(&mut self, _: usize, event: Event) -> Result<(), Oom> {
        match event {
            Event::Alloc { object, bytes, device, .. } => self.make(object, bytes.get(), device),
            Event::FreeRequested(object) => self.let_go(object, false),
            Event::Free(object) => self.let_go(object, true),
            Event::SegmentAlloc(segment) => self.segment(segment, true, false),
            Event::SegmentMap(segment) => self.segment(segment, true, true),
            Event::SegmentFree(segment) => self.segment(segment, false, false),
            Event::SegmentUnmap(segment) => self.segment(segment, false, true),
            Event::Oom { .. } | Event::Relabel(..) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        self.devices.get(usize::from(device.0))?.as_ref().map(|memory| memory.reading)
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        let block = self.blocks.get(object.0 as usize)?;
        let metered = self.devices.get(usize::from(block.device.0))?.is_some();
        (metered && block.state != State::Free).then_some(Bytes::new(block.size))
    }
}

impl Memory {
    fn home(&self, segment: u32) -> Home {
        let nowhere = Home { stream: Stream(0), pool: Pool(0), small: false, expandable: false };
        self.segments.get(&segment).copied().unwrap_or(nowhere)
    }

    /// Adds free memory; whether nothing was there.
    fn take(&mut self, range: Range<u64>, segment: Segment, expandable: bool) -> bool {
        let small = !expandable && segment.bytes.get() == SMALL_SEGMENT;
        let home = Home { stream: segment.stream, pool: segment.pool, small, expandable };
        self.segments.entry(segment.segment.0).or_insert(home);
        let over = self.ranges.range(..range.end).next_back();
        if range.start >= range.end || over.is_some_and(|(_, end)| *end > range.start) {
            return false;
        }
        self.ranges.insert(range.start, range.end);
        self.merge(range.start, Free { size: range.end - range.start, segment: segment.segment.0 });
        true
    }

    /// Takes free memory out; whether it was there and free.
    fn give_back(&mut self, range: &Range<u64>) -> bool {
        while let Some((start, end)) = self.ranges.range(..range.end).next_back().map(|(at, end)| (*at, *end))
        {
            if end <= range.start {
                break;
            }
            self.ranges.remove(&start);
            if start < range.start {
                self.ranges.insert(start, range.start);
            }
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
        }
        let Some((start, free)) = self.free_around(range.start) else { return false };
        if start + free.size < range.end {
            return false;
        }
        self.free.remove(&start);
        if start < range.start {
            self.free.insert(start, Free { size: range.start - start, ..free });
        }
        if start + free.size > range.end {
            self.free.insert(range.end, Free { size: start + free.size - range.end, ..free });
        }
        true
    }

    /// The free block around `address`.
    fn free_around(&self, address: u64) -> Option<(u64, Free)> {
        let (start, free) = self.free.range(..=address).next_back()?;
        (address < start + free.size).then_some((*start, *free))
    }

    /// The object behind which `address` shows what is its rest: a block in use that was taken to
    /// reach beyond it, or one that reaches up to it where the rest was taken to be free.
    /// One that was `found` at `address` itself shows nothing of what may be free before it.
    fn rest_around(&mut self, address: u64, found: bool) -> Option<(u32, bool)> {
        let (start, (object, owns)) = self.rests.range(..=address).next_back().map(|(at, it)| (*at, *it))?;
        let reaches = match self.free.get(&start) {
            // A block that was found: the address lies in the free block right behind it.
            Some(free) if !owns => {
                !found && start < address && address - start <= SMALL_LIMIT && address < start + free.size
            }
            _ => owns && self.free_around(address).is_none(),
        };
        if !reaches {
            return None;
        }
        self.rests.remove(&start);
        Some((object, owns))
    }

    /// Makes the block at `start` one of `size` bytes; `shrinks` tells whether it had more.
    fn resize(&mut self, start: u64, block: &mut Block, size: u64, shrinks: bool) {
        let old = block.size;
        if shrinks {
            if size >= old {
                return;
            }
            self.free.insert(start + size, Free { size: old - size, segment: block.segment });
        } else if let Some(free) = self.free.remove(&(start + old)) {
            let more = size - old;
            if free.size > more {
                self.free.insert(start + size, Free { size: free.size - more, ..free });
            }
        }
        block.size = size;
        let change = |total: Bytes| (total + Bytes::new(size)) - Bytes::new(old);
        if block.state == State::Allocated {
            self.reading.allocated = change(self.reading.allocated);
        }
        self.reading.active = change(self.reading.active);
    }

    /// Adds a free block at `address`, joined with free neighbours of its segment.
    fn merge(&mut self, address: u64, mut block: Free) {
        let next = self.free.get(&(address + block.size)).filter(|next| next.segment == block.segment);
        if let Some(next) = next.copied() {
            self.free.remove(&(address + block.size));
            block.size += next.size;
        }
        if let Some((start, before)) = self.free.range_mut(..address).next_back()
            && start + before.size == address
            && before.segment == block.segment
        {
            before.size += block.size;
        } else {
            self.free.insert(address, block);
        }
    }
}
