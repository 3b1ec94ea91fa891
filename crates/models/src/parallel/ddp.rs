//! DistributedDataParallel: its options, and the reducer that sums gradients in buckets.

mod buckets;
mod reducer;
mod sync;

use crate::contradiction::Contradiction;
use crate::loss::Loss;
use crate::setup::{Offload, Setup, Torch};

pub(crate) use reducer::Reducer;

/// Bytes of a bucket where nothing else is said.
const BUCKET_CAP: u64 = 25 << 20;
/// Bytes of the first bucket there, so that the first reduction begins early.
const FIRST_BUCKET_CAP: u64 = 1 << 20;

/// `DistributedDataParallel` around the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ddp {
    /// Gradients lie in the buckets, not beside them.
    pub gradient_as_bucket_view: bool,
    /// MiB of a bucket; none: 25, and 1 for the first.
    pub bucket_cap_mb: Option<u32>,
    /// Construction compares the shapes of parameters and sends those of rank 0, with the buffers, to all.
    pub init_sync: bool,
    /// Gradients are reduced in the last micro-batch alone (`no_sync()` around the others).
    pub no_sync: bool,
    /// Parameters without a gradient are looked for in each pass: results are copied, and buckets stay as they are
    /// made at first.
    pub find_unused_parameters: bool,
    /// Buckets are made as gradients come, and let go after backward.
    pub lazy_bucket_allocation: bool,
}

impl Default for Ddp {
    fn default() -> Self {
        Self {
            gradient_as_bucket_view: false,
            bucket_cap_mb: None,
            init_sync: true,
            no_sync: false,
            find_unused_parameters: false,
            lazy_bucket_allocation: false,
        }
    }
}

impl Ddp {
    /// Bytes at which the first bucket and each later one is full.
    fn caps(&self) -> [u64; 2] {
        match self.bucket_cap_mb {
            Some(mib) => [u64::from(mib) << 20; 2],
            None => [FIRST_BUCKET_CAP, BUCKET_CAP],
        }
    }

    pub(super) fn assumptions(&self, setup: &Setup) -> Vec<String> {
        let mut sentences = vec![
            "DistributedDataParallel of torch 2.15 around the whole model; the buffers that NCCL itself takes are no part of it"
                .to_owned(),
        ];
        if setup.torch != Torch::V2_15 {
            sentences.push(format!("DDP is that of torch 2.15, not of {}", setup.torch.as_str()));
        }
        sentences
    }

    pub(super) fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        let bars: [(&'static str, bool, &str); 5] = [
            (
                "optimizer-in-backward",
                setup.optimizer_in_backward,
                "a gradient is reduced before it is stepped",
            ),
            (
                "loss",
                matches!(setup.loss, Some(Loss::Chunked(_) | Loss::FusedLinear)),
                "a loss that calls parts of the model passes by what stands around the whole of it",
            ),
            (
                "checkpoint-reentrant",
                self.find_unused_parameters && setup.checkpoint_reentrant,
                "unused parameters are not found through reentrant checkpoints",
            ),
            ("offload", setup.offloads(Offload::Parameters), "parameters are on the device"),
            (
                "offload",
                setup.offloads(Offload::Optimizer),
                "an optimizer on the host takes gradients away before they are reduced",
            ),
        ];
        let (setting, _, because) = bars.into_iter().find(|(_, barred, _)| *barred)?;
        let sentence = format!("`--parallel ddp`: {because}");
        Some(Contradiction { settings: vec![setting, "parallel"], sentence })
    }
}
