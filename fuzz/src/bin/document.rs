//! A document: a ledger, hand-written states, or what is none.
#![no_main]

use vramledger::read_ledger;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(ledger) = read_ledger("file", bytes) {
        let json = wire::to_json(&ledger);
        assert!(read_ledger("again", json.as_bytes()).is_ok(), "what is written is read back");
    }
});
