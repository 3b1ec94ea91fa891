//! `vramledger-reading/1`: what evidence of a run says besides its ledger, a part of the ledger.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Category, Growth, Ladder, Measure, Simulated, Totals};

/// What a recording says of its run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Reading {
    /// `vramledger-reading/1`.
    #[schemars(extend("const" = Reading::FORMAT))]
    pub format: String,
    /// What the file is and how good it is.
    pub file: Evidence,
    /// Who was there at one instant: at the peak, unless another was asked for. Null where nothing
    /// ever was.
    pub instant: Option<Instant>,
    /// The steps that were found, in order; 0 is what comes before the first. A row for each device.
    pub steps: Vec<Step>,
    /// What grows from step to step.
    pub growth: Growth,
    /// What is reserved and in no block: at the peak of the reserved bytes, and at the end.
    pub stranding: Vec<Stranding>,
    /// Whether another setting of the allocator would have helped where there was no room; null
    /// where there was.
    pub remedy: Option<Remedy>,
    /// The recorded requests under other settings, where they were asked for.
    pub what_if: Option<WhatIf>,
}

/// What a file is and how good it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evidence {
    /// `cuda_snapshot`, `profiler_trace` or `memory_timeline`.
    pub form: String,
    /// The size of the file.
    pub file_bytes: u64,
    /// The releases of PyTorch that write such a file, as far as it shows.
    pub written_by: Option<String>,
    /// Entries of the recording, of the devices that were looked at.
    pub entries: u64,
    /// From the first entry to the last; null where nothing has a time.
    pub microseconds: Option<u64>,
    /// Different stacks; of a trace, different operators; null where the form has neither.
    pub stacks: Option<u64>,
    /// Requests of the recording, and how many of them have no stack of the program's own; of a trace, are
    /// made inside no operator.
    pub requests: u64,
    /// As said; null where the form has no stacks.
    pub requests_without_stack: Option<u64>,
    /// The devices as the recording finds them.
    pub devices: Vec<Start>,
    /// The settings string of the allocator; null where the file does not tell.
    pub alloc_conf: Option<String>,
    /// Settings of the allocator, as the file has them.
    pub settings: BTreeMap<String, Value>,
    /// Optimizer steps that were seen; null where the form shows none.
    pub updates: Option<u64>,
    /// Events of the tape that found no block where one should be: where there are any, allocated
    /// bytes may be off. Null where the recording has no addresses to follow blocks by.
    pub block_disagreements: Option<u64>,
    /// The most by which allocated bytes may be too low early in the recording: rests of blocks that
    /// were there before it, of which nothing tells. Null as before.
    pub hidden_block_bytes: Option<u64>,
    /// Whether the blocks at the end are those that the file lists; null where it lists none.
    pub blocks_agree: Option<bool>,
}

/// One device when its recording begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Start {
    /// The device.
    pub device: u16,
    /// Its number in the file; null for host memory.
    pub number: Option<u64>,
    /// Entries of its trace.
    pub entries: u64,
    /// Objects that are there before the first entry.
    pub objects_before: u64,
    /// Their bytes, as they were asked for.
    pub bytes_before: u64,
    /// How many of them the recording lets go of, so that they were not there for good; null where it does
    /// not tell which object it lets go of.
    pub let_go: Option<u64>,
}

/// Who was there at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Instant {
    /// What the total counts.
    pub measure: Measure,
    /// The device.
    pub device: u16,
    /// The event of the tape after which it is.
    pub event: u64,
    /// Microseconds after the first entry; null where nothing has a time.
    pub microseconds: Option<u64>,
    /// The step; null before the first mark of the tape.
    pub step: Option<u32>,
    /// The micro-batch.
    pub micro_batch: Option<u32>,
    /// The phase.
    pub phase: Option<String>,
    /// The total.
    pub bytes: u64,
    /// All measures.
    pub held: Ladder,
    /// What the objects are for; they sum to `bytes`.
    pub by_category: BTreeMap<Category, u64>,
    /// By what `rows` are told apart: stack, line, module, operator, size or category.
    pub by: String,
    /// Frames of a stack that count; for `by` stack.
    pub depth: u64,
    /// Who is there, largest first; they sum to `bytes`.
    pub rows: Vec<InstantRow>,
}

/// What has one stack, line, module, size or category.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InstantRow {
    /// The stack, line, module, size or category.
    pub name: String,
    /// What the objects are for; null where they are for several things.
    pub category: Option<Category>,
    /// Their bytes.
    pub bytes: u64,
    /// How many they are; 0 for a remainder that is no object.
    pub count: u64,
}

/// One step on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Step {
    /// The device.
    pub device: u16,
    /// The step; 0 is what comes before the first.
    pub step: u32,
    /// Forward passes.
    pub micro_batches: u32,
    /// The largest totals.
    pub peak: Totals,
    /// The phase of the largest allocated total, else of the largest requested one.
    pub peak_phase: String,
    /// The totals at the end.
    pub end: Totals,
    /// What the end holds more than the end of the step before; null for the first.
    pub grown_bytes: Option<i64>,
}

/// What is reserved on a device and in no block in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Stranding {
    /// `reserved_peak` or `end`.
    pub at: String,
    /// The device.
    pub device: u16,
    /// The event of the tape after which it is.
    pub event: u64,
    /// Segment bytes.
    pub reserved_bytes: u64,
    /// Bytes in blocks that are in use or await their free.
    pub active_bytes: u64,
    /// The difference of the two.
    pub stranded_bytes: u64,
    /// What of it is whole segments, which the allocator can give back.
    pub whole_bytes: u64,
    /// What of it shares its segment with blocks in use.
    pub pinned_bytes: u64,
    /// The largest free block.
    pub largest_free_block_bytes: u64,
    /// The segments that hold free memory, the most free first.
    pub segments: Vec<Stranded>,
}

/// A segment that holds free memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Stranded {
    /// Where it begins.
    pub address: u64,
    /// Its bytes; of an expandable segment, those of one mapped range.
    pub bytes: u64,
    /// What of it is free.
    pub free_bytes: u64,
    /// Its largest free block.
    pub largest_free_block_bytes: u64,
    /// Its stream, by the tape's number.
    pub stream: u16,
    /// Its pool, by the tape's number; 0 is the common one.
    pub pool: u16,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// The blocks in use that keep it, the largest first.
    pub pins: Vec<Pin>,
}

/// What keeps a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Pin {
    /// Where in the program it was made.
    pub name: String,
    /// What it is for.
    pub category: Category,
    /// Block bytes.
    pub bytes: u64,
    /// How many blocks.
    pub count: u64,
    /// The step in which the oldest was made; null before the first mark of the tape.
    pub since_step: Option<u32>,
}

/// Whether a setting of the allocator would have made room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Remedy {
    /// Whether one of `tried` would have; null where that cannot be told.
    pub helps: Option<bool>,
    /// A sentence.
    pub explanation: String,
    /// The recorded requests under each setting that was tried.
    pub tried: Option<WhatIf>,
}

/// The recorded requests under other settings of the allocator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct WhatIf {
    /// What the allocator could have of each device; null where it is not known, and nothing fails.
    pub capacity_bytes: Option<u64>,
    /// The event of the tape before which the replay under the recorded settings takes other
    /// segments than were recorded; null where it takes the same throughout.
    pub differs_from: Option<u64>,
    /// The recorded settings.
    pub recorded: Simulated,
    /// The others, in the order they were given.
    pub settings: Vec<Simulated>,
}

impl Reading {
    /// The format of this part.
    pub const FORMAT: &str = "vramledger-reading/1";
}
