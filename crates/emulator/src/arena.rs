//! First-fit placement in one range of addresses: pure arithmetic, no memory.

use std::collections::BTreeMap;

/// A range of addresses from which blocks are taken and to which they return.
pub struct Arena {
    /// Free ranges: start and length, neighbours merged.
    free: BTreeMap<usize, usize>,
    /// Blocks taken: start and length.
    taken: BTreeMap<usize, usize>,
    down: bool,
}

impl Arena {
    /// An arena over `length` addresses from `start`; `down` takes from the top.
    pub fn new(start: usize, length: usize, down: bool) -> Self {
        Self { free: BTreeMap::from([(start, length)]), taken: BTreeMap::new(), down }
    }

    /// Takes the first range of `length` that fits, lowest first (highest first when `down`).
    pub fn take(&mut self, length: usize) -> Option<usize> {
        let fits = |(&start, &room): (&usize, &usize)| (room >= length).then_some((start, room));
        let (start, room) =
            if self.down { self.free.iter().rev().find_map(fits) } else { self.free.iter().find_map(fits) }?;
        self.free.remove(&start);
        let at = if self.down { start + room - length } else { start };
        if room > length {
            let rest = if self.down { start } else { start + length };
            self.free.insert(rest, room - length);
        }
        self.taken.insert(at, length);
        Some(at)
    }

    /// Gives a block back and answers its length; None when no block starts at `at`.
    pub fn give(&mut self, at: usize) -> Option<usize> {
        let length = self.taken.remove(&at)?;
        let (mut start, mut end) = (at, at + length);
        if let Some((&before, &room)) = self.free.range(..start).next_back()
            && before + room == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(room) = self.free.remove(&end) {
            end += room;
        }
        self.free.insert(start, end - start);
        Some(length)
    }

    /// The block that holds an address: its start and length.
    pub fn block_of(&self, address: usize) -> Option<(usize, usize)> {
        let (&start, &length) = self.taken.range(..=address).next_back()?;
        (address < start + length).then_some((start, length))
    }
}

#[cfg(test)]
mod tests {
    use super::Arena;

    #[test]
    fn the_lowest_gap_that_fits_is_taken_again() {
        let mut arena = Arena::new(100, 100, false);
        assert_eq!(arena.take(10), Some(100));
        assert_eq!(arena.take(20), Some(110));
        assert_eq!(arena.take(10), Some(130));
        assert_eq!(arena.give(100), Some(10));
        assert_eq!(arena.take(15), Some(140));
        assert_eq!(arena.take(10), Some(100));
    }

    #[test]
    fn neighbours_merge_until_the_whole_range_is_free() {
        let mut arena = Arena::new(0, 30, false);
        let blocks: Vec<_> = (0..3).filter_map(|_| arena.take(10)).collect();
        assert_eq!(arena.take(1), None);
        for at in [blocks[1], blocks[0], blocks[2]] {
            assert_eq!(arena.give(at), Some(10));
        }
        assert_eq!(arena.take(30), Some(0));
    }

    #[test]
    fn down_takes_from_the_top() {
        let mut arena = Arena::new(0, 30, true);
        assert_eq!(arena.take(10), Some(20));
        assert_eq!(arena.take(10), Some(10));
        assert_eq!(arena.block_of(15), Some((10, 10)));
        assert_eq!(arena.block_of(5), None);
    }
}
