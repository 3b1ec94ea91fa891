//! The peak of one rank, as it is kept while others are read.

use std::collections::{BTreeMap, HashMap};

use ledger::{Category, Measure};
use wire::{Difference, Ledger};

use super::signed;
use super::stages::Sample;

/// The names of objects, each once.
#[derive(Debug, Default)]
pub(super) struct Names {
    all: Vec<String>,
    known: HashMap<String, u32>,
}

impl Names {
    fn of(&mut self, name: &str) -> u32 {
        if let Some(known) = self.known.get(name) {
            return *known;
        }
        let index = self.all.len() as u32;
        self.all.push(name.to_owned());
        self.known.insert(name.to_owned(), index);
        index
    }
}

/// What is kept of a peak.
#[derive(Debug)]
pub(super) struct PeakOf {
    pub(super) bytes: u64,
    pub(super) step: Option<u32>,
    pub(super) micro_batch: Option<u32>,
    pub(super) phase: Option<String>,
    /// What the device of the peak holds at the end.
    pub(super) end_bytes: Option<u64>,
    /// Bytes and objects by name and category.
    rows: BTreeMap<(u32, Category), (u64, u64)>,
}

impl PeakOf {
    /// The peak of `measure` in `ledger`, where it has one.
    pub(super) fn new(ledger: &Ledger, measure: Measure, names: &mut Names) -> Option<Self> {
        let peak = ledger.peaks.get(measure)?;
        let end = ledger.phases.iter().rfind(|row| row.device == peak.device).map(|row| row.end);
        let mut rows: BTreeMap<(u32, Category), (u64, u64)> = BTreeMap::new();
        for row in &peak.contributors {
            let held = rows.entry((names.of(&row.name), row.category.0)).or_default();
            held.0 += row.bytes;
            held.1 += row.count;
        }
        Some(Self {
            bytes: peak.bytes,
            step: peak.step,
            micro_batch: peak.micro_batch,
            phase: peak.phase.clone(),
            end_bytes: end.and_then(|end| match measure {
                Measure::Requested => end.requested_bytes,
                Measure::Allocated => end.allocated_bytes,
                Measure::Reserved => end.reserved_bytes,
            }),
            rows,
        })
    }

    /// What tells the stage of the rank.
    pub(super) fn sample(&self) -> Sample {
        let parameters = self.rows.iter().filter(|((_, category), _)| *category == Category::Parameter);
        Sample { bytes: self.bytes, parameters: parameters.map(|((name, _), held)| (*name, *held)).collect() }
    }
}

/// What ranks divide among themselves.
const DIVIDED: [Category; 4] =
    [Category::Parameter, Category::MasterWeight, Category::Gradient, Category::OptimizerState];

/// How much smaller the shards of `peak` are than those of `base`: as many objects of what ranks divide, and fewer
/// bytes, as the last ranks have where something cannot be divided evenly.
pub(super) fn smaller_shards(base: &PeakOf, peak: &PeakOf) -> u64 {
    let divided = base.rows.iter().filter(|((_, category), _)| DIVIDED.contains(category));
    let smaller = divided.filter_map(|(key, (bytes, count))| {
        let (own, objects) = peak.rows.get(key)?;
        (objects == count).then(|| bytes.saturating_sub(*own))
    });
    smaller.sum()
}

/// What `peak` holds more or less than `base`, the largest change first.
pub(super) fn differences(names: &Names, base: &PeakOf, peak: &PeakOf) -> Vec<Difference> {
    let keys: std::collections::BTreeSet<_> = base.rows.keys().chain(peak.rows.keys()).collect();
    let held = |of: &PeakOf, key: &(u32, Category)| of.rows.get(key).map_or(0, |held| held.0);
    let row = |key: &(u32, Category)| {
        let (baseline_bytes, bytes) = (held(base, key), held(peak, key));
        Difference {
            name: names.all[key.0 as usize].clone(),
            category: wire::Category(key.1),
            baseline_bytes,
            bytes,
            difference_bytes: signed(bytes) - signed(baseline_bytes),
        }
    };
    let mut rows: Vec<Difference> =
        keys.into_iter().map(row).filter(|row| row.difference_bytes != 0).collect();
    rows.sort_by(|a, b| {
        let size = |row: &Difference| std::cmp::Reverse(row.difference_bytes.unsigned_abs());
        size(a).cmp(&size(b)).then_with(|| (&a.name, a.category).cmp(&(&b.name, b.category)))
    });
    rows
}
