//! Evidence in text: step logs, summaries, the tables of nvidia-smi, and what a file is.
#![no_main]

use evidence::recognise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let text = recognise::text(bytes);
    if let Ok(log) = evidence::StepLog::read(&text) {
        for series in &log.series {
            assert!(series.extras.iter().all(|extra| extra.values.len() == series.points.len()));
        }
    }
    let _ = evidence::summary::summaries(&text);
    let _ = evidence::smi::smi(&text);
    let question = vramledger::ReadQuestion { depth: 2, ..vramledger::ReadQuestion::default() };
    let _ = vramledger::read("file", bytes, &question);
});
