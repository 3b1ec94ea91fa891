//! What is trained and how: architectures, optimizers, config readers, catalogues.

mod architecture;
mod causal_lm;
mod checkpoint;
mod config;
mod contradiction;
mod decoder;
mod families;
mod gpus;
mod linear;
mod lora;
mod loss;
mod mask;
mod mlp;
mod network;
mod nn;
mod norm;
mod optim;
mod parallel;
mod presets;
mod rotary;
mod run;
mod setup;
mod shards;
mod train;

pub use checkpoint::Checkpoint;
pub use contradiction::Contradiction;
pub use engine::{Collective, Messages, Traffic};
pub use gpus::{GPUS, Gpu};
pub use lora::{ALL_LINEAR, Lora};
pub use loss::Loss;
pub use parallel::{Ddp, Fsdp2, Megatron, Parallel, Reshard, Stage, Zero};
pub use presets::{PRESETS, Preset};
pub use run::{Flops, Model, Parameters, PlanError, Run};
pub use setup::{Attention, Offload, Optimizer, OptimizerImpl, Quantize, SdpaKernel, Setup, Torch, ZeroGrad};
pub use shards::{FlatBuffer, Sharding, Share, State};
