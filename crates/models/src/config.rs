//! Readers of Hugging Face config.json files, as found in the wild.
//!
//! A missing optional field takes the default of transformers' config class; a field that decides the
//! shape of the model and has the wrong type is an error that names it.

use ledger::Dtype;
use serde_json::{Map, Value};

use crate::gpt2::Gpt2Config;
use crate::llama::LlamaConfig;
use crate::nn::Activation;
use crate::run::PlanError;

/// The architectures that can be planned from a config.json, by `model_type`.
pub(crate) const FAMILIES: &[&str] = &["gpt2", "llama"];

/// No extent of a model is larger: products of two stay within 64 bits.
const LARGEST: u64 = 1 << 31;

/// An architecture read from a config, with the dtype it names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Architecture {
    /// `GPT2LMHeadModel`.
    Gpt2(Gpt2Config),
    /// `LlamaForCausalLM`.
    Llama(LlamaConfig),
}

/// Reads a config.json: the architecture and the dtype of the weights, where the config names one.
pub(crate) fn read(json: &str) -> Result<(Architecture, Option<Dtype>), PlanError> {
    let value: Value = serde_json::from_str(json)
        .map_err(|error| PlanError(format!("the config is no JSON that can be read: {error}")))?;
    let Value::Object(map) = value else {
        return Err(PlanError("the config must be a JSON object, as Hugging Face's config.json is".into()));
    };
    let fields = Fields(&map);
    let Some(model_type) = fields.text("model_type")? else {
        return Err(PlanError(format!(
            "the config has no `model_type`; supported are {}",
            FAMILIES.join(", ")
        )));
    };
    let architecture = match model_type {
        "gpt2" => Architecture::Gpt2(gpt2(&fields)?),
        "llama" => Architecture::Llama(llama(&fields)?),
        other => {
            return Err(PlanError(format!(
                "the model_type `{other}` is not supported; supported are {}",
                FAMILIES.join(", ")
            )));
        }
    };
    Ok((architecture, fields.dtype()?))
}

fn gpt2(fields: &Fields<'_>) -> Result<Gpt2Config, PlanError> {
    let hidden = fields.size(&["n_embd", "hidden_size"], 768)?;
    let heads = fields.size(&["n_head", "num_attention_heads"], 12)?;
    divides("n_head", heads, "n_embd", hidden)?;
    for unsupported in ["add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"] {
        if unsupported != "scale_attn_by_inverse_layer_idx" && fields.flag(unsupported, false)? {
            return Err(PlanError(format!("a gpt2 config with `{unsupported}` is not supported")));
        }
    }
    Ok(Gpt2Config {
        vocab: fields.size(&["vocab_size"], 50257)?,
        hidden,
        inner: fields.size(&["n_inner"], 4 * hidden)?,
        layers: fields.size(&["n_layer", "num_hidden_layers"], 12)?,
        heads,
        positions: fields.size(&["n_positions", "max_position_embeddings"], 1024)?,
        resid_dropout: fields.probability("resid_pdrop", 0.1)?,
        embd_dropout: fields.probability("embd_pdrop", 0.1)?,
        attn_dropout: fields.probability("attn_pdrop", 0.1)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        use_cache: fields.flag("use_cache", true)?,
        activation: fields.activation("activation_function", "gelu_new")?,
    })
}

fn llama(fields: &Fields<'_>) -> Result<LlamaConfig, PlanError> {
    let hidden = fields.size(&["hidden_size"], 4096)?;
    let heads = fields.size(&["num_attention_heads"], 32)?;
    let kv_heads = fields.size(&["num_key_value_heads"], heads)?;
    divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
    if fields.0.get("head_dim").is_none_or(Value::is_null) {
        divides("num_attention_heads", heads, "hidden_size", hidden)?;
    }
    let head = fields.size(&["head_dim"], hidden / heads)?;
    if !head.is_multiple_of(2) {
        return Err(PlanError(format!("rotary embedding needs an even `head_dim`, and it is {head}")));
    }
    Ok(LlamaConfig {
        vocab: fields.size(&["vocab_size"], 32000)?,
        hidden,
        intermediate: fields.size(&["intermediate_size"], 11008)?,
        layers: fields.size(&["num_hidden_layers"], 32)?,
        heads,
        kv_heads,
        head,
        max_positions: fields.size(&["max_position_embeddings"], 2048)?,
        attention_bias: fields.flag("attention_bias", false)?,
        mlp_bias: fields.flag("mlp_bias", false)?,
        attention_dropout: fields.probability("attention_dropout", 0.0)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        use_cache: fields.flag("use_cache", true)?,
        activation: fields.activation("hidden_act", "silu")?,
    })
}

fn divides(part_name: &str, part: u64, whole_name: &str, whole: u64) -> Result<(), PlanError> {
    if whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(PlanError(format!("`{part_name}` {part} does not divide `{whole_name}` {whole}")))
}

/// The fields of a config, read by name.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The first of `names` that is there and not null.
    fn get(&self, names: &[&'static str]) -> Option<(&'static str, &Value)> {
        names
            .iter()
            .find_map(|name| self.0.get(*name).filter(|value| !value.is_null()).map(|value| (*name, value)))
    }

    /// A positive extent.
    fn size(&self, names: &[&'static str], default: u64) -> Result<u64, PlanError> {
        let Some((name, value)) = self.get(names) else { return Ok(default) };
        let wrong =
            |what: &str| PlanError(format!("`{name}` must be a positive whole number, and it is {what}"));
        let size = match value {
            Value::Number(number) => number
                .as_u64()
                .or_else(|| {
                    number.as_f64().filter(|x| x.fract() == 0.0 && (1.0..1e15).contains(x)).map(|x| x as u64)
                })
                .ok_or_else(|| wrong(&number.to_string()))?,
            other => return Err(wrong(kind(other))),
        };
        match size {
            0 => Err(wrong("0")),
            size if size > LARGEST => {
                Err(PlanError(format!("`{name}` {size} is larger than 2^31, the limit")))
            }
            size => Ok(size),
        }
    }

    fn text(&self, name: &'static str) -> Result<Option<&str>, PlanError> {
        match self.get(&[name]) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((_, other)) => Err(PlanError(format!("`{name}` must be a text, and it is {}", kind(other)))),
        }
    }

    fn flag(&self, name: &'static str, default: bool) -> Result<bool, PlanError> {
        match self.get(&[name]) {
            None => Ok(default),
            Some((_, Value::Bool(flag))) => Ok(*flag),
            Some((_, other)) => {
                Err(PlanError(format!("`{name}` must be true or false, and it is {}", kind(other))))
            }
        }
    }

    fn probability(&self, name: &'static str, default: f64) -> Result<f64, PlanError> {
        let Some((_, value)) = self.get(&[name]) else { return Ok(default) };
        match value.as_f64() {
            Some(p) if (0.0..1.0).contains(&p) => Ok(p),
            Some(p) => Err(PlanError(format!("`{name}` must lie in [0, 1), and it is {p}"))),
            None => Err(PlanError(format!("`{name}` must be a number, and it is {}", kind(value)))),
        }
    }

    fn activation(&self, name: &'static str, default: &str) -> Result<Activation, PlanError> {
        let named = self.text(name)?.unwrap_or(default);
        Activation::named(named)
            .ok_or_else(|| PlanError(format!("the activation `{named}` of `{name}` is not supported")))
    }

    /// `torch_dtype`, or `dtype` as newer files have it.
    fn dtype(&self) -> Result<Option<Dtype>, PlanError> {
        let Some(text) = self.text("torch_dtype")?.or(self.text("dtype")?) else { return Ok(None) };
        match text.trim_start_matches("torch.") {
            "float32" => Ok(Some(Dtype::Fp32)),
            "float16" => Ok(Some(Dtype::Fp16)),
            "bfloat16" => Ok(Some(Dtype::Bf16)),
            "auto" => Ok(None),
            other => Err(PlanError(format!(
                "weights of dtype `{other}` cannot be planned; use --dtype fp32|bf16|fp16"
            ))),
        }
    }
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
