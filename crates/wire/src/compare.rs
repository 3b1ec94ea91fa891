//! `vramledger-compare/1`: candidates beside a baseline.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Category, Measure, Peak};

/// Candidates beside a baseline, each at its own peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Comparison {
    /// `vramledger-compare/1`.
    #[schemars(extend("const" = Comparison::FORMAT))]
    pub format: String,
    /// What every total here counts.
    pub measure: Measure,
    /// What the candidates are held against.
    pub baseline: Baseline,
    /// The candidates in the order they were given.
    pub candidates: Vec<Candidate>,
}

/// The baseline of a comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Baseline {
    /// Its name.
    pub name: String,
    /// Its peak.
    pub peak: Peak,
}

/// One candidate and what it saves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// Its own peak.
    pub peak: Peak,
    /// Peak of the baseline less this peak; negative where the candidate takes more.
    pub saving_bytes: i64,
    /// The saving by category; they sum to `saving_bytes`.
    pub saving_by_category: BTreeMap<Category, i64>,
    /// The categories that hold as much at both peaks.
    pub unchanged: Vec<Category>,
    /// What holds more or less at this peak than at the baseline's, the largest change first; their
    /// `difference_bytes` sum to `saving_bytes` with its sign turned.
    #[serde(default)]
    pub differences: Vec<Difference>,
}

/// What the objects of one name and category hold at two peaks that is not the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Difference {
    /// The name of the objects.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// What they hold at the baseline's peak.
    pub baseline_bytes: u64,
    /// What they hold at the candidate's peak.
    pub bytes: u64,
    /// `bytes` less `baseline_bytes`.
    pub difference_bytes: i64,
}

impl Comparison {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-compare/1";
}

impl From<&ledger::Comparison> for Comparison {
    fn from(comparison: &ledger::Comparison) -> Self {
        Self {
            format: Self::FORMAT.into(),
            measure: Measure(comparison.measure),
            baseline: Baseline { name: comparison.baseline.clone(), peak: Peak::from(&comparison.peak) },
            candidates: comparison.candidates.iter().map(Candidate::from).collect(),
        }
    }
}

impl From<&ledger::Candidate> for Candidate {
    fn from(candidate: &ledger::Candidate) -> Self {
        let savings = candidate.saving_by_category.iter();
        Self {
            name: candidate.name.clone(),
            peak: Peak::from(&candidate.peak),
            saving_bytes: candidate.saving.get(),
            saving_by_category: savings
                .map(|(category, saving)| (Category(*category), saving.get()))
                .collect(),
            unchanged: candidate.unchanged.iter().copied().map(Category).collect(),
            differences: candidate.differences.iter().map(Difference::from).collect(),
        }
    }
}

impl From<&ledger::Difference> for Difference {
    fn from(row: &ledger::Difference) -> Self {
        Self {
            name: row.name.clone(),
            category: Category(row.category),
            baseline_bytes: row.baseline.get(),
            bytes: row.candidate.get(),
            difference_bytes: row.candidate.delta(row.baseline).get(),
        }
    }
}
