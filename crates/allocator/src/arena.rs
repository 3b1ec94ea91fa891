//! The addresses that the device hands out: first fit in pages of 2 MiB.
//!
//! Only their order matters: before torch 2.15 it breaks ties between free blocks of one size.

use std::collections::BTreeMap;

use crate::rules::DEVICE_PAGE;

/// Whether the first address handed out is the lowest or the highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddressOrder {
    /// Later segments lie above earlier ones, where nothing was given back.
    Up,
    /// Later segments lie below earlier ones.
    Down,
}

/// One past the highest page of the arena, counted from its first end: no tape comes near.
const PAGES: u64 = 1 << 41;

/// The pages of a device's address space. Page 0 is the first to be handed out.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    order: AddressOrder,
    /// The free ranges: first page and number of pages, none adjacent to another.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    pub(crate) fn new(order: AddressOrder) -> Self {
        Self { order, free: BTreeMap::from([(0, PAGES)]) }
    }

    /// Hands out the address of the first free range of `bytes`; none where the arena is full.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let pages = bytes.div_ceil(DEVICE_PAGE);
        let (&first, &free) = self.free.iter().find(|(_, free)| **free >= pages)?;
        self.free.remove(&first);
        if free > pages {
            self.free.insert(first + pages, free - pages);
        }
        Some(self.address(first, pages))
    }

    /// Takes back what [`Arena::take`] handed out at `address` for `bytes`.
    pub(crate) fn give_back(&mut self, address: u64, bytes: u64) {
        let mut pages = bytes.div_ceil(DEVICE_PAGE);
        // The mapping between pages and addresses is its own inverse.
        let mut first = self.address(address / DEVICE_PAGE, pages) / DEVICE_PAGE;
        if let Some((&before, &free)) = self.free.range(..first).next_back()
            && before + free == first
        {
            first = before;
            pages += free;
            self.free.remove(&before);
        }
        if let Some(free) = self.free.remove(&(first + pages)) {
            pages += free;
        }
        self.free.insert(first, pages);
    }

    fn address(&self, first: u64, pages: u64) -> u64 {
        let page = match self.order {
            AddressOrder::Up => first,
            AddressOrder::Down => PAGES - first - pages,
        };
        page * DEVICE_PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_fits_is_taken() {
        for order in [AddressOrder::Up, AddressOrder::Down] {
            let mut arena = Arena::new(order);
            let mib = 1 << 20;
            let a = arena.take(20 * mib).unwrap();
            let b = arena.take(3 * mib).unwrap();
            let c = arena.take(20 * mib).unwrap();
            let above = |low: u64, high: u64| if order == AddressOrder::Up { low < high } else { low > high };
            assert!(above(a, b) && above(b, c), "{order:?}");
            arena.give_back(a, 20 * mib);
            let d = arena.take(30 * mib).unwrap();
            assert!(above(c, d), "{order:?}: 30 MiB do not fit in a gap of 20");
            assert_eq!(arena.take(20 * mib), Some(a));
            for (address, bytes) in [(c, 20), (a, 20), (d, 30), (b, 3)] {
                arena.give_back(address, bytes * mib);
            }
            assert_eq!(arena.free, BTreeMap::from([(0, PAGES)]), "{order:?}: all gaps are one");
        }
    }
}
