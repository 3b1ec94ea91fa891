//! The question that a planned ledger answers, from what it says it is of.

use std::str::FromStr;

use ledger::{Bytes, Dtype};
use models::{Ddp, Fsdp2, GPUS, Lora, Megatron, Model, Parallel, Setup, Stage, Zero};
use serde_json::{Map, Value};

use crate::{NamedModel, PlanQuestion};

/// The model and the rest of a question.
pub(super) struct Asked {
    pub(super) model: NamedModel,
    setup: Setup,
    gpu: models::Gpu,
    context: Bytes,
    alloc_conf: String,
}

impl Asked {
    /// What `subject` says was planned; none where it does not say all of it.
    pub(super) fn of(subject: &Map<String, Value>) -> Option<Self> {
        let model = subject.get("model")?;
        let name = model["name"].as_str()?.to_owned();
        let known = match &model["config"] {
            Value::Null => Model::from_mlp_name(&name)?.ok()?,
            config => Model::from_config(&config.to_string()).ok()?,
        };
        let said = subject.get("setup")?;
        let mut gpu = GPUS.iter().find(|gpu| Some(gpu.name) == said["gpu"].as_str())?.clone();
        gpu.capacity = Bytes::new(said["capacity_bytes"].as_u64()?);
        Some(Self {
            model: NamedModel { name, model: known },
            setup: setup(said, subject.get("software")?)?,
            gpu,
            context: Bytes::new(said["context_bytes"].as_u64()?),
            alloc_conf: said["alloc_conf"].as_str()?.to_owned(),
        })
    }

    /// The question with another setup.
    pub(super) fn with(&self, setup: Setup) -> PlanQuestion<'_> {
        PlanQuestion {
            model: &self.model,
            setup,
            gpu: self.gpu.clone(),
            context: self.context,
            alloc_conf: self.alloc_conf.clone(),
        }
    }

    pub(super) const fn setup(&self) -> &Setup {
        &self.setup
    }
}

fn setup(said: &Value, software: &Value) -> Option<Setup> {
    let usual = Setup::default();
    let flag = |key: &str| said[key].as_bool().unwrap_or(false);
    let number = |key: &str| said[key].as_u64();
    let small = |key: &str| number(key).and_then(|number| u32::try_from(number).ok());
    Some(Setup {
        batch: number("batch")?,
        seqs: said["seqs"].as_array()?.iter().filter_map(Value::as_u64).collect(),
        dtype: dtype(&said["dtype"])?,
        autocast: dtype(&said["autocast"])?,
        attention: word(&said["attention"])?.unwrap_or(usual.attention),
        sdpa_kernel: word(&said["sdpa_kernel"])?.unwrap_or(usual.sdpa_kernel),
        checkpoint: said["checkpoint"].as_str()?.parse().ok()?,
        checkpoint_reentrant: flag("checkpoint_reentrant"),
        optimizer: word(&said["optimizer"])??,
        optimizer_impl: word(&said["optimizer_impl"])?,
        momentum: said["momentum"].as_f64()?,
        nesterov: flag("nesterov"),
        weight_decay: said["weight_decay"].as_f64(),
        amsgrad: flag("amsgrad"),
        capturable: flag("capturable"),
        optimizer_in_backward: flag("optimizer_in_backward"),
        fp32_state: flag("fp32_state"),
        master_weights: flag("master_weights"),
        accumulate: small("accumulate")?,
        world_size: small("world_size")?,
        rank: small("rank")?,
        parallel: parallel(&said["parallel"])?,
        zero_grad: word(&said["zero_grad"])??,
        clip_grad_norm: said["clip_grad_norm"].as_f64(),
        offload: said["offload"].as_array()?.iter().map(|what| word(what)?).collect::<Option<_>>()?,
        keep_outputs: flag("keep_outputs"),
        // The model's own is none of the forms.
        loss: said["loss"].as_str().filter(|loss| *loss != "default").and_then(|loss| loss.parse().ok()),
        freeze: said["freeze"].as_array()?.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        quantize: word(&said["quantize"])?,
        prepare_kbit: flag("prepare_kbit"),
        lora: match &said["lora"] {
            Value::Null => None,
            lora => Some(Lora {
                rank: lora["rank"].as_u64()?,
                targets: lora["targets"]
                    .as_array()?
                    .iter()
                    .filter_map(Value::as_str)
                    .map(str::to_owned)
                    .collect(),
                dropout: lora["dropout"].as_f64()?,
                dtype: dtype(&lora["dtype"])??,
            }),
        },
        steps: small("steps")?,
        torch: word(&software["torch"])??,
    })
}

/// How ranks divide the work, nothing behind null.
#[allow(clippy::option_option, reason = "what is absent is not what is unknown")]
fn parallel(said: &Value) -> Option<Option<Parallel>> {
    let flag = |key: &str| said[key].as_bool().unwrap_or(false);
    let number = |key: &str| said[key].as_u64();
    let zero = |stage: Stage| {
        Some(Parallel::Zero(Zero {
            reduce_bucket_size: number("reduce_bucket_size")?,
            allgather_bucket_size: number("allgather_bucket_size")?,
            contiguous_gradients: flag("contiguous_gradients"),
            overlap_comm: said["overlap_comm"].as_bool(),
            round_robin_gradients: flag("round_robin_gradients"),
            prefetch_bucket_size: number("prefetch_bucket_size")?,
            param_persistence_threshold: number("param_persistence_threshold")?,
            max_live_parameters: number("max_live_parameters")?,
            max_reuse_distance: number("max_reuse_distance")?,
            grad_accum_dtype: dtype(&said["grad_accum_dtype"])?,
            ..Zero::new(stage)
        }))
    };
    let Some(kind) = said["kind"].as_str() else { return Some(None) };
    Some(Some(match kind {
        "ddp" => Parallel::Ddp(Ddp {
            gradient_as_bucket_view: flag("gradient_as_bucket_view"),
            bucket_cap_mb: number("bucket_cap_mb").and_then(|cap| u32::try_from(cap).ok()),
            init_sync: flag("init_sync"),
            find_unused_parameters: flag("find_unused_parameters"),
            lazy_bucket_allocation: flag("lazy_bucket_allocation"),
            no_sync: flag("no_sync"),
        }),
        "fsdp2" | "hsdp" => Parallel::Fsdp2(Fsdp2 {
            shard_size: number("shard_size").and_then(|size| u32::try_from(size).ok()),
            reshard_after_forward: said["reshard_after_forward"].as_str()?.parse().ok()?,
            root_reshard_after_forward: said["root_reshard_after_forward"].as_bool(),
            param_dtype: dtype(&said["mp_param_dtype"])?,
            reduce_dtype: dtype(&said["mp_reduce_dtype"])?,
            no_sync: flag("no_sync"),
        }),
        "zero1" => zero(Stage::One)?,
        "zero2" => zero(Stage::Two)?,
        "zero3" => zero(Stage::Three)?,
        "megatron-do" => Parallel::MegatronDo(Megatron {
            grad_reduce_in_fp32: said["grad_reduce_in_fp32"].as_bool(),
            overlap_grad_reduce: flag("overlap_grad_reduce"),
            bucket_size: number("bucket_size"),
        }),
        _ => return None,
    }))
}

/// The value behind a word, nothing behind null; none where the word is not known.
#[allow(clippy::option_option, reason = "a word that is absent is not one that is unknown")]
fn word<T: FromStr>(value: &Value) -> Option<Option<T>> {
    match value {
        Value::Null => Some(None),
        value => value.as_str()?.parse().ok().map(Some),
    }
}

/// The dtype of a name, nothing behind null; none where no weights have it.
#[allow(clippy::option_option, reason = "a dtype that is absent is not one that is unknown")]
fn dtype(value: &Value) -> Option<Option<Dtype>> {
    match value {
        Value::Null => Some(None),
        value => {
            let known = [Dtype::Fp64, Dtype::Fp32, Dtype::Fp16, Dtype::Bf16];
            known.into_iter().find(|dtype| Some(dtype.as_str()) == value.as_str()).map(Some)
        }
    }
}
