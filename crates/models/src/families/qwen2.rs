//! Qwen2 and Qwen2.5, as `Qwen2ForCausalLM` of transformers runs them: biases on queries, keys and values, and a
//! sliding window in the upper layers where the config asks for it.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults, Windowed};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let config = DecoderConfig { qkv_bias: true, ..DecoderConfig::read(fields, DEFAULTS)? };
    with_upper_windows(config, fields)
}

/// What both Qwen2 and Qwen3 take where a file says nothing.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocab: 151_936,
    hidden: 4096,
    intermediate: 22016,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head: None,
    max_positions: 32768,
    tied: false,
};

/// `use_sliding_window`, `max_window_layers` and `layer_types`.
pub(super) fn with_upper_windows(
    config: DecoderConfig,
    fields: &Fields<'_>,
) -> Result<DecoderConfig, PlanError> {
    let window = window(fields)?;
    let windowed = match fields.layer_types(config.layers)? {
        Some(listed) => Windowed::Listed(listed),
        None if window.is_none() => Windowed::None,
        None => Windowed::From(fields.count("max_window_layers", 28)?),
    };
    let (any, _) = windowed.among(config.layers);
    if any && window.is_none() {
        let sentence = "`layer_types` lists `sliding_attention`, which needs `use_sliding_window` and a `sliding_window`";
        return Err(PlanError(sentence.into()));
    }
    Ok(config.with_masks_by_type(window.filter(|_| any), windowed))
}

/// The sliding window, where `use_sliding_window` asks for one.
pub(super) fn window(fields: &Fields<'_>) -> Result<Option<u64>, PlanError> {
    let asked = fields.flag("use_sliding_window", false)?;
    Ok(fields.window(Some(4096))?.filter(|_| asked))
}
