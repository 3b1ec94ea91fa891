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
    devices: Vec<Option<Blocks>>,
    homes: Vec<Option<(DeviceId, u64)>>,
    segments: usize,
    learnt: FxHashMap<ObjectId, Bytes>,
    hidden: Bytes,
    disagreements: u64,
    first_disagreement: Option<usize>,
}

/// The blocks of one device.
#[derive(Clone, Debug, Default)]
struct Blocks {
    /// By address.
    blocks: BTreeMap<u64, Block>,
    segments: FxHashMap<u32, Home>,
    reading: Reading,
}

/// One block.
#[derive(Clone, Copy, Debug)]
struct Block {
    size: u64,
    segment: u32,
    state: State,
    /// The object in it and the bytes asked for; of one in use.
    object: u32,
    requested: u64,
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
        let blocks = |device: &ledger::Device| (device.kind == DeviceKind::Gpu).then(Blocks::default);
        Self {
            places,
            settings,
            devices: tape.devices.iter().map(blocks).collect(),
            homes: vec![None; tape.objects().len()],
            segments: 0,
            learnt: FxHashMap::default(),
            hidden: Bytes::ZERO,
            disagreements: 0,
            first_disagreement: None,
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

    /// How many events found no block where one should be, and the first of them: the recording has
    /// a gap, or other settings.
    pub fn disagreements(&self) -> (u64, Option<usize>) {
        (self.disagreements, self.first_disagreement)
    }

    /// The segments of `device` by address, with their blocks, as they are now.
    pub fn layout(&self, device: DeviceId) -> Vec<SegmentLayout> {
        let Some(Some(blocks)) = self.devices.get(usize::from(device.0)) else { return Vec::new() };
        let mut layout: Vec<(u32, SegmentLayout)> = Vec::new();
        let mut end = None;
        for (address, block) in &blocks.blocks {
            let used = block.state != State::Free;
            let object = used.then_some((ObjectId(block.object), Bytes::new(block.requested)));
            let shown = BlockLayout { size: Bytes::new(block.size), state: block.state, object };
            match layout.last_mut() {
                Some((segment, last)) if *segment == block.segment && end == Some(*address) => {
                    last.blocks.push(shown);
                }
                _ => {
                    let home = blocks.home(block.segment);
                    layout.push((
                        block.segment,
                        SegmentLayout {
                            address: *address,
                            stream: home.stream,
                            pool: home.pool,
                            small: home.small,
                            expandable: home.expandable,
                            blocks: vec![shown],
                        },
                    ));
                }
            }
            end = Some(address + block.size);
        }
        layout.into_iter().map(|(_, segment)| segment).collect()
    }

    fn disagree(&mut self, event: usize) {
        self.disagreements += 1;
        self.first_disagreement.get_or_insert(event);
    }

    fn segment(&mut self, event: usize, segment: Segment, takes: bool, expandable: bool) {
        let Some(start) = self.places.segments.get(self.segments).copied() else { return };
        self.segments += 1;
        let bytes = segment.bytes.get();
        let Some(Some(device)) = self.devices.get_mut(usize::from(segment.device.0)) else { return };
        let range = start..start.saturating_add(bytes);
        let whole = if takes {
            device.reading.reserved += segment.bytes;
            device.take(range, segment, expandable)
        } else {
            device.reading.reserved -= segment.bytes;
            device.give_back(range)
        };
        device.reading.reserved_high = device.reading.reserved;
        if !whole {
            self.disagree(event);
        }
    }

    fn make(&mut self, event: usize, object: ObjectId, requested: u64, device: DeviceId) {
        let index = object.0 as usize;
        let address = self.places.objects[index];
        let found = self.places.found[index];
        let known = self.places.blocks.get(&object).map(|bytes| bytes.get());
        let Some(Some(blocks)) = self.devices.get_mut(usize::from(device.0)) else { return };
        if requested == 0 {
            return;
        }
        self.homes[index] = Some((device, address));
        let rounded = self.settings.round(requested);
        let max_split = self.settings.max_split_size.map_or(u64::MAX, Bytes::get);
        let wish = Wish { object: object.0, requested, rounded, known, max_split };
        let placed = blocks.place(address, &wish, found);
        self.learnt.extend(placed.learnt.map(|(object, bytes)| (ObjectId(object), Bytes::new(bytes))));
        if !placed.agrees {
            self.disagree(event);
        }
    }

    fn let_go(&mut self, object: ObjectId, whole: bool) {
        let Some((device, address)) = self.homes[object.0 as usize] else { return };
        if let Some(Some(blocks)) = self.devices.get_mut(usize::from(device.0)) {
            if whole && self.places.found[object.0 as usize] && !self.places.blocks.contains_key(&object) {
                self.hidden += Bytes::new(blocks.behind(address));
            }
            blocks.let_go(address, object.0, whole);
        }
        if whole {
            self.homes[object.0 as usize] = None;
        }
    }
}

impl Meter for PlacedAllocator<'_> {
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom> {
        match event {
            Event::Alloc { object, bytes, device, .. } => self.make(index, object, bytes.get(), device),
            Event::FreeRequested(object) => self.let_go(object, false),
            Event::Free(object) => self.let_go(object, true),
            Event::SegmentAlloc(segment) => self.segment(index, segment, true, false),
            Event::SegmentMap(segment) => self.segment(index, segment, true, true),
            Event::SegmentFree(segment) => self.segment(index, segment, false, false),
            Event::SegmentUnmap(segment) => self.segment(index, segment, false, true),
            Event::Oom { .. } | Event::Relabel(..) | Event::Mark(_) => {}
        }
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        self.devices.get(usize::from(device.0))?.as_ref().map(|blocks| blocks.reading)
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        let (device, address) = self.homes.get(object.0 as usize).copied()??;
        let block = self.devices[usize::from(device.0)].as_ref()?.blocks.get(&address)?;
        (block.object == object.0).then_some(Bytes::new(block.size))
    }
}

/// A request.
struct Wish {
    object: u32,
    requested: u64,
    rounded: u64,
    /// The bytes of its block, where they are known.
    known: Option<u64>,
    max_split: u64,
}

/// What became of a request.
struct Placed {
    agrees: bool,
    /// An object whose block is of another size than was taken.
    learnt: Option<(u32, u64)>,
}

impl Blocks {
    fn home(&self, segment: u32) -> Home {
        let nowhere = Home { stream: Stream(0), pool: Pool(0), small: false, expandable: false };
        self.segments.get(&segment).copied().unwrap_or(nowhere)
    }

    /// Adds free memory; whether nothing was there.
    fn take(&mut self, range: Range<u64>, segment: Segment, expandable: bool) -> bool {
        let small = !expandable && segment.bytes.get() == SMALL_SEGMENT;
        let home = Home { stream: segment.stream, pool: segment.pool, small, expandable };
        self.segments.entry(segment.segment.0).or_insert(home);
        let over = self.blocks.range(..range.end).next_back();
        let free = over.is_none_or(|(start, block)| start + block.size <= range.start);
        if range.start < range.end && free {
            let (size, segment) = (range.end - range.start, segment.segment.0);
            self.blocks
                .insert(range.start, Block { size, segment, state: State::Free, object: 0, requested: 0 });
            self.merge(range.start);
        }
        free
    }

    /// Takes free memory out; whether it was there and free.
    fn give_back(&mut self, range: Range<u64>) -> bool {
        let Some((start, block)) = self.blocks.range(..=range.start).next_back() else { return false };
        let (start, block) = (*start, *block);
        if block.state != State::Free || start + block.size < range.end {
            return false;
        }
        self.blocks.remove(&start);
        if start < range.start {
            self.blocks.insert(start, Block { size: range.start - start, ..block });
        }
        if start + block.size > range.end {
            self.blocks.insert(range.end, Block { size: start + block.size - range.end, ..block });
        }
        true
    }

    /// Puts an object at `address`; `found` where no request made it.
    fn place(&mut self, address: u64, wish: &Wish, found: bool) -> Placed {
        let mut placed = Placed { agrees: true, learnt: None };
        let Some((mut start, mut block)) = self.around(address) else {
            self.use_block(address, wish, wish.known.unwrap_or(wish.rounded), u32::MAX);
            return Placed { agrees: false, learnt: None };
        };
        if block.state != State::Free {
            // What is there was taken to be larger than it is.
            let (object, size) = (block.object, address - start);
            placed.learnt = (size > 0).then_some((object, size));
            placed.agrees = false;
            self.resize(start, size);
            (start, block) =
                (address, Block { size: start + block.size - address, state: State::Free, ..block });
            self.blocks.insert(start, block);
        } else if start < address {
            let before = self.blocks.range(..start).next_back().map(|(at, block)| (*at, *block));
            let touches = before.filter(|(at, before)| {
                at + before.size == start && before.state != State::Free && before.segment == block.segment
            });
            match touches {
                Some((at, before)) if !found => {
                    // The rest of the block before it was not split off.
                    self.blocks.remove(&start);
                    self.resize(at, address - at);
                    placed.learnt = Some((before.object, address - at));
                }
                _ => {
                    placed.agrees = found;
                    self.resize(start, address - start);
                }
            }
            (start, block) = (address, Block { size: start + block.size - address, ..block });
            self.blocks.insert(start, block);
        }
        let home = self.home(block.segment);
        let rest = block.size.saturating_sub(wish.rounded);
        let splits = match home.small || home.expandable {
            true => rest >= MIN_BLOCK,
            false => wish.rounded < wish.max_split && rest > SMALL_LIMIT,
        };
        let size = match wish.known {
            Some(known) => known.min(block.size),
            // What lies behind an object that was found there is not known to be its rest.
            None if splits || found => wish.rounded.min(block.size),
            None => block.size,
        };
        placed.agrees &= wish.rounded <= block.size;
        self.blocks.remove(&start);
        self.use_block(start, wish, size, block.segment);
        if block.size > size {
            self.blocks.insert(start + size, Block { size: block.size - size, ..block });
        }
        placed
    }

    /// The block around `address`.
    fn around(&self, address: u64) -> Option<(u64, Block)> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        (address < start + block.size).then_some((*start, *block))
    }

    fn use_block(&mut self, address: u64, wish: &Wish, size: u64, segment: u32) {
        let (object, requested) = (wish.object, wish.requested);
        self.blocks.insert(address, Block { size, segment, state: State::Allocated, object, requested });
        self.reading.allocated += Bytes::new(size);
        self.reading.active += Bytes::new(size);
    }

    /// Gives the block at `address` another size, or takes it out where nothing is left of it.
    fn resize(&mut self, address: u64, size: u64) {
        let Some(block) = self.blocks.get_mut(&address) else { return };
        let (old, state) = (block.size, block.state);
        block.size = size;
        if size == 0 {
            self.blocks.remove(&address);
        }
        let change = |total: Bytes| (total + Bytes::new(size)) - Bytes::new(old);
        if state == State::Allocated {
            self.reading.allocated = change(self.reading.allocated);
        }
        if state != State::Free {
            self.reading.active = change(self.reading.active);
        }
    }

    fn let_go(&mut self, address: u64, object: u32, whole: bool) {
        let Some(block) = self.blocks.get_mut(&address).filter(|block| block.object == object) else {
            return;
        };
        let size = Bytes::new(block.size);
        if block.state == State::Allocated {
            self.reading.allocated -= size;
        }
        if !whole {
            block.state = State::Pending;
            return;
        }
        if block.state != State::Free {
            self.reading.active -= size;
        }
        (block.state, block.object, block.requested) = (State::Free, 0, 0);
        if block.segment == u32::MAX {
            // It was in no segment.
            self.blocks.remove(&address);
        } else {
            self.merge(address);
        }
    }

    /// What lies free behind the block at `address` and may be the rest of it.
    fn behind(&self, address: u64) -> u64 {
        let Some(block) = self.blocks.get(&address) else { return 0 };
        let home = self.home(block.segment);
        let next = self.blocks.get(&(address + block.size)).filter(|next| {
            next.state == State::Free && next.segment == block.segment && next.size <= SMALL_LIMIT
        });
        if home.small || home.expandable { 0 } else { next.map_or(0, |next| next.size) }
    }

    /// Joins the free block at `address` with free neighbours of its segment.
    fn merge(&mut self, address: u64) {
        let Some(mut block) = self.blocks.get(&address).copied() else { return };
        let joins = |other: &Block| other.state == State::Free && other.segment == block.segment;
        let next = self.blocks.get(&(address + block.size)).copied().filter(joins);
        let before = self.blocks.range(..address).next_back().map(|(at, block)| (*at, *block));
        let before = before.filter(|(at, before)| at + before.size == address && joins(before));
        if let Some(next) = next {
            self.blocks.remove(&(address + block.size));
            block.size += next.size;
        }
        match before {
            Some((at, before)) => {
                self.blocks.remove(&address);
                self.blocks.insert(at, Block { size: before.size + block.size, ..before });
            }
            None if next.is_some() => {
                self.blocks.insert(address, block);
            }
            None => {}
        }
    }
}
