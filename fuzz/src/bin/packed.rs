//! Files packed by gzip, whole and cut off: a byte says how much of them is there.
#![no_main]

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((part, rest)) = bytes.split_first() else { return };
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    if packed.write_all(rest).is_err() {
        return;
    }
    let Ok(packed) = packed.finish() else { return };
    let question = vramledger::ReadQuestion { depth: 2, ..vramledger::ReadQuestion::default() };
    let _ = vramledger::read("file", &packed[..packed.len() * (usize::from(*part) + 1) / 256], &question);
});
