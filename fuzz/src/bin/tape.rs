//! What stands behind the compression of a tape file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(frame) = zstd::encode_all(bytes, 1) else { return };
    let file = [b"vramledger-tape/1\n".as_slice(), &frame].concat();
    if let Ok((about, tape)) = wire::read_tape(&file) {
        ledger::replay(&tape, None);
        assert!(wire::write_tape(&about, &tape).is_ok(), "what is read can be written");
    }
});
