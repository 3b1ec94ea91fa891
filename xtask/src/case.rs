//! Recorded cases: a model, a setup and what a real run left behind.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ledger::{Bytes, Dtype};
use models::{Ddp, Fsdp2, GPUS, Gpu, Lora, Megatron, Model, Parallel, Reshard, Setup, Stage, Zero};
use serde::Deserialize;
use serde_json::Value;

/// One line of a `cases.jsonl`.
#[derive(Clone, Debug, Deserialize)]
pub struct Case {
    /// Its name.
    pub id: String,
    model: CaseModel,
    /// How it was trained.
    pub setup: CaseSetup,
    /// What was recorded.
    pub truth: Truth,
}

#[derive(Clone, Debug, Deserialize)]
struct CaseModel {
    class: String,
    config: Value,
}

/// The setup of a case.
#[derive(Clone, Debug, Deserialize)]
pub struct CaseSetup {
    gpu: String,
    /// All memory of the device.
    pub capacity_bytes: u64,
    batch: u64,
    seq: Option<u64>,
    seqs: Option<Vec<u64>>,
    dtype: String,
    /// The dtype of the autocast region.
    pub autocast: Option<String>,
    attention: String,
    sdpa_kernel: String,
    checkpoint: String,
    #[serde(default)]
    checkpoint_reentrant: bool,
    optimizer: String,
    optimizer_impl: Option<String>,
    momentum: Option<f64>,
    #[serde(default)]
    nesterov: bool,
    weight_decay: Option<f64>,
    #[serde(default)]
    amsgrad: bool,
    #[serde(default)]
    capturable: bool,
    #[serde(default)]
    optimizer_in_backward: bool,
    accumulate: u32,
    zero_grad: String,
    clip_grad_norm: Option<f64>,
    steps: u32,
    /// `PYTORCH_CUDA_ALLOC_CONF`.
    pub alloc_conf: String,
    /// How ranks divide the work.
    pub parallel: Option<CaseParallel>,
    lora: Option<CaseLora>,
    leak: Option<Value>,
    loss: Option<String>,
    quantize: Option<String>,
    #[serde(default)]
    prepare_kbit: bool,
    #[serde(default)]
    fp32_state: bool,
    #[serde(default)]
    master_weights: bool,
    #[serde(default)]
    freeze: Vec<String>,
    #[serde(default)]
    offload: Vec<String>,
    #[serde(default)]
    keep_outputs: bool,
}

/// How the ranks of a case divide the work.
#[derive(Clone, Debug, Deserialize)]
pub struct CaseParallel {
    kind: String,
    world: u32,
    #[serde(default)]
    rank: u32,
    shard_size: Option<u32>,
    /// `true`, `false`, or a number of ranks.
    reshard_after_forward: Option<Value>,
    root_reshard_after_forward: Option<bool>,
    mp: Option<String>,
    reduce_dtype: Option<String>,
    #[serde(default)]
    no_sync: bool,
    reduce_bucket_size: Option<u64>,
    contiguous_gradients: Option<bool>,
    overlap_comm: Option<bool>,
    #[serde(default)]
    round_robin_gradients: bool,
    grad_accum_dtype: Option<String>,
    gradient_as_bucket_view: Option<bool>,
    #[serde(default)]
    find_unused_parameters: bool,
    #[serde(default)]
    lazy_bucket_allocation: bool,
    bucket_cap_mb: Option<u32>,
    init_sync: Option<bool>,
    grad_reduce_in_fp32: Option<bool>,
    #[serde(default)]
    overlap_grad_reduce: bool,
    bucket_size: Option<u64>,
    prefetch_bucket_size: Option<u64>,
    param_persistence_threshold: Option<u64>,
    max_live_parameters: Option<u64>,
    max_reuse_distance: Option<u64>,
}

impl CaseParallel {
    /// Whether modules hold gathered parameters between forward and backward: then those are theirs.
    pub fn gathers(&self) -> bool {
        matches!(self.kind.as_str(), "fsdp2" | "hsdp")
    }

    fn parallel(&self) -> Result<Parallel> {
        let dtype = |text: &Option<String>| text.as_deref().map(dtype).transpose();
        match self.kind.as_str() {
            "ddp" => Ok(Parallel::Ddp(Ddp {
                gradient_as_bucket_view: self.gradient_as_bucket_view.unwrap_or(false),
                find_unused_parameters: self.find_unused_parameters,
                lazy_bucket_allocation: self.lazy_bucket_allocation,
                bucket_cap_mb: self.bucket_cap_mb,
                init_sync: self.init_sync.unwrap_or(true),
                no_sync: self.no_sync,
            })),
            "fsdp2" | "hsdp" => Ok(Parallel::Fsdp2(Fsdp2 {
                shard_size: self.shard_size,
                reshard_after_forward: match &self.reshard_after_forward {
                    Some(value) => value.to_string().parse().map_err(anyhow::Error::msg)?,
                    None => Reshard::default(),
                },
                root_reshard_after_forward: self.root_reshard_after_forward,
                param_dtype: dtype(&self.mp)?,
                reduce_dtype: dtype(&self.reduce_dtype)?,
                no_sync: self.no_sync,
            })),
            "zero1" => self.zero(Stage::One),
            "zero2" => self.zero(Stage::Two),
            "zero3" => self.zero(Stage::Three),
            "megatron-do" => Ok(Parallel::MegatronDo(Megatron {
                grad_reduce_in_fp32: self.grad_reduce_in_fp32,
                overlap_grad_reduce: self.overlap_grad_reduce,
                bucket_size: self.bucket_size,
            })),
            other => bail!("ranks that divide the work by {other} are not planned"),
        }
    }
}

impl CaseParallel {
    fn zero(&self, stage: Stage) -> Result<Parallel> {
        let usual = Zero::new(stage);
        Ok(Parallel::Zero(Zero {
            reduce_bucket_size: self.reduce_bucket_size.unwrap_or(usual.reduce_bucket_size),
            prefetch_bucket_size: self.prefetch_bucket_size.unwrap_or(usual.prefetch_bucket_size),
            param_persistence_threshold: self
                .param_persistence_threshold
                .unwrap_or(usual.param_persistence_threshold),
            max_live_parameters: self.max_live_parameters.unwrap_or(usual.max_live_parameters),
            max_reuse_distance: self.max_reuse_distance.unwrap_or(usual.max_reuse_distance),
            contiguous_gradients: self.contiguous_gradients.unwrap_or(usual.contiguous_gradients),
            overlap_comm: self.overlap_comm,
            round_robin_gradients: self.round_robin_gradients,
            grad_accum_dtype: self.grad_accum_dtype.as_deref().map(dtype).transpose()?,
            ..usual
        }))
    }
}

/// The adapters of a case.
#[derive(Clone, Debug, Deserialize)]
struct CaseLora {
    r: u64,
    dropout: f64,
    target_modules: CaseTargets,
    dtype: Option<String>,
}

/// The layers that are adapted: a word, or names.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum CaseTargets {
    Word(String),
    Names(Vec<String>),
}

impl CaseLora {
    fn lora(&self) -> Result<Lora> {
        Ok(Lora {
            rank: self.r,
            targets: match &self.target_modules {
                CaseTargets::Word(word) => vec![word.clone()],
                CaseTargets::Names(names) => names.clone(),
            },
            dropout: self.dropout,
            dtype: self.dtype.as_deref().map_or(Ok(Dtype::Fp32), dtype)?,
        })
    }
}

/// What was recorded of a case, in bytes.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the recorded file")]
pub struct Truth {
    torch: String,
    pub peak_requested_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub context_bytes: u64,
    pub oom: Option<TruthOom>,
    pub phases: Vec<TruthPhase>,
}

impl Truth {
    /// The release of torch that was recorded.
    fn torch(&self) -> Result<models::Torch> {
        let release: Vec<&str> = self.torch.split('.').take(2).collect();
        let known = release.join(".").parse();
        known.map_err(|()| anyhow::anyhow!("torch {} is not modelled", self.torch))
    }
}

/// Where a recorded run failed.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the recorded file")]
pub struct TruthOom {
    pub step: u32,
    pub phase: String,
}

/// What was recorded of a phase.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the recorded file")]
pub struct TruthPhase {
    pub step: u32,
    pub micro_batch: Option<u32>,
    pub phase: String,
    pub peak_requested_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub end_requested_bytes: u64,
    pub end_allocated_bytes: u64,
    pub end_reserved_bytes: u64,
    pub end_requested_by_owner: Option<TruthOwners>,
}

/// Requested bytes at a phase's end by owner.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the recorded file")]
pub struct TruthOwners {
    pub parameter: u64,
    pub buffer: u64,
    pub gradient: u64,
    pub optimizer_state: u64,
}

impl Case {
    /// Reads the cases at `path`, a JSON object a line.
    pub fn read_all(path: &Path) -> Result<Vec<Self>> {
        let text =
            fs::read_to_string(path).with_context(|| format!("failed to read `{}`", path.display()))?;
        text.lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(index, line)| {
                serde_json::from_str(line)
                    .with_context(|| format!("line {} of `{}`", index + 1, path.display()))
            })
            .collect()
    }

    /// Whether the planner can be asked: a family it knows on one device, without a planted leak.
    pub fn is_plannable(&self) -> bool {
        let known = Model::families().contains(&self.family());
        let whole = self.setup.leak.as_ref().is_none_or(Value::is_null);
        let divided = self.setup.parallel.as_ref().is_none_or(|ranks| ranks.parallel().is_ok());
        known && whole && divided
    }

    /// The `model_type` of the case's config.
    pub fn family(&self) -> &str {
        if self.model.class == "mlp" {
            return "mlp";
        }
        self.model.config["model_type"].as_str().unwrap_or("")
    }

    /// The model.
    pub fn model(&self) -> Result<Model> {
        if self.model.class == "mlp" {
            let name = format!("mlp:{}x{}", self.model.config["layers"], self.model.config["width"]);
            let Some(model) = Model::from_mlp_name(&name) else { bail!("`{name}` names no mlp") };
            return Ok(model?);
        }
        Ok(Model::from_config(&self.model.config.to_string())?)
    }

    /// The card, with the case's capacity.
    pub fn gpu(&self) -> Result<Gpu> {
        let known = GPUS.iter().find(|gpu| gpu.name == self.setup.gpu);
        let mut gpu =
            known.with_context(|| format!("the GPU `{}` is not in the catalogue", self.setup.gpu))?.clone();
        gpu.capacity = Bytes::new(self.setup.capacity_bytes);
        Ok(gpu)
    }

    /// The setup in the planner's words.
    pub fn setup(&self) -> Result<Setup> {
        let s = &self.setup;
        let word = |name: &str, text: &str| format!("the case's {name} `{text}` is not known");
        macro_rules! choice {
            ($name:literal, $text:expr) => {{
                let text: &str = $text;
                text.parse().map_err(|()| anyhow::anyhow!(word($name, text)))?
            }};
        }
        let of_mlp = self.model.config["loss"].as_str().map(|text| text.replace('_', "-"));
        let loss = s.loss.as_ref().or(of_mlp.as_ref()).map(|text| text.parse()).transpose();
        Ok(Setup {
            batch: s.batch,
            seqs: s.seqs.clone().unwrap_or_else(|| s.seq.into_iter().collect()),
            dtype: Some(dtype(&s.dtype)?),
            autocast: s.autocast.as_deref().map(dtype).transpose()?,
            attention: choice!("attention", &s.attention),
            sdpa_kernel: choice!("sdpa_kernel", &s.sdpa_kernel),
            checkpoint: s.checkpoint.parse().map_err(anyhow::Error::msg)?,
            checkpoint_reentrant: s.checkpoint_reentrant,
            optimizer: choice!("optimizer", &s.optimizer),
            optimizer_impl: match &s.optimizer_impl {
                Some(text) => Some(choice!("optimizer_impl", text)),
                None => None,
            },
            momentum: s.momentum.unwrap_or(0.0),
            nesterov: s.nesterov,
            weight_decay: s.weight_decay,
            amsgrad: s.amsgrad,
            capturable: s.capturable,
            optimizer_in_backward: s.optimizer_in_backward,
            accumulate: s.accumulate,
            world_size: s.parallel.as_ref().map_or(1, |ranks| ranks.world),
            rank: s.parallel.as_ref().map_or(0, |ranks| ranks.rank),
            parallel: s.parallel.as_ref().map(CaseParallel::parallel).transpose()?,
            zero_grad: choice!("zero_grad", &s.zero_grad),
            clip_grad_norm: s.clip_grad_norm,
            offload: s.offload.iter().map(|what| Ok(choice!("offload", what))).collect::<Result<_>>()?,
            keep_outputs: s.keep_outputs,
            loss: loss.map_err(anyhow::Error::msg)?,
            freeze: s.freeze.clone(),
            quantize: match &s.quantize {
                Some(text) => Some(choice!("quantize", text)),
                None => None,
            },
            prepare_kbit: s.prepare_kbit,
            fp32_state: s.fp32_state,
            master_weights: s.master_weights,
            lora: s.lora.as_ref().map(CaseLora::lora).transpose()?,
            steps: s.steps,
            torch: self.truth.torch()?,
        })
    }
}

fn dtype(text: &str) -> Result<Dtype> {
    Ok(match text {
        "fp32" => Dtype::Fp32,
        "bf16" => Dtype::Bf16,
        "fp16" => Dtype::Fp16,
        other => bail!("the dtype `{other}` is not known"),
    })
}
