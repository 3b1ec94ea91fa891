//! A recording of the emulator: two bytes say how long its `run.json` is, then come that and the snapshot.
#![no_main]

use evidence::Recording;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((length, rest)) = bytes.split_first_chunk::<2>() else { return };
    let Some((run, snapshot)) = rest.split_at_checked(usize::from(u16::from_be_bytes(*length))) else {
        return;
    };
    if let Ok(recording) = Recording::read(snapshot, run) {
        assert_eq!(recording.taped.tape.validate(), Ok(()));
        ledger::replay(&recording.taped.tape, None);
    }
});
