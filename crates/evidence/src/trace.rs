//! Profiler traces of PyTorch: what was allocated and let go, and which operator did it.
//!
//! A trace of the Chrome form may have gigabytes; what is kept of it are its `[memory]` instants and
//! the spans of operators and annotations, a few words each.

mod attribute;
mod phases;
mod scan;
mod tape;

use std::borrow::Cow;
use std::io::{self, Read};

use indexmap::IndexSet;
use ledger::{Tape, TapeError};
use serde::Deserialize;
use serde_json::value::RawValue;
use thiserror::Error;

use self::scan::{Next, Scanner};
use crate::Warning;

/// The most spans and instants that are kept: a gigabyte of them.
const MOST_KEPT: usize = 1 << 24;
/// The longest name of an operator, a process or a thread.
const LONGEST_NAME: usize = 200;
/// The most bytes of different names.
const MOST_NAMES: usize = 1 << 27;
/// The name of the instants of memory.
const MEMORY: &str = "[memory]";
/// The name of the instants of requests that found no room.
const OUT_OF_MEMORY: &str = "[OutOfMemory]";

/// A profiler trace.
#[derive(Debug)]
pub struct Trace {
    /// Blocks of the allocator, with the steps and phases that annotations tell. An object is named
    /// after the innermost operator that made it, and its owner is the annotation around that.
    pub tape: Tape,
    /// For each device of the tape what the trace says of it.
    pub devices: Vec<TraceDevice>,
    /// Events of the trace, of every kind.
    pub events: u64,
    /// The bytes of its text.
    pub bytes: u64,
    /// Different operators that made objects.
    pub operators: u64,
    /// How many objects were made inside no operator.
    pub without_operator: u64,
    /// How many objects were made.
    pub requests: u64,
    /// Optimizer steps that are annotated.
    pub updates: u64,
    /// What could not be told.
    pub warnings: Vec<Warning>,
}

/// What a trace says of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceDevice {
    /// Its number; none for host memory.
    pub number: Option<u16>,
    /// Its memory instants.
    pub entries: u64,
    /// Objects, known and of unknown number, that are there before the first instant.
    pub objects_before: u64,
    /// Their bytes.
    pub bytes_before: u64,
    /// How many of them are let go.
    pub let_go: u64,
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum TraceError {
    #[error("the trace cannot be read beyond byte {at}: {source}")]
    Source { at: u64, source: io::Error },
    #[error("the trace has no list of events, `traceEvents`")]
    NoEvents,
    #[error("the event of the trace that begins at byte {at} is longer than 16 MiB, or its text is damaged")]
    LargeEvent { at: u64 },
    #[error(
        "the trace has {events} events and not one `[memory]` instant: record it with `profile(profile_memory=True)`"
    )]
    NoMemory { events: u64 },
    #[error("the trace has more than {MOST_KEPT} operators and memory instants, or 128 MiB of their names")]
    TooLarge,
    #[error(transparent)]
    Tape(#[from] TapeError),
}

/// What of an event is looked at.
#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow, default)]
    ph: Cow<'a, str>,
    #[serde(borrow, default)]
    cat: Cow<'a, str>,
    #[serde(borrow, default)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    pid: Option<&'a RawValue>,
    #[serde(borrow)]
    tid: Option<&'a RawValue>,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(borrow)]
    args: Option<&'a RawValue>,
}

/// The arguments of a memory instant.
#[derive(Deserialize)]
struct MemoryArguments {
    #[serde(rename = "Bytes")]
    bytes: i64,
    #[serde(rename = "Addr")]
    address: Option<u64>,
    #[serde(rename = "Device Type")]
    device_type: i16,
    #[serde(rename = "Device Id")]
    device_id: i32,
    #[serde(rename = "Total Allocated")]
    allocated: Option<i64>,
    #[serde(rename = "Total Reserved")]
    reserved: Option<i64>,
}

/// What a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpanKind {
    /// An operator.
    Operator,
    /// A node of the backward pass at work.
    Backward,
    /// What the program calls this part of itself.
    Annotation,
    /// An optimizer's step.
    Update,
    /// An optimizer lets go of gradients, or zeroes them.
    ZeroGrad,
    /// A step as the profiler counts it.
    Step(u32),
}

/// Something that took time on a thread.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Microseconds.
    start: f64,
    end: f64,
    thread: u32,
    name: u32,
    kind: SpanKind,
}

/// A memory instant, or a request that found no room.
#[derive(Clone, Copy, Debug)]
struct Instant {
    time: f64,
    thread: u32,
    /// The type and number of its device.
    device: (i16, i32),
    /// Made where it is positive, let go where negative.
    bytes: i64,
    address: Option<u64>,
    allocated: Option<u64>,
    reserved: Option<u64>,
    out_of_memory: bool,
}

/// What is kept of a trace.
#[derive(Default)]
struct Kept {
    threads: IndexSet<String>,
    names: IndexSet<String>,
    /// The bytes of both.
    named: usize,
    spans: Vec<Span>,
    instants: Vec<Instant>,
    damaged: u64,
}

impl Trace {
    /// Reads a trace from its text, unpacked, which is never held as a whole. Of the GPUs only `device` is kept,
    /// where one is given.
    ///
    /// # Errors
    /// A source that fails, no list of events, or no memory instants in it.
    pub fn read(source: impl Read, device: Option<u16>) -> Result<Self, TraceError> {
        let mut scanner = Scanner::new(source);
        if !scanner.begin()? {
            return Err(TraceError::NoEvents);
        }
        let mut kept = Kept::default();
        let (mut events, mut cut, mut thread) = (0, false, String::new());
        loop {
            match scanner.next()? {
                Next::Event(text) => {
                    events += 1;
                    kept.take(text, &mut thread)?;
                }
                Next::End => break,
                Next::Cut => {
                    cut = true;
                    break;
                }
            }
        }
        let mut warnings = Vec::new();
        if cut {
            warnings.push(Warning::CutOff);
        }
        if kept.damaged > 0 {
            warnings.push(Warning::DamagedEvents { count: kept.damaged });
        }
        if kept.instants.is_empty() {
            return Err(TraceError::NoMemory { events });
        }
        let bytes = scanner.bytes();
        tape::tape(kept, device, events, bytes, warnings)
    }
}

impl Kept {
    /// Keeps what counts of the event in `text`.
    fn take(&mut self, text: &[u8], thread: &mut String) -> Result<(), TraceError> {
        if is_passed_over(text) {
            return Ok(());
        }
        let Ok(entry) = serde_json::from_slice::<Entry<'_>>(text) else {
            self.damaged += 1;
            return Ok(());
        };
        let span = entry.ph == "X" && matches!(&*entry.cat, "cpu_op" | "user_annotation" | "Operator");
        let out_of_memory = entry.name == OUT_OF_MEMORY;
        if !span && !out_of_memory && entry.name != MEMORY {
            return Ok(());
        }
        let Some(time) = entry.ts else {
            self.damaged += 1;
            return Ok(());
        };
        if self.spans.len() + self.instants.len() >= MOST_KEPT {
            return Err(TraceError::TooLarge);
        }
        thread.clear();
        thread.push_str(entry.pid.map_or("", RawValue::get));
        thread.push(' ');
        thread.push_str(entry.tid.map_or("", RawValue::get));
        let thread = intern(&mut self.threads, clip(thread), &mut self.named)?;
        if span {
            let operator = entry.cat != "user_annotation";
            let kind = match &*entry.name {
                name if operator && name.starts_with("autograd::engine::evaluate_function") => {
                    SpanKind::Backward
                }
                name if name.starts_with("Optimizer.step#") => SpanKind::Update,
                name if name.starts_with("Optimizer.zero_grad#") => SpanKind::ZeroGrad,
                name => match name.strip_prefix("ProfilerStep#").map(str::parse) {
                    Some(Ok(step)) => SpanKind::Step(step),
                    _ if operator => SpanKind::Operator,
                    _ => SpanKind::Annotation,
                },
            };
            let name = intern(&mut self.names, clip(&entry.name), &mut self.named)?;
            let end = time + entry.dur.unwrap_or(0.0).max(0.0);
            self.spans.push(Span { start: time, end, thread, name, kind });
            return Ok(());
        }
        let arguments = entry.args.map(|args| serde_json::from_str::<MemoryArguments>(args.get()));
        match arguments {
            Some(Ok(arguments)) if arguments.bytes != i64::MIN => {
                let total = |total: Option<i64>| total.and_then(|total| u64::try_from(total).ok());
                self.instants.push(Instant {
                    time,
                    thread,
                    device: (arguments.device_type, arguments.device_id),
                    bytes: arguments.bytes,
                    address: arguments.address,
                    allocated: total(arguments.allocated),
                    reserved: total(arguments.reserved),
                    out_of_memory,
                });
            }
            _ => self.damaged += 1,
        }
        Ok(())
    }
}

/// Categories of events that say nothing of memory.
const PASSED_OVER: [&[u8]; 5] = [b"python_function", b"kernel", b"cuda_runtime", b"cuda_driver", b"ac2g"];
/// How far into an event its category is looked for.
const CATEGORY_WITHIN: usize = 160;

/// Whether an event is of a category that is passed over, as far as its first bytes tell: most of a trace is.
fn is_passed_over(text: &[u8]) -> bool {
    let head = &text[..text.len().min(CATEGORY_WITHIN)];
    let Some(at) = head.windows(5).position(|key| key == b"\"cat\"") else { return false };
    let value = head[at + 5..].trim_ascii_start();
    let Some(value) = value.strip_prefix(b":").map(<[u8]>::trim_ascii_start) else { return false };
    let Some(value) = value.strip_prefix(b"\"") else { return false };
    PASSED_OVER
        .iter()
        .any(|category| value.strip_prefix(*category).is_some_and(|rest| rest.starts_with(b"\"")))
}

/// The handle of `text` in `table`; `bytes` are those of all names.
fn intern(table: &mut IndexSet<String>, text: &str, bytes: &mut usize) -> Result<u32, TraceError> {
    if let Some(index) = table.get_index_of(text) {
        return Ok(index as u32);
    }
    // The table has some bytes for each name besides.
    *bytes += text.len() + size_of::<String>();
    if *bytes > MOST_NAMES {
        return Err(TraceError::TooLarge);
    }
    Ok(table.insert_full(text.to_owned()).0 as u32)
}

/// As much of `name` as is kept.
fn clip(name: &str) -> &str {
    let end = (0..=LONGEST_NAME.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    &name[..end.unwrap_or(0)]
}
