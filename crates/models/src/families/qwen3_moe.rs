//! Qwen3 with experts, as `Qwen3MoeForCausalLM` of transformers runs it: in every layer, unless the config spares some.

use super::qwen2;
use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, Experts, HeadNorm, Router};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 151_936,
        hidden: 2048,
        intermediate: 6144,
        layers: 24,
        heads: 32,
        kv_heads: Some(4),
        head: None,
        max_positions: 32768,
        tied: false,
    };
    let bias = fields.flag("attention_bias", false)?;
    let config = DecoderConfig::read(fields, defaults)?;
    let experts = Experts {
        count: fields.size(&["num_experts", "num_local_experts"], 128)?,
        per_token: fields.size(&["num_experts_per_tok"], 8)?,
        intermediate: fields.size(&["moe_intermediate_size"], 768)?,
        router: Router::Qwen3 { normalized: fields.flag("norm_topk_prob", false)? },
        balanced: fields.flag("output_router_logits", false)?,
        step: fields.size(&["decoder_sparse_step"], 1)?,
        dense: fields.counts("mlp_only_layers")?,
    };
    if experts.balanced && !experts.are_among(config.layers) {
        let sentence = "`output_router_logits` needs a layer with experts; `decoder_sparse_step` and `mlp_only_layers` leave none";
        return Err(PlanError(sentence.into()));
    }
    let config = DecoderConfig {
        qkv_bias: bias,
        o_bias: bias,
        head_norm: HeadNorm::EachHead,
        experts: Some(experts.checked()?),
        position_ids_first: true,
        ..config
    };
    Ok(config.with_one_mask(qwen2::window(fields)?))
}
