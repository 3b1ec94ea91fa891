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
    /// What a ledger says besides, where one was found.
    #[serde(default)]
    pub evidence: Option<Compared>,
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
    /// Why it differs; null where it does not, or where nothing but totals was found.
    #[serde(default)]
    pub reason: Option<Reason>,
}

/// A prediction beside what a run left behind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compared {
    /// Where the two are not of one workload.
    pub mismatches: Vec<Mismatch>,
    /// The peaks of phases, in the measure of the reconciliation.
    pub phases: Vec<PhaseLine>,
    /// Totals at steps, of evidence that has no phases.
    #[serde(default)]
    pub steps: Vec<StepLine>,
    /// The request that found no room, where the evidence tells of one.
    #[serde(default)]
    pub request: Option<RequestLine>,
    /// What the card had left for anyone, where the evidence says: other processes and what lies outside the allocator
    /// take from it, so that it is not the margin of the process.
    #[serde(default)]
    pub device_free_bytes: Option<i64>,
    /// The peak by category: the differences sum to `estimate_difference_bytes`.
    pub categories: Vec<CategoryLine>,
    /// The setting of the prediction with which it would come nearest to what was found, where that is another one.
    pub setting: Option<OtherSetting>,
    /// The differences of the rows that no reason explains, without their signs.
    pub unexplained_bytes: u64,
    /// What the differences of each reason sum to.
    pub by_reason: Vec<ReasonLine>,
}

/// Something that the two sides say of the workload, differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Mismatch {
    /// What it is.
    pub what: String,
    /// What the prediction says.
    pub predicted: String,
    /// What was found.
    pub found: String,
}

/// A phase on both sides; null where one has none such.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseLine {
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1.
    pub micro_batch: Option<u32>,
    /// The name of the phase.
    pub phase: String,
    /// The predicted peak.
    pub predicted_bytes: Option<u64>,
    /// The peak found.
    pub found_bytes: Option<u64>,
    /// Found less predicted.
    pub difference_bytes: Option<i64>,
}

/// A total at a step on both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepLine {
    /// The step, as the evidence counts.
    pub step: u64,
    /// What it is the total of: allocated, reserved, peak_allocated or peak_reserved.
    pub figure: String,
    /// The phase at whose end it is taken to be; null for peaks, and where the sides count alike.
    pub end_of: Option<String>,
    /// The predicted total.
    pub predicted_bytes: u64,
    /// The total found.
    pub found_bytes: u64,
    /// Found less predicted.
    pub difference_bytes: i64,
}

/// A request that found no room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RequestLine {
    /// What the prediction asks of the device when it finds no room; null where it fits.
    pub predicted_bytes: Option<u64>,
    /// What was asked of the device.
    pub found_bytes: Option<u64>,
    /// The predicted objects that ask for as much, those that the stack speaks for first.
    pub objects: Vec<crate::SizedObject>,
}

/// A category at the peaks of both sides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CategoryLine {
    /// The category.
    pub category: Category,
    /// The predicted bytes.
    pub predicted_bytes: u64,
    /// The bytes found.
    pub found_bytes: u64,
    /// Found less predicted.
    pub difference_bytes: i64,
}

/// A setting with which the prediction would have come nearer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OtherSetting {
    /// The setting: `--attention eager`.
    pub setting: String,
    /// The peak that is predicted with it.
    pub predicted_bytes: u64,
    /// What was found less that.
    pub difference_bytes: i64,
}

/// What the differences of one reason sum to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReasonLine {
    /// The reason.
    pub reason: Reason,
    /// The sum, signed.
    pub difference_bytes: i64,
}

/// Why a line differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The optimizer makes its state in its first step, which the evidence has not reached.
    OptimizerStateNotCreated,
    /// An operator ran in another implementation than was predicted.
    OtherImplementation,
    /// Another release of the software ran.
    OtherVersion,
    /// The run had another setting than the prediction.
    OtherSetting,
    /// Scratch memory of libraries, which depends on versions and cards.
    Workspace,
    /// Rounding up to blocks, or a remainder that is not split.
    Rounding,
    /// Memory that the allocator never sees.
    OutsideAllocator,
    /// The recording began in the middle: what was there before has no name.
    RecordedFromMiddle,
    /// Something keeps objects of earlier steps alive.
    KeptByReference,
    /// Nothing known explains it.
    Unexplained,
}

impl Reason {
    /// What it says, as part of a sentence.
    pub const fn told(self) -> &'static str {
        match self {
            Self::OptimizerStateNotCreated => "optimizer state not created yet",
            Self::OtherImplementation => "other implementation of an operator",
            Self::OtherVersion => "other software version",
            Self::OtherSetting => "other setting",
            Self::Workspace => "workspace",
            Self::Rounding => "rounding",
            Self::OutsideAllocator => "outside the allocator",
            Self::RecordedFromMiddle => "recorded from the middle",
            Self::KeptByReference => "kept alive by a reference",
            Self::Unexplained => "unexplained",
        }
    }
}

impl Reconciliation {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-reconcile/1";

    /// Whether what was found is not far above the prediction, and, beside the ledger of a run, whether all but a
    /// hundredth of it is explained with the settings of the prediction.
    pub fn agrees(&self) -> bool {
        let far = self.signals.iter().any(|signal| signal.0 == ledger::Signal::InspectEstimateDifference);
        let explained = |compared: &Compared| {
            compared.setting.is_none() && compared.unexplained_bytes <= self.found.allocated_bytes / 100
        };
        !far && self.evidence.as_ref().is_none_or(explained)
    }

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
            evidence: None,
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
            reason: None,
        }
    }
}
