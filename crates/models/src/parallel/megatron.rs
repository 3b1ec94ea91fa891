//! Megatron's `DistributedDataParallel` with the distributed optimizer: its options.

mod distributed;
mod norm;

use ledger::Dtype;

use crate::contradiction::Contradiction;
use crate::setup::{Offload, Optimizer, OptimizerImpl, Setup, ZeroGrad};

pub(crate) use distributed::Distributed;

/// Weights and gradients in one buffer each, whole on every rank; each rank steps its part of every bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Megatron {
    /// Gradients are summed and reduced in fp32; none: where weights are bf16, as Megatron's arguments have it.
    pub grad_reduce_in_fp32: Option<bool>,
    /// Buckets are reduced while backward runs: without it there is one.
    pub overlap_grad_reduce: bool,
    /// Elements at which a bucket is closed; none: 40 million, or a million a rank where that is more.
    pub bucket_size: Option<u64>,
}

impl Megatron {
    /// The dtype of the gradients in their buffer, of weights in `dtype`.
    fn grad_dtype(&self, dtype: Dtype) -> Dtype {
        let wide = self.grad_reduce_in_fp32.unwrap_or(dtype == Dtype::Bf16);
        if wide { Dtype::Fp32 } else { dtype }
    }

    /// Elements at which a bucket is closed, over `ranks`; none: there is one.
    fn bucket_size(&self, ranks: u64) -> Option<u64> {
        let size = self.bucket_size.unwrap_or_else(|| 40_000_000.max(1_000_000 * ranks));
        self.overlap_grad_reduce.then_some(size)
    }

    pub(super) fn assumptions(&self, setup: &Setup) -> Vec<String> {
        let adam = match setup.optimizer_impl {
            Some(OptimizerImpl::Fused) => {
                "the FusedAdam of Transformer Engine, which makes no temporaries; its steps were not held against a run"
            }
            _ => "the Adam of torch, which it takes where neither Transformer Engine nor Apex is installed",
        };
        vec![format!(
            "DistributedDataParallel and DistributedOptimizer of Megatron-Core 0.16 around the model, with {adam}"
        )]
    }

    pub(super) fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        let adam = matches!(setup.optimizer, Optimizer::Adam | Optimizer::AdamW);
        let offloads = |what: Offload| setup.offloads(what);
        let bars: [(&'static str, bool, &str); 11] = [
            ("optimizer", !adam, "the distributed optimizer is of adam and adamw"),
            (
                "optimizer-impl",
                setup.optimizer_impl == Some(OptimizerImpl::ForLoop),
                "its Adam steps lists of tensors (foreach), or is fused",
            ),
            ("amsgrad", setup.amsgrad, "its Adam keeps two moments"),
            ("capturable", setup.capturable, "its Adam is not captured in a graph"),
            ("optimizer-in-backward", setup.optimizer_in_backward, "it steps after backward"),
            ("fp32-state", setup.fp32_state, "its state is fp32 already"),
            ("master-weights", setup.master_weights, "it has fp32 copies of its own"),
            (
                "zero-grad",
                setup.zero_grad == ZeroGrad::Keep,
                "its buffer of gradients is kept and zeroed, whatever",
            ),
            ("quantize", setup.quantize.is_some(), "weights of 4 bits are not planned with it"),
            (
                "loss",
                setup.loss.is_some_and(|loss| !loss.is_of_mlp()),
                "the loss is that of the model itself",
            ),
            (
                "offload",
                offloads(Offload::Optimizer) || offloads(Offload::Parameters),
                "weights and optimizer on the host are not planned with it",
            ),
        ];
        let (setting, _, because) = bars.into_iter().find(|(_, barred, _)| *barred)?;
        let sentence = format!("`--parallel megatron-do`: {because}");
        Some(Contradiction { settings: vec![setting, "parallel"], sentence })
    }
}
