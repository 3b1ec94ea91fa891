//! The caching allocator of one device: how a request finds its block, and what a free does.
//!
//! The rules are those of PyTorch's `c10/cuda/CUDACachingAllocator.cpp`, release 2.15, which differ
//! from earlier ones in the tie-break alone; each is told where it is applied.

use ledger::{ByteDelta, Bytes, Pool, Stream};
use rustc_hash::FxHashMap;

use crate::arena::{AddressOrder, Arena};
use crate::blocks::{Block, BlockId, BlockPool, Expandable, Segment, Slab, State};
use crate::free_set::FreeKey;
use crate::rules::{DEVICE_PAGE, MIN_BLOCK, SMALL_LIMIT};
use crate::settings::Settings;
use crate::stats::Stats;

/// Which of several free blocks of one size is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TieRule {
    /// The one in the segment taken first, then the lowest address: torch 2.15.
    SegmentCounter,
    /// The lowest address, of a device that hands out addresses in this order: earlier releases.
    Address(AddressOrder),
}

/// The memory of a device, as far as the allocator is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// All memory of the device; none: it never runs out, below 4 PiB.
    pub total: Option<Bytes>,
    /// What of it the allocator never gets: the CUDA context, libraries, other processes.
    pub outside: Bytes,
}

/// What the allocator did to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It took a segment.
    SegmentAlloc(Bytes),
    /// It gave a segment back.
    SegmentFree(Bytes),
    /// It mapped pages into an expandable segment.
    SegmentMap(Bytes),
    /// It unmapped pages of an expandable segment.
    SegmentUnmap(Bytes),
    /// It found no room for a block of this rounded size.
    Oom(Bytes),
}

/// A request that found no room, after everything that could be given back was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The bytes asked for.
    pub requested: Bytes,
    /// The size of the block that would have served it: the size of the recorded event.
    pub rounded: Bytes,
    /// What was asked of the device: the "Tried to allocate" of the message.
    pub segment: Bytes,
    /// The largest free block of the request's pool and stream; zero where there is none.
    pub largest_free_block: Bytes,
    /// Block bytes handed out.
    pub allocated: Bytes,
    /// `allocated` and the blocks that wait for other streams to be free.
    pub active: Bytes,
    /// Segment bytes held.
    pub reserved: Bytes,
    /// What was left on the device; none where the device has no known limit.
    pub device_free: Option<Bytes>,
    /// What a memory fraction allows in all, where one is set.
    pub allowed: Option<Bytes>,
}

impl Shortage {
    /// What a segment for the request could still have taken, less that segment: negative. What the
    /// device had left or what a memory fraction still allowed counts, whichever is less.
    pub fn headroom(&self) -> Option<ByteDelta> {
        let allowed = self.allowed.map(|allowed| allowed.saturating_sub(self.reserved));
        let room = self.device_free.into_iter().chain(allowed).min()?;
        Some(room.delta(self.segment.min(Bytes::MAX)))
    }
}

/// The address space of an expandable segment on a device of unknown size.
pub(crate) const UNKNOWN_DEVICE: u64 = 1 << 46;
/// No device is larger, and no request: 4 PiB. Sums stay far from overflow, and sizes and offsets fit
/// in a [`FreeKey`].
const LARGEST_DEVICE: u64 = 1 << 52;

/// The allocator of one device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceAllocator {
    pub(crate) settings: Settings,
    tie: TieRule,
    pub(crate) memory: DeviceMemory,
    /// What a memory fraction below 1 allows in all.
    allowed: Option<u64>,
    max_split: u64,
    pub(crate) blocks: Slab<Block>,
    pub(crate) segments: Slab<Segment>,
    segments_taken: u64,
    /// The halves of the pools: large at even places, small at odd ones; the default pool first.
    pub(crate) pools: Vec<BlockPool>,
    private_pools: FxHashMap<Pool, u32>,
    pending: Vec<BlockId>,
    pub(crate) arena: Arena,
    /// Bytes taken from the device, in whole device pages.
    taken: u64,
    pub(crate) stats: Stats,
    /// The largest number of reserved bytes after memory was taken, since the caller last looked.
    pub(crate) reserved_high: u64,
    /// What was done to the device since the caller last looked.
    pub(crate) actions: Vec<Action>,
    /// The objects whose pending blocks were waited for since the caller last looked.
    pub(crate) waited_for: Vec<u32>,
}

impl DeviceAllocator {
    pub(crate) fn new(settings: Settings, tie: TieRule, memory: DeviceMemory) -> Self {
        let order = match tie {
            TieRule::SegmentCounter => AddressOrder::Up,
            TieRule::Address(order) => order,
        };
        let fraction = settings.memory_fraction.filter(|fraction| *fraction < 1.0);
        let allowed =
            memory.total.zip(fraction).map(|(total, fraction)| (total.get() as f64 * fraction) as u64);
        Self {
            max_split: settings.max_split_size.map_or(u64::MAX, Bytes::get),
            settings,
            tie,
            memory,
            allowed,
            blocks: Slab::default(),
            segments: Slab::default(),
            segments_taken: 0,
            pools: vec![BlockPool::new(Pool(0), false), BlockPool::new(Pool(0), true)],
            private_pools: FxHashMap::default(),
            pending: Vec::new(),
            arena: Arena::new(order),
            taken: 0,
            stats: Stats::default(),
            reserved_high: 0,
            actions: Vec::new(),
            waited_for: Vec::new(),
        }
    }

    /// Hands out a block for a request of `requested` bytes, which are not 0.
    pub(crate) fn allocate(
        &mut self,
        object: u32,
        requested: u64,
        stream: Stream,
        pool: Pool,
    ) -> Result<BlockId, Shortage> {
        if requested > LARGEST_DEVICE {
            return Err(self.out_of_memory(requested, requested, requested, stream, 0));
        }
        let size = self.settings.round(requested);
        let segment = self.settings.segment(size);
        let pool = self.pool_index(pool) + u32::from(size <= SMALL_LIMIT);
        let found = self
            .find_free_block(size, stream, pool)
            .or_else(|| {
                self.collect_garbage();
                self.take_from_device(size, segment, stream, pool)
            })
            .or_else(|| {
                self.release_oversize_blocks(size, stream, pool)
                    .then(|| self.take_from_device(size, segment, stream, pool))?
            })
            .or_else(|| {
                self.release_cached_blocks();
                self.stats.num_alloc_retries += 1;
                self.take_from_device(size, segment, stream, pool)
            });
        match found {
            Some(block) => Ok(self.hand_out(block, size, requested, object, pool)),
            None => Err(self.out_of_memory(requested, size, segment, stream, pool)),
        }
    }

    /// The program lets go of `block`, which other streams still use.
    pub(crate) fn request_free(&mut self, id: BlockId) {
        self.let_go(id);
        self.blocks[id].state = State::Pending;
        self.pending.push(id);
    }

    /// `block` is no longer used by anybody.
    pub(crate) fn free(&mut self, id: BlockId) {
        if self.blocks[id].state == State::Pending {
            self.pending.retain(|pending| *pending != id);
        } else {
            self.let_go(id);
        }
        self.free_block(id);
    }

    /// Gives all cached blocks back to the device, as `torch.cuda.empty_cache()` does.
    pub(crate) fn release_cached_blocks(&mut self) {
        self.stats.num_sync_all_streams += 1;
        for id in std::mem::take(&mut self.pending) {
            self.waited_for.push(self.blocks[id].object);
            self.free_block(id);
        }
        self.release_blocks(0);
        self.release_blocks(1);
        for large in (2..self.pools.len() as u32).step_by(2) {
            if self.pools[large as usize].released {
                self.release_blocks(large + 1);
                self.release_blocks(large);
            }
        }
    }

    /// The blocks of the private `pool` are never split from now on.
    pub(crate) fn set_no_split(&mut self, pool: Pool) {
        let large = self.pool_index(pool) as usize;
        self.pools[large..=large + 1].iter_mut().for_each(|half| half.no_split = true);
    }

    /// The cached blocks of the private `pool` may go back to the device from now on.
    pub(crate) fn release_pool(&mut self, pool: Pool) {
        let large = self.pool_index(pool) as usize;
        self.pools[large..=large + 1].iter_mut().for_each(|half| half.released = true);
    }

    /// The most that may be reserved; none where the device has no known limit.
    pub(crate) fn limit(&self) -> Option<u64> {
        let available = self.memory.total.map(|total| total.saturating_sub(self.memory.outside).get());
        available.into_iter().chain(self.allowed).min()
    }

    /// What is left on the device; none where it has no known limit.
    pub(crate) fn device_free(&self) -> Option<u64> {
        self.memory
            .total
            .map(|total| total.get().saturating_sub(self.memory.outside.get()).saturating_sub(self.taken))
    }

    /// The index of the large half of `pool`.
    fn pool_index(&mut self, pool: Pool) -> u32 {
        if pool == Pool(0) {
            return 0;
        }
        let pools = &mut self.pools;
        *self.private_pools.entry(pool).or_insert_with(|| {
            pools.extend([BlockPool::new(pool, false), BlockPool::new(pool, true)]);
            pools.len() as u32 - 2
        })
    }

    fn collects_garbage(&self) -> bool {
        self.allowed.is_some() && self.settings.garbage_collection_threshold.is_some()
    }

    /// Best fit among the cached blocks of the stream: the smallest that is large enough.
    fn find_free_block(&mut self, size: u64, stream: Stream, pool: u32) -> Option<BlockId> {
        let counts = self.collects_garbage();
        let blocks = &self.blocks;
        let half = &mut self.pools[pool as usize];
        half.searches += u64::from(counts);
        let free = &mut half.stream(stream).free;
        let (mut position, mut found) = free.first_from(FreeKey::least(size))?;
        if self.settings.expandable_segments {
            // A block counts with the address space behind it: it may grow. A larger block that
            // can grow less is the better fit.
            let room = |id: BlockId| {
                let block = &blocks[id];
                let next = block.next.some().map(|next| &blocks[next]);
                block.size + next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
            };
            while let Some((next, larger)) = free.after(position)
                && room(larger.block) < room(found.block)
            {
                (position, found) = (next, larger);
            }
        }
        // A block that may not be split serves only requests that large, and not much smaller ones.
        let split = self.max_split;
        let most = size.saturating_add(self.settings.max_non_split_rounding.get());
        let whole = found.key.size();
        if (size < split && whole >= split) || (size >= split && whole >= most) {
            return None;
        }
        free.remove_at(position);
        Some(found.block)
    }

    /// Marks `id`, which is in no set, as handed out; splits off what is not needed of it.
    fn hand_out(&mut self, id: BlockId, size: u64, requested: u64, object: u32, pool: u32) -> BlockId {
        let half = &self.pools[pool as usize];
        let (small, no_split) = (half.small, half.no_split);
        let block = self.blocks[id];
        let remaining = block.size - size;
        let split = !no_split
            && if small || self.settings.expandable_segments {
                remaining >= MIN_BLOCK
            } else {
                size < self.max_split && remaining > SMALL_LIMIT
            };
        let counted = self.segments[block.segment].expandable.is_none();
        let was_split = block.is_split();
        if split {
            let rest = self.blocks.insert(Block {
                address: block.address + size,
                size: remaining,
                prev: id,
                state: State::Free,
                ..block
            });
            if let Some(next) = block.next.some() {
                self.blocks[next].prev = BlockId(rest);
            }
            self.blocks[id].next = BlockId(rest);
            self.blocks[id].size = size;
            self.insert_free(BlockId(rest));
            if counted && was_split {
                self.stats.inactive_split_bytes.decrease(small, size);
            } else if counted {
                self.stats.inactive_split_bytes.increase(small, remaining);
                self.stats.inactive_split.increase(small, 1);
            }
        } else if counted && was_split {
            self.stats.inactive_split_bytes.decrease(small, block.size);
            self.stats.inactive_split.decrease(small, 1);
        }

        let block = &mut self.blocks[id];
        block.state = State::Allocated;
        block.requested = requested;
        block.object = object;
        let size = block.size;
        self.stats.allocation.increase(small, 1);
        self.stats.allocated_bytes.increase(small, size);
        self.stats.active.increase(small, 1);
        self.stats.active_bytes.increase(small, size);
        self.stats.requested_bytes.increase(small, requested);
        if size >= self.max_split {
            self.stats.oversize_allocations.increase(1);
        }
        id
    }

    /// The program's half of a free: the block no longer counts as allocated.
    fn let_go(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        let size = block.size;
        let small = self.pools[self.segments[block.segment].pool as usize].small;
        self.stats.allocation.decrease(small, 1);
        self.stats.allocated_bytes.decrease(small, size);
        if size >= self.max_split {
            self.stats.oversize_allocations.decrease(1);
        }
    }

    /// The allocator's half: the block joins its free neighbours and is cached.
    fn free_block(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        block.state = State::Free;
        let (size, requested, prev, next) = (block.size, block.requested, block.prev, block.next);
        let segment = &self.segments[block.segment];
        let small = self.pools[segment.pool as usize].small;
        let counted = segment.expandable.is_none();
        let merged = [self.merge(id, prev), self.merge(id, next)];
        self.insert_free(id);
        if counted {
            let block = &self.blocks[id];
            let (count, bytes) = if block.is_split() { (1, block.size) } else { (0, 0) };
            let gone = merged.iter().flatten().count() as u64;
            let gone_bytes = merged.iter().flatten().sum::<u64>();
            let stats = &mut self.stats;
            for (stat, new, old) in [
                (&mut stats.inactive_split, count, gone),
                (&mut stats.inactive_split_bytes, bytes, gone_bytes),
            ] {
                if new > old {
                    stat.increase(small, new - old);
                } else if old > new {
                    stat.decrease(small, old - new);
                }
            }
        }
        self.stats.active.decrease(small, 1);
        self.stats.active_bytes.decrease(small, size);
        self.stats.requested_bytes.decrease(small, requested);
    }

    /// Joins the neighbour `from` into `into` where both are cached or both unmapped, and gives its
    /// bytes.
    pub(crate) fn merge(&mut self, into: BlockId, from: BlockId) -> Option<u64> {
        let from = from.some()?;
        let gone = self.blocks[from];
        if gone.state != self.blocks[into].state {
            return None;
        }
        if gone.state == State::Free {
            self.remove_free(from);
        } else {
            self.remove_unmapped(from);
        }
        let block = &mut self.blocks[into];
        block.size += gone.size;
        if block.prev == from {
            block.address = gone.address;
            block.prev = gone.prev;
            if let Some(prev) = gone.prev.some() {
                self.blocks[prev].next = into;
            }
        } else {
            block.next = gone.next;
            if let Some(next) = gone.next.some() {
                self.blocks[next].prev = into;
            }
        }
        self.blocks.remove(from.0);
        Some(gone.size)
    }

    fn free_key(&self, id: BlockId) -> FreeKey {
        let block = &self.blocks[id];
        match self.tie {
            TieRule::SegmentCounter => {
                let segment = &self.segments[block.segment];
                FreeKey::by_segment(block.size, segment.counter, block.address - segment.base)
            }
            TieRule::Address(_) => FreeKey::by_address(block.size, block.address),
        }
    }

    pub(crate) fn insert_free(&mut self, id: BlockId) {
        let key = self.free_key(id);
        let segment = &self.segments[self.blocks[id].segment];
        let half = &mut self.pools[segment.pool as usize];
        self.blocks[id].free_since = half.searches;
        half.stream(segment.stream).free.insert(key, id);
    }

    pub(crate) fn remove_free(&mut self, id: BlockId) {
        let key = self.free_key(id);
        let segment = &self.segments[self.blocks[id].segment];
        self.pools[segment.pool as usize].stream(segment.stream).free.remove(key);
    }

    pub(crate) fn insert_unmapped(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        let segment = &self.segments[block.segment];
        self.pools[segment.pool as usize].stream(segment.stream).unmapped.insert(block.address, id);
    }

    pub(crate) fn remove_unmapped(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        let segment = &self.segments[block.segment];
        self.pools[segment.pool as usize].stream(segment.stream).unmapped.remove(&block.address);
    }

    /// A block of at least `size` bytes in no set, from memory that the device gives; none where it
    /// has none.
    fn take_from_device(&mut self, size: u64, segment: u64, stream: Stream, pool: u32) -> Option<BlockId> {
        if self
            .allowed
            .is_some_and(|allowed| self.stats.reserved_bytes.all.current.saturating_add(segment) > allowed)
        {
            return None;
        }
        if self.settings.expandable_segments {
            return self.expand(size, stream, pool);
        }
        self.take_memory(1, segment)?;
        let Some(address) = self.arena.take(segment) else {
            self.give_memory(1, segment);
            return None;
        };
        let small = self.pools[pool as usize].small;
        self.stats.segment.increase(small, 1);
        self.reserve(small, segment);
        self.stats.num_device_alloc += 1;
        if segment >= self.max_split {
            self.stats.oversize_segments.increase(1);
        }
        self.actions.push(Action::SegmentAlloc(Bytes::new(segment)));
        Some(self.new_segment(address, segment, stream, pool, None, State::Free))
    }

    /// A segment with one block over all of it.
    pub(crate) fn new_segment(
        &mut self,
        address: u64,
        size: u64,
        stream: Stream,
        pool: u32,
        expandable: Option<Expandable>,
        state: State,
    ) -> BlockId {
        let counter = self.segments_taken;
        self.segments_taken += 1;
        let segment = self.segments.insert(Segment { counter, base: address, pool, stream, expandable });
        let (prev, next) = (BlockId::NONE, BlockId::NONE);
        let block =
            Block { address, size, requested: 0, object: 0, prev, next, segment, state, free_since: 0 };
        BlockId(self.blocks.insert(block))
    }

    /// Takes `count` pieces of `bytes` from the device, each in whole device pages, where it has them.
    pub(crate) fn take_memory(&mut self, count: u64, bytes: u64) -> Option<()> {
        let free = self.device_free().unwrap_or(u64::MAX).min(LARGEST_DEVICE - self.taken);
        let pages = bytes.checked_next_multiple_of(DEVICE_PAGE)?.checked_mul(count)?;
        self.taken += Some(pages).filter(|pages| *pages <= free)?;
        Some(())
    }

    pub(crate) fn give_memory(&mut self, count: u64, bytes: u64) {
        self.taken -= bytes.next_multiple_of(DEVICE_PAGE) * count;
    }

    /// Counts `bytes` more of reserved memory.
    pub(crate) fn reserve(&mut self, small: bool, bytes: u64) {
        self.stats.reserved_bytes.increase(small, bytes);
        self.reserved_high = self.reserved_high.max(self.stats.reserved_bytes.all.current);
    }

    /// Gives a cached block that is a whole segment back to the device.
    fn release_block(&mut self, id: BlockId) {
        self.remove_free(id);
        let block = self.blocks[id];
        let small = self.pools[self.segments[block.segment].pool as usize].small;
        self.give_memory(1, block.size);
        self.arena.give_back(block.address, block.size);
        self.stats.segment.decrease(small, 1);
        self.stats.reserved_bytes.decrease(small, block.size);
        self.stats.num_device_free += 1;
        if block.size >= self.max_split {
            self.stats.oversize_segments.decrease(1);
        }
        self.actions.push(Action::SegmentFree(Bytes::new(block.size)));
        self.segments.remove(block.segment);
        self.blocks.remove(id.0);
    }

    /// Gives back every cached block of a pool that is a whole segment, and every whole free page
    /// of expandable segments.
    fn release_blocks(&mut self, pool: u32) {
        let free: Vec<BlockId> = self.pools[pool as usize].free_blocks().collect();
        if self.settings.expandable_segments {
            free.into_iter().for_each(|id| self.unmap(id));
        } else {
            for id in free {
                if !self.blocks[id].is_split() {
                    self.release_block(id);
                }
            }
        }
    }

    /// Above the threshold, gives back whole cached segments of the large pool that were free for
    /// at least the mean time, and again until enough is given back or none is left.
    fn collect_garbage(&mut self) {
        let Some((allowed, threshold)) = self.allowed.zip(self.settings.garbage_collection_threshold) else {
            return;
        };
        let threshold = (threshold * allowed as f64) as u64;
        let reserved = self.stats.reserved_bytes.all.current;
        if reserved <= threshold {
            return;
        }
        let target = reserved - threshold;
        let half = &self.pools[0];
        let age = |id: BlockId| half.searches - self.blocks[id].free_since;
        let whole = half.free_blocks().filter(|id| !self.blocks[*id].is_split());
        let mut candidates: Vec<(BlockId, u64)> = whole.map(|id| (id, age(id))).collect();
        let mut reclaimed = 0;
        while reclaimed < target && !candidates.is_empty() {
            let total: u64 = candidates.iter().map(|(_, age)| age).sum();
            let mean = total as f64 / candidates.len() as f64;
            let (old, young): (Vec<_>, Vec<_>) =
                candidates.into_iter().partition(|(_, age)| *age as f64 >= mean);
            if old.is_empty() {
                // The mean was rounded up past every age.
                return;
            }
            for (id, _) in old {
                // An expandable segment is never one block: address space lies behind it.
                reclaimed += self.blocks[id].size;
                self.release_block(id);
            }
            candidates = young;
        }
    }

    /// With `max_split_size` set: gives back one cached block that is as large as the request and
    /// may not be split, or the largest such blocks until they make up for it.
    fn release_oversize_blocks(&mut self, size: u64, stream: Stream, pool: u32) -> bool {
        if self.settings.max_split_size.is_none() {
            return false;
        }
        if self.settings.expandable_segments {
            // Only whole segments can be given back here, and all are expandable.
            return false;
        }
        let wanted = size.max(self.max_split);
        let free = &self.pools[pool as usize].stream(stream).free;
        if let Some((_, found)) = free.first_from(FreeKey::least(wanted)) {
            self.release_block(found.block);
            return true;
        }
        let largest = free.iter().rev().take_while(|free| free.key.size() >= self.max_split);
        let mut released = 0;
        let mut chosen = Vec::new();
        for free in largest {
            if released >= wanted {
                break;
            }
            released += free.key.size();
            chosen.push(free.block);
        }
        chosen.into_iter().for_each(|id| self.release_block(id));
        released >= wanted
    }

    fn out_of_memory(
        &mut self,
        requested: u64,
        rounded: u64,
        segment: u64,
        stream: Stream,
        pool: u32,
    ) -> Shortage {
        self.stats.num_ooms += 1;
        self.actions.push(Action::Oom(Bytes::new(rounded)));
        let largest = self.pools[pool as usize]
            .stream(stream)
            .free
            .iter()
            .next_back()
            .map_or(0, |free| free.key.size());
        Shortage {
            requested: Bytes::new(requested),
            rounded: Bytes::new(rounded),
            segment: Bytes::new(segment),
            largest_free_block: Bytes::new(largest),
            allocated: Bytes::new(self.stats.allocated_bytes.all.current),
            active: Bytes::new(self.stats.active_bytes.all.current),
            reserved: Bytes::new(self.stats.reserved_bytes.all.current),
            device_free: self.device_free().map(Bytes::new),
            allowed: self.allowed.map(Bytes::new),
        }
    }
}
