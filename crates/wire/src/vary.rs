//! `vramledger-vary/1`: one plan under other settings; `vramledger-largest/1`: the largest value that fits.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Category, Flops, Oom, Peak};

/// A plan under other settings, a row each. The first row is what the others are held against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Variations {
    /// `vramledger-vary/1`.
    #[schemars(extend("const" = Variations::FORMAT))]
    pub format: String,
    /// The model.
    pub model: String,
    /// A row for each combination of the values.
    pub rows: Vec<Variation>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// One combination of values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Variation {
    /// The values that are varied, by their keys, in the order of the question.
    pub settings: Vec<SettingValue>,
    /// Why this combination cannot be planned; `null` where it was.
    pub refused: Option<String>,
    /// What it gives; `null` where it cannot be planned.
    pub outcome: Option<VariationOutcome>,
}

/// A setting and its value, as in a setup file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SettingValue {
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
}

/// What one combination of values gives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VariationOutcome {
    /// Whether it fits the card.
    pub fits: bool,
    /// What the reserved peak leaves of the card; negative where a request found no room.
    pub headroom_bytes: Option<i64>,
    /// The request that found no room.
    pub oom: Option<Oom>,
    /// The peak of requested bytes, on a card without end.
    pub peak: Peak,
    /// The largest `memory_allocated`; `null` where it does not fit.
    pub peak_allocated_bytes: Option<u64>,
    /// The largest `memory_reserved`; `null` where it does not fit.
    pub peak_reserved_bytes: Option<u64>,
    /// Requested peak of the first row less this one.
    pub saving_bytes: i64,
    /// The saving by category; they sum to `saving_bytes`.
    pub saving_by_category: BTreeMap<Category, i64>,
    /// The categories that hold as much at both peaks.
    pub unchanged: Vec<Category>,
    /// What it costs.
    pub costs: Costs,
    /// Why more recomputation than in another row lowers no peak; `null` where it does, or there is none.
    pub no_gain: Option<String>,
}

/// What is counted of the costs of a step, all micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Costs {
    /// Floating-point operations.
    pub flops: Option<Flops>,
    /// Bytes copied to the host, but for what the script reads back.
    pub to_host_bytes: u64,
    /// Bytes copied from the host, but for the batch.
    pub from_host_bytes: u64,
    /// Bytes of the whole tensors that collective operations of ranks are over.
    #[serde(default)]
    pub collective_bytes: u64,
    /// Forward and backward passes in one update on one rank.
    pub forward_backward_rounds: u64,
    /// Tokens of an update on all ranks, at the longest sequence; `null` for a model without one.
    pub tokens: Option<u64>,
}

/// The largest value of a setting with which a plan fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Largest {
    /// `vramledger-largest/1`.
    #[schemars(extend("const" = Largest::FORMAT))]
    pub format: String,
    /// The model.
    pub model: String,
    /// The card.
    pub gpu: String,
    /// The setting: `batch` or `seq`.
    pub key: String,
    /// The largest value that fits; `null` where not even 1 does.
    pub value: Option<u64>,
    /// What was tried, by value.
    pub tries: Vec<Try>,
    /// Why no larger value can be planned; `null` where the next one does not fit.
    pub bound: Option<String>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// One value that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Try {
    /// The value.
    pub value: u64,
    /// Whether it fits the card.
    pub fits: bool,
    /// The largest `memory_reserved`; `null` where it does not fit.
    pub peak_reserved_bytes: Option<u64>,
    /// What the reserved peak leaves of the card; negative where a request found no room.
    pub headroom_bytes: Option<i64>,
    /// The request that found no room.
    pub oom: Option<Oom>,
}

impl Variations {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-vary/1";
}

impl Largest {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-largest/1";
}
