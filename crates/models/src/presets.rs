//! The well-known model sizes, as the config.json their authors published.

/// A model known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// The name used on the command line: `llama-3-8b`.
    pub name: &'static str,
    /// Its config.json.
    pub config: &'static str,
}

macro_rules! presets {
    ($($name:literal),+ $(,)?) => {
        /// Every preset, by family and size.
        pub const PRESETS: &[Preset] = &[
            $(Preset { name: $name, config: include_str!(concat!("../presets/", $name, ".json")) }),+
        ];
    };
}

presets! {
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "llama-3.2-1b",
    "llama-3.2-3b",
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameters that the authors' checkpoints have, tied ones once.
    #[test]
    fn presets_have_the_parameters_of_the_published_models() {
        let parameters = [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
        ];
        assert_eq!(PRESETS.len(), parameters.len());
        for (preset, (name, expected)) in PRESETS.iter().zip(parameters) {
            assert_eq!(preset.name, name);
            let config: serde_json::Value = serde_json::from_str(preset.config).unwrap();
            assert_eq!(count(&config), expected, "{name}");
        }
    }

    fn count(config: &serde_json::Value) -> u64 {
        let n = |key: &str| config[key].as_u64().unwrap();
        if config["model_type"] == "gpt2" {
            let width = n("n_embd");
            let block = 12 * width * width + 13 * width;
            return (n("vocab_size") + n("n_positions")) * width + n("n_layer") * block + 2 * width;
        }
        let width = n("hidden_size");
        let head = width / n("num_attention_heads");
        let attention = 2 * width * (n("num_attention_heads") + n("num_key_value_heads")) * head;
        let block = attention + 3 * width * n("intermediate_size") + 2 * width;
        let tables = if config["tie_word_embeddings"] == true { 1 } else { 2 };
        tables * n("vocab_size") * width + n("num_hidden_layers") * block + width
    }
}
