//! `vramledger-instants/1`: what messages and tables say of devices, one moment each.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Category;

/// What one file says of devices, one moment each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Instants {
    /// `vramledger-instants/1`.
    #[schemars(extend("const" = Instants::FORMAT))]
    pub format: String,
    /// The moments, in the order of the file.
    pub instants: Vec<DeviceInstant>,
}

/// What is known of one device at one moment. A field that is not told is null.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceInstant {
    /// Who says it: `oom`, `summary`, `stats`, `smi`.
    pub source: String,
    /// The library behind the device: `cuda`, `hip`, `xpu`, `mps`, `npu`, `jax`, or the one that failed.
    pub backend: Option<String>,
    /// The form of the message.
    pub family: Option<String>,
    /// The line of the file in which it begins.
    pub line: Option<u64>,
    /// The rank that says it.
    pub rank: Option<u32>,
    /// The process that says it, as the log calls it.
    pub speaker: Option<String>,
    /// The device.
    pub device: Option<u32>,
    /// Its name.
    pub device_name: Option<String>,
    /// What was asked of the device: "Tried to allocate". The byte nearest to what is printed.
    pub requested_bytes: Option<u64>,
    /// The least and the most that is printed so.
    pub requested_bytes_range: Option<[u64; 2]>,
    /// The least and the most bytes of the tensor behind the request.
    pub tensor_bytes_range: Option<[u64; 2]>,
    /// All memory of the device.
    pub capacity_bytes: Option<u64>,
    /// What of it is free; below zero where it is counted so.
    pub free_bytes: Option<i64>,
    /// What the card has in use, all processes together.
    pub used_bytes: Option<u64>,
    /// Bytes that the program asked for and holds.
    pub held_bytes: Option<u64>,
    /// Bytes of the allocator's blocks.
    pub allocated_bytes: Option<u64>,
    /// Blocks in use, and those that await their free.
    pub active_bytes: Option<u64>,
    /// Bytes of the allocator's segments.
    pub reserved_bytes: Option<u64>,
    /// Reserved less allocated.
    pub unallocated_bytes: Option<u64>,
    /// The most that was allocated so far.
    pub peak_allocated_bytes: Option<u64>,
    /// The most that was reserved so far.
    pub peak_reserved_bytes: Option<u64>,
    /// What of the unallocated bytes is in segments that are in use, which cannot be given back.
    pub inactive_split_bytes: Option<u64>,
    /// Requests that found no room so far.
    pub out_of_memory_count: Option<u64>,
    /// How often the cache was given back to serve a request so far.
    pub retries: Option<u64>,
    /// The coarsest unit of the figures, which are rounded down to it; null where they are to the byte.
    pub unit_bytes: Option<u64>,
    /// What of the allocated bytes is in private pools.
    pub private_pool_bytes: Option<u64>,
    /// What the process may use, where that is less than the device.
    pub allowed_bytes: Option<u64>,
    /// What this process holds, inside the allocator and out of it.
    pub process_bytes: Option<u64>,
    /// What of it lies outside the allocator.
    pub outside_bytes: Option<u64>,
    /// What the process holds beside the allocator, as MPS tells it.
    pub beside_bytes: Option<u64>,
    /// Where this process is not named: the one of `other_processes` that it probably is.
    pub own_process_guess: Option<u64>,
    /// The processes that are named by their number, in the order of the message.
    pub other_processes: Vec<OtherProcess>,
    /// What they hold together, but for the one that is probably this process.
    pub other_processes_bytes: Option<u64>,
    /// What a program of XLA needs.
    pub needs: Option<ProgramNeeds>,
    /// What was asked for, less what was free and what was reserved and in no block: above zero, no setting of the
    /// allocator could have made room.
    pub short_bytes: Option<i64>,
    /// Why there was no room: `fragmentation`, `capacity`, `other_process`, `limit` or `unknown`.
    pub verdict: Option<String>,
    /// Sentences.
    pub explanation: String,
    /// The stack of the program, outermost call first.
    pub stack: Vec<StackFrame>,
    /// What the stack says was at work; null where it says nothing.
    pub work: Option<String>,
    /// The phase of the training step that it is of.
    pub phase: Option<String>,
    /// What a plan has in place when it makes the first object that the stack speaks for: bytes asked for; null without one.
    pub predicted_bytes: Option<u64>,
    /// By what it is for; they sum to `predicted_bytes`.
    pub predicted_by_category: BTreeMap<Category, u64>,
    /// The objects that have a size which asks for this much, those that the stack speaks for first.
    pub candidates: Vec<SizedObject>,
    /// What is odd about it.
    pub warnings: Vec<String>,
}

/// A process on the card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OtherProcess {
    /// Its number.
    pub pid: u64,
    /// Its name.
    pub name: Option<String>,
    /// What it holds.
    pub bytes: Option<u64>,
    /// What it is: `own` (probably this process), `rank` (of the same job), or `other`.
    pub role: String,
}

/// What a program of XLA needs, by what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramNeeds {
    /// What it is given.
    pub parameter_bytes: Option<u64>,
    /// Its constants.
    pub constant_bytes: Option<u64>,
    /// What may be alive when it ends.
    pub output_bytes: Option<u64>,
    /// What it uses meanwhile.
    pub temp_bytes: Option<u64>,
    /// All of it.
    pub total_bytes: Option<u64>,
    /// What of it is lost between the parts.
    pub fragmentation_bytes: Option<u64>,
}

/// A call of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StackFrame {
    /// The file.
    pub file: String,
    /// The line.
    pub line: Option<u64>,
    /// The function.
    pub function: String,
    /// The line of the program.
    pub code: Option<String>,
}

/// Objects that may be what was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SizedObject {
    /// Their name, the same for every layer.
    pub name: String,
    /// What they are for; null where only a size speaks for them.
    pub category: Option<Category>,
    /// The bytes of one.
    pub bytes: u64,
    /// How many are made; null where that is not known.
    pub count: Option<u64>,
    /// The element type.
    pub dtype: Option<String>,
    /// The extent of each dimension.
    pub shape: Option<Vec<u64>>,
    /// The phase in which the first is made.
    pub phase: Option<String>,
    /// Whether the stack speaks for it; null where there is no stack that decides.
    pub decided: Option<bool>,
}

impl Instants {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-instants/1";
}
