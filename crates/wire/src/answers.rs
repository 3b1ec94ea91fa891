//! The answers to small questions: budget, checkpoint plan, trade-off, the two catalogues.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a parameter costs before any activation, and the cards that follow from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Budget {
    /// `vramledger-budget/1`.
    #[schemars(extend("const" = Budget::FORMAT))]
    pub format: String,
    /// The cards that are asked about.
    pub cards: BudgetCards,
    /// A row for each training recipe.
    pub recipes: Vec<BudgetRecipe>,
    /// A row for each size of model.
    pub models: Vec<BudgetModel>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// A number of equal cards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BudgetCards {
    /// The name in the catalogue of GPUs.
    pub gpu: String,
    /// How many.
    pub count: u64,
    /// The decimal size that one card is sold by: 80 GB is 80 * 10^9.
    pub nominal_bytes: u64,
    /// What the driver reports of one card.
    pub capacity_bytes: u64,
}

/// Bytes that a parameter costs under one recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BudgetRecipe {
    /// The recipe.
    pub name: String,
    /// Bytes of the weight itself.
    pub parameter: u64,
    /// Bytes of its gradient.
    pub gradient: u64,
    /// Bytes of its fp32 master copy.
    pub master_weight: u64,
    /// Bytes of the two moments of Adam.
    pub optimizer_state: u64,
    /// The sum.
    pub bytes_per_parameter: u64,
    /// The parameters that all cards hold together, by their nominal size.
    pub largest_model_nominal: u64,
    /// The same by the driver's capacity.
    pub largest_model_capacity: u64,
    /// What a step of this recipe needs besides.
    pub note: Option<String>,
}

/// The cards that one size of model needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BudgetModel {
    /// The number of parameters.
    pub parameters: u64,
    /// Bytes a parameter: mixed precision with Adam.
    pub bytes_per_parameter: u64,
    /// Weights, gradients, master weights and optimizer state together.
    pub bytes: u64,
    /// The fewest cards that hold them, by their nominal size.
    pub cards_nominal: u64,
    /// The same by the driver's capacity.
    pub cards_capacity: u64,
}

/// What checkpointing every few layers keeps, in units of one layer's activations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointPlan {
    /// `vramledger-checkpoint-plan/1`.
    #[schemars(extend("const" = CheckpointPlan::FORMAT))]
    pub format: String,
    /// The layers of the model.
    pub layers: u64,
    /// What is kept without checkpointing: a unit a layer.
    pub units_without: u64,
    /// A row for each length of segment.
    pub segments: Vec<CheckpointSegment>,
    /// The length that keeps least; the shortest on ties.
    pub best: CheckpointSegment,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// Which layers of a model to recompute under a memory budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointBudget {
    /// `vramledger-checkpoint-budget/1`.
    #[schemars(extend("const" = CheckpointBudget::FORMAT))]
    pub format: String,
    /// What it is of: model, setup, software.
    pub subject: Map<String, Value>,
    /// The most allocated bytes that the run may have.
    pub budget_bytes: u64,
    /// The layers of the model.
    pub layers: u64,
    /// What a layer keeps where it is not recomputed, requested; the largest.
    pub kept_bytes: u64,
    /// What it leaves to the next one, requested; the largest.
    pub input_bytes: u64,
    /// No checkpointing, that of every layer, and segments of the square root of all layers.
    pub strategies: Vec<CheckpointStrategy>,
    /// The one within the budget that recomputes least; none where none is.
    pub best: Option<CheckpointStrategy>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// One form of checkpointing, as it was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointStrategy {
    /// What it is called.
    pub name: String,
    /// What `plan --checkpoint` takes.
    pub checkpoint: String,
    /// The largest total of allocated bytes.
    pub peak_allocated_bytes: u64,
    /// The step of that peak.
    pub peak_step: Option<u32>,
    /// Its phase.
    pub peak_phase: Option<String>,
    /// Floating-point operations of what is recomputed in a step.
    pub recompute_flops: u64,
    /// Those of the forward pass.
    pub forward_flops: u64,
    /// Whether the peak is within the budget.
    pub within_budget: bool,
}

/// One length of segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointSegment {
    /// Layers of a segment, S.
    pub segment: u64,
    /// The inputs of the segments, L/S.
    pub kept_units: f64,
    /// The segment that backward is in, S.
    pub recomputed_units: u64,
    /// Their sum.
    pub units: f64,
}

/// What a smaller dtype and a smaller saved fraction do to one saved tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tradeoff {
    /// `vramledger-tradeoff/1`.
    #[schemars(extend("const" = Tradeoff::FORMAT))]
    pub format: String,
    /// Samples of one micro-batch.
    pub batch: u64,
    /// Tokens of one sample.
    pub seq: u64,
    /// Width of the tensor.
    pub hidden: u64,
    /// A row for each dtype and saved fraction.
    pub rows: Vec<TradeoffRow>,
    /// What these figures leave out.
    pub interpretation_limits: Vec<String>,
}

/// One dtype and saved fraction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TradeoffRow {
    /// `bf16 / save 50%`.
    pub name: String,
    /// The element type.
    pub dtype: String,
    /// The fraction of the activations that is kept, in (0, 1].
    pub saved_fraction: f64,
    /// The kept activations.
    pub saved_activation_bytes: u64,
    /// The fraction of the forward pass that runs again, in [0, 1].
    pub extra_forward_fraction: f64,
}

/// The catalogue of models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelCatalogue {
    /// `vramledger-models/1`.
    #[schemars(extend("const" = ModelCatalogue::FORMAT))]
    pub format: String,
    /// A row for each preset.
    pub models: Vec<ModelEntry>,
    /// The families that can be planned: each a `model_type` of a config.json, but for mlp.
    pub families: Vec<String>,
}

/// One preset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelEntry {
    /// The name used on the command line.
    pub name: String,
    /// Its `model_type`.
    pub family: String,
    /// Transformer blocks.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Rows of the token embedding.
    pub vocab: u64,
    /// The longest sequence.
    pub max_seq: u64,
    /// The dtype of the published weights.
    pub dtype: String,
}

/// The catalogue of GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GpuCatalogue {
    /// `vramledger-gpus/1`.
    #[schemars(extend("const" = GpuCatalogue::FORMAT))]
    pub format: String,
    /// A row for each card; the first is the default.
    pub gpus: Vec<GpuEntry>,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GpuEntry {
    /// The name used on the command line.
    pub name: String,
    /// All memory that the driver reports.
    pub capacity_bytes: u64,
    /// The decimal size that the card is sold by.
    pub nominal_bytes: u64,
    /// Compute capability: `9.0`.
    pub compute_capability: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Where the figures come from.
    pub source: String,
}

macro_rules! formats {
    ($($document:ident: $format:literal),+ $(,)?) => {$(
        impl $document {
            /// The format of this document.
            pub const FORMAT: &str = $format;
        }
    )+};
}

formats! {
    Budget: "vramledger-budget/1",
    CheckpointPlan: "vramledger-checkpoint-plan/1",
    CheckpointBudget: "vramledger-checkpoint-budget/1",
    Tradeoff: "vramledger-tradeoff/1",
    ModelCatalogue: "vramledger-models/1",
    GpuCatalogue: "vramledger-gpus/1",
}
