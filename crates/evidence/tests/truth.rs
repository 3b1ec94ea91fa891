//! Recorded snapshots of real PyTorch: their tapes are the recorded event lists, to the byte.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::io::Read as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use allocator::{CachingAllocator, Settings, TieRule, first_difference, memory_of};
use evidence::snapshot::{Action, Alive, Entry, Narrator, Plain, Setting, Taped};
use evidence::{Snapshot, Warning};
use flate2::read::GzDecoder;
use ledger::{Bytes, Device, DeviceId, DeviceKind, Event, Mark, Phase, Tape, Totals, replay};
use serde_json::Value;

#[path = "../../../xtask/src/events.rs"]
mod events;

struct Case {
    name: String,
    snapshot: Snapshot,
    device: Device,
    settings: Settings,
    truth: Value,
}

fn truth() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth")
}

fn list(name: &str) -> PathBuf {
    truth().join("events").join(format!("{name}.csv.gz"))
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for file in std::fs::read_dir(truth().join("snaps")).unwrap() {
        let path = file.unwrap().path();
        let Some(name) = path.to_str().unwrap().strip_suffix(".pickle.gz") else { continue };
        let case: Value = serde_json::from_slice(&std::fs::read(format!("{name}.json")).unwrap()).unwrap();
        let mut bytes = Vec::new();
        GzDecoder::new(std::fs::File::open(&path).unwrap()).read_to_end(&mut bytes).unwrap();
        cases.push(Case {
            name: name.rsplit('/').next().unwrap().to_owned(),
            snapshot: Snapshot::read(&bytes).unwrap(),
            device: Device {
                name: "GPU 0".into(),
                kind: DeviceKind::Gpu,
                capacity: case["setup"]["capacity_bytes"].as_u64().map(Bytes::new),
                context: case["truth"]["context_bytes"].as_u64().map(Bytes::new),
            },
            settings: Settings::parse(case["setup"]["alloc_conf"].as_str().unwrap()).unwrap().0,
            truth: case["truth"].clone(),
        });
    }
    assert_eq!(cases.len(), 13);
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    cases
}

fn taped(case: &Case, narrator: &mut dyn Narrator) -> Taped {
    let mut taped = case.snapshot.tape(narrator).unwrap();
    assert_eq!(taped.warnings, [], "{}", case.name);
    taped.tape.devices = vec![case.device.clone()];
    taped
}

/// An event without the names of objects and segments, which lists and snapshots give as they like.
fn bare(event: Event) -> Event {
    let unnamed = |segment: ledger::Segment| ledger::Segment { segment: ledger::SegmentId(0), ..segment };
    match event {
        Event::SegmentAlloc(segment) => Event::SegmentAlloc(unnamed(segment)),
        Event::SegmentFree(segment) => Event::SegmentFree(unnamed(segment)),
        Event::SegmentMap(segment) => Event::SegmentMap(unnamed(segment)),
        Event::SegmentUnmap(segment) => Event::SegmentUnmap(unnamed(segment)),
        other => other,
    }
}

fn bare_events(tape: &Tape) -> Vec<Event> {
    tape.events().filter(|event| !matches!(event, Event::Mark(_))).map(bare).collect()
}

#[test]
fn tapes_are_the_recorded_lists_event_by_event() {
    for case in cases() {
        let recorded = events::read(&list(&case.name), case.device.clone()).unwrap();
        let taped = taped(&case, &mut Plain);
        assert_eq!(taped.tape.validate(), Ok(()));
        let (ours, theirs) = (bare_events(&taped.tape), bare_events(&recorded));
        if let Some(at) = ours.iter().zip(&theirs).position(|(a, b)| a != b) {
            panic!("{}: event {at} is {:?}, recorded {:?}", case.name, ours[at], theirs[at]);
        }
        assert_eq!(ours.len(), theirs.len(), "{}", case.name);
        assert_eq!(taped.origins.len(), taped.tape.objects().len());
    }
}

#[test]
fn objects_are_named_after_the_innermost_frames_that_say_something() {
    for case in cases() {
        let recorded = events::read(&list(&case.name), case.device.clone()).unwrap();
        let tape = taped(&case, &mut Plain).tape;
        for (ours, theirs) in tape.objects().iter().zip(recorded.objects()) {
            let ours = tape.name(tape.label(ours.label).name);
            // The lists write `file:line:function < file:line:function`, and nothing for nobody.
            let Some(theirs) = recorded.label(theirs.label).owner.map(|owner| recorded.name(owner)) else {
                // The lists leave the training script's own frames out.
                assert!(ours == "unattributed" || ours.starts_with("train.py:"), "{}: {ours}", case.name);
                continue;
            };
            let innermost = |site: &str| site.split(" < ").next().unwrap().replace(':', " ");
            assert_eq!(innermost(ours), innermost(theirs), "{}", case.name);
        }
    }
}

/// Sets the marks that a recorded list has, by its entries.
struct Marks {
    /// By entry. The lists leave the entry of a snapshot that was taken out.
    entries: std::vec::IntoIter<Mark>,
    now: Option<Mark>,
}

impl Marks {
    fn of(case: &Case) -> Self {
        let mut text = String::new();
        GzDecoder::new(std::fs::File::open(list(&case.name)).unwrap()).read_to_string(&mut text).unwrap();
        let marks = text.lines().skip(1).map(|line| {
            let columns: Vec<&str> = line.split(',').collect();
            let phase = Phase::NAMES.iter().position(|name| *name == columns[7]).unwrap();
            Mark {
                step: columns[5].parse().unwrap(),
                micro_batch: columns[6].parse().ok(),
                phase: Phase(phase as u16),
                text: None,
            }
        });
        Self { entries: marks.collect::<Vec<_>>().into_iter(), now: None }
    }
}

impl Narrator for Marks {
    fn before(
        &mut self,
        tape: &mut Tape,
        _: &Alive,
        _: DeviceId,
        _: usize,
        entry: &Entry,
    ) -> ControlFlow<()> {
        if entry.action != Action::Snapshot {
            let mark = self.entries.next();
            if mark != self.now {
                self.now = mark;
                tape.mark(mark.unwrap());
            }
        }
        ControlFlow::Continue(())
    }
}

#[test]
fn phases_and_peaks_are_those_of_the_run() {
    for case in cases() {
        let tape = taped(&case, &mut Marks::of(&case)).tape;
        let name = &case.name;
        let peak = |key: &str| Bytes::new(case.truth[key].as_u64().unwrap());
        // By the tape's own entries.
        let own = replay(&tape, None).peaks;
        assert_eq!(own.requested.unwrap().bytes, peak("peak_requested_bytes"), "{name}");
        assert_eq!(own.reserved.unwrap().bytes, peak("peak_reserved_bytes"), "{name}");
        // By the allocator that follows it.
        let memory = memory_of(&tape);
        let tie = TieRule::SegmentCounter;
        let difference = first_difference(&tape, &case.settings, tie, &memory);
        assert_eq!(difference, None, "{name}");
        let mut allocator = CachingAllocator::new(&case.settings, tie, &memory);
        let ledger = replay(&tape, Some(&mut allocator));
        let peaks = [&ledger.peaks.requested, &ledger.peaks.allocated, &ledger.peaks.reserved];
        let peaks = peaks.map(|found| found.as_ref().unwrap().bytes);
        let theirs = ["peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes"].map(peak);
        assert_eq!(peaks, theirs, "{name}");
        for (found, row) in ledger.phases.iter().zip(case.truth["phases"].as_array().unwrap()) {
            assert_eq!(
                (u64::from(found.at.step), &found.at.phase),
                (row["step"].as_u64().unwrap(), &row["phase"].as_str().unwrap().to_owned())
            );
            let totals = |what: &str| {
                let total = |measure: &str| row[format!("{what}_{measure}_bytes")].as_u64().map(Bytes::new);
                Totals {
                    requested: total("requested"),
                    allocated: total("allocated"),
                    reserved: total("reserved"),
                }
            };
            // The row of the phase that failed is not complete.
            if ledger.oom.is_none() || found.at.step == 0 {
                assert_eq!((found.peak, found.end), (totals("peak"), totals("end")), "{name} {:?}", found.at);
            }
        }
        let failed = ledger.oom.map(|oom| u64::from(oom.at.unwrap().step));
        assert_eq!(failed, case.truth["oom"]["step"].as_u64(), "{name}");
    }
}

#[test]
fn settings_stacks_and_annotations_are_read() {
    for case in cases() {
        let snapshot = &case.snapshot;
        let expandable = snapshot.setting("expandable_segments");
        assert_eq!(expandable, Some(&Setting::Bool(case.settings.expandable_segments)), "{}", case.name);
        assert_eq!(snapshot.setting("roundup_power2_divisions.32768"), Some(&Setting::Integer(0)));
        assert_eq!(snapshot.setting("garbage_collection_threshold"), Some(&Setting::Real(0.0)));
        assert_eq!(snapshot.warnings, Vec::<Warning>::new());
        let annotated = snapshot.annotations.iter().filter(|annotation| {
            annotation.starts && snapshot.text(annotation.name).starts_with("Optimizer.step#")
        });
        let steps = case.truth["phases"].as_array().unwrap().iter().filter(|row| row["phase"] == "update");
        assert_eq!(annotated.count(), steps.count(), "{}", case.name);
        // Stacks are shared: thousands of entries have some dozens.
        assert!(snapshot.stacks() > 10 && snapshot.stacks() < 200, "{}", snapshot.stacks());
    }
}
