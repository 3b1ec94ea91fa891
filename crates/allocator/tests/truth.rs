//! Recorded runs of real PyTorch, replayed: every segment in its place, every peak to the byte.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::path::PathBuf;

use allocator::{CachingAllocator, Settings, TieRule, first_difference, memory_of, simulate};
use ledger::{Bytes, Device, DeviceKind, Event, Tape, replay};
use serde_json::Value;

#[path = "../../../xtask/src/events.rs"]
mod events;

struct Case {
    name: String,
    settings: Settings,
    tape: Tape,
    truth: Value,
}

fn cases() -> Vec<Case> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/events");
    let lines = std::fs::read_to_string(folder.join("cases.jsonl")).unwrap();
    let case = |line: &str| {
        let case: Value = serde_json::from_str(line).unwrap();
        let name = case["id"].as_str().unwrap().strip_prefix("s-").unwrap().to_owned();
        let device = Device {
            name: case["setup"]["gpu"].as_str().unwrap().into(),
            kind: DeviceKind::Gpu,
            capacity: Some(bytes(&case["setup"]["capacity_bytes"])),
            context: Some(bytes(&case["truth"]["context_bytes"])),
        };
        let (settings, warnings) = Settings::parse(case["setup"]["alloc_conf"].as_str().unwrap()).unwrap();
        assert_eq!(warnings, []);
        let tape = events::read(&folder.join(format!("{name}.csv.gz")), device).unwrap();
        Case { name, settings, tape, truth: case["truth"].clone() }
    };
    let cases: Vec<Case> = lines.lines().map(case).collect();
    assert_eq!(cases.len(), 39);
    cases
}

fn bytes(value: &Value) -> Bytes {
    Bytes::new(value.as_u64().unwrap())
}

#[test]
fn every_segment_event_is_predicted_in_its_place() {
    for case in cases() {
        let recorded = |event: &Event| matches!(event, Event::SegmentAlloc(_) | Event::SegmentMap(_));
        assert!(case.tape.events().filter(recorded).count() > 5, "{}", case.name);
        let difference = |settings: &Settings| {
            first_difference(&case.tape, settings, TieRule::SegmentCounter, &memory_of(&case.tape))
        };
        assert_eq!(difference(&case.settings), None, "{}", case.name);
        let settings =
            Settings { expandable_segments: !case.settings.expandable_segments, ..case.settings.clone() };
        assert!(difference(&settings).is_some(), "{}: another setting is told apart", case.name);
    }
}

#[test]
fn peaks_retries_and_failures_are_those_of_the_run() {
    for case in cases() {
        let settings = std::slice::from_ref(&case.settings);
        let reports = simulate(&case.tape, settings, TieRule::SegmentCounter, &memory_of(&case.tape));
        let device = &reports[0].devices[0];
        let name = &case.name;
        assert_eq!(device.peak_allocated, bytes(&case.truth["peak_allocated_bytes"]), "{name}");
        assert_eq!(device.peak_reserved, bytes(&case.truth["peak_reserved_bytes"]), "{name}");
        assert_eq!(
            device.stats.requested_bytes.all.peak,
            bytes(&case.truth["peak_requested_bytes"]).get(),
            "{name}"
        );
        assert_eq!(device.retries, case.truth["num_alloc_retries"].as_u64().unwrap(), "{name}");
        assert_eq!(device.ooms, case.truth["num_ooms"].as_u64().unwrap(), "{name}");
        assert_eq!(reports[0].fits, Some(case.truth["oom"].is_null()), "{name}");
    }
}

#[test]
fn the_one_replay_gives_each_phase_its_recorded_peaks_and_ends() {
    for case in cases() {
        let memory = memory_of(&case.tape);
        let mut allocator = CachingAllocator::new(&case.settings, TieRule::SegmentCounter, &memory);
        let ledger = replay(&case.tape, Some(&mut allocator));
        let truth = case.truth["phases"].as_array().unwrap();
        assert_eq!(ledger.phases.len(), truth.len(), "{}", case.name);
        for (row, phase) in ledger.phases.iter().zip(truth) {
            let place = format!("{}: {:?}", case.name, row.at);
            assert_eq!(u64::from(row.at.step), phase["step"].as_u64().unwrap(), "{place}");
            assert_eq!(row.at.phase, phase["phase"].as_str().unwrap(), "{place}");
            for (totals, which) in [(row.peak, "peak"), (row.end, "end")] {
                let expected = |measure: &str| Some(bytes(&phase[format!("{which}_{measure}_bytes")]));
                assert_eq!(totals.requested, expected("requested"), "{place}");
                assert_eq!(totals.allocated, expected("allocated"), "{place}");
                assert_eq!(totals.reserved, expected("reserved"), "{place}");
            }
        }
        let peak = ledger.peaks.allocated.unwrap();
        assert_eq!(peak.at.unwrap().phase, case.truth["peak_phase"].as_str().unwrap(), "{}", case.name);
    }
}

/// What is printed for the run that failed: "Tried to allocate 250.00 MiB. … total capacity of
/// 1.22 GiB of which 136.00 MiB is free. … 517.88 MiB is allocated by PyTorch, and 46.12 MiB is
/// reserved by PyTorch but unallocated."
#[test]
fn the_failure_tells_what_the_message_tells() {
    let case = cases().into_iter().find(|case| case.name == "llama-oom").unwrap();
    let memory = memory_of(&case.tape);
    let settings = ["", "expandable_segments:True"].map(|text| Settings::parse(text).unwrap().0);
    let reports = simulate(&case.tape, &settings, TieRule::SegmentCounter, &memory);
    let failure = reports[0].failure.unwrap();
    let mib = |bytes: Bytes| format!("{:.2}", bytes.get() as f64 / f64::from(1 << 20));
    assert_eq!(failure.object, None);
    assert_eq!(mib(failure.shortage.segment), "250.00");
    assert_eq!(mib(failure.shortage.device_free.unwrap()), "136.00");
    assert_eq!(mib(failure.shortage.allocated), "517.88");
    assert_eq!(mib(failure.shortage.reserved - failure.shortage.allocated), "46.12");
    assert_eq!(reports[0].devices[0].headroom.unwrap().get(), -(114 << 20));

    // 136.00 free and 46.12 unallocated are less than 250: no setting helps.
    assert_eq!(reports[1].fits, Some(false));

    let roomy = [Some(allocator::DeviceMemory { total: None, ..memory[0].unwrap() })];
    let report = &simulate(&case.tape, &settings, TieRule::SegmentCounter, &roomy)[0];
    assert_eq!((report.fits, report.recorded_ooms_avoided), (None, 1));
}
