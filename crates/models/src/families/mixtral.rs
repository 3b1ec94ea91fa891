//! Mixtral, as `MixtralForCausalLM` of transformers runs it: a Mistral with experts in every layer.

use super::mistral::DEFAULTS;
use crate::config::Fields;
use crate::decoder::{DecoderConfig, Experts, Router};
use crate::run::PlanError;

pub(super) fn read(fields: &Fields<'_>) -> Result<DecoderConfig, PlanError> {
    let config = DecoderConfig::read(fields, DEFAULTS)?;
    let experts = Experts {
        count: fields.size(&["num_local_experts", "num_experts"], 8)?,
        per_token: fields.size(&["num_experts_per_tok"], 2)?,
        intermediate: config.intermediate,
        router: Router::Mixtral { jitter: fields.number("router_jitter_noise")?.is_some_and(|noise| noise > 0.0) },
        balanced: fields.flag("output_router_logits", false)?,
        step: 1,
        dense: Vec::new(),
    };
    let config = DecoderConfig { experts: Some(experts.checked()?), position_ids_first: true, ..config };
    Ok(config.with_one_mask(fields.window(None)?))
}
