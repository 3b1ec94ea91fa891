//! The families that a config.json can name by its `model_type`, a file each.

use std::sync::Arc;

use crate::architecture::Architecture;
use crate::config::Fields;
use crate::run::PlanError;

/// A family of models.
pub(crate) struct Family {
    /// Its `model_type`.
    pub(crate) name: &'static str,
    /// Reads the extents that a config gives.
    pub(crate) read: fn(&Fields<'_>) -> Result<Arc<dyn Architecture>, PlanError>,
}

macro_rules! families {
    ($($name:literal = $module:ident),+ $(,)?) => {
        $(mod $module;)+

        /// Every family.
        pub(crate) const FAMILIES: &[Family] = &[
            $(Family { name: $name, read: |fields| Ok(Arc::new($module::read(fields)?)) }),+
        ];
    };
}

families! {
    "gpt2" = gpt2,
    "llama" = llama,
    "mistral" = mistral,
    "qwen2" = qwen2,
    "qwen3" = qwen3,
    "mixtral" = mixtral,
    "qwen3_moe" = qwen3_moe,
    "gemma2" = gemma2,
    "gemma3_text" = gemma3,
    "phi3" = phi3,
    "olmo2" = olmo2,
}
