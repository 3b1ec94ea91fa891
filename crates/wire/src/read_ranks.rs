//! `vramledger-read-ranks/1`: what the files of many ranks say side by side.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Difference, Measure};

/// The ranks of a job, each with its peak, and those that are unlike the others of their stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankReadings {
    /// `vramledger-read-ranks/1`.
    #[schemars(extend("const" = RankReadings::FORMAT))]
    pub format: String,
    /// What every peak and end here counts.
    pub measure: Measure,
    /// A row for each file that was read, numbers in their names in the order of numbers.
    pub ranks: Vec<RankReading>,
    /// The ranks that are held against each other: the stages of a pipeline, where there are several.
    pub stages: Vec<RankStage>,
    /// The ranks whose peak is not that of their stage, the largest difference first.
    pub outliers: Vec<RankOutlier>,
    /// The files that were not read.
    pub unread: Vec<UnreadRank>,
    /// What must not be read into the numbers.
    pub interpretation_limits: Vec<String>,
    /// What the readers could not read or make sense of.
    pub warnings: Vec<String>,
}

/// What the file of one rank says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankReading {
    /// What to call it.
    pub name: String,
    /// The number of the rank; null where neither the file nor its name tells.
    pub rank: Option<u64>,
    /// Its stage, by its place in `stages`.
    pub stage: u64,
    /// Its peak, on the device that has most.
    pub peak_bytes: u64,
    /// The step of the peak; null before the first mark.
    pub step: Option<u32>,
    /// The micro-batch of the peak.
    pub micro_batch: Option<u32>,
    /// The phase of the peak; null before the first mark.
    pub phase: Option<String>,
    /// The peak less the median peak of its stage.
    pub difference_bytes: i64,
    /// Whether that is more than the stage's tolerance, but for smaller shards: as many parameters, gradients and
    /// states as the reference, of fewer bytes.
    pub outlier: bool,
    /// The peak of the reserved bytes.
    pub reserved_bytes: Option<u64>,
    /// What is reserved and in no block at the peak of the reserved bytes.
    pub stranded_bytes: Option<u64>,
    /// What is held at the end.
    pub end_bytes: Option<u64>,
    /// The request that found no room; null where every one found it.
    pub oom: Option<RankOom>,
}

/// Where a rank ran out of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankOom {
    /// The step; null before the first mark.
    pub step: Option<u32>,
    /// The phase; null before the first mark.
    pub phase: Option<String>,
    /// The bytes that were asked for.
    pub requested_bytes: u64,
}

/// Ranks that are held against each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankStage {
    /// The names of its ranks.
    pub ranks: Vec<String>,
    /// By what they were put together.
    pub alike: Alike,
    /// The parameters at the peak of `reference`; null where no rank of the stage tells what is one.
    pub parameter_bytes: Option<u64>,
    /// How many objects those are.
    pub parameter_objects: Option<u64>,
    /// The rank of the median peak, the lower of two, with which outliers are compared.
    pub reference: String,
    /// Its peak.
    pub median_bytes: u64,
    /// The smallest peak.
    pub least_bytes: u64,
    /// The largest.
    pub most_bytes: u64,
    /// The median of what the peaks differ from the median by.
    pub deviation_bytes: u64,
    /// A peak that differs from the median by more is an outlier: 5 times 1.4826 times the deviation,
    /// at least a 4096th of the median.
    pub tolerance_bytes: u64,
}

/// By what the ranks of a stage were put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Alike {
    /// They have the same parameters, by place, number and bytes.
    Parameters,
    /// They have the same parameters as others, and their peaks lie together and apart from those:
    /// stages with other numbers of micro-batches under way.
    Peaks,
    /// No parameters are known of them.
    Unknown,
}

/// A rank whose peak is not that of its stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankOutlier {
    /// Its name.
    pub name: String,
    /// The rank it is compared with: the reference of its stage.
    pub reference: String,
    /// Its peak less that of the reference.
    pub difference_bytes: i64,
    /// The phase of the reference's peak, where the two peak in different phases.
    pub other_phase: Option<String>,
    /// What it holds more or less than the reference, each at its own peak, the largest change first;
    /// they sum to `difference_bytes`. `baseline_bytes` are the reference's.
    pub differences: Vec<Difference>,
}

/// A file that was not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnreadRank {
    /// What to call it.
    pub name: String,
    /// Why, in a sentence.
    pub reason: String,
}

impl RankReadings {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-read-ranks/1";
}
