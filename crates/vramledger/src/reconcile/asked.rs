//! The question that a planned ledger answers, from what it says it is of.

use std::str::FromStr;

use ledger::{Bytes, Dtype};
use models::{GPUS, Lora, Model, Setup};
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
    /// What `subject` says was planned; none where it does not say all of it, or of ranks that divide the work.
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
    if !said["parallel"].is_null() {
        return None;
    }
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
        zero_grad: word(&said["zero_grad"])??,
        clip_grad_norm: said["clip_grad_norm"].as_f64(),
        offload: said["offload"].as_array()?.iter().map(|what| word(what)?).collect::<Option<_>>()?,
        keep_outputs: flag("keep_outputs"),
        loss: said["loss"].as_str().and_then(|loss| loss.parse().ok()),
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
        ..usual
    })
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
