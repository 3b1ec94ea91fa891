//! Profiler traces and memory timelines: `read` of them, whose rows sum to their total.
#![no_main]

use evidence::{Timeline, Trace};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(trace) = Trace::read(bytes, None) {
        assert_eq!(trace.tape.validate(), Ok(()), "a trace becomes a tape that holds");
        let books = ledger::replay(&trace.tape, None);
        for peak in [&books.peaks.allocated, &books.peaks.reserved].into_iter().flatten() {
            let rows: u64 = peak.contributors.iter().map(|row| row.bytes.get()).sum();
            assert_eq!(rows, peak.bytes.get(), "the rows of a peak sum to it");
        }
    }
    if let Ok(Timeline::Raw(read)) = Timeline::read(bytes) {
        assert_eq!(read.tape.validate(), Ok(()), "a timeline becomes a tape that holds");
    }
    let question = vramledger::ReadQuestion { depth: 2, ..vramledger::ReadQuestion::default() };
    let _ = vramledger::read("file", bytes, &question);
});
