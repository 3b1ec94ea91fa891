//! Candidates beside a baseline: what each would save at its own peak.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::{ByteDelta, Bytes, Category, Measure, Peak, Peaks};

/// A ledger in a comparison: its name and its peaks.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// The name it is compared under.
    pub name: &'a str,
    /// Its peaks.
    pub peaks: &'a Peaks,
}

/// Candidates beside a baseline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// What every total here counts.
    pub measure: Measure,
    /// The name of the baseline.
    pub baseline: String,
    /// The peak of the baseline.
    pub peak: Peak,
    /// The candidates in the order they were given.
    pub candidates: Vec<Candidate>,
}

/// One candidate and what it saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// Its own peak, which may lie in another phase than the baseline's.
    pub peak: Peak,
    /// Peak of the baseline less this peak; negative where the candidate takes more.
    pub saving: ByteDelta,
    /// The saving by category, of all that occur at either peak; they sum to `saving`.
    pub saving_by_category: BTreeMap<Category, ByteDelta>,
    /// The categories that hold as much at both peaks.
    pub unchanged: Vec<Category>,
    /// What holds more or less at this peak, the largest change first; they sum to `saving` with its
    /// sign turned.
    pub differences: Vec<Difference>,
}

/// What the objects of one name and category hold at two peaks that is not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The name of the objects.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// What they hold at the baseline's peak.
    pub baseline: Bytes,
    /// What they hold at the candidate's peak.
    pub candidate: Bytes,
}

/// Why ledgers cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum CompareError {
    #[error("there is no candidate to compare `{baseline}` with")]
    NoCandidates { baseline: String },
    #[error("ledger {index} has an empty name; name it as `NAME=FILE`")]
    EmptyName { index: usize },
    #[error("two ledgers are called `{name}`; name one of them as `NAME=FILE`")]
    DoubledName { name: String },
    #[error("no measure has a known peak in `{baseline}` and in all its candidates")]
    NoCommonMeasure { baseline: String },
}

/// Compares each of `candidates` with `baseline`, every one at its own peak.
///
/// The measure is the first of allocated, requested, reserved that all of them know. Two peaks are
/// different instants: their difference is what the card must hold less, and nothing else.
///
/// # Errors
/// An empty set of candidates, an empty or doubled name, or no measure that all know.
pub fn compare(baseline: Named<'_>, candidates: &[Named<'_>]) -> Result<Comparison, CompareError> {
    let mut names = BTreeSet::new();
    for (index, ledger) in std::iter::once(&baseline).chain(candidates).enumerate() {
        if ledger.name.is_empty() {
            return Err(CompareError::EmptyName { index });
        }
        if !names.insert(ledger.name) {
            return Err(CompareError::DoubledName { name: ledger.name.into() });
        }
    }
    if candidates.is_empty() {
        return Err(CompareError::NoCandidates { baseline: baseline.name.into() });
    }
    [Measure::Allocated, Measure::Requested, Measure::Reserved]
        .into_iter()
        .find_map(|measure| compare_by(measure, baseline, candidates))
        .ok_or_else(|| CompareError::NoCommonMeasure { baseline: baseline.name.into() })
}

fn compare_by(measure: Measure, baseline: Named<'_>, candidates: &[Named<'_>]) -> Option<Comparison> {
    let base = baseline.peaks.get(measure)?;
    let candidates = candidates.iter().map(|candidate| {
        let peak = candidate.peaks.get(measure)?;
        let at = |peak: &Peak, category| peak.by_category.get(&category).copied().unwrap_or(Bytes::ZERO);
        let saving_by_category: BTreeMap<_, _> = (base.by_category.keys().chain(peak.by_category.keys()))
            .map(|category| (*category, at(base, *category).delta(at(peak, *category))))
            .collect();
        let unchanged = saving_by_category.iter().filter(|(_, saving)| saving.get() == 0);
        Some(Candidate {
            name: candidate.name.into(),
            peak: peak.clone(),
            saving: base.bytes.delta(peak.bytes),
            unchanged: unchanged.map(|(category, _)| *category).collect(),
            differences: differences(base, peak),
            saving_by_category,
        })
    });
    let candidates = candidates.collect::<Option<Vec<_>>>()?;
    Some(Comparison { measure, baseline: baseline.name.into(), peak: base.clone(), candidates })
}

/// What is not the same at two peaks, by name and category.
fn differences(base: &Peak, peak: &Peak) -> Vec<Difference> {
    let mut rows: BTreeMap<(&str, Category), (Bytes, Bytes)> = BTreeMap::new();
    for row in &base.contributors {
        rows.entry((&row.name, row.category)).or_default().0 += row.bytes;
    }
    for row in &peak.contributors {
        rows.entry((&row.name, row.category)).or_default().1 += row.bytes;
    }
    let changed = rows.into_iter().filter(|(_, (baseline, candidate))| baseline != candidate);
    let mut differences: Vec<Difference> = changed
        .map(|((name, category), (baseline, candidate))| Difference {
            name: name.into(),
            category,
            baseline,
            candidate,
        })
        .collect();
    // Rows come by name and category, and a stable order keeps that among equal changes.
    differences.sort_by_key(|row| std::cmp::Reverse(row.candidate.delta(row.baseline).get().unsigned_abs()));
    differences
}
