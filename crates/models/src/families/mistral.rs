//! Mistral, as `MistralForCausalLM` of transformers runs it: every layer sees a sliding window, where there is one.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let config = DecoderConfig { position_ids_first: true, ..DecoderConfig::read(fields, DEFAULTS)? };
    Ok(config.with_one_mask(fields.window(Some(4096))?))
}

/// What both Mistral and Mixtral take where a file says nothing.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocab: 32000,
    hidden: 4096,
    intermediate: 14336,
    layers: 32,
    heads: 32,
    kv_heads: Some(8),
    head: None,
    max_positions: 4096 * 32,
    tied: false,
};
