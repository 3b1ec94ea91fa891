//! Expandable segments: address space for the whole device, and memory mapped into it by the page.

use ledger::{Bytes, Stream};

use crate::blocks::{Block, BlockId, Expandable, State};
use crate::device::{Action, DeviceAllocator, UNKNOWN_DEVICE};
use crate::rules::SMALL_SEGMENT;

impl DeviceAllocator {
    /// A block of at least `size` bytes in no set, made of free blocks and newly mapped pages; none
    /// where the device has not enough memory. What was mapped until then stays mapped.
    pub(crate) fn expand(&mut self, size: u64, stream: Stream, pool: u32) -> Option<BlockId> {
        let mut block = self.find_room(size, stream, pool)?;
        if self.blocks[block].state == State::Unmapped {
            self.map(block, size.min(self.blocks[block].size))?;
        }
        while self.blocks[block].size < size {
            // A free block stands before an unmapped one, which joins it once mapped.
            let next = self.blocks[block].next.some()?;
            let missing = size - self.blocks[block].size;
            self.map(next, missing.min(self.blocks[next].size))?;
            block = next;
        }
        self.remove_free(block);
        Some(block)
    }

    /// The first block of the room with the lowest address: an unmapped range, with the free block
    /// before it, where enough of free and unmapped ranges follow. A new segment where there is none.
    fn find_room(&mut self, size: u64, stream: Stream, pool: u32) -> Option<BlockId> {
        let unused = |id: BlockId| {
            id.some().filter(|id| matches!(self.blocks[*id].state, State::Free | State::Unmapped))
        };
        for &unmapped in self.pools[pool as usize].stream_ref(stream).iter().flat_map(|s| s.unmapped.values())
        {
            let first = unused(self.blocks[unmapped].prev).unwrap_or(unmapped);
            let mut room = 0;
            let mut next = Some(first);
            while let Some(id) = next.filter(|_| room < size) {
                room += self.blocks[id].size;
                next = unused(self.blocks[id].next);
            }
            if room >= size {
                return Some(first);
            }
        }
        let small = self.pools[pool as usize].small;
        let page = if small { SMALL_SEGMENT } else { self.settings.large_segment_size.get() };
        // An eighth more than the device, so that pages can move to the end.
        let device = self.memory.total.map_or(UNKNOWN_DEVICE, |total| total.get().min(UNKNOWN_DEVICE));
        let size = (device + device / 8).max(1).checked_next_multiple_of(page)?;
        let base = self.arena.take(size)?;
        let expandable = Expandable { size, page };
        let block = self.new_segment(base, size, stream, pool, Some(expandable), State::Unmapped);
        self.insert_unmapped(block);
        Some(block)
    }

    /// Maps pages for the first `size` bytes of an unmapped block, which joins its free neighbours.
    fn map(&mut self, id: BlockId, size: u64) -> Option<()> {
        let page = self.expandable(id).page;
        let bytes = size.next_multiple_of(page);
        self.take_memory(bytes / page, page)?;
        self.remove_unmapped(id);
        let block = self.blocks[id];
        if bytes < block.size {
            let rest = Block { address: block.address + bytes, size: block.size - bytes, prev: id, ..block };
            let rest = BlockId(self.blocks.insert(rest));
            if let Some(next) = block.next.some() {
                self.blocks[next].prev = rest;
            }
            self.blocks[id].next = rest;
            self.blocks[id].size = bytes;
            self.insert_unmapped(rest);
        }
        self.blocks[id].state = State::Free;
        let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
        self.merge(id, prev);
        self.merge(id, next);
        self.insert_free(id);
        let small = self.pools[self.segments[block.segment].pool as usize].small;
        self.reserve(small, bytes);
        self.stats.num_device_alloc += 1;
        self.actions.push(Action::SegmentMap(Bytes::new(bytes)));
        Some(())
    }

    /// Unmaps the whole pages inside a free block; gives the address space back where nothing else
    /// is left of the segment.
    pub(crate) fn unmap(&mut self, id: BlockId) {
        let Expandable { size: space, page } = self.expandable(id);
        let block = self.blocks[id];
        let base = self.segments[block.segment].base;
        let first = base + (block.address - base).next_multiple_of(page);
        let last = base + (block.end() - base) / page * page;
        if first >= last {
            return;
        }
        self.remove_free(id);
        let bytes = last - first;
        self.blocks[id].address = first;
        self.blocks[id].size = bytes;
        self.blocks[id].state = State::Unmapped;
        if block.address < first {
            let before = Block { size: first - block.address, next: id, state: State::Free, ..block };
            let before = BlockId(self.blocks.insert(before));
            if let Some(prev) = block.prev.some() {
                self.blocks[prev].next = before;
            }
            self.blocks[id].prev = before;
            self.insert_free(before);
        }
        if last < block.end() {
            let after =
                Block { address: last, size: block.end() - last, prev: id, state: State::Free, ..block };
            let after = BlockId(self.blocks.insert(after));
            if let Some(next) = block.next.some() {
                self.blocks[next].prev = after;
            }
            self.blocks[id].next = after;
            self.insert_free(after);
        }
        let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
        self.merge(id, prev);
        self.merge(id, next);
        self.insert_unmapped(id);
        self.give_memory(bytes / page, page);
        let small = self.pools[self.segments[block.segment].pool as usize].small;
        self.stats.reserved_bytes.decrease(small, bytes);
        self.stats.num_device_free += 1;
        self.actions.push(Action::SegmentUnmap(Bytes::new(bytes)));
        if !self.blocks[id].is_split() {
            self.remove_unmapped(id);
            self.arena.give_back(base, space);
            self.segments.remove(block.segment);
            self.blocks.remove(id.0);
        }
    }

    fn expandable(&self, id: BlockId) -> Expandable {
        let segment = &self.segments[self.blocks[id].segment];
        segment.expandable.expect("with expandable segments every segment is one")
    }
}
