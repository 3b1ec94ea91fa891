//! The answer for evidence that is a tape without addresses: profiler traces and memory timelines.

use std::collections::BTreeMap;

use evidence::recognise::Opened;
use evidence::{RawTimeline, Trace};
use ledger::{Bytes, DeviceId, Event, Measure, Provenance, Tape};
use serde_json::{Map, Value, json};
use wire::{About, Evidence, Instant, InstantRow, Ledger, Reading, Start};

use super::{By, Read, ReadQuestion, group, steps};
use crate::{Error, growth};

/// The ledger of the profiler trace in `source`.
pub(super) fn trace(
    path: &str,
    source: Opened<'_>,
    question: &ReadQuestion,
    file_bytes: impl Fn() -> u64,
) -> Result<Read, Error> {
    let wrong = |problem| Error::Trace { name: path.into(), problem };
    let trace = Trace::read(source.source, question.device).map_err(wrong)?;
    let devices = trace.devices.iter().zip(0..);
    let devices = devices.map(|(found, device)| Start {
        device,
        number: found.number.map(u64::from),
        entries: found.entries,
        objects_before: found.objects_before,
        bytes_before: found.bytes_before,
        let_go: Some(found.let_go),
    });
    let file = Evidence {
        requests: trace.requests,
        requests_without_stack: Some(trace.without_operator),
        updates: Some(trace.updates),
        stacks: Some(trace.operators),
        ..evidence("profiler_trace", file_bytes(), devices.collect())
    };
    let limits = [
        "objects are told apart by the operator that made them; what they are for is known only where their life tells",
        "what lies outside the allocator (the CUDA context, NCCL, other processes) is not in a trace",
    ];
    answer(path, trace.tape, file, &trace.warnings, &limits, question)
}

/// The ledger of a memory timeline of objects.
pub(super) fn timeline(
    path: &str,
    timeline: RawTimeline,
    question: &ReadQuestion,
    file_bytes: u64,
) -> Result<Read, Error> {
    let before = timeline.tape.before;
    let bytes_before: Bytes = (0..before)
        .filter_map(|event| match timeline.tape.event(event) {
            Event::Alloc { bytes, .. } => Some(bytes),
            _ => None,
        })
        .sum();
    let start = Start {
        device: 0,
        number: None,
        entries: timeline.entries,
        objects_before: before as u64,
        bytes_before: bytes_before.get(),
        let_go: None,
    };
    let requests = (before..timeline.tape.len())
        .filter(|event| matches!(timeline.tape.event(*event), Event::Alloc { .. }))
        .count() as u64;
    let file = Evidence { requests, ..evidence("memory_timeline", file_bytes, vec![start]) };
    let limits = [
        "categories are those that PyTorch's profiler infers; who made an object is not in a timeline",
        "which device it is of, and what is reserved, is not in a timeline",
    ];
    answer(path, timeline.tape, file, &timeline.warnings, &limits, question)
}

fn evidence(form: &str, file_bytes: u64, devices: Vec<Start>) -> Evidence {
    Evidence {
        form: form.into(),
        file_bytes,
        written_by: None,
        entries: devices.iter().map(|start| start.entries).sum(),
        microseconds: None,
        stacks: None,
        requests: 0,
        requests_without_stack: None,
        devices,
        alloc_conf: None,
        settings: BTreeMap::new(),
        updates: None,
        block_disagreements: None,
        hidden_block_bytes: None,
        blocks_agree: None,
    }
}

fn answer(
    path: &str,
    tape: Tape,
    mut file: Evidence,
    warnings: &[evidence::Warning],
    limits: &[&str],
    question: &ReadQuestion,
) -> Result<Read, Error> {
    if !question.what_if.is_empty() {
        let what =
            "other settings are tried on requests, and this file has blocks: a memory snapshot is needed";
        return Err(Error::Setup { what: what.into() });
    }
    tape.validate().map_err(|problem| Error::Tape { name: path.into(), problem })?;
    let subject = match json!({ "recording": path, "setup": {}, "software": {} }) {
        Value::Object(subject) => subject,
        _ => Map::new(),
    };
    let about = About {
        subject,
        interpretation_limits: limits.iter().map(|limit| (*limit).to_owned()).collect(),
        warnings: warnings.iter().map(ToString::to_string).collect(),
        ..About::new(Provenance::Measured)
    };
    let books = ledger::replay(&tape, None);
    let mut ledger = Ledger::new(about.clone(), &books);
    let times = || (0..tape.len()).filter_map(|event| tape.time_us(event)).filter(|time| *time > 0);
    file.microseconds = times().min().zip(times().max()).map(|(first, last)| last - first);
    let instant = match books.peaks.get(Measure::Allocated) {
        None => None,
        Some(peak) => {
            let no_such = |what: String| Error::NoSuch { name: path.into(), what };
            let at = looked_at(&tape, peak.device, peak.event, question).map_err(no_such)?;
            Some(instant(&tape, peak.device, at, question, file.stacks.is_some()))
        }
    };
    ledger.reading = Some(Box::new(Reading {
        format: Reading::FORMAT.into(),
        file,
        instant,
        steps: steps(&ledger),
        growth: growth::of_tape(&tape, &|| None, question.capacity),
        stranding: Vec::new(),
        remedy: None,
        what_if: None,
    }));
    Ok(Read { ledger, tape: Some((about, tape)) })
}

/// The event that `question` asks for, else that of the peak. An error is what the tape does not have.
fn looked_at(tape: &Tape, device: DeviceId, peak: usize, question: &ReadQuestion) -> Result<usize, String> {
    if let Some(event) = question.at {
        let event = usize::try_from(event).ok().filter(|event| *event < tape.len());
        return event.ok_or_else(|| format!("{} events, from 0 on", tape.len()));
    }
    let Some(step) = question.step else { return Ok(peak) };
    let (mut within, mut best): (bool, Option<(u64, usize)>) = (false, None);
    walk(tape, device, |index, event, held| {
        if let Event::Mark(mark) = event {
            within = tape.mark_of(mark).step == step;
        }
        if within && best.is_none_or(|(most, _)| held.total > most) {
            best = Some((held.total, index));
        }
        true
    });
    best.map(|(_, event)| event).ok_or_else(|| format!("no step {step}"))
}

/// What is held on one device.
struct Held {
    /// The bytes of each object; none where it is not there.
    bytes: Vec<Option<u64>>,
    total: u64,
    reserved: Option<u64>,
    mark: Option<ledger::MarkId>,
}

/// Follows what is held on `device`, until `each` has seen enough.
fn walk(tape: &Tape, device: DeviceId, mut each: impl FnMut(usize, Event, &Held) -> bool) {
    let mut held = Held { bytes: vec![None; tape.objects().len()], total: 0, reserved: None, mark: None };
    for (index, event) in tape.events().enumerate() {
        match event {
            Event::Alloc { object, bytes, device: of, .. } if of == device => {
                held.bytes[object.0 as usize] = Some(bytes.get());
                held.total += bytes.get();
            }
            Event::Free(object) => held.total -= held.bytes[object.0 as usize].take().unwrap_or(0),
            Event::SegmentMap(segment) if segment.device == device => {
                held.reserved = Some(held.reserved.unwrap_or(0) + segment.bytes.get());
            }
            Event::SegmentUnmap(segment) if segment.device == device => {
                held.reserved = held.reserved.map(|reserved| reserved.saturating_sub(segment.bytes.get()));
            }
            Event::Mark(mark) => held.mark = Some(mark),
            _ => {}
        }
        if !each(index, event, &held) {
            return;
        }
    }
}

/// Who is there on `device` after the event at `at`; told apart by category where no `operators` are known.
fn instant(tape: &Tape, device: DeviceId, at: usize, question: &ReadQuestion, operators: bool) -> Instant {
    let mut rows = group::Rows::new();
    let mut by_category: BTreeMap<wire::Category, u64> = BTreeMap::new();
    let mut labels: Vec<_> = tape.objects().iter().map(|object| object.label).collect();
    let (mut total, mut reserved, mut mark) = (0, None, None);
    walk(tape, device, |index, event, held| {
        if let Event::Relabel(object, label) = event {
            labels[object.0 as usize] = label;
        }
        if index < at {
            return true;
        }
        (total, reserved, mark) = (held.total, held.reserved, held.mark);
        let alive = held.bytes.iter().zip(&labels).filter_map(|(bytes, label)| Some(((*bytes)?, *label)));
        for (bytes, label) in alive {
            let label = tape.label(label);
            *by_category.entry(wire::Category(label.category)).or_default() += bytes;
            let name = match question.by {
                By::Category => label.category.as_str().to_owned(),
                By::Size => bytes.to_string(),
                By::Stack | By::Line | By::Module if !operators => label.category.as_str().to_owned(),
                By::Stack | By::Line | By::Module => match label.owner {
                    Some(owner) if owner != label.name => {
                        format!("{} in {}", tape.name(label.name), tape.name(owner))
                    }
                    _ => tape.name(label.name).to_owned(),
                },
            };
            group::add(&mut rows, question.by, name, label.category, bytes);
        }
        false
    });
    let mut rows: Vec<InstantRow> = rows.into_values().collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let mark = mark.map(|mark| tape.mark_of(mark));
    let held = ledger::Ladder {
        allocated: Some(Bytes::new(total)),
        reserved: reserved.map(Bytes::new),
        ..ledger::Ladder::default()
    };
    let by = match question.by {
        By::Category | By::Size => question.by.as_str(),
        By::Stack | By::Line | By::Module if !operators => By::Category.as_str(),
        By::Stack | By::Line | By::Module => "operator",
    };
    let first = (0..tape.len()).filter_map(|event| tape.time_us(event)).find(|time| *time > 0);
    let now = tape.time_us(at).filter(|time| *time > 0);
    Instant {
        measure: wire::Measure(Measure::Allocated),
        device: device.0,
        event: at as u64,
        microseconds: now.zip(first).map(|(now, first)| now.saturating_sub(first)),
        step: mark.map(|mark| mark.step),
        micro_batch: mark.and_then(|mark| mark.micro_batch),
        phase: mark.map(|mark| tape.phase_name(mark.phase).to_owned()),
        bytes: total,
        held: held.into(),
        by_category,
        by: by.into(),
        depth: 1,
        rows,
    }
}
