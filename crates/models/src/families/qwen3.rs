//! Qwen3, as `Qwen3ForCausalLM` of transformers runs it: norms on the heads of queries and keys, and no biases
//! unless the config asks for them.

use super::qwen2;
use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, HeadNorm};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let bias = fields.flag("attention_bias", false)?;
    let defaults = Defaults { head: Some(128), ..qwen2::DEFAULTS };
    let config = DecoderConfig {
        qkv_bias: bias,
        o_bias: bias,
        head_norm: HeadNorm::EachHead,
        ..DecoderConfig::read(fields, defaults)?
    };
    qwen2::with_upper_windows(config, fields)
}
