//! Profiler traces become tapes.

use evidence::{Trace, TraceError};
use ledger::{DeviceId, Event, Measure, Phase};

fn span(category: &str, name: &str, start: f64, end: f64) -> String {
    format!(
        r#"{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 1, "tid": 1, "ts": {start}, "dur": {}}}"#,
        end - start
    )
}

fn memory(time: f64, address: u64, bytes: i64, allocated: u64, reserved: u64) -> String {
    format!(
        r#"{{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": {time},
            "args": {{"Total Reserved": {reserved}, "Total Allocated": {allocated}, "Bytes": {bytes}, "Device Id": 0, "Device Type": 1, "Addr": {address}}}}}"#
    )
}

fn trace(events: &[String]) -> String {
    format!(
        r#"{{"schemaVersion": 1, "deviceProperties": [{{"name": "x"}}], "traceEvents": [{}], "traceName": "t"}}"#,
        events.join(",")
    )
}

fn training() -> Vec<String> {
    vec![
        span("user_annotation", "ProfilerStep#3", 10.0, 100.0),
        span("user_annotation", "forward", 11.0, 30.0),
        span("cpu_op", "aten::linear", 12.0, 20.0),
        span("cpu_op", "aten::addmm", 13.0, 19.0),
        memory(14.0, 1, 512, 2560, 2 << 20),
        memory(18.0, 2, 1024, 3584, 2 << 20),
        span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 40.0, 60.0),
        span("cpu_op", "aten::mm", 42.0, 50.0),
        memory(45.0, 3, 4096, 7680, 4 << 20),
        memory(55.0, 2, -1024, 6656, 4 << 20),
        span("cpu_op", "aten::_foreach_norm", 62.0, 63.0),
        memory(62.5, 4, 512, 7168, 4 << 20),
        span("user_annotation", "Optimizer.step#AdamW.step", 70.0, 90.0),
        memory(75.0, 4, -512, 6656, 4 << 20),
        // This one was there before.
        memory(95.0, 9, -1536, 5120, 4 << 20),
    ]
}

#[test]
fn operators_own_what_they_make() {
    let read = Trace::read(trace(&training()).as_bytes(), None).unwrap();
    let tape = &read.tape;
    tape.validate().unwrap();
    let books = ledger::replay(tape, None);
    let peak = books.peaks.get(Measure::Allocated).unwrap();
    assert_eq!(peak.bytes.get(), 7680);
    assert_eq!(books.peaks.get(Measure::Reserved).unwrap().bytes.get(), 4 << 20);
    let rows: Vec<(&str, &str, u64)> = peak
        .contributors
        .iter()
        .map(|row| (row.name.as_str(), row.category.as_str(), row.bytes.get()))
        .collect();
    assert_eq!(
        rows,
        [
            ("aten::mm", "unattributed", 4096),
            ("made before the recording", "unattributed", 2048),
            ("aten::addmm", "activation", 1024),
            ("aten::addmm", "unattributed", 512),
        ]
    );
    assert_eq!(
        (read.devices[0].objects_before, read.devices[0].bytes_before, read.devices[0].let_go),
        (2, 2048, 1)
    );
    assert_eq!((read.requests, read.without_operator, read.updates), (4, 0, 1));
    let phases: Vec<(u32, Phase, Option<u32>)> =
        tape.marks().iter().map(|mark| (mark.step, mark.phase, mark.micro_batch)).collect();
    assert_eq!(
        phases,
        [(3, Phase::FORWARD, Some(1)), (3, Phase::BACKWARD, Some(1)), (3, Phase::UPDATE, None)]
    );
    let owner = tape.labels().iter().find(|label| tape.name(label.name) == "aten::addmm").unwrap().owner;
    assert_eq!(owner.map(|owner| tape.name(owner)), Some("forward"));
    let warnings: Vec<String> = read.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("2.0 KiB") || warnings[0].contains("2048"), "{warnings:?}");
}

#[test]
fn what_outlives_its_phase_is_told_by_where_it_was_made() {
    let mut events = Vec::new();
    for (step, at) in [(1, 0.0), (2, 100.0)] {
        events.extend([
            span("user_annotation", &format!("ProfilerStep#{step}"), at, at + 99.0),
            span("cpu_op", "aten::addmm", at + 1.0, at + 9.0),
            memory(at + 2.0, 1, 512, 512, 0),
            span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 10.0, at + 29.0),
            span("cpu_op", "aten::mm", at + 11.0, at + 20.0),
            memory(at + 12.0, 2, 1024, 1536, 0),
            memory(at + 28.0, 1, -512, 1024, 0),
            span("user_annotation", "Optimizer.step#AdamW.step", at + 40.0, at + 49.0),
            span("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad", at + 50.0, at + 59.0),
            memory(at + 55.0, 2, -1024, 0, 0),
        ]);
    }
    // The state is made in the first step alone.
    events.extend([span("cpu_op", "aten::zeros_like", 41.0, 44.0), memory(42.0, 3, 2048, 3072, 0)]);
    // What the first multiplication of a thread keeps for the later ones is never let go.
    events.push(memory(13.0, 4, 4096, 5632, 0));
    let read = Trace::read(trace(&events).as_bytes(), None).unwrap();
    let of = |size: u64| -> Vec<&str> {
        let made = read.tape.events().filter_map(|event| match event {
            Event::Alloc { object, bytes, .. } if bytes.get() == size => Some(object),
            _ => None,
        });
        made.map(|object| read.tape.label(read.tape.object(object).label).category.as_str()).collect()
    };
    assert_eq!(of(512), ["activation", "activation"]);
    assert_eq!(of(1024), ["gradient", "gradient"]);
    assert_eq!(of(2048), ["optimizer_state"]);
    assert_eq!(of(4096), ["unattributed"]);
    assert_eq!(read.operators, 3);
}

#[test]
fn a_trace_that_is_cut_off_is_read_as_far_as_it_goes() {
    let whole = trace(&training());
    let cut = &whole[..whole.find("4096").unwrap()];
    let read = Trace::read(cut.as_bytes(), None).unwrap();
    assert_eq!(ledger::replay(&read.tape, None).peaks.allocated.unwrap().bytes.get(), 3584);
    assert!(read.warnings.iter().any(|warning| warning.to_string().contains("ends in the middle")));
}

#[test]
fn a_total_that_is_no_sum_is_told() {
    let events = [memory(1.0, 1, 512, 512, 0), memory(2.0, 2, 512, 4096, 0)];
    let read = Trace::read(trace(&events).as_bytes(), None).unwrap();
    assert!(read.warnings.iter().any(|warning| warning.to_string().contains("not the sum")));
}

#[test]
fn other_threads_operators_own_nothing_here() {
    let other = span("cpu_op", "aten::copy_", 0.0, 9.0).replace(r#""tid": 1"#, r#""tid": 2"#);
    let read = Trace::read(trace(&[other, memory(1.0, 1, 512, 512, 0)]).as_bytes(), None).unwrap();
    assert_eq!(read.without_operator, 1);
    let Event::Alloc { object, device, .. } = read.tape.events().next().unwrap() else { panic!() };
    assert_eq!(device, DeviceId(0));
    assert_eq!(read.tape.name(read.tape.label(read.tape.object(object).label).name), "no operator");
}

#[test]
fn a_trace_without_memory_says_how_to_record_it() {
    let told = Trace::read(trace(&[span("cpu_op", "aten::mm", 1.0, 2.0)]).as_bytes(), None).unwrap_err();
    assert!(matches!(told, TraceError::NoMemory { events: 1 }));
    assert!(told.to_string().contains("profile_memory=True"));
    assert!(matches!(Trace::read(&b"{}"[..], None), Err(TraceError::NoEvents)));
}
