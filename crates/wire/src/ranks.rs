//! What one rank of a job holds of the states of training, without activations.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What one rank holds by recipe and by how the states are divided over the ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankBudget {
    /// `vramledger-budget-ranks/1`.
    #[schemars(extend("const" = RankBudget::FORMAT))]
    pub format: String,
    /// How the states are divided, as asked: `zero3`.
    pub parallel: String,
    /// The ranks of the job.
    pub world_size: u64,
    /// The rank that is asked about.
    pub rank: u64,
    /// The ranks of a group of hsdp; null where there is none.
    pub shard_size: Option<u64>,
    /// A row for each division and recipe that somebody runs.
    pub rates: Vec<RankRate>,
    /// The models, each with a row for each division and recipe.
    pub models: Vec<RankModel>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// Bytes a parameter on one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankRate {
    /// How the states are divided.
    pub parallel: String,
    /// The recipe of training.
    pub recipe: String,
    /// The ranks that share what is divided.
    pub divisor: u64,
    /// The weight.
    pub parameter: RankPart,
    /// Its gradient.
    pub gradient: RankPart,
    /// Its fp32 copy.
    pub master_weight: RankPart,
    /// The two moments of Adam.
    pub optimizer_state: RankPart,
    /// The fp32 copy of the gradient that is made for the update and dies with it.
    pub update_gradient: RankPart,
    /// The first four, in bytes a parameter that every rank holds.
    pub on_every_rank: u64,
    /// And in bytes a parameter that are shared out over the divisor.
    pub divided: u64,
    /// The sum: on_every_rank + divided / divisor.
    pub bytes_per_parameter: f64,
}

/// Bytes a parameter of one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankPart {
    /// Bytes a parameter, on all ranks of a group together.
    pub bytes: u64,
    /// Whether each rank holds a part of them.
    pub divided: bool,
}

/// What the rank holds of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankModel {
    /// The model; null where only its size is known, which then is one tensor.
    pub name: Option<String>,
    /// The number of parameters.
    pub parameters: u64,
    /// A row for each division and recipe, in the order of the rates.
    pub rows: Vec<RankBytes>,
}

/// Bytes of one model on the rank, under one division and recipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankBytes {
    /// How the states are divided.
    pub parallel: String,
    /// The recipe of training.
    pub recipe: String,
    /// The weights.
    pub parameter_bytes: u64,
    /// Their gradients.
    pub gradient_bytes: u64,
    /// Their fp32 copies.
    pub master_weight_bytes: u64,
    /// The two moments of Adam.
    pub optimizer_state_bytes: u64,
    /// The sum of these four.
    pub bytes: u64,
    /// What of the sum belongs to no parameter.
    pub padding_bytes: u64,
    /// What the fp32 copies of the gradients add in the update.
    pub update_gradient_bytes: u64,
}

impl RankBudget {
    /// The format of the document.
    pub const FORMAT: &str = "vramledger-budget-ranks/1";
}
