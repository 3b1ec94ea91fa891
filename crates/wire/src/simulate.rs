//! `vramledger-simulate/1`: one tape under several settings of the allocator.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Device, Oom, Outside, Provenance};

/// What one tape takes of its devices under several settings of the caching allocator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Simulation {
    /// `vramledger-simulate/1`.
    #[schemars(extend("const" = Simulation::FORMAT))]
    pub format: String,
    /// The name of the tape.
    pub name: String,
    /// Where the requests of the tape come from.
    pub provenance: Provenance,
    /// What was run: the model, the setup, the software.
    pub subject: Map<String, Value>,
    /// The release of torch by whose rule equal blocks are chosen.
    pub torch: String,
    /// The devices, with the capacity and context that counted; `device` elsewhere is an index into
    /// them.
    pub devices: Vec<Device>,
    /// What lies on the devices outside the allocator.
    pub outside: Vec<Outside>,
    /// A row for each settings string, in the order they were given.
    pub settings: Vec<Simulated>,
    /// What had to be assumed, a sentence each.
    pub assumptions: Vec<String>,
    /// What must not be read into the numbers.
    pub interpretation_limits: Vec<String>,
    /// Settings that are unknown or not modelled.
    pub warnings: Vec<String>,
}

/// The tape under one settings string.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Simulated {
    /// The settings, as in `PYTORCH_CUDA_ALLOC_CONF`; empty for the defaults.
    pub alloc_conf: String,
    /// Whether everything found room; null where nothing failed but the capacity is not known.
    pub fits: Option<bool>,
    /// The first request that found no room. What the tape holds after it was not replayed, unless
    /// the tape records the failure itself and goes on.
    pub oom: Option<Oom>,
    /// How many failures that the tape records would not have happened.
    pub recorded_ooms_avoided: u64,
    /// A row for each GPU.
    pub devices: Vec<SimulatedDevice>,
}

/// One GPU under one settings string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SimulatedDevice {
    /// The device.
    pub device: u16,
    /// The most block bytes handed out at once.
    pub peak_allocated_bytes: u64,
    /// The most segment bytes held at once.
    pub peak_reserved_bytes: u64,
    /// Of the reserved peak, when it was first reached: what was in no block in use.
    pub stranded_at_peak_bytes: u64,
    /// What the reserved peak leaves of the device; after a failure, what was free less what was
    /// asked for, which is negative. Null where the capacity is not known.
    pub headroom_bytes: Option<i64>,
    /// Requests that had to give back all cached blocks first.
    pub retries: u64,
    /// Everything the allocator counted, under the names of `torch.cuda.memory_stats`.
    pub memory_stats: BTreeMap<String, u64>,
}

impl Simulation {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger-simulate/1";
}
