//! Readers of Hugging Face config.json files, as found in the wild.
//!
//! A missing optional field takes the default of transformers' config class; a field that decides the
//! shape of the model and has the wrong type is an error that names it.

use std::sync::Arc;

use ledger::Dtype;
use serde_json::{Map, Value};

use crate::architecture::Architecture;
use crate::families::FAMILIES;
use crate::nn::Activation;
use crate::rotary::RopeScaling;
use crate::run::PlanError;

/// No extent of a model is larger: products of two stay within 64 bits.
const LARGEST: u64 = 1 << 31;

/// What a config.json says of a model.
pub(crate) struct Config {
    pub(crate) family: &'static str,
    pub(crate) architecture: Arc<dyn Architecture>,
    /// The dtype of the weights, where the config names one.
    pub(crate) dtype: Option<Dtype>,
}

/// Reads a config.json.
pub(crate) fn read(json: &str) -> Result<Config, PlanError> {
    let value: Value = serde_json::from_str(json)
        .map_err(|error| PlanError(format!("the config is no JSON that can be read: {error}")))?;
    let Value::Object(map) = value else {
        return Err(PlanError("the config must be a JSON object, as Hugging Face's config.json is".into()));
    };
    let fields = Fields(&map);
    let supported = || FAMILIES.iter().map(|family| family.name).collect::<Vec<_>>().join(", ");
    let Some(model_type) = fields.text("model_type")? else {
        return Err(PlanError(format!("the config has no `model_type`; supported are {}", supported())));
    };
    let Some(family) = FAMILIES.iter().find(|family| family.name == model_type) else {
        return Err(PlanError(format!(
            "the model_type `{model_type}` is not supported; supported are {}",
            supported()
        )));
    };
    Ok(Config { family: family.name, architecture: (family.read)(&fields)?, dtype: fields.dtype()? })
}

/// Refuses a `part` that does not divide its `whole`.
pub(crate) fn divides(part_name: &str, part: u64, whole_name: &str, whole: u64) -> Result<(), PlanError> {
    if whole.is_multiple_of(part) {
        return Ok(());
    }
    Err(PlanError(format!("`{part_name}` {part} does not divide `{whole_name}` {whole}")))
}

/// The fields of a config, read by name.
pub(crate) struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The first of `names` that is there and not null.
    fn get(&self, names: &[&'static str]) -> Option<(&'static str, &Value)> {
        names
            .iter()
            .find_map(|name| self.0.get(*name).filter(|value| !value.is_null()).map(|value| (*name, value)))
    }

    /// Whether `name` is there and null.
    pub(crate) fn is_null(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(Value::is_null)
    }

    /// Whether `name` is there and not null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null())
    }

    /// A positive extent.
    pub(crate) fn size(&self, names: &[&'static str], default: u64) -> Result<u64, PlanError> {
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

    /// A whole number, zero included.
    pub(crate) fn count(&self, name: &'static str, default: u64) -> Result<u64, PlanError> {
        match self.get(&[name]) {
            Some((_, value)) if value.as_u64() == Some(0) => Ok(0),
            _ => self.size(&[name], default),
        }
    }

    /// A list of whole numbers, empty where it is not there.
    pub(crate) fn counts(&self, name: &'static str) -> Result<Vec<u64>, PlanError> {
        let Some((_, value)) = self.get(&[name]) else { return Ok(Vec::new()) };
        let wrong = || PlanError(format!("`{name}` must be a list of whole numbers, and it is {value}"));
        let list = value.as_array().ok_or_else(wrong)?;
        list.iter().map(|item| item.as_u64().ok_or_else(wrong)).collect()
    }

    /// A text, where there is one.
    pub(crate) fn text(&self, name: &'static str) -> Result<Option<&str>, PlanError> {
        match self.get(&[name]) {
            None => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((_, other)) => Err(PlanError(format!("`{name}` must be a text, and it is {}", kind(other)))),
        }
    }

    /// True or false.
    pub(crate) fn flag(&self, name: &'static str, default: bool) -> Result<bool, PlanError> {
        match self.get(&[name]) {
            None => Ok(default),
            Some((_, Value::Bool(flag))) => Ok(*flag),
            Some((_, other)) => {
                Err(PlanError(format!("`{name}` must be true or false, and it is {}", kind(other))))
            }
        }
    }

    /// A probability below 1.
    pub(crate) fn probability(&self, name: &'static str, default: f64) -> Result<f64, PlanError> {
        let Some((_, value)) = self.get(&[name]) else { return Ok(default) };
        match value.as_f64() {
            Some(p) if (0.0..1.0).contains(&p) => Ok(p),
            Some(p) => Err(PlanError(format!("`{name}` must lie in [0, 1), and it is {p}"))),
            None => Err(PlanError(format!("`{name}` must be a number, and it is {}", kind(value)))),
        }
    }

    /// A number, where there is one.
    pub(crate) fn number(&self, name: &'static str) -> Result<Option<f64>, PlanError> {
        match self.get(&[name]) {
            None => Ok(None),
            Some((_, value)) => match value.as_f64() {
                None => Err(PlanError(format!("`{name}` must be a number, and it is {}", kind(value)))),
                number => Ok(number),
            },
        }
    }

    /// A number; none where it is null.
    pub(crate) fn number_or(&self, name: &'static str, default: f64) -> Result<Option<f64>, PlanError> {
        if self.is_null(name) { Ok(None) } else { Ok(Some(self.number(name)?.unwrap_or(default))) }
    }

    /// An activation by its name.
    pub(crate) fn activation(&self, name: &'static str, default: &str) -> Result<Activation, PlanError> {
        let named = self.text(name)?.unwrap_or(default);
        Activation::named(named)
            .ok_or_else(|| PlanError(format!("the activation `{named}` of `{name}` is not supported")))
    }

    /// `sliding_window`, where it is not null.
    pub(crate) fn window(&self, default: Option<u64>) -> Result<Option<u64>, PlanError> {
        match default {
            _ if self.is_null("sliding_window") => Ok(None),
            None if !self.has("sliding_window") => Ok(None),
            default => Ok(Some(self.size(&["sliding_window"], default.unwrap_or(1))?)),
        }
    }

    /// Which of the layers that `layer_types` lists see a sliding window; none where it is not there.
    pub(crate) fn layer_types(&self, layers: u64) -> Result<Option<Vec<bool>>, PlanError> {
        let Some((name, value)) = self.get(&["layer_types"]) else { return Ok(None) };
        let Value::Array(types) = value else {
            return Err(PlanError(format!("`{name}` must be a list, and it is {}", kind(value))));
        };
        if types.len() as u64 != layers {
            let found = types.len();
            return Err(PlanError(format!(
                "`{name}` lists {found} layers, and `num_hidden_layers` is {layers}"
            )));
        }
        let windowed = types.iter().map(|layer| match layer.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(PlanError(format!(
                "`{name}` may list `full_attention` and `sliding_attention`, and it lists {layer}"
            ))),
        });
        windowed.collect::<Result<_, _>>().map(Some)
    }

    /// `rope_scaling`, or `rope_parameters` as newer files have it.
    fn rope(&self) -> Result<Option<Fields<'_>>, PlanError> {
        match self.get(&["rope_scaling", "rope_parameters"]) {
            None => Ok(None),
            Some((_, Value::Object(fields))) => Ok(Some(Fields(fields))),
            Some((name, value)) => {
                Err(PlanError(format!("`{name}` must be an object, and it is {}", kind(value))))
            }
        }
    }

    /// What the type of rotary embedding asks of a pass.
    pub(crate) fn rope_scaling(&self, positions: u64) -> Result<RopeScaling, PlanError> {
        let Some(rope) = self.rope()? else { return Ok(RopeScaling::Fixed) };
        let named = match rope.text("rope_type")? {
            None => rope.text("type")?,
            named => named,
        };
        match named {
            None | Some("default" | "linear" | "yarn" | "llama3") => Ok(RopeScaling::Fixed),
            Some("dynamic") => Ok(RopeScaling::Dynamic { positions }),
            Some("longrope" | "su") => Ok(RopeScaling::Long),
            Some(other) => Err(PlanError(format!("the rope type `{other}` is not supported"))),
        }
    }

    /// `partial_rotary_factor`, among the parameters of the rotary embedding or beside them.
    pub(crate) fn partial_rotary_factor(&self) -> Result<f64, PlanError> {
        let name = "partial_rotary_factor";
        let within = self.rope()?.map(|rope| rope.number(name)).transpose()?.flatten();
        Ok(within.or(self.number(name)?).unwrap_or(1.0))
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
