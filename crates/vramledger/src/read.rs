//! What a recording of a run says: peaks, owners, steps, growth, stranding, failures.

mod account;
mod group;
mod logged;
mod oom;
mod ranks;
mod recorded;
mod remedy;
mod settings;
mod shots;
mod stranding;
mod traced;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{self, Read as _};

use allocator::PlacedAllocator;
use evidence::recognise::{self, Form, Opened, TextForm};
use evidence::snapshot::{Setting, Snapshot, SnapshotError, Stack};
use evidence::{LogError, Smi, StepLog, Timeline};
use ledger::{Bytes, DeviceKind, Event, Measure, Provenance, Tape};
use serde_json::{Map, Value, json};
use wire::{About, Document, Evidence, Ledger, Reading, Start, Step};

pub use group::By;
pub(crate) use oom::printed_slack;
pub use ranks::RankReader;

use self::recorded::Run;
use self::shots::Shot;
use crate::Error;
use crate::Known;
use crate::evidence::of_document;
use crate::growth;

/// What `read` is asked.
#[derive(Clone, Debug, Default)]
pub struct ReadQuestion {
    /// By what the objects at the instant are told apart.
    pub by: By,
    /// How many frames of a stack count.
    pub depth: usize,
    /// The event after which to look, in place of the peak.
    pub at: Option<u64>,
    /// The GPU to look at, by its number in the file; none: all of them.
    pub device: Option<u16>,
    /// The step whose peak to look at, in place of the run's.
    pub step: Option<u32>,
    /// Settings strings to replay the requests under.
    pub what_if: Vec<String>,
    /// What the device has, in place of what the evidence tells: what grows is held against it.
    pub capacity: Option<Bytes>,
    /// What is known of the run that an out-of-memory message is of.
    pub known: Option<Known>,
    /// How many bytes the source has, where that is known: a large file then gets its room at once.
    pub size: Option<u64>,
}

/// What `read` answers: what the evidence is, told in its document.
#[derive(Debug)]
pub enum Answer {
    /// Of a recording, a trace, a timeline of objects, a document: a ledger.
    Ledger(Box<Read>),
    /// Of a step log, sums over time: a series.
    Series(wire::Series),
    /// Of out-of-memory messages, accounts of the allocator, cards: one moment each.
    Instants(wire::Instants),
}

/// A ledger that was read.
#[derive(Debug)]
pub struct Read {
    /// The ledger; of a recording, with what it says besides.
    pub ledger: Ledger,
    /// The tape of a recording, and what is known of its run.
    tape: Option<(About, Tape)>,
}

/// The frames of a stack that count where nothing else is said.
pub const DEPTH: usize = 2;

/// The most MiB, unpacked, that are read of a file of `form`, which is read at once: what it becomes in memory may be
/// several times as much. Traces are read as they come.
const fn largest(form: Form, packed: bool) -> u64 {
    match form {
        // Its tables are smaller than itself.
        Form::Pickle if packed => 1024,
        Form::Pickle => 2048,
        Form::Text => 512,
        Form::Timeline => 256,
        _ => 128,
    }
}

/// All of `source`.
fn whole(path: &str, opened: Opened<'_>, size: Option<u64>) -> Result<Vec<u8>, Error> {
    let mib = largest(opened.form, opened.packed);
    let room = size.filter(|size| !opened.packed && *size <= mib << 20).unwrap_or(0);
    let mut bytes = Vec::with_capacity(room as usize);
    let read = opened.source.take((mib << 20) + 1).read_to_end(&mut bytes);
    read.map_err(|source| Error::Read { path: path.into(), source })?;
    if bytes.len() as u64 > mib << 20 {
        return Err(Error::TooLarge { name: path.into(), mib });
    }
    Ok(bytes)
}

/// What the evidence in `source` says, whose form is told by how it begins; of a document that has a
/// ledger, that. `path` is what an error calls it.
///
/// # Errors
/// A file that cannot be read or is no evidence, or a question about what it does not have.
pub fn read(path: &str, source: impl io::Read, question: &ReadQuestion) -> Result<Answer, Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let counted = Cell::new(0);
    let opened = Opened::new(Counted { source, bytes: &counted }).map_err(failed)?;
    let ledger = |read| Ok(Answer::Ledger(Box::new(read)));
    match opened.form {
        Form::Trace => ledger(traced::trace(path, opened, question, || counted.get())?),
        Form::Empty => Err(Error::NotEvidence { name: path.into(), what: "empty" }),
        Form::Other(what) => Err(Error::NotEvidence { name: path.into(), what }),
        form => {
            let bytes = whole(path, opened, question.size)?;
            let file_bytes = counted.get();
            match form {
                Form::Pickle => ledger(snapshot(path, bytes, file_bytes, question)?),
                Form::Timeline => timeline(path, &bytes, file_bytes, question),
                Form::Records => records(path, &bytes, file_bytes, question),
                Form::Text => text(path, &recognise::text(&bytes), file_bytes, question),
                _ => ledger(document(path, &bytes, question)?),
            }
        }
    }
}

/// Counts what is read of a file.
struct Counted<'a, R> {
    source: R,
    bytes: &'a Cell<u64>,
}

impl<R: io::Read> io::Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.bytes.set(self.bytes.get() + read as u64);
        Ok(read)
    }
}

fn snapshot(path: &str, bytes: Vec<u8>, file_bytes: u64, question: &ReadQuestion) -> Result<Read, Error> {
    let mut snapshot = Snapshot::read(&bytes).map_err(|problem| damaged(path, problem))?;
    // The tables hold all of it; a large file is not kept beside them.
    drop(bytes);
    if let Some(device) = question.device
        && !snapshot.keep_device(device)
    {
        return Err(Error::NoSuch { name: path.into(), what: format!("nothing of GPU {device}") });
    }
    let run = Run::of(path, snapshot)?;
    run.answer(path, file_bytes, question)
}

/// A document that has a ledger; of a tape with what grows on it.
fn document(path: &str, bytes: &[u8], question: &ReadQuestion) -> Result<Read, Error> {
    let document = Document::read(bytes).map_err(|problem| Error::Document { name: path.into(), problem })?;
    let growth = match &document {
        Document::Tape(read) => Some(growth::of_kept(&read.0, &read.1, question.capacity)),
        Document::Ledger(_) | Document::States(_) => None,
    };
    let mut ledger = of_document(path, document)?;
    if let Some(growth) = growth {
        ledger.growth = Some(Box::new(growth));
    }
    Ok(Read { ledger, tape: None })
}

fn timeline(path: &str, bytes: &[u8], file_bytes: u64, question: &ReadQuestion) -> Result<Answer, Error> {
    let read = Timeline::read(bytes).map_err(|problem| Error::Timeline { name: path.into(), problem })?;
    match read {
        Timeline::Raw(read) => {
            Ok(Answer::Ledger(Box::new(traced::timeline(path, *read, question, file_bytes)?)))
        }
        Timeline::Sums(found) => {
            let limits = ["the sums are by category, in bytes; who made an object is not in a timeline"];
            Ok(Answer::Series(logged::series(
                "memory_timeline",
                file_bytes,
                &[found],
                &[],
                &limits,
                question.capacity,
            )))
        }
    }
}

/// A list of records, as a trainer keeps its log.
fn records(path: &str, bytes: &[u8], file_bytes: u64, question: &ReadQuestion) -> Result<Answer, Error> {
    let log = StepLog::of_records(bytes).map_err(|problem| Error::Log { name: path.into(), problem })?;
    Ok(Answer::Series(logged::step_log(&log, file_bytes, question.capacity)))
}

fn instants(found: &[evidence::Instant]) -> wire::Instants {
    let instants = found.iter().map(account::account).collect();
    wire::Instants { format: wire::Instants::FORMAT.into(), instants }
}

fn text(path: &str, text: &str, file_bytes: u64, question: &ReadQuestion) -> Result<Answer, Error> {
    let not = |what| Error::NotEvidence { name: path.into(), what };
    match recognise::text_form(text, evidence::looks_like_oom) {
        TextForm::Other(what) => Err(not(what)),
        TextForm::Smi => match evidence::smi::smi(text) {
            Some(Smi { series, warnings, .. }) if !series.is_empty() => {
                let limits =
                    ["what a card has in use is of all its processes, and of more than their allocators"];
                Ok(Answer::Series(logged::series(
                    "smi",
                    file_bytes,
                    &series,
                    &warnings,
                    &limits,
                    question.capacity,
                )))
            }
            Some(Smi { instants: found, .. }) => Ok(Answer::Instants(instants(&found))),
            None => Err(not("a text without figures of memory")),
        },
        TextForm::OutOfMemory => {
            // A program that has failed may print what its allocator says besides.
            let mut read = oom::instants(text.as_bytes(), question.known.as_ref());
            read.instants.extend(instants(&evidence::summary::summaries(text)).instants);
            Ok(Answer::Instants(read))
        }
        TextForm::Summary => Ok(Answer::Instants(instants(&evidence::summary::summaries(text)))),
        TextForm::Log => match StepLog::read(text) {
            Ok(log) => Ok(Answer::Series(logged::step_log(&log, file_bytes, question.capacity))),
            Err(LogError::NoRows) => Err(not("a text without figures of memory")),
            Err(problem) => Err(Error::Log { name: path.into(), problem }),
        },
    }
}

impl Read {
    /// The ledger, and of a recording its tape and what is known of its run.
    pub fn into_parts(self) -> (Ledger, Option<(About, Tape)>) {
        (self.ledger, self.tape)
    }

    /// The file of the recording's tape, `.vlt`.
    ///
    /// # Errors
    /// No recording, or a tape beyond the limits of the form.
    pub fn tape_file(&self) -> Result<Vec<u8>, Error> {
        let no_tape = || Error::Setup { what: "a tape is kept of recordings alone".into() };
        let (about, tape) = self.tape.as_ref().ok_or_else(no_tape)?;
        Ok(wire::write_tape(about, tape)?)
    }
}

fn damaged(path: &str, problem: SnapshotError) -> Error {
    Error::Snapshot { name: path.into(), problem }
}

impl Run {
    /// The answer to `question`.
    fn answer(self, path: &str, file_bytes: u64, question: &ReadQuestion) -> Result<Read, Error> {
        let no_such = |what: String| Error::NoSuch { name: path.into(), what };
        let looked_at = self.instant_event(question).map_err(no_such)?;
        let peak = self.books.peaks.reserved.as_ref().map(|peak| (peak.device, self.served(peak.event)));
        let failure = self.books.oom.as_ref().map(|oom| (oom.device, oom.event));
        let last = self.taped.tape.len().checked_sub(1);
        let stops = looked_at.iter().map(|at| at.event).chain(peak.map(|at| at.1));
        let stops: Vec<usize> = stops.chain(failure.map(|at| at.1)).chain(last).collect();
        let shots = self.shots(&stops);
        let shot = |event: usize| shots.iter().find(|shot| shot.event == event);
        let instant =
            looked_at.as_ref().and_then(|at| Some(group::instant(&self, shot(at.event)?, at, question)));
        let gpus = self.gpus();
        let mut stranding = Vec::new();
        if let Some((device, event)) = peak {
            stranding
                .extend(shot(event).map(|shot| stranding::stranding(&self, "reserved_peak", device, shot)));
        }
        if let Some(end) = last.and_then(shot) {
            stranding.extend(gpus.iter().map(|gpu| stranding::stranding(&self, "end", *gpu, end)));
        }
        let meter = || -> Option<Box<dyn growth::Books + '_>> {
            Some(Box::new(PlacedAllocator::new(&self.taped.tape, &self.places, &self.settings)))
        };
        let growth = growth::of_tape(&self.taped.tape, &meter, question.capacity);
        let blocks_agree = last.and_then(shot).and_then(|shot| self.blocks_agree(shot));
        let about = self.about(path);
        let mut ledger = Ledger::new(about.clone(), &self.books);
        let mut remedy = None;
        if let Some(failure) = failure.and_then(|(_, event)| shot(event)) {
            let oom = remedy::out_of_memory(&self, failure);
            remedy = remedy::remedy(&self, &oom);
            ledger.fits = Some(false);
            ledger.headroom_bytes = remedy::headroom(&oom);
            ledger.oom = Some(oom);
        }
        let what_if = match question.what_if.as_slice() {
            [] => None,
            settings => Some(remedy::what_if(&self, ledger.oom.as_ref(), settings)?),
        };
        let file = self.evidence(file_bytes, blocks_agree);
        let steps = steps(&ledger);
        ledger.reading = Some(Box::new(Reading {
            format: Reading::FORMAT.into(),
            file,
            instant,
            steps,
            growth,
            stranding,
            remedy,
            what_if,
        }));
        Ok(Read { ledger, tape: Some((about, self.taped.tape)) })
    }

    fn about(&self, path: &str) -> About {
        let subject = json!({
            "recording": path,
            "setup": { "alloc_conf": self.alloc_conf() },
            "software": {},
        });
        let mut limits = vec![
            "steps, phases and categories are inferred from stacks, lifetimes and sizes; what they do not tell is unattributed"
                .to_owned(),
            "what lies outside the allocator (the CUDA context, NCCL, other processes) is not in a snapshot".into(),
        ];
        if self.taped.devices.iter().flatten().count() > 1 {
            limits
                .push("one process with several GPUs: the phases are those of the GPU that did most".into());
        }
        About {
            subject: match subject {
                Value::Object(subject) => subject,
                _ => Map::new(),
            },
            interpretation_limits: limits,
            warnings: self.warnings.clone(),
            ..About::new(Provenance::Measured)
        }
    }

    fn alloc_conf(&self) -> Option<&str> {
        match self.snapshot.setting("PYTORCH_CUDA_ALLOC_CONF") {
            Some(Setting::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// What the file is and how good it is.
    fn evidence(&self, file_bytes: u64, blocks_agree: Option<bool>) -> Evidence {
        let tape = &self.taped.tape;
        let value = |setting: &Setting| match setting {
            Setting::Bool(value) => json!(value),
            Setting::Integer(value) => json!(value),
            Setting::Real(value) => json!(value),
            Setting::Text(value) => json!(value),
        };
        let settings: BTreeMap<String, Value> =
            self.snapshot.settings.iter().map(|(name, setting)| (name.clone(), value(setting))).collect();
        let telling: Vec<bool> = (0..self.snapshot.stacks())
            .map(|stack| self.snapshot.telling_frames(Stack(stack as u32)).next().is_some())
            .collect();
        let (mut requests, mut without) = (0, 0);
        for origin in self.taped.origins.iter().filter(|origin| origin.entry.is_some()) {
            requests += 1;
            without += u64::from(!telling[origin.stack.0 as usize]);
        }
        let starts = self.starts();
        let times = || (0..tape.len()).filter_map(|event| tape.time_us(event)).filter(|time| *time > 0);
        let updates = tape.marks().iter().filter(|mark| mark.phase == ledger::Phase::UPDATE).count();
        Evidence {
            form: "cuda_snapshot".into(),
            file_bytes,
            written_by: self.snapshot.written_by().map(Into::into),
            entries: starts.iter().map(|start| start.entries).sum(),
            microseconds: times().min().zip(times().max()).map(|(first, last)| last - first),
            stacks: Some(self.snapshot.stacks() as u64 - 1),
            requests,
            requests_without_stack: Some(without),
            devices: starts,
            alloc_conf: self.alloc_conf().map(Into::into),
            settings,
            updates: Some(updates as u64),
            block_disagreements: Some(self.block_disagreements),
            hidden_block_bytes: Some(self.hidden.get()),
            blocks_agree,
        }
    }

    /// The devices when their recordings begin.
    fn starts(&self) -> Vec<Start> {
        let mut let_go = vec![0_u64; self.taped.devices.len()];
        let mut starts: Vec<Start> = Vec::new();
        for (device, number) in self.taped.devices.iter().enumerate() {
            let trace =
                number.map_or(Some(&self.snapshot.host_trace), |number| self.snapshot.traces.get(number));
            starts.push(Start {
                device: device as u16,
                number: number.map(|number| number as u64),
                entries: trace.map_or(0, |trace| trace.len() as u64),
                objects_before: 0,
                bytes_before: 0,
                let_go: None,
            });
        }
        // What came without an entry, before or later, has none of its own.
        for event in self.taped.tape.events() {
            let Event::Alloc { object, bytes, .. } = event else { continue };
            let origin = self.taped.origins[object.0 as usize];
            if origin.entry.is_none() {
                let start = &mut starts[usize::from(origin.device.0)];
                start.objects_before += 1;
                start.bytes_before = start.bytes_before.saturating_add(bytes.get());
                let_go[usize::from(origin.device.0)] += u64::from(origin.end.is_some());
            }
        }
        for (start, let_go) in starts.iter_mut().zip(let_go) {
            start.let_go = Some(let_go);
        }
        starts
    }

    /// The GPUs of the tape.
    fn gpus(&self) -> Vec<ledger::DeviceId> {
        let devices = self.taped.tape.devices.iter().enumerate();
        let gpus = devices.filter(|(_, device)| device.kind == DeviceKind::Gpu);
        gpus.map(|(index, _)| ledger::DeviceId(index as u16)).collect()
    }

    /// Whether the blocks of `shot`, the last of the tape, are those that the file lists.
    fn blocks_agree(&self, shot: &Shot) -> Option<bool> {
        let mut listed: Vec<(u64, u64)> = Vec::new();
        for segment in &self.snapshot.segments {
            for block in &segment.blocks {
                if block.state != evidence::snapshot::BlockState::Inactive {
                    listed.push((block.address?, block.size.get()));
                }
            }
        }
        if listed.is_empty() && self.snapshot.segments.is_empty() {
            return None;
        }
        let mut found: Vec<(u64, u64)> =
            shot.blocks().map(|(address, block)| (address, block.size.get())).collect();
        listed.sort_unstable();
        found.sort_unstable();
        Some(listed == found)
    }
}

/// The steps of `ledger`, a row for each device.
fn steps(ledger: &Ledger) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for row in &ledger.phases {
        let known = steps.iter_mut().rev().find(|step| step.device == row.device);
        let before = known.as_ref().map(|step| (step.step, step.end));
        match known.filter(|step| step.step == row.step) {
            Some(step) => {
                let measure = |totals: &wire::Totals| totals.allocated_bytes.or(totals.requested_bytes);
                if measure(&row.peak) > measure(&step.peak) {
                    step.peak_phase.clone_from(&row.phase);
                }
                step.peak.requested_bytes = step.peak.requested_bytes.max(row.peak.requested_bytes);
                step.peak.allocated_bytes = step.peak.allocated_bytes.max(row.peak.allocated_bytes);
                step.peak.reserved_bytes = step.peak.reserved_bytes.max(row.peak.reserved_bytes);
                let grown = held(&row.end).zip(held(&step.end));
                let grown = grown.map(|(end, before)| end.cast_signed() - before.cast_signed());
                step.grown_bytes = step.grown_bytes.zip(grown).map(|(a, b)| a + b);
                step.end = row.end;
                step.micro_batches = step.micro_batches.max(row.micro_batch.unwrap_or(0));
            }
            None => {
                let grown = before.and_then(|(_, end)| held(&row.end).zip(held(&end)));
                steps.push(Step {
                    device: row.device,
                    step: row.step,
                    micro_batches: row.micro_batch.unwrap_or(0),
                    peak: row.peak,
                    peak_phase: row.phase.clone(),
                    end: row.end,
                    grown_bytes: grown.map(|(end, before)| end.cast_signed() - before.cast_signed()),
                });
            }
        }
    }
    steps
}

/// What is held, by the first measure that is known.
fn held(totals: &wire::Totals) -> Option<u64> {
    totals.requested_bytes.or(totals.allocated_bytes)
}

/// The measure in which an instant is told: the first of these that is known.
const MEASURES: [Measure; 2] = [Measure::Allocated, Measure::Requested];
