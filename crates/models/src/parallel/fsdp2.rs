//! FSDP2 (`fully_shard`): its options, and the units that a model is divided into.

mod collectives;
mod param;
mod unit;

use std::fmt;
use std::str::FromStr;

use ledger::Dtype;

use crate::contradiction::Contradiction;
use crate::parallel::Ranks;
use crate::setup::{Offload, Optimizer, OptimizerImpl, Setup, Torch};

pub(crate) use param::Shard;
pub(crate) use unit::{Job, Unit};

/// `fully_shard` on every block and on the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fsdp2 {
    /// Ranks that share one copy of the parameters; fewer than all of them replicate it (HSDP). None: all.
    pub shard_size: Option<u32>,
    /// What becomes of a block's parameters after its forward pass.
    pub reshard_after_forward: Reshard,
    /// The same of the root; none: they stay.
    pub root_reshard_after_forward: Option<bool>,
    /// `MixedPrecisionPolicy(param_dtype=…)`.
    pub param_dtype: Option<Dtype>,
    /// `MixedPrecisionPolicy(reduce_dtype=…)`.
    pub reduce_dtype: Option<Dtype>,
    /// Gradients are reduced in the last micro-batch alone (`set_requires_gradient_sync(False)` before).
    pub no_sync: bool,
}

/// What becomes of gathered parameters after a forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reshard {
    /// They are freed, and gathered again for backward.
    #[default]
    Free,
    /// They stay.
    Keep,
    /// Groups of so many ranks share a copy.
    Among(u32),
}

impl fmt::Display for Reshard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Free => f.write_str("true"),
            Self::Keep => f.write_str("false"),
            Self::Among(ranks) => write!(f, "{ranks}"),
        }
    }
}

impl FromStr for Reshard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse::<u32>()) {
            ("true", _) => Ok(Self::Free),
            ("false", _) => Ok(Self::Keep),
            (_, Ok(ranks)) if ranks > 1 => Ok(Self::Among(ranks)),
            _ => Err("it is true, false, or a number of ranks from 2 on".into()),
        }
    }
}

impl Default for Fsdp2 {
    fn default() -> Self {
        Self {
            shard_size: None,
            reshard_after_forward: Reshard::Free,
            root_reshard_after_forward: None,
            param_dtype: None,
            reduce_dtype: None,
            no_sync: false,
        }
    }
}

impl Fsdp2 {
    /// Its name on the command line.
    pub(super) const fn name(&self) -> &'static str {
        if self.shard_size.is_some() { "hsdp" } else { "fsdp2" }
    }

    /// The ranks that share one copy, of `world`.
    pub(crate) fn shards(&self, world: u32) -> u32 {
        self.shard_size.unwrap_or(world)
    }

    pub(super) fn assumptions(&self, setup: &Setup) -> Vec<String> {
        let mut sentences = vec![
            "fully_shard of torch 2.15 on every block and the root; the buffers that NCCL itself takes are no part of it"
                .to_owned(),
        ];
        if setup.torch != Torch::V2_15 {
            sentences.push(format!("FSDP2 is that of torch 2.15, not of {}", setup.torch.as_str()));
        }
        sentences
    }

    pub(super) fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        use Optimizer::{Adagrad, Adam, AdamW, RmsProp, Sgd};
        let (name, world) = (self.name(), setup.world_size);
        let told = |settings: &[&'static str], sentence: String| {
            Some(Contradiction { settings: settings.to_vec(), sentence })
        };
        if let Some(shard) = self.shard_size.filter(|shard| *shard == 0 || !world.is_multiple_of(*shard)) {
            let sentence =
                format!("`--shard-size {shard}`: {world} ranks of `--world-size` are not a multiple of it");
            return told(&["shard-size", "world-size"], sentence);
        }
        if let Reshard::Among(ranks) = self.reshard_after_forward {
            let shards = self.shards(world);
            if ranks >= shards || !shards.is_multiple_of(ranks) {
                let sentence = format!(
                    "`--reshard-after-forward {ranks}`: it is true, false, or a divisor of the {shards} ranks that share the parameters, smaller than they are"
                );
                return told(&["reshard-after-forward", "world-size"], sentence);
            }
        }
        let planned = matches!(setup.optimizer, Sgd | Adam | AdamW | RmsProp | Adagrad);
        let fused =
            setup.optimizer_impl == Some(OptimizerImpl::Fused) && !matches!(setup.optimizer, Adam | AdamW);
        let bars: [(&'static str, bool, &str); 10] = [
            ("optimizer-impl", fused, "of fused optimizers torch has adam and adamw on shards"),
            ("optimizer", !planned, "the optimizer of shards is sgd, adam, adamw, rmsprop or adagrad"),
            ("quantize", setup.quantize.is_some(), "weights of 4 bits are not planned with it"),
            ("prepare-kbit", setup.prepare_kbit, "weights of 4 bits are not planned with it"),
            (
                "loss",
                setup.loss.is_some_and(|loss| !loss.is_of_mlp()),
                "the loss is that of the model itself",
            ),
            (
                "checkpoint-reentrant",
                setup.checkpoint_reentrant,
                "a reentrant checkpoint is not planned with it",
            ),
            ("optimizer-in-backward", setup.optimizer_in_backward, "it steps after backward"),
            (
                "master-weights",
                setup.master_weights,
                "shards of fp32 with `--mp-param-dtype` are its master weights",
            ),
            ("capturable", setup.capturable, "a captured step of shards is not planned"),
            (
                "offload",
                setup.offloads(Offload::Optimizer),
                "`--offload parameters` takes the optimizer with it",
            ),
        ];
        let (setting, _, because) = bars.into_iter().find(|(_, barred, _)| *barred)?;
        told(&[setting, "parallel"], format!("`--parallel {name}`: {because}"))
    }
}

impl Ranks for Job {
    fn begin(&self, last: bool) {
        self.reduce_gradients(last);
    }
}
