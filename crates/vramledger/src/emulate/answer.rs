//! The ledger of a recorded run.

use std::collections::BTreeSet;

use evidence::Recording;
use evidence::recording::RunMark;
use evidence::snapshot::{Action, Setting};
use ledger::{ByteDelta, Bytes, DeviceId, DeviceKind, Event, Tape};
use models::Torch;
use serde_json::{Map, Value, json};
use wire::{About, Batch, Ledger, Parameters};

use super::recorded::Recorded;
use super::{EmulationQuestion, Software};
use crate::plan::outside;
use crate::{Error, failure, fit, growth};

pub use evidence::recording::End;

/// What `emulate` answers.
#[derive(Clone, Debug)]
pub struct Emulation {
    /// The books.
    pub ledger: Ledger,
    /// The run they were made from.
    pub tape: Tape,
    /// What is known of the run besides; a tape file keeps it.
    pub about: About,
    /// How the program ended.
    pub end: End,
    /// The error that ended it, in its own words.
    pub error: Option<String>,
}

impl Emulation {
    /// The file of the run's tape, `.vlt`.
    ///
    /// # Errors
    /// A tape beyond the limits of the form.
    pub fn tape_file(&self) -> Result<Vec<u8>, Error> {
        Ok(wire::write_tape(&self.about, &self.tape)?)
    }
}

/// The answer to `question`, from the `snapshot.pickle` and the `run.json` that its program left.
/// `software` is what the program ran on, where it could be asked.
///
/// # Errors
/// A recording that cannot be read.
pub fn emulation(
    question: &EmulationQuestion,
    software: Option<&Software>,
    snapshot: &[u8],
    run: &[u8],
) -> Result<Emulation, Error> {
    let mut recording = Recording::read(snapshot, run)?;
    for device in &mut recording.taped.tape.devices {
        if device.kind == DeviceKind::Gpu {
            device.name = question.gpu.name.into();
            (device.capacity, device.context) = (Some(question.gpu.capacity), Some(question.context));
        }
    }
    let mut warnings: Vec<String> = recording.taped.warnings.iter().map(ToString::to_string).collect();
    let alloc_conf = alloc_conf(&recording);
    let settings = fit::or_defaults(fit::settings(&alloc_conf), &mut warnings);
    let torch = fit::torch(&recording.run.torch).unwrap_or(Torch::V2_15);
    let tape = &recording.taped.tape;
    let mut meter = Recorded::new(tape, &settings, fit::tie_rule(torch));
    let books = ledger::replay(tape, Some(&mut meter));
    warnings.extend(disagreements(&recording, &meter));
    let device = books.oom.as_ref().map(|oom| oom.device).or(recording.device()).unwrap_or(DeviceId(0));
    warnings.extend(fit::retried(meter.retries(device)));
    if books.oom.is_some() && recording.run.end != End::Failed {
        warnings.push(
            "the program went on after it was out of memory: what came after is in the books too".into(),
        );
    }
    let about = About {
        subject: subject(question, software, &recording, &alloc_conf),
        outside: vec![outside(device.0, question.context)],
        interpretation_limits: limits(question, tape),
        warnings,
        parameters: recording.run.parameters.map(|counted| Parameters {
            total: counted.total,
            trainable: counted.trainable,
            bytes: counted.bytes,
        }),
        batch: batch(question, &recording),
        ..About::new(ledger::Provenance::Emulated)
    };
    let mut ledger = Ledger::new(about.clone(), &books);
    let again = || -> Option<Box<dyn growth::Books>> {
        Some(Box::new(Recorded::new(tape, &settings, fit::tie_rule(torch))))
    };
    ledger.growth = Some(Box::new(growth::of_tape(tape, &again, None)));
    ledger.fits = Some(ledger.oom.is_none());
    let shortage = meter.failure().filter(|_| books.oom.is_some() && meter.difference().is_none());
    ledger.headroom_bytes = match (shortage, &books.oom) {
        (Some(failure), _) => failure.shortage.headroom().map(ByteDelta::get),
        (None, Some(_)) => None,
        (None, None) => {
            let peak = books.peaks.reserved.as_ref().map_or(Bytes::ZERO, |peak| peak.bytes);
            meter.limit(device).map(|limit| limit.delta(peak).get())
        }
    };
    if let Some(oom) = &mut ledger.oom {
        if let Some(failure) = shortage {
            *oom = failure::oom(tape, failure);
        }
        oom.object = failed_object(&recording);
    }
    let Recording { taped, run, .. } = recording;
    Ok(Emulation { ledger, tape: taped.tape, about, end: run.end, error: run.error })
}

/// How often forward and backward ran for an update, where there was one. The samples of a batch are the program's own.
fn batch(question: &EmulationQuestion, recording: &Recording) -> Option<Batch> {
    let marks = &recording.run.marks;
    let last = marks.iter().rfind(|mark| mark.phase == "update" && mark.step == recording.run.steps)?;
    let rounds =
        marks.iter().filter(|mark| mark.step == last.step).filter_map(|mark| mark.micro_batch).max()?;
    Some(Batch {
        micro_batch: None,
        accumulate: rounds.into(),
        world_size: question.rank.map_or(1, |rank| rank.gpus.into()),
        effective_batch: None,
        forward_backward_rounds: rounds.into(),
    })
}

/// The allocator's settings string that the run had, whoever set it.
fn alloc_conf(recording: &Recording) -> String {
    match recording.snapshot.setting("PYTORCH_CUDA_ALLOC_CONF") {
        Some(Setting::Text(settings)) => settings.clone(),
        _ => String::new(),
    }
}

/// Where the replay and the recording do not agree: each first place.
fn disagreements(recording: &Recording, meter: &Recorded) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(event) = meter.difference() {
        found.push(format!(
            "from event {event} on PyTorch took other segments than its known rules say: reserved bytes are the recorded ones, allocated bytes may be off by the remainders of blocks"
        ));
    }
    let Some(device) = recording.device() else { return found };
    let off = meter.at_marks().iter().find_map(|(mark, allocated)| {
        let noted = recording.noted(*mark)?;
        let replayed = allocated[usize::from(device.0)];
        (noted.allocated_bytes != replayed.get()).then_some((mark.0, noted, replayed))
    });
    found.extend(off.map(|(mark, RunMark { step, phase, allocated_bytes, .. }, replayed)| {
        let counted = Bytes::new(*allocated_bytes);
        format!("at mark {mark} ({phase} of step {step}) PyTorch counted {counted} allocated, and the replay {replayed}")
    }));
    found
}

/// What the first request that failed was for: the module at work and the place in the program.
fn failed_object(recording: &Recording) -> Option<String> {
    let first = recording.run.ooms.first()?;
    let snapshot = &recording.snapshot;
    let trace = snapshot.traces.get(usize::from(first.device))?;
    let failed = snapshot.entries(trace).find(|entry| entry.action == Action::Oom);
    let site = failed.and_then(|entry| snapshot.site(entry.stack, 1));
    let module = Some(first.module.clone()).filter(|module| !module.is_empty());
    // Autograd's threads have no stack, but a node at work.
    let place = site.or_else(|| first.operator.clone());
    let parts: Vec<String> = module.into_iter().chain(place).collect();
    Some(if parts.is_empty() { format!("what {} makes", first.phase) } else { parts.join(" ") })
}

/// What the ledger is of: the program, how it was started, and on what it ran.
fn subject(
    question: &EmulationQuestion,
    software: Option<&Software>,
    recording: &Recording,
    alloc_conf: &str,
) -> Map<String, Value> {
    let subject = json!({
        "program": question.program,
        "setup": {
            "gpu": question.gpu.name,
            "capacity_bytes": question.gpu.capacity.get(),
            "context_bytes": question.context.get(),
            "alloc_conf": alloc_conf,
            "steps": recording.run.steps,
            "rank": question.rank.map(|rank| rank.rank),
            "world_size": question.rank.map(|rank| rank.gpus),
            "nodes": question.rank.map(|rank| rank.nodes),
        },
        "software": {
            "torch": recording.run.torch,
            "python": software.map(|software| &software.python),
            "cuda": software.map(|software| &software.cuda),
        },
    });
    match subject {
        Value::Object(subject) => subject,
        _ => Map::new(),
    }
}

/// What emulation cannot know.
fn limits(question: &EmulationQuestion, tape: &Tape) -> Vec<String> {
    let mut limits = vec![
        "no kernel ran, so values are not those of a real run: what depends on them, such as the experts that a router chooses or whether a loss is finite, may differ, and the memory with it".to_owned(),
        "workspaces of cuDNN (convolutions, its attention), cuSOLVER, cuSPARSE and cuFFT count as 0 bytes where only the library itself could tell their size".into(),
        "what CUDA libraries and NCCL take outside the allocator is in the context or nowhere".into(),
    ];
    let used = tape.events().filter_map(|event| match event {
        Event::Alloc { device, stream, .. } => Some((device, stream)),
        _ => None,
    });
    let streams: BTreeSet<_> = used.collect();
    let devices: BTreeSet<_> = streams.iter().map(|(device, _)| device).collect();
    if streams.len() > devices.len() {
        limits.push(
            "work on side streams ends at once here: their blocks are free again at the earliest moment, and a real device may reserve more".into(),
        );
    }
    if let Some(rank) = question.rank {
        limits.push(format!(
            "rank {} of {} alone: the others are absent, and what they would send is zero",
            rank.rank, rank.gpus
        ));
    }
    limits
}
