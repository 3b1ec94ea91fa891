//! The settings of `plan` that say how ranks divide the work: a flag and a key of a setup file each.

use anyhow::{Result, bail};
use clap::Args;
use vramledger::ledger::Dtype;
use vramledger::models::{Ddp, Fsdp2, Megatron, Parallel, Reshard};

use crate::args::deepspeed::DeepSpeedSettings;
use crate::value;

/// How ranks divide the work, and the options of the framework that does it.
#[derive(Args, Clone, Default, PartialEq)]
pub struct ParallelSettings {
    /// How ranks divide the work: ddp (each holds all of it and sums gradients in buckets), fsdp2 (fully_shard on
    /// every block and the root), hsdp (the same in groups of --shard-size ranks), zero1, zero2, zero3 (DeepSpeed's
    /// stages), megatron-do (Megatron's distributed optimizer) [default: each rank holds all of it]
    #[arg(long, value_name = "KIND", value_parser = ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "megatron-do"], hide_possible_values = true, help_heading = "Ranks")]
    pub parallel: Option<String>,
    /// Ranks, for the effective batch and for what each of them holds [default: 1]
    #[arg(long, value_name = "N", value_parser = value::positive_u32, help_heading = "Ranks", allow_negative_numbers = true)]
    pub world_size: Option<u32>,
    /// The rank that is planned, from 0 [default: 0]
    #[arg(long, value_name = "R", help_heading = "Ranks", allow_negative_numbers = true)]
    pub rank: Option<u32>,
    /// Gradients are reduced in the last micro-batch alone [default: in each]
    #[arg(long, help_heading = "Ranks")]
    pub no_sync: bool,

    /// Gradients lie in the buckets in which they are summed [default: beside them]
    #[arg(long, help_heading = "Ranks: ddp")]
    pub gradient_as_bucket_view: bool,
    /// MiB of a bucket [default: 25, and 1 for the first]
    #[arg(long, value_name = "MIB", value_parser = value::positive_u32, help_heading = "Ranks: ddp", allow_negative_numbers = true)]
    pub bucket_cap_mb: Option<u32>,
    /// Ranks begin with weights that are equal already: none are sent when the model is wrapped (init_sync=False)
    #[arg(long, help_heading = "Ranks: ddp")]
    pub no_init_sync: bool,
    /// Parameters without a gradient are looked for in each pass, which copies the model's results and keeps the
    /// first buckets
    #[arg(long, help_heading = "Ranks: ddp")]
    pub find_unused_parameters: bool,
    /// Buckets are made as gradients come and let go after backward [default: they stay]
    #[arg(long, help_heading = "Ranks: ddp")]
    pub lazy_bucket_allocation: bool,

    /// Ranks that share one copy of the parameters
    #[arg(long, value_name = "N", value_parser = value::positive_u32, help_heading = "Ranks: hsdp", allow_negative_numbers = true)]
    pub shard_size: Option<u32>,
    /// What becomes of a block's parameters after forward: true (they are freed), false (they stay), N (ranks in
    /// groups of N share a copy) [default: true]
    #[arg(long, value_name = "true|false|N", value_parser = str::parse::<Reshard>, help_heading = "Ranks: fsdp2, hsdp")]
    pub reshard_after_forward: Option<Reshard>,
    /// Whether those of the root are freed after forward [default: false]
    #[arg(long, value_name = "true|false", help_heading = "Ranks: fsdp2, hsdp")]
    pub root_reshard_after_forward: Option<bool>,
    /// Dtype in which parameters are gathered and computed with [default: --dtype]
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype(), help_heading = "Ranks: fsdp2, hsdp")]
    pub mp_param_dtype: Option<Dtype>,
    /// Dtype in which gradients are reduced [default: --dtype]
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype(), help_heading = "Ranks: fsdp2, hsdp")]
    pub mp_reduce_dtype: Option<Dtype>,

    /// Whether gradients are summed and reduced in fp32 [default: where weights are bf16]
    #[arg(long, value_name = "true|false", help_heading = "Ranks: megatron-do")]
    pub grad_reduce_in_fp32: Option<bool>,
    /// Gradients are reduced in buckets while backward runs
    #[arg(long, help_heading = "Ranks: megatron-do")]
    pub overlap_grad_reduce: bool,
    /// Elements at which a bucket is closed [default: 40 million, or a million a rank where that is more]
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Ranks: megatron-do", allow_negative_numbers = true)]
    pub bucket_size: Option<u64>,
    #[command(flatten)]
    pub deepspeed: DeepSpeedSettings,
}

impl ParallelSettings {
    /// These settings, and those of `file` where there are none.
    pub fn over(&self, file: Self) -> Self {
        Self {
            parallel: self.parallel.clone().or(file.parallel),
            world_size: self.world_size.or(file.world_size),
            rank: self.rank.or(file.rank),
            no_sync: self.no_sync || file.no_sync,
            gradient_as_bucket_view: self.gradient_as_bucket_view || file.gradient_as_bucket_view,
            bucket_cap_mb: self.bucket_cap_mb.or(file.bucket_cap_mb),
            no_init_sync: self.no_init_sync || file.no_init_sync,
            find_unused_parameters: self.find_unused_parameters || file.find_unused_parameters,
            lazy_bucket_allocation: self.lazy_bucket_allocation || file.lazy_bucket_allocation,
            shard_size: self.shard_size.or(file.shard_size),
            reshard_after_forward: self.reshard_after_forward.or(file.reshard_after_forward),
            root_reshard_after_forward: self.root_reshard_after_forward.or(file.root_reshard_after_forward),
            mp_param_dtype: self.mp_param_dtype.or(file.mp_param_dtype),
            mp_reduce_dtype: self.mp_reduce_dtype.or(file.mp_reduce_dtype),
            grad_reduce_in_fp32: self.grad_reduce_in_fp32.or(file.grad_reduce_in_fp32),
            overlap_grad_reduce: self.overlap_grad_reduce || file.overlap_grad_reduce,
            bucket_size: self.bucket_size.or(file.bucket_size),
            deepspeed: self.deepspeed.over(file.deepspeed),
        }
    }

    /// How ranks divide the work.
    pub fn parallel(&self) -> Result<Option<Parallel>> {
        let kind = self.parallel.as_deref();
        let sharded: &[&str] = &["fsdp2", "hsdp"];
        let given: [(&str, bool, &[&str]); 14] = [
            ("no-sync", self.no_sync, &["ddp", "fsdp2", "hsdp"]),
            ("gradient-as-bucket-view", self.gradient_as_bucket_view, &["ddp"]),
            ("bucket-cap-mb", self.bucket_cap_mb.is_some(), &["ddp"]),
            ("no-init-sync", self.no_init_sync, &["ddp"]),
            ("find-unused-parameters", self.find_unused_parameters, &["ddp"]),
            ("lazy-bucket-allocation", self.lazy_bucket_allocation, &["ddp"]),
            ("shard-size", self.shard_size.is_some(), &["hsdp"]),
            ("reshard-after-forward", self.reshard_after_forward.is_some(), sharded),
            ("root-reshard-after-forward", self.root_reshard_after_forward.is_some(), sharded),
            ("mp-param-dtype", self.mp_param_dtype.is_some(), sharded),
            ("mp-reduce-dtype", self.mp_reduce_dtype.is_some(), sharded),
            ("grad-reduce-in-fp32", self.grad_reduce_in_fp32.is_some(), &["megatron-do"]),
            ("overlap-grad-reduce", self.overlap_grad_reduce, &["megatron-do"]),
            ("bucket-size", self.bucket_size.is_some(), &["megatron-do"]),
        ];
        let given = given.into_iter().chain(self.deepspeed.given());
        for (key, _, kinds) in given.filter(|(_, given, _)| *given) {
            let theirs = kinds.join(" or ");
            match kind {
                None => bail!("`--{key}` is of ranks that divide the work: it needs `--parallel {theirs}`"),
                Some(kind) if !kinds.contains(&kind) => {
                    bail!("`--{key}` is of {theirs}, and `--parallel` is {kind}")
                }
                Some(_) => {}
            }
        }
        if kind == Some("hsdp") && self.shard_size.is_none() {
            bail!("`--parallel hsdp` needs `--shard-size`, the ranks that share one copy of the parameters");
        }
        if self.bucket_size.is_some() && !self.overlap_grad_reduce {
            bail!("`--bucket-size` is of buckets: it needs `--overlap-grad-reduce`");
        }
        if let Some(zero) = kind.and_then(|kind| self.deepspeed.zero(kind)) {
            return Ok(Some(Parallel::Zero(zero)));
        }
        Ok(match kind {
            Some("ddp") => Some(Parallel::Ddp(Ddp {
                gradient_as_bucket_view: self.gradient_as_bucket_view,
                bucket_cap_mb: self.bucket_cap_mb,
                init_sync: !self.no_init_sync,
                find_unused_parameters: self.find_unused_parameters,
                lazy_bucket_allocation: self.lazy_bucket_allocation,
                no_sync: self.no_sync,
            })),
            Some("megatron-do") => Some(Parallel::MegatronDo(Megatron {
                grad_reduce_in_fp32: self.grad_reduce_in_fp32,
                overlap_grad_reduce: self.overlap_grad_reduce,
                bucket_size: self.bucket_size,
            })),
            Some("fsdp2" | "hsdp") => Some(Parallel::Fsdp2(Fsdp2 {
                shard_size: self.shard_size,
                reshard_after_forward: self.reshard_after_forward.unwrap_or_default(),
                root_reshard_after_forward: self.root_reshard_after_forward,
                param_dtype: self.mp_param_dtype,
                reduce_dtype: self.mp_reduce_dtype,
                no_sync: self.no_sync,
            })),
            _ => None,
        })
    }
}
