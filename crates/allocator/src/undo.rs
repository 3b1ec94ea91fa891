//! The way back: from what was asked of the device to the requests that ask for it.

use std::ops::RangeInclusive;

use ledger::Bytes;

use crate::rules::{LARGE_SEGMENT, MIN_BLOCK, MIN_LARGE, ROUND_LARGE, SMALL_LIMIT, SMALL_SEGMENT};

/// The sizes of requests for which the allocator, as it is set by default, asks the device for a
/// segment between `low` and `high` bytes; in order, and apart from each other. Empty where it asks for no such segment.
pub fn requests_behind(low: Bytes, high: Bytes) -> Vec<RangeInclusive<u64>> {
    let asked = low.get()..=high.get();
    let mut requests = Vec::new();
    if asked.contains(&SMALL_SEGMENT) {
        requests.push(1..=SMALL_LIMIT);
    }
    // The largest request whose block is below the least that has a segment of its own.
    let shared = MIN_LARGE - MIN_BLOCK;
    if asked.contains(&LARGE_SEGMENT) {
        requests.push(SMALL_LIMIT + 1..=shared);
    }
    let first = low.get().max(MIN_LARGE).div_ceil(ROUND_LARGE).saturating_mul(ROUND_LARGE);
    let last = high.get() / ROUND_LARGE * ROUND_LARGE;
    if first <= last {
        requests.push((first - ROUND_LARGE).max(shared) + 1..=last);
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::MIB;

    fn behind(low: u64, high: u64) -> Vec<RangeInclusive<u64>> {
        requests_behind(Bytes::new(low), Bytes::new(high))
    }

    #[test]
    fn a_segment_is_undone_to_the_requests_that_ask_for_it() {
        assert_eq!(behind(2 * MIB, 2 * MIB), [1..=MIB]);
        assert_eq!(behind(20 * MIB, 20 * MIB), [MIB + 1..=10 * MIB - 512, 18 * MIB + 1..=20 * MIB]);
        assert_eq!(behind(10 * MIB, 10 * MIB), [10 * MIB - 511..=10 * MIB]);
        assert_eq!(behind(274 * MIB, 274 * MIB), [272 * MIB + 1..=274 * MIB]);
        assert_eq!(behind(273 * MIB, 273 * MIB), []);
        assert_eq!(behind(4 * MIB, 8 * MIB), []);
    }

    #[test]
    fn a_printed_size_stands_for_several_segments() {
        assert_eq!(behind(300 * MIB - 5_000_000, 300 * MIB + 5_000_000), [294 * MIB + 1..=304 * MIB]);
        assert_eq!(behind(0, u64::MAX).last().map(|range| *range.end()), Some(u64::MAX - (2 * MIB - 1)));
    }
}
