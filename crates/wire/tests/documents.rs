//! The JSON documents: their field names, reading them back, and what is refused.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Entry, Event, Found, Label, Mark, Named, Object, Phase,
    Pool, States, Stream, Tape, Unit, compare, reconcile, replay,
};
use serde_json::{Value, json};
use wire::{About, Comparison, Document, Ledger, Reconciliation, to_json};

/// One parameter of 100 bytes and in forward an activation of 20 that is saved.
fn small() -> Ledger {
    let device = Device {
        name: "H100-80GB".into(),
        kind: DeviceKind::Gpu,
        capacity: Some(Bytes::new(1000)),
        context: None,
    };
    let mut tape = Tape::new(Unit::Requested, vec![device]);
    for (name, category, bytes, saved, mark) in [
        ("weight", Category::Parameter, 100, false, (0, None, Phase::LOAD)),
        ("hidden", Category::Activation, 20, true, (1, Some(1), Phase::FORWARD)),
    ] {
        let (step, micro_batch, phase) = mark;
        tape.mark(Mark { step, micro_batch, phase, text: None });
        let name = tape.intern(name);
        let label = tape.intern_label(Label { name, owner: None, category, saved });
        let object = tape.new_object(Object { label, layout: None }).unwrap();
        let (device, stream, pool) = (DeviceId(0), Stream(0), Pool(0));
        tape.push(Event::Alloc { object, bytes: Bytes::new(bytes), device, stream, pool });
    }
    let mut about = About::new(ledger::Provenance::Estimated);
    about.subject.insert("model".into(), "small".into());
    about.assumptions.push("the workspace is that of release 2.15".into());
    Ledger::new(about, &replay(&tape, None))
}

fn value(document: &Ledger) -> Value {
    serde_json::from_str(&to_json(document)).unwrap()
}

fn read(document: &Value) -> Result<Ledger, String> {
    match Document::read(document.to_string().as_bytes()) {
        Ok(Document::Ledger(ledger)) => Ok(*ledger),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn the_ledger_has_the_fields_of_its_format() {
    let expected = json!({
        "format": "vramledger/1",
        "provenance": "estimated",
        "subject": {"model": "small"},
        "devices": [{"name": "H100-80GB", "kind": "gpu", "capacity_bytes": 1000, "context_bytes": null}],
        "outside": [],
        "phases": [
            {"device": 0, "step": 0, "micro_batch": null, "phase": "load",
             "peak": {"requested_bytes": 100, "allocated_bytes": null, "reserved_bytes": null},
             "end": {"requested_bytes": 100, "allocated_bytes": null, "reserved_bytes": null},
             "end_by_category": {"parameter": 100, "activation": 0}},
            {"device": 0, "step": 1, "micro_batch": 1, "phase": "forward",
             "peak": {"requested_bytes": 120, "allocated_bytes": null, "reserved_bytes": null},
             "end": {"requested_bytes": 120, "allocated_bytes": null, "reserved_bytes": null},
             "end_by_category": {"parameter": 100, "activation": 20}},
        ],
        "peaks": {
            "requested": {
                "bytes": 120, "device": 0, "step": 1, "micro_batch": 1, "phase": "forward", "event": 3,
                "at_peak": {"requested_bytes": 120, "allocated_bytes": null, "active_bytes": null,
                            "reserved_bytes": null, "process_bytes": null, "device_bytes": 1000},
                "by_category": {"parameter": 100, "activation": 20},
                "contributors": [
                    {"name": "weight", "category": "parameter", "bytes": 100, "count": 1, "saved": 0},
                    {"name": "hidden", "category": "activation", "bytes": 20, "count": 1, "saved": 20},
                ],
            },
            "allocated": null,
            "reserved": null,
        },
        "parameters": null, "flops": null, "batch": null, "tokens": null, "traffic": null, "ranks": null, "fits": null, "headroom_bytes": null, "oom": null,
        "assumptions": ["the workspace is that of release 2.15"], "interpretation_limits": [], "warnings": [],
        "tape": null,
    });
    assert_eq!(value(&small()), expected);
}

#[test]
fn a_ledger_is_read_back() {
    let ledger = small();
    assert_eq!(read(&value(&ledger)).unwrap(), ledger);
    let books = ledger.books().unwrap();
    assert_eq!(Ledger::new(About::new(ledger::Provenance::Estimated), &books).peaks, ledger.peaks);
}

#[test]
fn a_ledger_that_contradicts_itself_is_refused() {
    let broken = |pointer: &str, with: Value| {
        let mut document = value(&small());
        *document.pointer_mut(pointer).unwrap() = with;
        read(&document).unwrap_err()
    };
    assert_eq!(
        broken("/peaks/requested/contributors/0/bytes", 99.into()),
        "`peaks.requested`: `contributors` do not sum to `bytes`, which is 120 B"
    );
    assert_eq!(
        broken("/peaks/requested/by_category/parameter", 99.into()),
        "`peaks.requested`: `by_category` do not sum to `bytes`, which is 120 B"
    );
    assert_eq!(
        broken("/phases/1/device", 1.into()),
        "`phases` row 1: `device` is 1, of which the document has 1"
    );
    assert_eq!(
        broken("/phases/0/peak/requested_bytes", u64::MAX.into()),
        "`phases` row 0: 18446744073709551615 bytes are more than 2^63"
    );
}

#[test]
fn a_ledger_of_wrong_types_is_refused_with_the_place() {
    let broken = |pointer: &str, with: Value| {
        let mut document = value(&small());
        *document.pointer_mut(pointer).unwrap() = with;
        read(&document).unwrap_err()
    };
    let long = "\u{1b}[31m".repeat(1 << 18);
    for (pointer, with) in [
        ("/peaks/requested/bytes", json!(long)),
        ("/provenance", json!(long)),
        ("/peaks/requested/bytes", json!("120")),
        ("/peaks/requested/bytes", json!(true)),
        ("/peaks/requested/bytes", json!(-1)),
        ("/peaks/requested/bytes", json!(1.5)),
        ("/provenance", json!("guessed")),
        ("/phases/0/step", json!(null)),
        ("/devices/0/kind", json!("tpu")),
        ("/peaks/requested/contributors/0/category", json!("weights")),
    ] {
        let message = broken(pointer, with);
        assert!(
            message.starts_with("the ledger cannot be read: ") && message.contains(" line "),
            "{message}"
        );
    }
}

#[test]
fn other_formats_and_versions_say_what_they_are() {
    let message = |text: &str| Document::read(text.as_bytes()).unwrap_err().to_string();
    assert_eq!(
        message(r#"{"format": "vramledger/2"}"#),
        "`vramledger/2` is a version this vramledger does not know; it reads `vramledger/1`"
    );
    assert_eq!(
        message(r#"{"format": "vramledger-compare/1"}"#),
        "`vramledger-compare/1` is a comparison, where a ledger, a tape or states are needed"
    );
    assert!(message(r#"{"format": "parquet"}"#).starts_with("unknown format `parquet`"));
    assert!(message(r#"{"format": 1}"#).starts_with("unknown format `a number`"));
    assert_eq!(
        message("vramledger-tape/2\nxyz"),
        "`vramledger-tape/2` is a version this vramledger does not know; it reads `vramledger-tape/1`"
    );
    assert!(message("PAR1").starts_with("neither JSON nor a tape"));
    assert!(message(r#"{"format": "vramledger/1", "format": "vramledger/1"}"#).contains("duplicate field"));
}

fn constructed(rows: &[(&str, &str, f64)]) -> ledger::Ledger {
    let mut states = States::default();
    for (name, category, size_mib) in rows {
        let (start_phase, end_phase, device) = ("load", "zero_grad", "gpu");
        let entry =
            Entry { name, category, size_mib: *size_mib, start_phase, end_phase, device, persistent: true };
        states.push(entry).unwrap();
    }
    replay(&states.tape().unwrap(), None)
}

#[test]
fn the_comparison_has_the_fields_of_its_format() {
    let base = constructed(&[("w", "parameter", 2.0), ("a", "activation", 1.0)]);
    let candidate = constructed(&[("w", "parameter", 2.0), ("a", "activation", 3.0)]);
    let comparison = compare(
        Named { name: "base", peaks: &base.peaks },
        &[Named { name: "more", peaks: &candidate.peaks }],
    )
    .unwrap();
    let document: Value = serde_json::from_str(&to_json(&Comparison::from(&comparison))).unwrap();
    assert_eq!(document["format"], "vramledger-compare/1");
    assert_eq!(document["measure"], "allocated");
    assert_eq!(document["baseline"]["name"], "base");
    assert_eq!(document["baseline"]["peak"]["bytes"], 3 << 20);
    let row = &document["candidates"][0];
    assert_eq!(row["name"], "more");
    assert_eq!(row["peak"]["phase"], "load");
    assert_eq!(row["saving_bytes"], -2 << 20);
    assert_eq!(row["saving_by_category"], json!({"parameter": 0, "activation": -2 << 20}));
    assert_eq!(row["unchanged"], json!(["parameter"]));
}

#[test]
fn the_reconciliation_has_the_fields_of_its_format() {
    let books = constructed(&[("w", "parameter", 1.0)]);
    let found = Found { allocated: Bytes::mib(2), reserved: Bytes::mib(3), capacity: Bytes::mib(3) };
    let record = reconcile(&books.prediction(None).unwrap(), found, None).unwrap();
    let limits = vec!["constructed_snapshot_not_gpu_measurement".into()];
    let document: Value = serde_json::from_str(&to_json(&Reconciliation::new(&record, limits))).unwrap();
    let expected = json!({
        "format": "vramledger-reconcile/1",
        "measure": "allocated",
        "at": {"step": 0, "phase": "load"},
        "predicted_bytes": 1 << 20,
        "found": {"allocated_bytes": 2 << 20, "reserved_bytes": 3 << 20, "capacity_bytes": 3 << 20},
        "estimate_difference_bytes": 1 << 20,
        "allocator_gap_bytes": 1 << 20,
        "budget_margin_bytes": 0,
        "alert_fraction": 0.1,
        "signals": ["inspect_estimate_difference", "inspect_allocator_retained_space", "capacity_pressure"],
        "rows": [
            {"name": "w", "category": "parameter", "predicted_bytes": 1 << 20, "found_bytes": null,
             "difference_bytes": null, "reason": null},
            {"name": "unattributed", "category": "unattributed", "predicted_bytes": null, "found_bytes": null,
             "difference_bytes": 1 << 20, "reason": null},
        ],
        "dominant_object": "w",
        "evidence": null,
        "interpretation_limits": ["constructed_snapshot_not_gpu_measurement"],
    });
    assert_eq!(document, expected);
}

#[test]
fn every_document_has_a_schema_with_its_fields() {
    let schemas = wire::schemas();
    let ledger = serde_json::to_value(&schemas[0].1).unwrap();
    assert_eq!(ledger["properties"]["format"]["const"], "vramledger/1");
    let document = value(&small());
    for field in document.as_object().unwrap().keys() {
        assert!(ledger["properties"].get(field).is_some(), "{field}");
    }
    for (format, schema) in &schemas {
        let schema = serde_json::to_value(schema).unwrap();
        if *format == "states" {
            assert_eq!(schema["anyOf"].as_array().unwrap().len(), 2);
        } else {
            assert_eq!(schema["properties"]["format"]["const"], *format);
        }
    }
}
