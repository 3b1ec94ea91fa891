//! A log with out-of-memory messages: whatever stands in it, figures that hold together or a sentence.
#![no_main]

use vramledger::{Answer, Known, ReadQuestion, read};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let known = Some(Known::of_parameters(6_738_415_616, 8));
    let question = ReadQuestion { depth: 2, known, ..ReadQuestion::default() };
    for message in evidence::read_oom(bytes) {
        assert!(message.line >= 1, "a message begins in a line");
    }
    if let Ok(Answer::Instants(instants)) = read("file", bytes, &question) {
        for instant in &instants.instants {
            if let Some([low, high]) = instant.tensor_bytes_range {
                assert!(low <= high, "a range has its least first");
            }
        }
    }
});
