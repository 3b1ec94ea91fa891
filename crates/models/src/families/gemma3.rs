//! Gemma 3 for text, as `Gemma3ForCausalLM` of transformers runs it: a Gemma 2 with norms on the heads of queries and
//! keys, and angles of their own for the layers with a sliding window.

use super::gemma2;
use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, HeadNorm};
use crate::rotary::{RopeScaling, Rotary};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 262_208,
        hidden: 2304,
        intermediate: 9216,
        layers: 26,
        heads: 8,
        kv_heads: Some(4),
        head: Some(256),
        max_positions: 131_072,
        tied: true,
    };
    let config = DecoderConfig {
        logit_softcap: fields.number("final_logit_softcapping")?.is_some(),
        head_norm: HeadNorm::EachHeadTransposed,
        ..gemma2::with_gemma_layers(fields, defaults)?
    };
    if config.rotary.scaling != RopeScaling::Fixed {
        return Err(PlanError("frequencies that change with the length are not supported in Gemma 3".into()));
    }
    let config = gemma2::with_alternating_windows(config, fields, fields.size(&["sliding_window_pattern"], 6)?)?;
    let (windowed, full) = config.windowed.among(config.layers);
    let rotary = Rotary { types: usize::from(windowed) + usize::from(full), ..config.rotary };
    Ok(DecoderConfig { rotary, ..config })
}
