//! `read` of any file, with everything that can be asked of it: a snapshot becomes a tape, and the tape an answer.
#![no_main]

use vramledger::{Answer, By, ReadQuestion, read};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let question = ReadQuestion {
        by: By::Stack,
        depth: 2,
        what_if: vec!["expandable_segments:True".into()],
        ..ReadQuestion::default()
    };
    if let Ok(Answer::Ledger(answer)) = read("file", bytes, &question) {
        for peak in [&answer.ledger.peaks.requested, &answer.ledger.peaks.allocated].into_iter().flatten() {
            let rows: u64 = peak.contributors.iter().map(|row| row.bytes).sum();
            assert_eq!(rows, peak.bytes, "the rows of a peak sum to it");
        }
    }
});
