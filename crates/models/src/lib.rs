//! What is trained and how: architectures, optimizers, config readers, catalogues.

mod causal_lm;
mod config;
mod gpt2;
mod gpus;
mod llama;
mod mlp;
mod network;
mod nn;
mod optim;
mod presets;
mod run;
mod setup;
mod train;

pub use gpus::{GPUS, Gpu};
pub use presets::{PRESETS, Preset};
pub use run::{Flops, Model, Parameters, PlanError, Run};
pub use setup::{
    Attention, Checkpoint, MlpLoss, Optimizer, OptimizerImpl, SdpaKernel, Setup, Torch, ZeroGrad,
};
