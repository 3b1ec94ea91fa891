//! What lies where: the segments of a device and the blocks in them.

use ledger::{Bytes, ObjectId, Pool, Stream};

use crate::blocks::{BlockId, State};
use crate::device::DeviceAllocator;

/// A range of address space that the allocator holds, and everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentLayout {
    /// Where it begins, counted from the first address that the device hands out.
    pub address: u64,
    /// The stream it serves.
    pub stream: Stream,
    /// The pool it serves.
    pub pool: Pool,
    /// Whether it holds blocks of at most 1 MiB.
    pub small: bool,
    /// Whether it grows by the page.
    pub expandable: bool,
    /// Its blocks by address; none lies between them.
    pub blocks: Vec<BlockLayout>,
}

/// A block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Its size.
    pub size: Bytes,
    /// What it is.
    pub state: State,
    /// Of a block in use or awaiting free, the object in it and the bytes that were asked for.
    pub object: Option<(ObjectId, Bytes)>,
}

impl SegmentLayout {
    /// The bytes with memory behind them: what the segment adds to reserved memory.
    pub fn reserved(&self) -> Bytes {
        self.blocks.iter().filter(|block| block.state != State::Unmapped).map(|block| block.size).sum()
    }
}

impl DeviceAllocator {
    /// The segments by address.
    pub(crate) fn layout(&self) -> Vec<SegmentLayout> {
        let heads = self.blocks.indices().map(BlockId).filter(|id| self.blocks[*id].prev == BlockId::NONE);
        let mut segments: Vec<SegmentLayout> = heads.map(|head| self.segment_layout(head)).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    fn segment_layout(&self, head: BlockId) -> SegmentLayout {
        let first = self.blocks[head];
        let segment = self.segments[first.segment];
        let half = &self.pools[segment.pool as usize];
        let mut blocks = Vec::new();
        let mut next = head.some();
        while let Some(id) = next {
            let block = self.blocks[id];
            let used = matches!(block.state, State::Allocated | State::Pending);
            let object = used.then_some((ObjectId(block.object), Bytes::new(block.requested)));
            blocks.push(BlockLayout { size: Bytes::new(block.size), state: block.state, object });
            next = block.next.some();
        }
        SegmentLayout {
            address: first.address,
            stream: segment.stream,
            pool: half.pool,
            small: half.small,
            expandable: segment.expandable.is_some(),
            blocks,
        }
    }
}
