//! The cached blocks of one stream in the order in which they are tried.
//!
//! A sorted array in chunks: most sets are one chunk, where finding, adding and taking out a block
//! cost less than in a tree of small nodes; and no set, however large, is moved as a whole.

use crate::blocks::BlockId;
use crate::rules::MIN_BLOCK;

/// The place of a free block in the order: the smallest first, then by a tie-break of 84 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeKey {
    high: u64,
    low: u64,
}

impl FreeKey {
    const TIE_BITS: u32 = 84;

    /// A block of `size` bytes in the segment taken as number `counter`, `offset` bytes from its
    /// beginning.
    pub(crate) fn by_segment(size: u64, counter: u64, offset: u64) -> Self {
        Self::new(size, u128::from(counter) << 44 | u128::from(offset / MIN_BLOCK))
    }

    /// A block of `size` bytes at `address`.
    pub(crate) fn by_address(size: u64, address: u64) -> Self {
        Self::new(size, u128::from(address / MIN_BLOCK))
    }

    /// Before all blocks of `size` bytes.
    pub(crate) fn least(size: u64) -> Self {
        Self::new(size, 0)
    }

    /// The size of the block.
    pub(crate) fn size(self) -> u64 {
        (self.order() >> Self::TIE_BITS) as u64 * MIN_BLOCK
    }

    fn new(size: u64, tie: u128) -> Self {
        let order = u128::from(size / MIN_BLOCK) << Self::TIE_BITS | tie;
        Self { high: (order >> 64) as u64, low: order as u64 }
    }

    fn order(self) -> u128 {
        u128::from(self.high) << 64 | u128::from(self.low)
    }
}

/// A block of the set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeBlock {
    pub(crate) key: FreeKey,
    pub(crate) block: BlockId,
}

/// Where a block stands in the set, until the set changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    chunk: usize,
    index: usize,
}

const CHUNK: usize = 32;

/// Free blocks in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSet {
    /// None is empty, and none has `CHUNK` blocks.
    chunks: Vec<Vec<FreeBlock>>,
    /// The last key of each chunk.
    lasts: Vec<FreeKey>,
}

impl FreeSet {
    /// The first block that does not stand before `key`.
    pub(crate) fn first_from(&self, key: FreeKey) -> Option<(Position, FreeBlock)> {
        let chunk = self.lasts.partition_point(|last| last.order() < key.order());
        let blocks = self.chunks.get(chunk)?;
        let index = blocks.partition_point(|block| block.key.order() < key.order());
        Some((Position { chunk, index }, blocks[index]))
    }

    /// The block after the one at `position`.
    pub(crate) fn after(&self, Position { chunk, index }: Position) -> Option<(Position, FreeBlock)> {
        let next = match self.chunks[chunk].get(index + 1) {
            Some(block) => (Position { chunk, index: index + 1 }, *block),
            None => (Position { chunk: chunk + 1, index: 0 }, self.chunks.get(chunk + 1)?[0]),
        };
        Some(next)
    }

    pub(crate) fn insert(&mut self, key: FreeKey, block: BlockId) {
        let new = FreeBlock { key, block };
        let chunk = self.lasts.partition_point(|last| last.order() < key.order());
        let chunk = chunk.min(self.chunks.len().saturating_sub(1));
        let Some(blocks) = self.chunks.get_mut(chunk) else {
            let mut blocks = Vec::with_capacity(CHUNK);
            blocks.push(new);
            self.chunks.push(blocks);
            self.lasts.push(key);
            return;
        };
        let index = blocks.partition_point(|block| block.key.order() < key.order());
        blocks.insert(index, new);
        if index + 1 == blocks.len() {
            self.lasts[chunk] = key;
        }
        if blocks.len() == CHUNK {
            let mut upper = Vec::with_capacity(CHUNK);
            upper.extend(blocks.drain(CHUNK / 2..));
            self.lasts.insert(chunk, blocks[CHUNK / 2 - 1].key);
            self.chunks.insert(chunk + 1, upper);
        }
    }

    pub(crate) fn remove(&mut self, key: FreeKey) {
        if let Some((position, found)) = self.first_from(key)
            && found.key == key
        {
            self.remove_at(position);
        }
    }

    pub(crate) fn remove_at(&mut self, Position { chunk, index }: Position) {
        let blocks = &mut self.chunks[chunk];
        blocks.remove(index);
        match blocks.last() {
            Some(last) => self.lasts[chunk] = last.key,
            None => {
                self.chunks.remove(chunk);
                self.lasts.remove(chunk);
            }
        }
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = FreeBlock> + '_ {
        self.chunks.iter().flatten().copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The set against the standard library's.
        #[test]
        fn a_set_is_a_set(operations in prop::collection::vec((0..600_u64, any::<bool>()), 0..2000)) {
            let mut set = FreeSet::default();
            let mut model = std::collections::BTreeMap::new();
            let key = |number: u64| FreeKey::by_segment(number / 5 * 512, number % 5, number);
            for (number, insert) in operations {
                // The order of the keys is that of the numbers.
                if insert && model.insert(number, BlockId(number as u32)).is_none() {
                    set.insert(key(number), BlockId(number as u32));
                } else if !insert {
                    model.remove(&number);
                    set.remove(key(number));
                }
                let next = set.first_from(key(number)).map(|(_, found)| found.block);
                prop_assert_eq!(next, model.range(number..).next().map(|(_, block)| *block));
            }
            let found: Vec<BlockId> = set.iter().map(|block| block.block).collect();
            let expected: Vec<BlockId> = model.into_values().collect();
            prop_assert_eq!(&found, &expected);
            let mut walked = Vec::new();
            let mut next = set.first_from(FreeKey::least(0));
            while let Some((position, found)) = next {
                walked.push(found.block);
                next = set.after(position);
            }
            prop_assert_eq!(walked, expected);
        }
    }
}
