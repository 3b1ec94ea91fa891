//! `vramledger-reconcile/1`: a prediction beside what was found.

use ledger::{ByteDelta, Bytes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Category, Measure, Signal};

/// A prediction beside what an allocator said, of one instant. Differences keep their sign.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Reconciliation {
    /// `vramledger-reconcile/1`.
    #[schemars(extend("const" = Reconciliation::FORMAT))]
    pub format: String,
    /// What the prediction counts.
    pub measure: Measure,
    /// Where on the timeline.
    pub at: At,
    /// The predicted total.
    pub predicted_bytes: u64,
    /// What was found.
    pub found: Found,
    /// Allocated less predicted.
    pub estimate_difference_bytes: i64,
    /// Reserved less allocated: what the allocator keeps. Not proof of fragmentation.
    pub allocator_gap_bytes: i64,
    /// Capacity less reserved. Not what is free on the card.
    pub budget_margin_bytes: i64,
    /// The share beyond which a difference is a signal.
    pub alert_fraction: f64,
    /// What deserves a look.
    pub signals: Vec<Signal>,
    /// Line by line: the differences that are known sum to `estimate_difference_bytes`.
    pub rows: Vec<Row>,
    /// The name of the largest predicted object.
    pub dominant_object: Option<String>,
    /// What must not be read into the numbers.
    #[serde(default)]
    pub interpretation_limits: Vec<String>,
}

/// A place on the timeline; null where it is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct At {
    /// The step, from 1; 0 is the load.
    pub step: Option<u32>,
    /// The name of the phase.
    pub phase: Option<String>,
}

/// What an allocator said at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Found {
    /// `memory_allocated`.
    pub allocated_bytes: u64,
    /// `memory_reserved`.
    pub reserved_bytes: u64,
    /// What the process may use.
    pub capacity_bytes: u64,
}

/// One line of a reconciliation; null where one side does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// The name of the objects.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// The predicted bytes.
    pub predicted_bytes: Option<u64>,
    /// The bytes found.
    pub found_bytes: Option<u64>,
    /// Found less predicted.
    pub difference_bytes: Option<i64>,
}

impl Reconciliation {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-reconcile/1";

    /// The document of `reconciliation`, whose numbers have these limits.
    pub fn new(reconciliation: &ledger::Reconciliation, interpretation_limits: Vec<String>) -> Self {
        let at = reconciliation.at.as_ref();
        Self {
            format: Self::FORMAT.into(),
            measure: Measure(reconciliation.measure),
            at: At { step: at.map(|at| at.step), phase: at.map(|at| at.phase.clone()) },
            predicted_bytes: reconciliation.predicted.get(),
            found: Found {
                allocated_bytes: reconciliation.found.allocated.get(),
                reserved_bytes: reconciliation.found.reserved.get(),
                capacity_bytes: reconciliation.found.capacity.get(),
            },
            estimate_difference_bytes: reconciliation.estimate_difference.get(),
            allocator_gap_bytes: reconciliation.allocator_gap.get(),
            budget_margin_bytes: reconciliation.budget_margin.get(),
            alert_fraction: ledger::Reconciliation::ALERT_FRACTION,
            signals: reconciliation.signals.iter().copied().map(Signal).collect(),
            rows: reconciliation.rows.iter().map(Row::from).collect(),
            dominant_object: reconciliation.dominant_object.clone(),
            interpretation_limits,
        }
    }
}

impl From<&ledger::Row> for Row {
    fn from(row: &ledger::Row) -> Self {
        Self {
            name: row.name.clone(),
            category: Category(row.category),
            predicted_bytes: row.predicted.map(Bytes::get),
            found_bytes: row.found.map(Bytes::get),
            difference_bytes: row.difference.map(ByteDelta::get),
        }
    }
}
