//! Gemma 2, as `Gemma2ForCausalLM` of transformers runs it: scaled embeddings, norms around both parts of a layer,
//! every other layer with a sliding window, and scores and logits kept small by a tanh, which only eager attention can.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, NormPlaces, Windowed};
use crate::norm::Norm;
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 256_000,
        hidden: 2304,
        intermediate: 9216,
        layers: 26,
        heads: 8,
        kv_heads: Some(4),
        head: Some(256),
        max_positions: 8192,
        tied: true,
    };
    let config = DecoderConfig {
        attention_softcap: fields.number_or("attn_logit_softcapping", 50.0)?.is_some(),
        logit_softcap: fields.number_or("final_logit_softcapping", 30.0)?.is_some(),
        runs_sdpa: false,
        ..with_gemma_layers(fields, defaults)?
    };
    with_alternating_windows(config, fields, 2)
}

/// What both Gemma 2 and Gemma 3 have.
pub(super) fn with_gemma_layers(fields: &Fields<'_>, defaults: Defaults) -> Result<DecoderConfig, PlanError> {
    let bias = fields.flag("attention_bias", false)?;
    if fields.flag("use_bidirectional_attention", false)? {
        return Err(PlanError("a Gemma config with `use_bidirectional_attention` is not supported".into()));
    }
    Ok(DecoderConfig {
        qkv_bias: bias,
        o_bias: bias,
        scaled_embedding: true,
        norm: Norm::OneMore,
        norm_places: NormPlaces::Around,
        activation: fields.activation("hidden_activation", "gelu_pytorch_tanh")?,
        ..DecoderConfig::read(fields, defaults)?
    })
}

/// A window in all layers but each `period`-th, unless `layer_types` says it otherwise; its mask is made anyhow.
pub(super) fn with_alternating_windows(
    config: DecoderConfig,
    fields: &Fields<'_>,
    period: u64,
) -> Result<DecoderConfig, PlanError> {
    let Some(window) = fields.window(Some(4096))? else {
        return Err(PlanError("a Gemma config needs a `sliding_window`, and it is null".into()));
    };
    let listed = fields.layer_types(config.layers)?.map(Windowed::Listed);
    Ok(config.with_masks_by_type(Some(window), listed.unwrap_or(Windowed::AllButEvery(period))))
}
