//! `vramledger-series/1`: totals at the steps of a run, as a log has them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Growth;

/// What a step log, a memory timeline of sums or a query over time says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Series {
    /// `vramledger-series/1`.
    #[schemars(extend("const" = Series::FORMAT))]
    pub format: String,
    /// `step_log`, `memory_timeline` or `smi`.
    pub form: String,
    /// The size of the file.
    pub file_bytes: u64,
    /// The columns that were read as memory; empty where the form has no names.
    pub columns: Vec<SeriesColumn>,
    /// One for each device or rank that the file tells apart.
    pub series: Vec<SeriesOf>,
    /// What must not be read into the numbers.
    pub interpretation_limits: Vec<String>,
    /// What a reader could not read or make sense of.
    pub warnings: Vec<String>,
}

/// A column that was read as memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesColumn {
    /// Its name in the file.
    pub name: String,
    /// What it was read as: allocated, reserved, peak_allocated, peak_reserved, used, capacity.
    pub figure: String,
    /// The bytes of its unit.
    pub unit_bytes: u64,
    /// Whether the file says the unit.
    pub unit_is_said: bool,
}

/// The totals of one device or rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesOf {
    /// The device or rank as the file calls it; null where it tells none apart.
    pub of: Option<String>,
    /// The step of the first point; null where there is none.
    pub first_step: Option<u64>,
    /// The step of the last.
    pub last_step: Option<u64>,
    /// What is known of each figure.
    pub figures: Vec<SeriesFigure>,
    /// What grows from step to step.
    pub growth: Growth,
    /// A point for each row, in the order of the file.
    pub points: Vec<SeriesPoint>,
    /// The other numbers of each row.
    pub extras: Vec<SeriesExtra>,
}

/// What is known of one figure over all points.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesFigure {
    /// Which.
    pub figure: String,
    /// How many points have it.
    pub points: u64,
    /// At the first of them.
    pub first_bytes: u64,
    /// At the last.
    pub last_bytes: u64,
    /// The least.
    pub least_bytes: u64,
    /// The most.
    pub most_bytes: u64,
    /// The step of the most, the first of equal ones.
    pub most_at_step: u64,
}

/// One row; null where it does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesPoint {
    /// The step as the file counts it; the number of the row, from 0, where it counts none.
    pub step: u64,
    /// Bytes of the allocator's blocks.
    pub allocated_bytes: Option<u64>,
    /// Bytes of the allocator's segments.
    pub reserved_bytes: Option<u64>,
    /// The most that was allocated so far.
    pub peak_allocated_bytes: Option<u64>,
    /// The most that was reserved so far.
    pub peak_reserved_bytes: Option<u64>,
    /// What the whole card has in use.
    pub used_bytes: Option<u64>,
    /// All memory of the card.
    pub capacity_bytes: Option<u64>,
}

/// A column of other numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesExtra {
    /// Its name in the file.
    pub name: String,
    /// Its value at each point.
    pub values: Vec<Option<f64>>,
}

impl Series {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-series/1";
}
