//! What a ledger says of ranks: what the one it is of holds, and what they do together.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Category;

/// One rank among those that divide the work, in the last step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ranks {
    /// How they divide it, as `--parallel` says it.
    pub parallel: String,
    /// How many they are.
    pub world_size: u64,
    /// The one of this ledger, from 0.
    pub rank: u64,
    /// What it holds of each state of the training.
    pub states: Vec<RankState>,
    /// What its collective operations read and write.
    pub buffers: RankBuffers,
    /// What ranks do together, by kind.
    pub collectives: Vec<RankCollective>,
}

/// What a rank holds of one state: the most at the end of a phase, in requested bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankState {
    /// The device.
    pub device: u16,
    /// The state.
    pub category: Category,
    /// Its bytes on this rank.
    pub bytes: u64,
    /// Ranks that each hold a part of it; 1 where each holds all.
    pub divided_among: u64,
}

/// Communication buffers and gathered parameters, in requested bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankBuffers {
    /// The most that is there together.
    pub most_bytes: u64,
    /// The micro-batch of that.
    pub micro_batch: Option<u32>,
    /// The phase of that; null where there are none.
    pub phase: Option<String>,
    /// What is there all the time.
    pub least_bytes: u64,
}

/// The collective operations of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankCollective {
    /// The kind: `all-reduce`, `all-gather`, `reduce-scatter`, `broadcast` or `reduce`.
    pub kind: String,
    /// How many there are.
    pub count: u64,
    /// The bytes of the whole tensors that they are over, together.
    pub bytes: u64,
}
