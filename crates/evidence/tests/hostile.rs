//! Whatever the bytes are: an answer or a sentence, never a panic, and no more memory than allowed.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

mod common;

use std::io::Read as _;
use std::path::Path;
use std::sync::OnceLock;

use common::{Value, dict, int, list, pickle, text};
use evidence::pickle::{Builder, Built, Heap, Limits, PickleError, Value as Plain, read};
use evidence::snapshot::Plain as NoStory;
use evidence::{Recording, Snapshot};
use flate2::read::GzDecoder;
use ledger::replay;
use proptest::collection::vec;
use proptest::prelude::*;

/// Reads `bytes` as a snapshot and takes it as far as it goes.
fn take(bytes: &[u8]) {
    let Ok(snapshot) = Snapshot::read(bytes) else { return };
    let Ok(taped) = snapshot.tape(&mut NoStory) else { return };
    assert_eq!(taped.tape.validate(), Ok(()));
    assert_eq!(taped.origins.len(), taped.tape.objects().len());
    replay(&taped.tape, None);
    for warning in taped.warnings.iter().chain(&snapshot.warnings) {
        assert!(!warning.to_string().is_empty());
    }
}

/// A small real snapshot.
fn real() -> &'static [u8] {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/snaps/mlp-4x1024.pickle.gz");
        let mut bytes = Vec::new();
        GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Opcodes and bytes that mean something to the machine, more often than others.
fn opcodes() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop::sample::select(b"(.hjq\x94rKMJ\x8aGN\x88\x89\x8cX)\x85\x86\x87t]}aesu\x95c0".to_vec());
    let piece = prop_oneof![
        4 => opcode.prop_map(|opcode| vec![opcode]),
        2 => (0..40_u8).prop_map(|index| vec![b'h', index]),
        1 => Just(b"\x8c\x06action\x8c\x05alloc\x8c\x04addrK\x07\x8c\x04sizeK\x09".to_vec()),
        1 => Just(b"\x8c\x05state\x8c\x08inactive\x8c\x04sizeK\x09".to_vec()),
        1 => Just(b"\x8c\x0atotal_sizeK\x09\x8c\x06blocks".to_vec()),
        1 => Just(b"\x8c\x08segments]\x8c\x0ddevice_traces]".to_vec()),
        1 => vec(any::<u8>(), 0..4),
    ];
    vec(piece, 0..60).prop_map(|pieces| [b"\x80\x04".to_vec(), pieces.concat()].concat())
}

/// Traces that contradict themselves and the state at the end.
fn snapshots() -> impl Strategy<Value = Value> {
    let action = prop::sample::select(vec![
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
        "snapshot",
        "annotate",
        "other",
    ]);
    let size = prop_oneof![8 => 0..4096_i64, 1 => Just(i64::MAX), 1 => Just(i64::MAX / 2)];
    let address = prop_oneof![12 => (0..8_i64).prop_map(|slot| slot * 512), 1 => Just(i64::MAX)];
    let entry =
        (action, address.clone(), size.clone(), 0..3_i64).prop_map(|(action, address, size, time)| {
            dict(&[
                ("action", text(action)),
                (if action == "oom" { "device_free" } else { "addr" }, int(address)),
                ("size", int(size)),
                ("stream", int(time)),
                ("time_us", int(time)),
                ("frames", list(&[])),
            ])
        });
    let state = prop::sample::select(vec!["active_allocated", "active_pending_free", "inactive"]);
    let block = (size.clone(), state).prop_map(|(size, state)| {
        dict(&[("size", int(size)), ("requested_size", int(size / 2)), ("state", text(state))])
    });
    let segment =
        (address, size, any::<bool>(), vec(block, 0..5)).prop_map(|(address, size, grows, blocks)| {
            dict(&[
                ("device", int(0)),
                ("address", int(address)),
                ("total_size", int(size)),
                ("is_expandable", Value::Bool(grows)),
                ("blocks", list(&blocks)),
            ])
        });
    let traces = vec(vec(entry, 0..40), 0..3);
    (vec(segment, 0..4), traces).prop_map(|(segments, traces)| {
        let traces: Vec<Value> = traces.iter().map(|trace| list(trace)).collect();
        dict(&[("segments", list(&segments)), ("device_traces", list(&traces))])
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn bytes_of_any_kind(bytes in vec(any::<u8>(), 0..300)) {
        take(&bytes);
        take(&[b"\x80\x04".to_vec(), bytes].concat());
    }

    #[test]
    fn opcodes_in_any_order(bytes in opcodes()) {
        take(&bytes);
    }

    #[test]
    fn traces_that_contradict_themselves(snapshot in snapshots()) {
        take(&pickle(&snapshot));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn real_files_with_some_bytes_changed(changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = real().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        take(&bytes);
    }

    #[test]
    fn real_files_cut_and_joined(cuts in vec(any::<prop::sample::Index>(), 3)) {
        let file = real();
        let [a, b, c] = [0, 1, 2].map(|cut| cuts[cut].index(file.len()));
        take(&file[..a]);
        take(&[&file[..a], &file[b.min(c)..b.max(c)]].concat());
    }

    #[test]
    fn recordings_of_any_bytes(run in vec(any::<u8>(), 0..100), marks in vec((0..4_u32, 0..9_usize), 0..6)) {
        drop(Recording::read(real(), &run));
        let marks: Vec<String> = marks
            .iter()
            .map(|(step, phase)| {
                let phase = ["load", "forward", "backward", "update", "end", "loss", "x", "", "end"][*phase];
                format!(
                    r#"{{"step":{step},"micro_batch":null,"phase":"{phase}","allocated_bytes":0,
                    "requested_bytes":0,"reserved_bytes":0,"active_bytes":0}}"#
                )
            })
            .collect();
        let run = format!(
            r#"{{"format":"vramledger-recording/1","torch":"","device":3,"steps":0,"end":"failed","error":null,
            "marks":[{}],"labels":[{{"mark":2,"category":"gradient","objects":[[5,"x"],[6,""]]}}],"ooms":[],
            "final":{{}}}}"#,
            marks.join(",")
        );
        drop(Recording::read(real(), run.as_bytes()));
    }
}

/// Takes nothing over.
struct Nothing;

impl Builder for Nothing {
    const VOCABULARY: &'static [&'static str] = &[];
    fn dict(&mut self, _: &mut Heap, _: &[Plain]) -> Result<Option<Built>, String> {
        Ok(None)
    }
    fn list(&mut self, _: &mut Heap, _: Option<Built>, _: &[Plain]) -> Result<Option<Built>, String> {
        Ok(None)
    }
    fn memory(&self) -> usize {
        0
    }
}

#[test]
fn files_made_to_fill_memory_are_stopped() {
    let repeated = |piece: &[u8]| [b"\x80\x04", piece.repeat((4 << 20) / piece.len()).as_slice()].concat();
    // Empty lists, which take far more than the byte each; the same in one list; texts that differ;
    // numbers in the memo; tuples in tuples.
    let texts: Vec<u8> = (0..400_000_u32)
        .flat_map(|number| [b"\x8c\x04".as_slice(), &number.to_le_bytes()].concat())
        .collect();
    let files = [
        repeated(b"]"),
        [b"\x80\x04]".as_slice(), &repeated(b"]a")[2..]].concat(),
        [b"\x80\x04".as_slice(), &texts].concat(),
        repeated(b"K\x01\x94"),
        [b"\x80\x04)".as_slice(), &b"\x85".repeat(1 << 20)].concat(),
        repeated(b"}(K\x01]u"),
    ];
    for (index, file) in files.iter().enumerate() {
        let limits = Limits { memory: 1 << 20, ..Limits::for_length(file.len()) };
        let error = read(file, limits, &mut Nothing).err().unwrap();
        assert!(matches!(error, PickleError::Limit { .. }), "{index}: {error}");
    }
}

#[test]
fn lists_in_lists_without_end_are_only_data() {
    // Read in a loop, dropped without recursion, and no snapshot.
    let closed = [b"\x80\x04]".to_vec(), b"]".repeat(1 << 18), b"a".repeat(1 << 18), b".".to_vec()].concat();
    assert_eq!(
        Snapshot::read(&closed).unwrap_err().to_string(),
        "it is a pickle, but no memory snapshot: it is no dict with `segments` and `device_traces`, and no list of segments"
    );
}
