//! A setup file, and the question that it asks of a model.
#![no_main]

use std::sync::OnceLock;

use vramledger::NamedModel;

/// The model of every question.
fn model() -> Option<&'static NamedModel> {
    static MODEL: OnceLock<Option<NamedModel>> = OnceLock::new();
    MODEL.get_or_init(|| vramledger::load_model("gpt2").ok()).as_ref()
}

libfuzzer_sys::fuzz_target!(|text: &str| {
    if let (Ok(settings), Some(model)) = (vramledger_cli::Settings::of_file("setup.toml", text), model()) {
        let _ = settings.question(model);
    }
});
