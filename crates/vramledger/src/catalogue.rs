//! The catalogues of models and GPUs, and how a name finds its entry.

use models::{GPUS, Gpu, Model, PRESETS};
use wire::answers::{GpuCatalogue, GpuEntry, ModelCatalogue, ModelEntry};

use crate::Error;

/// The GPU called `name`, in any case.
pub fn find_gpu(name: &str) -> Result<&'static Gpu, Error> {
    GPUS.iter()
        .find(|gpu| gpu.name.eq_ignore_ascii_case(name))
        .ok_or_else(|| Error::UnknownGpu { name: name.into() })
}

/// Every GPU.
pub fn gpu_catalogue() -> GpuCatalogue {
    let entry = |gpu: &Gpu| GpuEntry {
        name: gpu.name.into(),
        capacity_bytes: gpu.capacity.get(),
        nominal_bytes: gpu.nominal.get(),
        compute_capability: format!("{}.{}", gpu.compute_capability.0, gpu.compute_capability.1),
        multiprocessors: gpu.multiprocessors,
        source: gpu.source.into(),
    };
    GpuCatalogue { format: GpuCatalogue::FORMAT.into(), gpus: GPUS.iter().map(entry).collect() }
}

/// Every preset.
pub fn model_catalogue() -> ModelCatalogue {
    ModelCatalogue {
        format: ModelCatalogue::FORMAT.into(),
        models: PRESETS.iter().map(|preset| entry(preset.name, preset.config)).collect(),
        families: Model::families().into_iter().map(Into::into).collect(),
    }
}

/// The entry of a preset, read from its config: GPT-2 and the later models name the same things differently.
fn entry(name: &str, config: &str) -> ModelEntry {
    let config: serde_json::Value = serde_json::from_str(config).unwrap_or_default();
    let number = |keys: &[&str]| keys.iter().find_map(|key| config[*key].as_u64()).unwrap_or_default();
    let heads = number(&["n_head", "num_attention_heads"]);
    ModelEntry {
        name: name.into(),
        family: config["model_type"].as_str().unwrap_or_default().into(),
        layers: number(&["n_layer", "num_hidden_layers"]),
        hidden: number(&["n_embd", "hidden_size"]),
        heads,
        kv_heads: config["num_key_value_heads"].as_u64().unwrap_or(heads),
        vocab: number(&["vocab_size"]),
        max_seq: number(&["n_positions", "max_position_embeddings"]),
        dtype: match config["torch_dtype"].as_str() {
            Some("float16") => "fp16",
            Some("bfloat16") => "bf16",
            _ => "fp32",
        }
        .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_and_misspelt_ones_get_a_hint() {
        assert_eq!(find_gpu("a100-80gb").unwrap().name, "A100-80GB");
        let hint = find_gpu("H100-80").unwrap_err().hint().unwrap();
        assert!(hint.starts_with("did you mean `H100-80GB`"), "{hint}");
    }

    #[test]
    fn every_preset_is_read_whole() {
        for model in model_catalogue().models {
            assert!(Model::families().contains(&model.family.as_str()), "{}", model.name);
            for number in
                [model.layers, model.hidden, model.heads, model.kv_heads, model.vocab, model.max_seq]
            {
                assert!(number > 0, "{}", model.name);
            }
        }
        let biggest =
            model_catalogue().models.into_iter().find(|model| model.name == "llama-3.1-405b").unwrap();
        assert_eq!((biggest.layers, biggest.kv_heads, biggest.dtype.as_str()), (126, 8, "bf16"));
    }
}
