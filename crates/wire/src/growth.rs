//! What grows from step to step: a part of a ledger, of a reading and of a series.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Category;

/// What grows from step to step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Growth {
    /// What became of it.
    pub verdict: Trend,
    /// A sentence or two.
    pub explanation: String,
    /// What is counted: `step`, of training or of the log; `pass` of a model that is only run; `round`
    /// of what a program repeats that has neither.
    pub per: String,
    /// Steps at whose ends something was counted.
    pub steps: u64,
    /// After this step nothing grows that does not grow still; null where that is not known.
    pub warm_up_steps: Option<u64>,
    /// What is allocated when steps end, after the warm-up.
    pub allocated: Option<Slope>,
    /// What is reserved then.
    pub reserved: Option<Slope>,
    /// How many times faster reserved grows than allocated; null where not both grow.
    pub times_faster: Option<f64>,
    /// What the rows grow by a step together.
    pub bytes_per_step: u64,
    /// Whether what autograd saved for backward passes of earlier steps is still there.
    pub kept_graph: bool,
    /// The input whose largest value bounds the memory: a column of the log, `input` of a tape.
    pub bounded_by: Option<String>,
    /// What the allocator can have of the device; null where that is not known.
    pub capacity_bytes: Option<u64>,
    /// Steps from the last one until the device is full; null where nothing grows or its capacity is
    /// not known.
    pub steps_until_full: Option<u64>,
    /// The step in which that is.
    pub full_at_step: Option<u64>,
    /// What to know of keeping tensors; null where nothing is kept.
    pub advice: Option<String>,
    /// What still grows, by where it was made, the most first.
    pub rows: Vec<Growing>,
    /// What grew over several steps and grows no more.
    pub settled: Vec<Growing>,
    /// What grows by so little that it is not held against anyone: objects of one smallest block.
    pub trifles: Vec<Growing>,
}

/// How held bytes move from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trend {
    /// Fewer steps than it takes to tell.
    TooFewSteps,
    /// Nothing grows.
    Steady,
    /// What grew at first grows no more.
    WarmUp,
    /// What is allocated grows: something is kept step after step.
    Growing,
    /// What is reserved grows, and what is allocated does not, or far less.
    Stranding,
    /// It grows only when a longer input than ever before comes.
    LongestInput,
}

/// The slope of a figure over steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Slope {
    /// Of what: `requested`, `allocated`, `reserved`, `peak_allocated`, `peak_reserved`, `used`.
    pub figure: String,
    /// The slope of the line of least squares, in bytes a step.
    pub bytes_per_step: i64,
    /// The interval of 95 % around it: where it begins,
    pub low_bytes_per_step: i64,
    /// and where it ends.
    pub high_bytes_per_step: i64,
    /// The points that the line goes through.
    pub points: u64,
    /// The step of the first of them.
    pub from_step: u64,
    /// The step of the last.
    pub to_step: u64,
}

/// What is kept step after step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Growing {
    /// Where in the program it is made.
    pub name: String,
    /// What it is for.
    pub category: Category,
    /// Whether autograd saves it for a backward pass.
    pub saved: bool,
    /// What it grows by a step.
    pub bytes_per_step: u64,
    /// How many objects more there are a step.
    pub objects_per_step: f64,
    /// The size of one object, that of most of them.
    pub object_bytes: u64,
    /// The first step with which it grew.
    pub first_step: u32,
    /// The last.
    pub last_step: u32,
    /// What there is of it after the last step.
    pub bytes: u64,
    /// How many objects that is.
    pub count: u64,
}
