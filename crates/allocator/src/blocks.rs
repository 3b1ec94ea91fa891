//! The tables of blocks, segments and pools: dense arrays, handles that are indices.

use std::collections::BTreeMap;

use ledger::{Pool, Stream};

use crate::free_set::FreeSet;

/// An index into [`Blocks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    /// No block.
    pub(crate) const NONE: Self = Self(u32::MAX);

    pub(crate) fn some(self) -> Option<Self> {
        (self != Self::NONE).then_some(self)
    }
}

/// What a block is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Cached, in its pool's set of free blocks.
    Free,
    /// Handed out.
    Allocated,
    /// Let go by the program, still in use by another stream.
    Pending,
    /// Address space of an expandable segment without memory behind it.
    Unmapped,
}

/// A range of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// The bytes asked for, and the object they are for; of a block handed out.
    pub(crate) requested: u64,
    pub(crate) object: u32,
    /// The neighbours in the segment.
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    /// An index into the segments of the device.
    pub(crate) segment: u32,
    pub(crate) state: State,
    /// How often the pool had been searched when the block became free.
    pub(crate) free_since: u64,
}

impl Block {
    /// Whether the block shares its segment with others.
    pub(crate) fn is_split(&self) -> bool {
        self.prev != BlockId::NONE || self.next != BlockId::NONE
    }

    pub(crate) fn end(&self) -> u64 {
        self.address + self.size
    }
}

/// A range of address space taken from the device in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// When it was taken, counted over the segments of the device: the tie-break since torch 2.15.
    pub(crate) counter: u64,
    /// Its first address.
    pub(crate) base: u64,
    /// An index into the block pools of the device.
    pub(crate) pool: u32,
    pub(crate) stream: Stream,
    /// Of an expandable segment, its whole address space and its page.
    pub(crate) expandable: Option<Expandable>,
}

/// The address space of an expandable segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expandable {
    pub(crate) size: u64,
    pub(crate) page: u64,
}

/// A table whose vacant places are used again.
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<T>,
    vacant: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.vacant.pop() {
            self.entries[index as usize] = value;
            return index;
        }
        self.entries.push(value);
        // Each entry stands for at least one live object or free range between two of them.
        u32::try_from(self.entries.len() - 1).expect("a tape holds fewer than 2^32 objects")
    }

    pub(crate) fn remove(&mut self, index: u32) {
        self.vacant.push(index);
    }

    /// The places in use.
    pub(crate) fn indices(&self) -> impl Iterator<Item = u32> {
        let mut used = vec![true; self.entries.len()];
        self.vacant.iter().for_each(|index| used[*index as usize] = false);
        (0..used.len() as u32).filter(move |index| used[*index as usize])
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, index: u32) -> &T {
        &self.entries[index as usize]
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.entries[index as usize]
    }
}

impl std::ops::Index<BlockId> for Slab<Block> {
    type Output = Block;
    fn index(&self, id: BlockId) -> &Block {
        &self.entries[id.0 as usize]
    }
}

impl std::ops::IndexMut<BlockId> for Slab<Block> {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.entries[id.0 as usize]
    }
}

/// The small or the large half of a pool.
#[derive(Clone, Debug)]
pub(crate) struct BlockPool {
    pub(crate) pool: Pool,
    pub(crate) small: bool,
    /// Blocks are never split.
    pub(crate) no_split: bool,
    /// Nobody uses the private pool any more: its cached blocks may go back to the device.
    pub(crate) released: bool,
    /// How often the pool was searched, counted where garbage is collected.
    pub(crate) searches: u64,
    /// The cached blocks of each stream, ordered by stream.
    streams: Vec<(Stream, StreamBlocks)>,
}

/// The blocks of a pool that wait to be handed out on one stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamBlocks {
    pub(crate) free: FreeSet,
    /// The unmapped ranges of expandable segments, by address.
    pub(crate) unmapped: BTreeMap<u64, BlockId>,
}

impl BlockPool {
    pub(crate) fn new(pool: Pool, small: bool) -> Self {
        Self { pool, small, no_split: false, released: false, searches: 0, streams: Vec::new() }
    }

    pub(crate) fn stream(&mut self, stream: Stream) -> &mut StreamBlocks {
        let index = match self.find(stream) {
            Ok(index) => index,
            Err(index) => {
                self.streams.insert(index, (stream, StreamBlocks::default()));
                index
            }
        };
        &mut self.streams[index].1
    }

    /// The blocks of `stream`, where the pool has seen it.
    pub(crate) fn stream_ref(&self, stream: Stream) -> Option<&StreamBlocks> {
        self.find(stream).ok().map(|index| &self.streams[index].1)
    }

    fn find(&self, stream: Stream) -> Result<usize, usize> {
        // Nearly all blocks are on the first stream.
        match self.streams.first() {
            Some((first, _)) if *first == stream => Ok(0),
            _ => self.streams.binary_search_by_key(&stream, |(stream, _)| *stream),
        }
    }

    /// The free blocks in the order of the pool: by stream, then as they are tried.
    pub(crate) fn free_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.streams.iter().flat_map(|(_, stream)| stream.free.iter().map(|free| free.block))
    }
}
