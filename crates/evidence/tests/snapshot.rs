//! Snapshots of every age and in every state of disrepair.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

mod common;

use common::{Value, dict, int, list, pickle, text};
use evidence::snapshot::{Action, BlockState, Plain, Setting, Stack};
use evidence::{Snapshot, Warning};
use ledger::{Bytes, DeviceKind, Event, Pool, Stream, Tape, replay};

fn sentence(bytes: &[u8]) -> String {
    Snapshot::read(bytes).unwrap_err().to_string()
}

fn read(value: &Value) -> Snapshot {
    Snapshot::read(&pickle(value)).unwrap()
}

/// A segment of 2 MiB at `address` with blocks of (requested, size, state).
fn segment(address: i64, blocks: &[(i64, i64, &str)]) -> Value {
    let mut at = address;
    let blocks = blocks.iter().map(|(requested, size, state)| {
        let block = dict(&[
            ("address", int(at)),
            ("size", int(*size)),
            ("requested_size", int(*requested)),
            ("state", text(state)),
            ("frames", list(&[])),
        ]);
        at += size;
        block
    });
    let blocks: Vec<Value> = blocks.collect();
    dict(&[
        ("device", int(0)),
        ("address", int(address)),
        ("total_size", int(2 << 20)),
        ("stream", int(0)),
        ("segment_type", text("small")),
        ("blocks", list(&blocks)),
    ])
}

fn entry(action: &str, address: i64, size: i64) -> Value {
    entry_at(action, address, size, 1)
}

fn entry_at(action: &str, address: i64, size: i64, time: i64) -> Value {
    dict(&[
        ("action", text(action)),
        ("addr", int(address)),
        ("size", int(size)),
        ("stream", int(0)),
        ("time_us", int(time)),
    ])
}

fn snapshot(segments: &[Value], traces: &[&[Value]]) -> Value {
    let traces: Vec<Value> = traces.iter().map(|trace| list(trace)).collect();
    dict(&[("segments", list(segments)), ("device_traces", list(&traces))])
}

/// The events, shortly: `+1000` an object, `-0` its free, `s2097152` a segment.
fn told(tape: &Tape) -> Vec<String> {
    let event = |event| match event {
        Event::Alloc { bytes, .. } => format!("+{}", bytes.get()),
        Event::FreeRequested(object) => format!("?{}", object.0),
        Event::Free(object) => format!("-{}", object.0),
        Event::SegmentAlloc(segment) => format!("s{}", segment.bytes.get()),
        Event::SegmentFree(segment) => format!("s-{}", segment.bytes.get()),
        Event::SegmentMap(segment) => format!("m{}@{}", segment.bytes.get(), segment.segment.0),
        Event::SegmentUnmap(segment) => format!("m-{}@{}", segment.bytes.get(), segment.segment.0),
        Event::Oom { bytes, .. } => format!("!{}", bytes.get()),
        Event::Mark(_) | Event::Relabel(..) => "?".into(),
    };
    tape.events().map(event).collect()
}

const NOTHING: &str = "inactive";
const USED: &str = "active_allocated";
const MIB2: i64 = 2 << 20;

#[test]
fn files_that_are_no_snapshot_say_what_they_are() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert_eq!(sentence(b""), "the file is empty");
    assert_eq!(
        sentence(pointer),
        "it is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`"
    );
    assert_eq!(
        sentence(b"PK\x03\x04......"),
        "it is a zip archive, as `torch.save` writes, not a memory snapshot"
    );
    assert_eq!(sentence(b"\x1f\x8b\x08"), "it is compressed with gzip, not a memory snapshot");
    assert_eq!(sentence(b"  {\"segments\": []}"), "it is JSON, not a memory snapshot");
    assert_eq!(sentence(b"<html>"), "it is HTML or XML, not a memory snapshot");
    assert_eq!(sentence(b"\n \n"), "it is white space, not a memory snapshot");
    assert_eq!(sentence(b"hello"), "it is no pickle of protocol 2 to 5: it begins with the byte 0x68");
    let no_snapshot = "it is a pickle, but no memory snapshot: it is no dict with `segments` and `device_traces`, and no list of segments";
    assert_eq!(sentence(&pickle(&int(7))), no_snapshot);
    assert_eq!(sentence(&pickle(&list(&[]))), no_snapshot);
    assert_eq!(sentence(&pickle(&dict(&[("loss", int(1))]))), no_snapshot);
    assert_eq!(sentence(&pickle(&list(&[int(1)]))), no_snapshot);
    let code = b"\x80\x04\x8c\x02os\x8c\x06system\x93.";
    assert_eq!(
        sentence(code),
        "`STACK_GLOBAL` at byte 14 would name or call code; plain data needs none, so the file is not read"
    );
}

#[test]
fn damage_is_one_sentence() {
    let damaged = |trace: Value| sentence(&pickle(&snapshot(&[], &[&[trace]])));
    assert!(
        damaged(dict(&[("action", text("alloc")), ("size", int(1))]))
            .starts_with("trace entry 0 of the file: `alloc` without an address or a size (before byte ")
    );
    assert!(damaged(entry("alloc", 0, -5)).starts_with("trace entry 0 of the file: the size -5 is negative"));
    assert!(
        damaged(dict(&[("action", int(3))])).starts_with("trace entry 0 of the file: its action is no text")
    );
    let whole = pickle(&snapshot(&[segment(0, &[(1, 512, USED)])], &[&[entry("alloc", 0, 1)]]));
    assert_eq!(
        sentence(&whole[..whole.len() - 1]),
        format!("it breaks off at byte {}: the file is not complete", whole.len() - 1)
    );
    let mut longer = whole;
    longer.extend(b"...");
    assert_eq!(Snapshot::read(&longer).unwrap().warnings.last(), Some(&Warning::TrailingBytes { count: 3 }));
}

#[test]
fn a_snapshot_without_a_recording_has_its_state() {
    let state = segment(1 << 40, &[(1000, 1024, USED), (0, MIB2 - 1024, NOTHING)]);
    for file in [snapshot(std::slice::from_ref(&state), &[&[]]), list(std::slice::from_ref(&state))] {
        let snapshot = read(&file);
        assert_eq!(snapshot.warnings, [Warning::NoEvents, Warning::NoStacks]);
        let taped = snapshot.tape(&mut Plain).unwrap();
        assert_eq!(told(&taped.tape), ["s2097152", "+1000"]);
        assert_eq!(taped.warnings, []);
    }
}

#[test]
fn a_recording_of_one_entry_says_so() {
    let snapshot = read(&snapshot(&[], &[&[entry("snapshot", 0, 0)]]));
    assert_eq!(snapshot.warnings[0], Warning::OneEvent);
    let taped = snapshot.tape(&mut Plain).unwrap();
    assert!(taped.tape.is_empty());
    assert_eq!(taped.tape.devices[0].name, "GPU 0");
}

#[test]
fn what_was_there_before_is_told_by_the_end() {
    // Before: 1000 at 0, 500 at 1024 (freed in the recording), 700 at 2048 (awaiting its free).
    let state =
        segment(0, &[(1000, 1024, USED), (600, 1024, USED), (0, 1024, NOTHING), (0, MIB2 - 3072, NOTHING)]);
    let trace = [
        entry("free_requested", 1024, 500),
        entry("free_completed", 2048, 700),
        entry("free_completed", 1024, 500),
        entry("alloc", 1024, 600),
    ];
    let snapshot = read(&snapshot(&[state], &[&trace]));
    let taped = snapshot.tape(&mut Plain).unwrap();
    assert_eq!(told(&taped.tape), ["s2097152", "+700", "?0", "+1000", "+500", "?2", "-0", "-2", "+600"]);
    let device = || "GPU 0".to_owned();
    assert_eq!(
        taped.warnings,
        [
            Warning::BegunInTheMiddle { device: device(), objects: 3, bytes: Bytes::new(2200) },
            Warning::Truncated { device: device(), unmatched_frees: 2 },
        ]
    );
    let ledger = replay(&taped.tape, None);
    assert_eq!(ledger.peaks.requested.unwrap().bytes, Bytes::new(1600));
}

#[test]
fn segments_are_anchored_at_the_end_too() {
    // One segment is given back in the recording, one was there all along, one is taken.
    let segments = [segment(0, &[(0, MIB2, NOTHING)]), segment(3 * MIB2, &[(0, MIB2, NOTHING)])];
    let trace = [entry("segment_free", MIB2, MIB2), entry("segment_alloc", 3 * MIB2, MIB2)];
    let taped = read(&snapshot(&segments, &[&trace])).tape(&mut Plain).unwrap();
    assert_eq!(told(&taped.tape), ["s2097152", "s2097152", "s-2097152", "s2097152"]);
    assert_eq!(taped.warnings, []);
}

#[test]
fn expandable_segments_grow_and_shrink() {
    let trace = [
        entry("segment_map", 0, MIB2),
        entry("segment_map", MIB2, 2 * MIB2),
        entry("segment_map", 64 * MIB2, MIB2),
        entry("segment_unmap", MIB2, MIB2),
    ];
    let range = |address: i64, size: i64| {
        dict(&[
            ("device", int(0)),
            ("address", int(address)),
            ("total_size", int(size)),
            ("is_expandable", Value::Bool(true)),
            ("blocks", list(&[])),
        ])
    };
    let end = [range(0, MIB2), range(2 * MIB2, MIB2), range(64 * MIB2, MIB2)];
    let taped = read(&snapshot(&end, &[&trace])).tape(&mut Plain).unwrap();
    assert_eq!(told(&taped.tape), ["m2097152@0", "m4194304@0", "m2097152@1", "m-2097152@0"]);
    assert_eq!(taped.warnings, []);
}

#[test]
fn gaps_in_a_recording_are_told_and_the_tape_still_stands() {
    // A second object at an address that was never let go; one at the end that nobody made; one that
    // is gone at the end.
    let state = segment(0, &[(0, 512, NOTHING), (300, 512, USED), (0, MIB2 - 1024, NOTHING)]);
    let trace = [
        entry("alloc", 0, 100),
        entry("alloc", 0, 200),
        entry("alloc", 512, 50),
        entry("free_requested", 512, 50),
        entry("free_completed", 512, 50),
    ];
    let taped = read(&snapshot(&[state], &[&trace])).tape(&mut Plain).unwrap();
    assert_eq!(told(&taped.tape), ["s2097152", "+100", "-0", "+200", "+50", "-2", "+300"]);
    let device = || "GPU 0".to_owned();
    assert_eq!(
        taped.warnings,
        [
            Warning::UnrecordedAllocations { device: device(), count: 1, bytes: Bytes::new(300) },
            Warning::UnrecordedFrees { device: device(), count: 1 },
            Warning::MissingAtEnd { device: device(), count: 1, bytes: Bytes::new(200) },
        ]
    );
}

#[test]
fn either_half_of_a_free_may_be_left_out() {
    let state = || segment(0, &[(0, MIB2, NOTHING)]);
    for action in ["free_requested", "free_completed"] {
        let trace = [entry("alloc", 0, 100), entry(action, 0, 100), entry(action, 512, 70)];
        let taped = read(&snapshot(&[state()], &[&trace])).tape(&mut Plain).unwrap();
        assert_eq!(told(&taped.tape), ["s2097152", "+70", "+100", "-1", "-0"], "{action}");
    }
}

#[test]
fn a_failure_and_unknown_actions_are_kept() {
    let oom = dict(&[
        ("action", text("oom")),
        ("device_free", int(12345)),
        ("size", int(1 << 30)),
        ("stream", int(0)),
        ("time_us", int(5)),
    ]);
    let trace = [
        oom,
        entry("teleport", 0, 5),
        entry("teleport", 1, 5),
        entry("annotate", 0, 0),
        entry("dance", 0, 0),
    ];
    let snapshot = read(&snapshot(&[], &[&trace]));
    let unknown = |action: &str, count| Warning::UnknownActions { action: action.to_owned(), count };
    assert_eq!(snapshot.warnings[1..], [unknown("teleport", 2), unknown("dance", 1)]);
    let failed = snapshot.entry(&snapshot.traces[0], 0);
    assert_eq!((failed.action, failed.address, failed.size.get()), (Action::Oom, 12345, 1 << 30));
    let Action::Other(name) = snapshot.entry(&snapshot.traces[0], 1).action else { panic!("unknown") };
    assert_eq!(snapshot.text(name), "teleport");
    assert_eq!(told(&snapshot.tape(&mut Plain).unwrap().tape), ["!1073741824"]);
}

#[test]
fn devices_streams_and_pools_are_kept_apart() {
    let on = |address: i64, stream: i64, pool: (i64, i64), time: i64| {
        dict(&[
            ("action", text("alloc")),
            ("addr", int(address)),
            ("size", int(address + 1)),
            ("stream", int(stream)),
            ("time_us", int(time)),
            ("pool_id", Value::Tuple(vec![int(pool.0), int(pool.1)])),
        ])
    };
    // The second and the fourth device are not used, though the latter knows of the snapshot; the entries
    // of the others mix by their times.
    let taken = dict(&[("action", text("snapshot")), ("addr", int(0)), ("size", int(0)), ("stream", int(0))]);
    let first = [on(1, 0, (0, 0), 10), on(2, 94_298_764_647_072, (0, 0), 30)];
    let third = [on(1, 0, (0, 0), 20), on(3, 0, (4, 0), 40)];
    let mut parts = vec![("segments", list(&[]))];
    parts.push(("device_traces", list(&[list(&first), list(&[]), list(&third), list(&[taken])])));
    parts.push(("host_traces", list(&[on(7, 0, (0, 0), 25)])));
    let snapshot = read(&dict(&parts));
    assert_eq!(snapshot.streams, [0, 94_298_764_647_072]);
    assert_eq!(snapshot.pools, [(0, 0), (4, 0)]);
    let taped = snapshot.tape(&mut Plain).unwrap();
    let names: Vec<&str> = taped.tape.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["GPU 0", "GPU 2", "pinned host memory"]);
    assert_eq!(taped.tape.devices[2].kind, DeviceKind::Cpu);
    assert_eq!(taped.devices, [Some(0), Some(2), None]);
    let places: Vec<(u16, u64, Stream, Pool)> = (taped.tape.events())
        .map(|event| match event {
            Event::Alloc { bytes, device, stream, pool, .. } => (device.0, bytes.get(), stream, pool),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        places,
        [
            (0, 2, Stream(0), Pool(0)),
            (1, 2, Stream(0), Pool(0)),
            (2, 8, Stream(0), Pool(0)),
            (0, 3, Stream(1), Pool(0)),
            (1, 4, Stream(0), Pool(1)),
        ]
    );
    let times: Vec<_> = (0..taped.tape.len()).filter_map(|event| taped.tape.time_us(event)).collect();
    assert_eq!(times, [10, 20, 25, 30, 40]);
}

#[test]
fn snapshots_of_torch_2_0_have_histories() {
    // Blocks without an address, what is in them as a list of the newest first; entries without a time.
    let frame = dict(&[("filename", text("/app/train.py")), ("line", int(7)), ("name", text("step"))]);
    let history = |address: i64, size: i64| {
        dict(&[
            ("addr", int(address)),
            ("real_size", int(size)),
            ("frames", list(std::slice::from_ref(&frame))),
        ])
    };
    let block = |size: i64, state: &str, history: &[Value]| {
        dict(&[("size", int(size)), ("state", text(state)), ("history", list(history))])
    };
    let segment = dict(&[
        ("device", int(0)),
        ("address", int(4096)),
        ("total_size", int(MIB2)),
        ("segment_type", text("small")),
        (
            "blocks",
            list(&[
                block(512, NOTHING, &[history(4096, 9)]),
                block(1024, USED, &[history(4608, 1000), history(4608, 3)]),
                block(MIB2 - 1536, NOTHING, &[]),
            ]),
        ),
    ]);
    let alloc = dict(&[
        ("action", text("alloc")),
        ("addr", int(4608)),
        ("size", int(1000)),
        ("stream", int(0)),
        ("frames", list(std::slice::from_ref(&frame))),
    ]);
    let snapshot = read(&snapshot(&[segment], &[&[alloc, entry("snapshot", 0, 0)]]));
    let blocks = &snapshot.segments[0].blocks;
    let addresses: Vec<_> = blocks.iter().map(|block| block.address).collect();
    assert_eq!(addresses, [Some(4096), Some(4608), Some(5632)]);
    assert_eq!((blocks[1].requested.get(), blocks[1].state), (1000, BlockState::Allocated));
    assert_eq!(blocks[1].stack, Stack(1));
    assert_eq!(snapshot.site(Stack(1), 2).as_deref(), Some("train.py:7 step"));
    let taped = snapshot.tape(&mut Plain).unwrap();
    assert_eq!(told(&taped.tape), ["s2097152", "+1000"]);
    assert_eq!(taped.warnings, []);
}

#[test]
fn a_place_in_the_program_is_no_machine_code_and_no_wrapper() {
    let frame = |file: &str, line: i64, name: &str| {
        dict(&[("name", text(name)), ("filename", text(file)), ("line", int(line))])
    };
    let frames = [
        frame("/usr/lib/libtorch_cpu.so", 64_465_105, "??"),
        frame("CUDACachingAllocator.cpp", 0, "c10::cuda::malloc(unsigned long)"),
        frame("/usr/local/lib/libpython3.11.so.1.0", 12, "_PyObject_MakeTpCall"),
        frame("/venv/torch/_ops.py", 9, "__call__"),
        frame("/venv/torch/nn/modules/linear.py", 134, "forward"),
        frame("/venv/torch/nn/modules/module.py", 1787, "_call_impl"),
        frame("/venv/transformers/utils/generic.py", 1036, "wrapper"),
        frame("C:\\run\\train.py", 7, "<module>"),
    ];
    let alloc =
        dict(&[("action", text("alloc")), ("addr", int(0)), ("size", int(1)), ("frames", list(&frames))]);
    let snapshot = read(&snapshot(&[], &[&[alloc]]));
    let stack = snapshot.entry(&snapshot.traces[0], 0).stack;
    assert_eq!(snapshot.stack(stack).count(), 8);
    assert_eq!(snapshot.site(stack, 5).as_deref(), Some("linear.py:134 forward < train.py:7 <module>"));
    assert_eq!(snapshot.site(stack, 1).as_deref(), Some("linear.py:134 forward"));
    assert_eq!(snapshot.site(Stack(0), 2), None);
}

#[test]
fn settings_keep_their_types_and_notes_their_texts() {
    let settings = dict(&[
        ("max_split_size", int(-1)),
        ("expandable_segments", Value::Bool(true)),
        ("PYTORCH_CUDA_ALLOC_CONF", text("expandable_segments:True")),
        ("roundup_power2_divisions", dict(&[("1", int(8)), ("32768", int(4))])),
    ]);
    let noted = dict(&[
        ("action", text("alloc")),
        ("addr", int(0)),
        ("size", int(1)),
        ("user_metadata", text("3:model.layers.0")),
        ("compile_context", text("0/0")),
        ("frames", Value::None),
    ]);
    let file = dict(&[
        ("segments", list(&[])),
        ("device_traces", list(&[list(&[noted])])),
        ("allocator_settings", settings),
    ]);
    let snapshot = read(&file);
    assert_eq!(snapshot.setting("max_split_size"), Some(&Setting::Integer(-1)));
    assert_eq!(snapshot.setting("expandable_segments"), Some(&Setting::Bool(true)));
    assert_eq!(snapshot.setting("roundup_power2_divisions.32768"), Some(&Setting::Integer(4)));
    let entry = snapshot.entry(&snapshot.traces[0], 0);
    assert_eq!(snapshot.text(entry.user_metadata), "3:model.layers.0");
    assert_eq!(snapshot.text(entry.compile_context), "0/0");
}

#[test]
fn one_append_for_a_whole_list_is_as_good_as_many() {
    let trace: Vec<Value> = (0..2500).map(|at| entry_at("alloc", at * 512, at, at)).collect();
    let file = snapshot(&[], &[&trace]);
    let (thousands, whole, single) =
        (common::pickle_in(&file, 1000), common::pickle_in(&file, usize::MAX), common::pickle_in(&file, 1));
    for bytes in [thousands, whole, single] {
        let snapshot = Snapshot::read(&bytes).unwrap();
        let sizes = snapshot.entries(&snapshot.traces[0]).map(|entry| entry.size.get());
        assert!(sizes.eq(0..2500));
    }
}

#[test]
fn two_segments_cannot_share_their_blocks() {
    // Else a short file could ask for blocks without end.
    let mut bytes = b"\x80\x04]\x94(".to_vec();
    bytes.extend(b"}\x94(\x8c\x0atotal_sizeK\x01\x8c\x06blocks]\x94(");
    bytes.extend(b"}(\x8c\x04sizeK\x01\x8c\x05state\x8c\x08inactiveue");
    bytes.extend(b"u}(\x8c\x0atotal_sizeK\x01\x8c\x06blocksh\x02ue.");
    assert!(sentence(&bytes).starts_with("two segments have the same blocks"), "{}", sentence(&bytes));
}
