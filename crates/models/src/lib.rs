//! What is trained and how: architectures, optimizers, config readers, catalogues.

mod gpus;
mod presets;
mod run;
mod setup;

pub use gpus::{GPUS, Gpu};
pub use presets::{PRESETS, Preset};
pub use run::{Flops, Model, Parameters, PlanError, Run};
pub use setup::{
    Attention, Checkpoint, MlpLoss, Optimizer, OptimizerImpl, SdpaKernel, Setup, Torch, ZeroGrad,
};
