//! The allocator's settings that a snapshot tells of.

use allocator::Settings;
use evidence::snapshot::{Setting, Snapshot};
use ledger::Bytes;

use crate::fit;

/// The settings, and what their reader should know. What a program changed while it ran is in the
/// fields and not in the string of the environment, so the fields win.
pub(super) fn settings(snapshot: &Snapshot) -> (Settings, Vec<String>) {
    let mut warnings = Vec::new();
    let mut settings = match snapshot.setting("PYTORCH_CUDA_ALLOC_CONF") {
        Some(Setting::Text(text)) => fit::or_defaults(Settings::parse(text), &mut warnings),
        _ => Settings::default(),
    };
    match snapshot.setting("max_split_size") {
        Some(Setting::Integer(bytes)) if *bytes > 0 => {
            settings.max_split_size = Some(Bytes::new(bytes.cast_unsigned()));
        }
        Some(Setting::Integer(_)) => settings.max_split_size = None,
        _ => {}
    }
    if let Some(Setting::Bool(expandable)) = snapshot.setting("expandable_segments") {
        settings.expandable_segments = *expandable;
    }
    if let Some(Setting::Real(threshold)) = snapshot.setting("garbage_collection_threshold") {
        settings.garbage_collection_threshold = Some(*threshold).filter(|it| *it > 0.0 && *it < 1.0);
    }
    for (interval, divisions) in settings.roundup_power2_divisions.iter_mut().enumerate() {
        let name = format!("roundup_power2_divisions.{}", 1_u32 << interval);
        if let Some(Setting::Integer(value)) = snapshot.setting(&name) {
            // PyTorch takes powers of two alone.
            let value = u64::try_from(*value).unwrap_or(0);
            *divisions = if value.is_power_of_two() { value } else { 0 };
        }
    }
    (settings, warnings)
}
