//! What holds of every replay.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod tapes;

use std::collections::BTreeMap;

use ledger::{
    Bytes, DeviceId, DeviceKind, Event, Measure, Meter, Named, ObjectId, Oom, Peak, Peaks, Reading, Tape,
    Unit, compare, replay,
};
use proptest::prelude::*;

/// An allocator that puts each object in a block of whole 512 bytes, waits where the tape waits,
/// and never gives a segment back.
#[derive(Default)]
struct Rounding {
    blocks: BTreeMap<ObjectId, (DeviceId, u64)>,
    readings: BTreeMap<DeviceId, Reading>,
    awaiting: BTreeMap<ObjectId, ()>,
    tells_blocks: bool,
}

impl Meter for Rounding {
    fn apply(&mut self, _: usize, event: Event) -> Result<(), Oom> {
        match event {
            Event::Alloc { object, bytes, device, .. } if device.0 < 2 => {
                let block = bytes.get().next_multiple_of(512);
                self.blocks.insert(object, (device, block));
                let now = self.readings.entry(device).or_default();
                now.allocated += Bytes::new(block);
                now.active += Bytes::new(block);
                now.reserved = now.reserved.max(now.active);
                now.reserved_high = now.reserved;
            }
            Event::FreeRequested(object) => {
                if let Some((device, block)) = self.blocks.get(&object) {
                    self.readings.get_mut(device).unwrap().allocated -= Bytes::new(*block);
                    self.awaiting.insert(object, ());
                }
            }
            Event::Free(object) => {
                if let Some((device, block)) = self.blocks.remove(&object) {
                    let now = self.readings.get_mut(&device).unwrap();
                    now.active -= Bytes::new(block);
                    if self.awaiting.remove(&object).is_none() {
                        now.allocated -= Bytes::new(block);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        (device.0 < 2).then(|| self.readings.get(&device).copied().unwrap_or_default())
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        let (_, block) = self.blocks.get(&object)?;
        self.tells_blocks.then_some(Bytes::new(*block))
    }
}

fn peaks(peaks: &Peaks) -> impl Iterator<Item = (Measure, &Peak)> {
    Measure::ALL.iter().filter_map(|measure| peaks.get(*measure).map(|peak| (*measure, peak)))
}

/// The requested totals of a device after each event, the slow way.
fn naive(tape: &Tape, device: DeviceId) -> Vec<u64> {
    let mut held: BTreeMap<ObjectId, u64> = BTreeMap::new();
    let totals = tape.events().map(|event| {
        match event {
            Event::Alloc { object, bytes, device: at, .. } if at == device => {
                held.insert(object, bytes.get());
            }
            Event::FreeRequested(object) | Event::Free(object) => {
                held.remove(&object);
            }
            _ => {}
        }
        held.values().sum()
    });
    totals.collect()
}

fn check(tape: &Tape, meter: Option<bool>) {
    let books = |meter: Option<bool>| match meter {
        Some(tells_blocks) => replay(tape, Some(&mut Rounding { tells_blocks, ..Rounding::default() })),
        None => replay(tape, None),
    };
    let ledger = books(meter);
    assert_eq!(ledger, books(meter), "the same tape gives the same books");

    for (measure, peak) in peaks(&ledger.peaks) {
        assert_eq!(peak.contributors.iter().map(|row| row.bytes).sum::<Bytes>(), peak.bytes, "{measure}");
        assert_eq!(peak.by_category.values().copied().sum::<Bytes>(), peak.bytes, "{measure}");
        for (category, bytes) in &peak.by_category {
            let rows = peak.contributors.iter().filter(|row| row.category == *category);
            assert_eq!(rows.map(|row| row.bytes).sum::<Bytes>(), *bytes);
        }
        let order =
            |row: &ledger::Contributor| (std::cmp::Reverse(row.bytes), row.name.clone(), row.category);
        assert!(peak.contributors.is_sorted_by_key(order), "{:?}", peak.contributors);
        assert!(peak.contributors.iter().all(|row| row.saved <= row.bytes));
        assert_eq!(tape.devices[usize::from(peak.device.0)].kind, DeviceKind::Gpu);

        // The peak bounds every phase of its device kind, and the first phase that reaches it is its own.
        let gpus = |row: &&ledger::PhaseRow| tape.devices[usize::from(row.device.0)].kind == DeviceKind::Gpu;
        let reached: Vec<_> = (ledger.phases.iter().filter(gpus))
            .filter(|row| row.peak.get(measure).unwrap_or(Bytes::ZERO) >= peak.bytes)
            .collect();
        assert!(reached.iter().all(|row| row.peak.get(measure).unwrap_or(Bytes::ZERO) == peak.bytes));
        if let (Some(at), Some(first)) = (&peak.at, reached.first()) {
            assert_eq!(&first.at, at, "{measure}");
        }
    }
    for row in &ledger.phases {
        for measure in Measure::ALL {
            assert_eq!(row.peak.get(*measure).is_some(), row.end.get(*measure).is_some());
            assert!(row.peak.get(*measure) >= row.end.get(*measure));
        }
        let held = row.end_by_category.values().copied().sum::<Bytes>();
        let end = if tape.unit == Unit::Requested { row.end.requested } else { row.end.allocated };
        if tape.unit == Unit::Requested || meter.is_none() {
            assert_eq!(end, Some(held));
        }
    }
    for (_, peak) in peaks(&ledger.peaks).filter(|_| tape.unit == Unit::Requested && meter.is_some()) {
        let at = peak.at_peak;
        assert!(
            at.requested <= at.allocated && at.allocated <= at.active && at.active <= at.reserved,
            "{at:?}"
        );
    }
    if tape.unit == Unit::Requested
        && let Some(peak) = &ledger.peaks.requested
    {
        let totals = naive(tape, peak.device);
        assert_eq!(totals.iter().max().copied(), Some(peak.bytes.get()));
        let first = totals.iter().position(|total| *total == peak.bytes.get()).unwrap();
        assert!(peak.bytes == Bytes::ZERO || peak.event == first, "ties go to the earliest");
    }
}

proptest! {
    #[test]
    fn of_a_tape_alone(tape in tapes::tape(true)) {
        prop_assert_eq!(tape.validate(), Ok(()));
        check(&tape, None);
    }

    #[test]
    fn of_a_tape_and_a_meter(tape in tapes::tape(false), tells_blocks: bool) {
        check(&tape, Some(tells_blocks));
    }

    #[test]
    fn of_comparisons(base in tapes::tape(false), other in tapes::tape(false)) {
        let (mut a, mut b) = (Rounding::default(), Rounding::default());
        let (base, other) = (replay(&base, Some(&mut a)), replay(&other, Some(&mut b)));
        let base = Named { name: "base", peaks: &base.peaks };
        let other = Named { name: "other", peaks: &other.peaks };
        if let Ok(comparison) = compare(base, &[other]) {
            let candidate = &comparison.candidates[0];
            let sum: i64 = candidate.saving_by_category.values().map(|saving| saving.get()).sum();
            prop_assert_eq!(sum, candidate.saving.get());
            let (base, other) = (comparison.peak.bytes, candidate.peak.bytes);
            prop_assert_eq!(candidate.saving, base.delta(other));
            for category in &candidate.unchanged {
                prop_assert_eq!(candidate.saving_by_category[category].get(), 0);
            }
        }
    }
}
