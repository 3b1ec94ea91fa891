//! The files of several ranks: a byte parts them, and what is told of them holds together.
#![no_main]

use vramledger::RankReader;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut reader = RankReader::new(None);
    for (rank, file) in bytes.split(|byte| *byte == 0xff).take(16).enumerate() {
        reader.read(&format!("rank{rank}"), "file", file);
    }
    let Ok(answer) = reader.answer() else { return };
    let members: usize = answer.stages.iter().map(|stage| stage.ranks.len()).sum();
    assert_eq!(members, answer.ranks.len(), "each rank is in one stage");
    for outlier in &answer.outliers {
        let rows: i64 = outlier.differences.iter().map(|row| row.difference_bytes).sum();
        assert_eq!(rows, outlier.difference_bytes, "the rows of a difference sum to it");
    }
});
