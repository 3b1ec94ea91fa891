//! Hand-written states are read strictly: one sentence says what is wrong and where.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use ledger::{Bytes, DeviceKind};
use serde_json::{Value, json};
use wire::Document;

fn sample() -> Value {
    json!({
        "name": "parameters", "category": "parameter", "size_mb": 800, "start_phase": "load",
        "end_phase": "zero_grad", "device": "gpu", "persistent": true,
    })
}

fn read(text: &str) -> Result<ledger::States, String> {
    match Document::read(text.as_bytes()) {
        Ok(Document::States(states)) => Ok(*states),
        Ok(other) => panic!("{text} is {other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

fn error(text: &str) -> String {
    read(text).unwrap_err()
}

/// The error for a state whose `field` is `value`.
fn with(field: &str, value: Value) -> String {
    let mut state = sample();
    state[field] = value;
    error(&json!([state]).to_string())
}

#[test]
fn both_forms_are_read() {
    let list = read(&json!([sample()]).to_string()).unwrap();
    assert_eq!(list.states()[0].bytes, Bytes::mib(800));
    assert_eq!(list.states()[0].device, DeviceKind::Gpu);
    assert_eq!(read(&json!({ "states": [sample()] }).to_string()).unwrap(), list);
    let mut own = sample();
    own["start_phase"] = "a".into();
    own["end_phase"] = "b".into();
    let own = read(&json!({ "states": [own], "phases": ["a", "b"] }).to_string()).unwrap();
    assert_eq!(own.phases(), ["a", "b"]);
}

#[test]
fn a_missing_field_is_named() {
    let mut state = sample();
    state.as_object_mut().unwrap().remove("size_mb");
    state.as_object_mut().unwrap().remove("persistent");
    assert_eq!(
        error(&json!([sample(), state]).to_string()),
        "state 1 (`parameters`): `size_mb`, `persistent` is missing"
    );
    assert!(error("[{}]").starts_with("state 0: `name`, `category`,"));
}

#[test]
fn a_wrong_type_is_named() {
    let prefix = "state 0 (`parameters`): ";
    assert_eq!(
        with("size_mb", "800".into()),
        format!("{prefix}`size_mb` is a text, where a number is needed")
    );
    assert_eq!(
        with("size_mb", true.into()),
        format!("{prefix}`size_mb` is a boolean, where a number is needed")
    );
    assert_eq!(with("size_mb", Value::Null), format!("{prefix}`size_mb` is null, where a number is needed"));
    assert_eq!(with("size_mb", json!([1])), format!("{prefix}`size_mb` is a list, where a number is needed"));
    assert_eq!(with("category", 3.into()), format!("{prefix}`category` is a number, where a text is needed"));
    assert_eq!(with("device", json!({})), format!("{prefix}`device` is an object, where a text is needed"));
    assert_eq!(with("name", false.into()), "state 0: `name` is a boolean, where a text is needed");
    assert_eq!(error("[3]"), "state 0: this is a number, where an object is needed");
    assert_eq!(error(r#"[["parameters"]]"#), "state 0: this is a list, where an object is needed");
}

#[test]
fn persistent_is_a_boolean() {
    let needed =
        |found| format!("state 0 (`parameters`): `persistent` is {found}, where true or false is needed");
    assert_eq!(with("persistent", 1.into()), needed("a number"));
    assert_eq!(with("persistent", "true".into()), needed("a text"));
    assert_eq!(with("persistent", Value::Null), needed("null"));
}

#[test]
fn nan_and_infinity_are_no_numbers() {
    for token in ["NaN", "Infinity", "-Infinity", "nan", "1e999", "-1e999", "0x10"] {
        let text = json!([sample()]).to_string().replace("800", token);
        let message = error(&text);
        assert!(message.starts_with("the states cannot be read: "), "{token}: {message}");
        assert!(message.contains("line 1 column"), "{token}: {message}");
    }
}

#[test]
fn sizes_are_amounts() {
    let bad = |size: f64| with("size_mb", size.into());
    assert_eq!(bad(-0.5), "state 0 (`parameters`): `size_mb` is -0.5; a size is not negative");
    assert_eq!(bad(1e300), "state 0 (`parameters`): `size_mb` is 1e300; a size is below 2^53 bytes");
}

#[test]
fn unknown_words_are_named() {
    assert!(
        with("category", "temporary".into()).contains("unknown category `temporary`; use one of parameter, ")
    );
    assert_eq!(
        with("device", "tpu".into()),
        "state 0 (`parameters`): unknown device `tpu`; use `gpu` or `cpu`"
    );
    assert_eq!(
        with("start_phase", "warmup".into()),
        "state 0 (`parameters`): `start_phase` is `warmup`, which is no phase of the timeline (load, forward, loss, \
         backward, update, zero_grad)"
    );
}

#[test]
fn the_start_is_not_after_the_end() {
    let mut state = sample();
    state["start_phase"] = "backward".into();
    state["end_phase"] = "forward".into();
    assert_eq!(
        error(&json!([state]).to_string()),
        "state 0 (`parameters`): `start_phase` `backward` comes after `end_phase` `forward`"
    );
}

#[test]
fn names_are_there_and_differ() {
    assert_eq!(with("name", "".into()), "state 0 has an empty name");
    let doubled = json!([sample(), sample()]).to_string();
    assert_eq!(
        error(&doubled),
        "state 1: `parameters` is the name of an earlier state; every state needs its own"
    );
    let phases = json!({ "states": [sample()], "phases": ["a", ""] }).to_string();
    assert_eq!(error(&phases), "phase 1 has an empty name");
}

#[test]
fn a_field_is_there_once() {
    let text = json!([sample()]).to_string().replace("\"device\"", "\"name\":\"twice\",\"device\"");
    assert!(error(&text).ends_with("`name` is there twice"), "{}", error(&text));
    assert!(error(r#"{"states": [], "states": []}"#).contains("duplicate field `states`"));
}

#[test]
fn nothing_is_refused() {
    assert_eq!(error("[]"), "there is no state");
    assert_eq!(error(r#"{"states": []}"#), "there is no state");
    assert_eq!(error(r#"{"states": [], "phases": []}"#), "there is no phase");
    assert_eq!(error(" \n"), "there is nothing in it");
    assert!(error("{}").starts_with("the JSON has neither a `format` nor `states`"));
}

#[test]
fn deep_nesting_and_long_words_are_one_sentence() {
    let deep = 5 << 20;
    let list = format!("{}{}", "[".repeat(deep), "]".repeat(deep));
    assert_eq!(error(&list), "state 0: this is a list, where an object is needed");
    assert!(error(&"[".repeat(2 * deep)).starts_with("the states cannot be read: EOF"));
    let object = r#"{"a":"#.repeat(deep / 5);
    assert!(error(&object).starts_with("the JSON cannot be read: "));
    let ledger =
        format!(r#"{{"format": "vramledger/1", "provenance": "estimated", "subject": {{"a": {list}}}}}"#);
    assert!(error(&ledger).starts_with("the ledger cannot be read: recursion limit"), "{}", error(&ledger));
    let long = "x".repeat(1 << 20);
    for field in ["category", "start_phase", "device"] {
        assert!(with(field, long.clone().into()).len() < 600, "{field}");
    }
    let mut state = sample();
    state["name"] = long.into();
    state["device"] = "tpu".into();
    assert!(error(&json!([state]).to_string()).len() < 600);
}

#[test]
fn a_byte_order_mark_is_skipped() {
    assert!(read(&format!("\u{feff}{}", json!([sample()]))).is_ok());
}
