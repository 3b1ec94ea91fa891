//! OLMo 2, as `Olmo2ForCausalLM` of transformers runs it: norms after both parts of a layer and over all heads of queries
//! and keys, and angles in fp32.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, HeadNorm, NormPlaces};
use crate::norm::Norm;
use crate::rotary::Rotary;
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 50304,
        hidden: 4096,
        intermediate: 11008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head: None,
        max_positions: 2048,
        tied: false,
    };
    let bias = fields.flag("attention_bias", false)?;
    let config = DecoderConfig::read(fields, defaults)?;
    Ok(DecoderConfig {
        qkv_bias: bias,
        o_bias: bias,
        norm: Norm::Fp32,
        norm_places: NormPlaces::After,
        head_norm: HeadNorm::AllHeads,
        rotary: Rotary { fp32: true, ..config.rotary },
        ..config
    })
}
