//! Address ranges that do not overlap: the segments of a device, or the mapped parts of them.

use std::collections::BTreeMap;

/// What a range belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    pub(super) segment: u32,
    pub(super) stream: u16,
    pub(super) pool: u16,
    pub(super) expandable: bool,
}

/// Ranges by where they begin, each with its end.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, (u64, Mapped)>);

impl Ranges {
    /// Adds a range over whatever was there: the bytes that were not covered before.
    pub(super) fn insert(&mut self, start: u64, end: u64, what: Mapped) -> u64 {
        if start >= end {
            return 0;
        }
        let (covered, _) = self.remove(start, end);
        self.0.insert(start, (end, what));
        end - start - covered
    }

    /// Takes everything between `start` and `end` out: the bytes that were covered, and by what first.
    pub(super) fn remove(&mut self, start: u64, end: u64) -> (u64, Option<Mapped>) {
        let (mut bytes, mut first) = (0, None);
        while let Some((from, to, what)) = self.first_over(start, end) {
            self.0.remove(&from);
            if from < start {
                self.0.insert(from, (start, what));
            }
            if to > end {
                self.0.insert(end, (to, what));
            }
            bytes += to.min(end) - from.max(start);
            first = first.or(Some(what));
        }
        (bytes, first)
    }

    /// The first range that has a byte between `start` and `end`.
    fn first_over(&self, start: u64, end: u64) -> Option<(u64, u64, Mapped)> {
        let before = self.0.range(..=start).next_back().filter(|(_, (to, _))| *to > start);
        let found = before.or_else(|| self.0.range(start..end).next());
        found.filter(|_| start < end).map(|(from, (to, what))| (*from, *to, *what))
    }

    /// The range that ends where `address` begins.
    pub(super) fn ending_at(&self, address: u64) -> Option<Mapped> {
        let (_, (end, what)) = self.0.range(..address).next_back()?;
        (*end == address).then_some(*what)
    }

    /// The range that holds `address`.
    pub(super) fn around(&self, address: u64) -> Option<Mapped> {
        let (_, (end, what)) = self.0.range(..=address).next_back()?;
        (*end > address).then_some(*what)
    }

    /// Every range in order: where it begins and ends, and what it belongs to.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64, Mapped)> + '_ {
        self.0.iter().map(|(start, (end, what))| (*start, *end, *what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Mapped = Mapped { segment: 0, stream: 0, pool: 0, expandable: true };
    const B: Mapped = Mapped { segment: 1, ..A };

    #[test]
    fn what_is_taken_out_of_the_middle_leaves_both_ends() {
        let mut ranges = Ranges::default();
        assert_eq!(ranges.insert(10, 30, A), 20);
        assert_eq!(ranges.remove(15, 20), (5, Some(A)));
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(10, 15, A), (20, 30, A)]);
        assert_eq!(ranges.insert(12, 40, B), 15);
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [(10, 12, A), (12, 40, B)]);
        assert_eq!(ranges.remove(0, 100), (30, Some(A)));
        assert_eq!(ranges.remove(0, 100), (0, None));
    }

    #[test]
    fn neighbours_are_found() {
        let mut ranges = Ranges::default();
        ranges.insert(10, 20, A);
        assert_eq!((ranges.ending_at(20), ranges.ending_at(19)), (Some(A), None));
        assert_eq!((ranges.around(10), ranges.around(19), ranges.around(20)), (Some(A), Some(A), None));
        assert_eq!(ranges.insert(5, 5, A), 0);
    }
}
