//! Recorded snapshots of real PyTorch: their phases and owners are those that were noted beside them.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::io::Read as _;
use std::path::Path;

use evidence::Snapshot;
use flate2::read::GzDecoder;
use ledger::{Category, PhaseRow, replay};
use serde_json::Value;

fn cases() -> Vec<(String, Snapshot, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/snaps");
    let mut cases = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let Some(name) = path.to_str().unwrap().strip_suffix(".pickle.gz") else { continue };
        let case: Value = serde_json::from_slice(&std::fs::read(format!("{name}.json")).unwrap()).unwrap();
        let mut bytes = Vec::new();
        GzDecoder::new(std::fs::File::open(&path).unwrap()).read_to_end(&mut bytes).unwrap();
        let name = name.rsplit('/').next().unwrap().to_owned();
        cases.push((name, Snapshot::read(&bytes).unwrap(), case));
    }
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(cases.len(), 13);
    cases
}

fn rows(snapshot: &Snapshot) -> Vec<PhaseRow> {
    replay(&snapshot.training().unwrap().tape, None).phases
}

/// The step, micro-batch and phase of a row.
fn place(step: u64, micro_batch: Option<u64>, phase: &str) -> String {
    format!("{step}:{}:{phase}", micro_batch.map(|at| at.to_string()).unwrap_or_default())
}

#[test]
fn phases_begin_and_end_where_they_did() {
    let mut wrong = Vec::new();
    for (name, snapshot, case) in cases() {
        let found = rows(&snapshot).into_iter().map(|row| {
            let at = place(row.at.step.into(), row.at.micro_batch.map(Into::into), &row.at.phase);
            let end = row.end;
            (at, end.requested.unwrap().get(), end.reserved.unwrap().get(), row.peak.requested.unwrap().get())
        });
        let truth = case["truth"]["phases"].as_array().unwrap().iter().map(|row| {
            let number = |key: &str| row[key].as_u64();
            let at = place(number("step").unwrap(), number("micro_batch"), row["phase"].as_str().unwrap());
            let bytes = |key: &str| number(key).unwrap();
            (at, bytes("end_requested_bytes"), bytes("end_reserved_bytes"), bytes("peak_requested_bytes"))
        });
        let (found, truth): (Vec<_>, Vec<_>) = (found.collect(), truth.collect());
        if found != truth {
            let places = found.iter().map(|row| row.0.as_str()).collect::<Vec<_>>().join(" ");
            let differ = found.iter().zip(&truth).find(|(a, b)| a != b);
            wrong.push(format!("{name}: {differ:?} {} {} {places}", found.len(), truth.len()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn owners_are_those_noted_at_every_border() {
    let mut wrong = Vec::new();
    for (name, snapshot, case) in cases() {
        let found = rows(&snapshot);
        for (row, truth) in found.iter().zip(case["truth"]["phases"].as_array().unwrap()) {
            let owners = &truth["end_requested_by_owner"];
            let of = |category: Category| row.end_by_category.get(&category).map_or(0, |bytes| bytes.get());
            let known = [
                ("parameter", Category::Parameter),
                ("buffer", Category::Buffer),
                ("gradient", Category::Gradient),
                ("optimizer_state", Category::OptimizerState),
            ];
            let ours: Vec<(&str, u64)> = known.iter().map(|(key, category)| (*key, of(*category))).collect();
            let theirs: Vec<(&str, u64)> =
                known.iter().map(|(key, _)| (*key, owners[key].as_u64().unwrap())).collect();
            if ours != theirs {
                wrong.push(format!("{name} {:?}: {ours:?} for {theirs:?}", row.at));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
