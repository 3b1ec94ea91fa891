//! Llama, as `LlamaForCausalLM` of transformers runs it: the decoder that the other families are told by.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 32000,
        hidden: 4096,
        intermediate: 11008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head: None,
        max_positions: 2048,
        tied: false,
    };
    let attention_bias = fields.flag("attention_bias", false)?;
    Ok(DecoderConfig {
        qkv_bias: attention_bias,
        o_bias: attention_bias,
        mlp_bias: fields.flag("mlp_bias", false)?,
        ..DecoderConfig::read(fields, defaults)?
    })
}
