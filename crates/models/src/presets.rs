//! The well-known model sizes, as the config.json their authors published.

/// A model known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name used on the command line: `llama-3-8b`.
    pub name: &'static str,
    /// Its config.json.
    pub config: &'static str,
}

/// Every preset, by family and size.
pub const PRESETS: &[Preset] = &[];
