//! Phi-3 and Phi-4, as `Phi3ForCausalLM` of transformers runs them: one projection to queries, keys and values, one to
//! gate and up, heads of which a part turns, and dropout before each residual.

use crate::config::Fields;
use crate::decoder::{DecoderConfig, Defaults};
use crate::rotary::Rotary;
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let defaults = Defaults {
        vocab: 32064,
        hidden: 3072,
        intermediate: 8192,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head: None,
        max_positions: 4096,
        tied: false,
    };
    let config = DecoderConfig::read(fields, defaults)?;
    let part = fields.partial_rotary_factor()?;
    let size = (config.head as f64 * part) as u64;
    if !(part > 0.0 && part <= 1.0) || size == 0 || !size.is_multiple_of(2) {
        return Err(PlanError(format!(
            "`partial_rotary_factor` {part} of heads of {} is no even number of elements",
            config.head
        )));
    }
    let config = DecoderConfig {
        fused: true,
        residual_dropout: fields.probability("resid_pdrop", 0.0)?,
        rotary: Rotary { size, partial: true, ..config.rotary },
        position_ids_first: true,
        ..config
    };
    Ok(config.with_one_mask(fields.window(None)?))
}
