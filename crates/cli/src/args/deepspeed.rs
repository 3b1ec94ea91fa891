//! The settings of `plan` that DeepSpeed's ZeRO alone has, under its names and with its values.

use clap::Args;
use vramledger::ledger::Dtype;
use vramledger::models::{Stage, Zero};

use crate::value;

/// The options of ZeRO.
#[derive(Args, Clone, Default, PartialEq)]
pub struct DeepSpeedSettings {
    /// Elements of gradients reduced at a time [default: 500000000]
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Ranks: zero1, zero2, zero3", allow_negative_numbers = true)]
    pub reduce_bucket_size: Option<u64>,
    /// Elements gathered at a time [default: 500000000]: torch gathers in place, and no byte depends on it
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Ranks: zero1, zero2", allow_negative_numbers = true)]
    pub allgather_bucket_size: Option<u64>,
    /// Gradients are not copied into a buffer as they come (contiguous_gradients) [default: they are]
    #[arg(long, help_heading = "Ranks: zero1, zero2, zero3")]
    pub no_contiguous_gradients: bool,
    /// Gradients are reduced, and parameters gathered, beside the computation [default: in zero3 alone]
    #[arg(long, conflicts_with = "no_overlap_comm", help_heading = "Ranks: zero1, zero2, zero3")]
    pub overlap_comm: bool,
    /// They are not, in zero3 either
    #[arg(long, help_heading = "Ranks: zero1, zero2, zero3")]
    pub no_overlap_comm: bool,
    /// Parameters are dealt out to the partitions in turn
    #[arg(long, help_heading = "Ranks: zero1, zero2")]
    pub round_robin_gradients: bool,
    /// Dtype in which micro-batches are added up (data_types.grad_accum_dtype) [default: --dtype]
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype(), help_heading = "Ranks: zero1, zero2, zero3")]
    pub grad_accum_dtype: Option<Dtype>,
    /// Elements of parameters gathered ahead of use (stage3_prefetch_bucket_size) [default: 50000000]
    #[arg(long, value_name = "N", help_heading = "Ranks: zero3", allow_negative_numbers = true)]
    pub prefetch_bucket_size: Option<u64>,
    /// Parameters of at most so many elements stay whole (stage3_param_persistence_threshold) [default: 100000]
    #[arg(long, value_name = "N", help_heading = "Ranks: zero3", allow_negative_numbers = true)]
    pub param_persistence_threshold: Option<u64>,
    /// Elements of parameters that may be whole before no more are gathered ahead (stage3_max_live_parameters)
    /// [default: 1000000000]
    #[arg(long, value_name = "N", help_heading = "Ranks: zero3", allow_negative_numbers = true)]
    pub max_live_parameters: Option<u64>,
    /// Parameters stay whole that are used again within so many elements (stage3_max_reuse_distance)
    /// [default: 1000000000]
    #[arg(long, value_name = "N", help_heading = "Ranks: zero3", allow_negative_numbers = true)]
    pub max_reuse_distance: Option<u64>,
}

impl DeepSpeedSettings {
    /// The values of `--parallel` that are DeepSpeed's.
    pub const KINDS: [&str; 3] = ["zero1", "zero2", "zero3"];

    /// These settings, and those of `file` where there are none.
    pub fn over(&self, file: Self) -> Self {
        Self {
            reduce_bucket_size: self.reduce_bucket_size.or(file.reduce_bucket_size),
            allgather_bucket_size: self.allgather_bucket_size.or(file.allgather_bucket_size),
            no_contiguous_gradients: self.no_contiguous_gradients || file.no_contiguous_gradients,
            overlap_comm: self.overlap_comm || (file.overlap_comm && !self.no_overlap_comm),
            no_overlap_comm: self.no_overlap_comm || (file.no_overlap_comm && !self.overlap_comm),
            round_robin_gradients: self.round_robin_gradients || file.round_robin_gradients,
            grad_accum_dtype: self.grad_accum_dtype.or(file.grad_accum_dtype),
            prefetch_bucket_size: self.prefetch_bucket_size.or(file.prefetch_bucket_size),
            param_persistence_threshold: self
                .param_persistence_threshold
                .or(file.param_persistence_threshold),
            max_live_parameters: self.max_live_parameters.or(file.max_live_parameters),
            max_reuse_distance: self.max_reuse_distance.or(file.max_reuse_distance),
        }
    }

    /// Each setting, whether it is given, and the kinds that have it.
    pub fn given(&self) -> Vec<(&'static str, bool, &'static [&'static str])> {
        let (all, flat, gathered) = (&Self::KINDS[..], &["zero1", "zero2"][..], &["zero3"][..]);
        vec![
            ("reduce-bucket-size", self.reduce_bucket_size.is_some(), all),
            ("allgather-bucket-size", self.allgather_bucket_size.is_some(), flat),
            ("no-contiguous-gradients", self.no_contiguous_gradients, all),
            ("overlap-comm", self.overlap_comm, all),
            ("no-overlap-comm", self.no_overlap_comm, all),
            ("round-robin-gradients", self.round_robin_gradients, flat),
            ("grad-accum-dtype", self.grad_accum_dtype.is_some(), all),
            ("prefetch-bucket-size", self.prefetch_bucket_size.is_some(), gathered),
            ("param-persistence-threshold", self.param_persistence_threshold.is_some(), gathered),
            ("max-live-parameters", self.max_live_parameters.is_some(), gathered),
            ("max-reuse-distance", self.max_reuse_distance.is_some(), gathered),
        ]
    }

    /// The options of the stage that `kind` names, where it is one.
    pub fn zero(&self, kind: &str) -> Option<Zero> {
        let stages = [Stage::One, Stage::Two, Stage::Three];
        let at = Self::KINDS.iter().position(|name| *name == kind)?;
        let usual = Zero::new(stages[at]);
        Some(Zero {
            reduce_bucket_size: self.reduce_bucket_size.unwrap_or(usual.reduce_bucket_size),
            allgather_bucket_size: self.allgather_bucket_size.unwrap_or(usual.allgather_bucket_size),
            contiguous_gradients: !self.no_contiguous_gradients,
            overlap_comm: (self.overlap_comm || self.no_overlap_comm).then_some(self.overlap_comm),
            round_robin_gradients: self.round_robin_gradients,
            prefetch_bucket_size: self.prefetch_bucket_size.unwrap_or(usual.prefetch_bucket_size),
            param_persistence_threshold: self
                .param_persistence_threshold
                .unwrap_or(usual.param_persistence_threshold),
            max_live_parameters: self.max_live_parameters.unwrap_or(usual.max_live_parameters),
            max_reuse_distance: self.max_reuse_distance.unwrap_or(usual.max_reuse_distance),
            grad_accum_dtype: self.grad_accum_dtype,
            ..usual
        })
    }
}
