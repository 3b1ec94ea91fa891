//! A model's config.json.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = models::Model::from_config(text);
});
