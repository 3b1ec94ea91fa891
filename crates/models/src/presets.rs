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
    "mistral-7b-v0.1",
    "mistral-7b-v0.3",
    "mistral-nemo-12b",
    "mistral-small-24b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gemma-2-2b",
    "gemma-2-9b",
    "gemma-2-27b",
    "gemma-3-270m",
    "gemma-3-1b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "phi-3-mini-4k",
    "phi-3-medium-4k",
    "phi-4",
    "olmo-2-1b",
    "olmo-2-7b",
    "olmo-2-13b",
    "olmo-2-32b",
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GPUS, Model, Optimizer, Setup};

    /// The parameters that the authors' checkpoints have, tied ones once; of Gemma 3 the text model's.
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
            ("mistral-7b-v0.1", 7_241_732_096),
            ("mistral-7b-v0.3", 7_248_023_552),
            ("mistral-nemo-12b", 12_247_782_400),
            ("mistral-small-24b", 23_572_403_200),
            ("mixtral-8x7b", 46_702_792_704),
            ("mixtral-8x22b", 140_620_634_112),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-2-9b", 9_241_705_984),
            ("gemma-2-27b", 27_227_128_320),
            ("gemma-3-270m", 268_098_176),
            ("gemma-3-1b", 999_885_952),
            ("gemma-3-4b", 3_880_263_168),
            ("gemma-3-12b", 11_766_034_176),
            ("gemma-3-27b", 27_009_346_304),
            ("phi-3-mini-4k", 3_821_079_552),
            ("phi-3-medium-4k", 13_960_238_080),
            ("phi-4", 14_659_507_200),
            ("olmo-2-1b", 1_484_916_736),
            ("olmo-2-7b", 7_298_617_344),
            ("olmo-2-13b", 13_716_198_400),
            ("olmo-2-32b", 32_234_279_936),
        ];
        assert_eq!(PRESETS.len(), parameters.len());
        for (preset, (name, expected)) in PRESETS.iter().zip(parameters) {
            assert_eq!(preset.name, name);
            let setup = Setup { seqs: vec![1], steps: 1, optimizer: Optimizer::Sgd, ..Setup::default() };
            let run = Model::from_config(preset.config).unwrap().train(&setup, &GPUS[0]).unwrap();
            assert_eq!(run.parameters.total, expected, "{name}");
        }
    }
}
