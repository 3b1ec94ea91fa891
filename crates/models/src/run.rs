//! A planned run: the tape of some training steps and what is known besides.

use ledger::Tape;

use crate::{Gpu, Setup};

/// What a planned run gives.
#[derive(Clone, Debug)]
pub struct Run {
    /// What happened to memory, in requested bytes.
    pub tape: Tape,
    /// The parameters of the model.
    pub parameters: Parameters,
    /// Floating-point operations of the matrix products and attention, of one step.
    pub flops: Flops,
    /// What had to be assumed, a sentence each.
    pub assumptions: Vec<String>,
}

/// The parameters of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// All of them; tied ones once.
    pub total: u64,
    /// Those that require a gradient.
    pub trainable: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Floating-point operations of the matrix products and attention, of one step (all micro-batches).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// The forward pass.
    pub forward: u64,
    /// The backward pass, without recomputation.
    pub backward: u64,
    /// The forward pass run again by checkpointing.
    pub recompute: u64,
    /// The optimizer.
    pub update: u64,
}

/// Why a model cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(pub String);

/// A model: what a config.json or a preset says.
#[derive(Clone, Debug)]
pub struct Model {}

impl Model {
    /// Reads a Hugging Face config.json.
    pub fn from_config(_json: &str) -> Result<Self, PlanError> {
        Err(PlanError("no architecture is known".into()))
    }

    /// Reads `mlp:LAYERSxWIDTH`; none where `name` has another form.
    pub fn from_mlp_name(_name: &str) -> Option<Result<Self, PlanError>> {
        None
    }

    /// The architecture: `llama`, `gpt2`, `mlp`.
    pub fn family(&self) -> &'static str {
        ""
    }

    /// The longest sequence the config allows; none for an mlp.
    pub fn max_seq(&self) -> Option<u64> {
        None
    }

    /// Runs the steps of `setup` on shapes.
    pub fn train(&self, _setup: &Setup, _gpu: &Gpu) -> Result<Run, PlanError> {
        Err(PlanError("no architecture is known".into()))
    }
}
