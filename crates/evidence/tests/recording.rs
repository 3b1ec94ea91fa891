//! Recordings of real programs on the emulated device, as tapes with phases and owners.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use evidence::recording::{End, RecordingError};
use evidence::{Recording, Warning};
use flate2::read::GzDecoder;
use ledger::{Bytes, Category, Ledger, PhaseRow, replay};
use serde_json::Value;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/recordings").join(name)
}

fn files(name: &str) -> (Vec<u8>, Value) {
    let mut snapshot = Vec::new();
    let file = std::fs::File::open(folder(name).join("snapshot.pickle.gz")).unwrap();
    GzDecoder::new(file).read_to_end(&mut snapshot).unwrap();
    let run = std::fs::read(folder(name).join("run.json")).unwrap();
    (snapshot, serde_json::from_slice(&run).unwrap())
}

fn read(name: &str) -> (Recording, Ledger) {
    let (snapshot, run) = files(name);
    let recording = Recording::read(&snapshot, run.to_string().as_bytes()).unwrap();
    assert_eq!(recording.taped.tape.validate(), Ok(()));
    let ledger = replay(&recording.taped.tape, None);
    (recording, ledger)
}

fn line(row: &PhaseRow) -> String {
    let bytes = |bytes: Option<Bytes>| bytes.unwrap().get();
    let held = row.end_by_category.iter().filter(|(_, bytes)| **bytes > Bytes::ZERO);
    let held: Vec<String> = held.map(|(category, bytes)| format!("{category} {}", bytes.get())).collect();
    let batch = row.at.micro_batch.map_or("-".into(), |batch| batch.to_string());
    let (at, peak, end) = (&row.at, bytes(row.peak.requested), bytes(row.end.requested));
    format!("{} {batch} {}: {peak}, {end}: {}", at.step, at.phase, held.join(", "))
}

fn lines(ledger: &Ledger) -> Vec<String> {
    ledger.phases.iter().map(line).collect()
}

#[test]
fn figures_at_every_mark_are_those_that_pytorch_gave() {
    for name in ["mlp", "accumulated", "ckpt", "oom", "oom-backward", "fsdp"] {
        let (recording, ledger) = read(name);
        // A mark that disagrees is a warning; the end state disagrees with nothing.
        assert_eq!(recording.taped.warnings, [], "{name}");
        assert_eq!(recording.snapshot.warnings, [], "{name}");
        let peak = ledger.peaks.reserved.unwrap().bytes.get();
        assert_eq!(recording.run.statistics["reserved_bytes.all.peak"], peak.cast_signed(), "{name}");
    }
}

#[test]
fn a_loop_has_its_phases_and_owners() {
    let (recording, ledger) = read("mlp");
    assert_eq!((recording.run.end, recording.run.steps), (End::Stopped, 3));
    // Two weights of 256 x 512 and biases of 512 and 256, in fp32.
    assert_eq!(
        lines(&ledger)[..5],
        [
            "0 - load: 5117184, 5117184: parameter 1051648, input 4065536",
            "1 1 forward: 6362368, 1313796: parameter 1051648, activation 196612, input 65536",
            "1 1 backward: 35852296, 2168836: parameter 1051648, gradient 1051648, activation 4, input 65536",
            "1 - update: 5323780, 3220484: parameter 1051648, optimizer_state 2103296, activation 4, input 65536",
            "2 1 forward: 8465668, 3417092: parameter 1051648, optimizer_state 2103296, activation 196612, input 65536",
        ]
    );
    assert_eq!(ledger.phases.len(), 10, "the tape ends with the last step");
}

#[test]
fn a_batch_belongs_to_the_forward_phase_that_it_is_for() {
    let (recording, ledger) = read("accumulated");
    // The batch of 256 x 512 values is copied to the device as bytes, made fp32 there, and joined by its target.
    assert_eq!(
        lines(&ledger)[..6],
        [
            "0 - load: 8398848, 8398848: parameter 8398848",
            "1 1 forward: 13641728, 12068868: parameter 8398848, activation 2621444, input 1048576",
            "1 1 backward: 53489672, 17846276: parameter 8398848, gradient 8398848, activation 4, input 1048576",
            "1 2 forward: 22040580, 20467716: parameter 8398848, gradient 8398848, activation 2621444, input 1048576",
            "1 2 backward: 60313608, 17846276: parameter 8398848, gradient 8398848, activation 4, input 1048576",
            "1 - update: 43042820, 26245124: parameter 8398848, optimizer_state 16797696, activation 4, input 1048576",
        ]
    );
    let counted = recording.run.parameters.unwrap();
    assert_eq!((counted.total, counted.trainable, counted.bytes), (2_099_712, 2_099_712, 8_398_848));
}

#[test]
fn every_byte_of_a_peak_has_an_owner() {
    for name in ["mlp", "ckpt", "oom", "fsdp"] {
        let (_, ledger) = read(name);
        let peak = ledger.peaks.requested.unwrap();
        assert_eq!(peak.by_category.get(&Category::Unattributed), None, "{name}");
        assert_eq!(peak.by_category.values().copied().sum::<Bytes>(), peak.bytes, "{name}");
    }
}

#[test]
fn gradients_and_optimizer_state_are_as_large_as_the_parameters() {
    let (_, ledger) = read("ckpt");
    for row in ledger.phases.iter().filter(|row| row.at.step > 0) {
        let held = |category| row.end_by_category[&category].get();
        let parameters = held(Category::Parameter);
        assert_eq!(parameters, 7_047_680);
        let expected = match row.at.phase.as_str() {
            "backward" => (parameters, if row.at.step == 1 { 0 } else { 2 * parameters }),
            "update" => (0, 2 * parameters),
            _ => (0, if row.at.step == 1 { 0 } else { 2 * parameters }),
        };
        assert_eq!((held(Category::Gradient), held(Category::OptimizerState)), expected, "{}", line(row));
        assert_eq!(held(Category::Buffer), 128);
        assert_eq!(held(Category::Input), 2048);
    }
}

#[test]
fn objects_of_modules_are_named_by_them() {
    let (recording, _) = read("ckpt");
    let tape = &recording.taped.tape;
    let mut owners: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for object in tape.objects() {
        let label = tape.label(object.label);
        let owner = label.owner.map_or("", |owner| tape.name(owner));
        owners.entry(tape.name(label.name)).or_default().push(owner);
    }
    let distinct = |name: &str| {
        let mut found = owners[name].clone();
        found.sort_unstable();
        found.dedup();
        found
    };
    let layers = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"];
    assert_eq!(distinct("model.layers.*.mlp.down_proj.weight"), layers);
    assert_eq!(distinct("model.layers.*.mlp.down_proj.weight.exp_avg"), layers);
    assert_eq!(distinct("model.layers.*.mlp.down_proj linear.py:134 forward"), layers);
}

#[test]
fn what_backward_recomputes_is_an_activation() {
    let (_, ledger) = read("ckpt");
    let peak = ledger.peaks.requested.unwrap();
    assert_eq!(peak.at.unwrap().phase, "backward");
    let layer = peak.contributors.iter().find(|row| row.name.starts_with("model.layers.*.mlp.act_fn "));
    assert_eq!(layer.unwrap().category, Category::Activation);
}

#[test]
fn a_sharded_rank_has_its_share_and_its_buffers() {
    let (_, ledger) = read("fsdp");
    let forward = ledger.phases.iter().filter(|row| row.at.phase == "forward");
    for row in forward {
        // An eighth of the 7047680 bytes; the root's parameters stay gathered until backward.
        assert_eq!(row.end_by_category[&Category::Parameter].get(), 7_047_680 / 8);
        assert_eq!(row.end_by_category[&Category::CommunicationBuffer].get(), 2 * 4000 * 256 * 2 + 512);
    }
}

#[test]
fn a_run_out_of_memory_tells_where() {
    let (recording, ledger) = read("oom");
    assert_eq!(recording.run.end, End::Failed);
    assert!(recording.run.error.as_ref().unwrap().starts_with("OutOfMemoryError: CUDA out of memory."));
    let [oom] = &recording.run.ooms[..] else { panic!("one failure") };
    assert_eq!(oom.module, "model.layers.1.mlp.down_proj");
    let failure = ledger.oom.unwrap();
    assert_eq!(failure.requested.get(), oom.requested_bytes);
    assert_eq!(failure.at.unwrap().phase, "forward");
    // The product that failed had its result already; its workspace is what found no room.
    let peak = ledger.peaks.requested.unwrap();
    assert_eq!(peak.by_category.get(&Category::Workspace), None);
}

#[test]
fn a_failure_on_autograds_thread_has_its_module_and_its_node() {
    let (recording, ledger) = read("oom-backward");
    let [oom] = &recording.run.ooms[..] else { panic!("one failure") };
    assert_eq!((oom.module.as_str(), oom.operator.as_deref()), ("5", Some("AddmmBackward0")));
    assert_eq!(ledger.oom.unwrap().at.unwrap().phase, "backward");
}

#[test]
fn damaged_recordings_are_told() {
    let (snapshot, run) = files("mlp");
    let sentence = |snapshot: &[u8], run: &Value| {
        Recording::read(snapshot, run.to_string().as_bytes()).unwrap_err().to_string()
    };
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut run = run.clone();
        change(&mut run);
        run
    };
    assert_eq!(sentence(b"", &run), "the recording's snapshot cannot be read: the file is empty");
    let other = changed(&|run| run["format"] = "vramledger-recording/2".into());
    assert_eq!(
        sentence(&snapshot, &other),
        "the recording is of the form `vramledger-recording/2`; `vramledger-recording/1` is read"
    );
    let other = changed(&|run| run["marks"][3]["phase"] = "lunch".into());
    assert_eq!(
        sentence(&snapshot, &other),
        "mark 3 of the recording is in the phase `lunch`, which is no phase of a training step"
    );
    let other = changed(&|run| run["labels"][0]["category"] = "loot".into());
    assert_eq!(
        sentence(&snapshot, &other),
        "a label of the recording has the category `loot`, which is none"
    );
    assert!(matches!(Recording::read(&snapshot, b"[]"), Err(RecordingError::Run(_))));
    // Where notes and entries disagree the tape still stands, with a warning.
    let other = changed(&|run| run["marks"][5]["reserved_bytes"] = 0.into());
    let read = Recording::read(&snapshot, other.to_string().as_bytes()).unwrap();
    assert!(
        matches!(read.taped.warnings[..], [Warning::MarkDisagrees { mark: 5, measure: "reserved", .. }]),
        "{:?}",
        read.taped.warnings
    );
}
