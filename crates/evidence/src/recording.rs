//! What the emulator's recorder leaves behind: a snapshot, and what it knew of the program.
//!
//! `snapshot.pickle` is PyTorch's own; its entries carry notes, `MARK:MODULE`. `run.json`, of the form
//! `vramledger-recording/1`, has the marks (where the program was), the labels (which tensor lives at
//! which address), and how the program ended. Together they make a tape whose phases and owners are
//! known. What no label names has its category from where it was made and how long it lived.

mod borders;
mod classify;

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use ledger::{Bytes, Category, DeviceId, Event, Mark, MarkId, ObjectId, Phase, Tape, TapeError};
use serde::Deserialize;
use thiserror::Error;

use borders::{Border, borders};

use crate::Warning;
use crate::snapshot::{Action, Alive, Entry, Narrator, Snapshot, SnapshotError, Taped};

/// A recorded run, as a tape with phases, names and categories.
#[derive(Debug)]
pub struct Recording {
    /// The tape. It ends where the last step does.
    pub taped: Taped,
    /// The snapshot that it was made of.
    pub snapshot: Snapshot,
    /// What the recorder noted.
    pub run: Run,
    /// For each mark of the tape the mark of the recorder that it is; none for one that the tape has besides.
    noted: Vec<Option<usize>>,
}

/// `run.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Run {
    /// `vramledger-recording/1`.
    pub format: String,
    /// The version of PyTorch.
    pub torch: String,
    /// The CUDA device that the program used.
    pub device: u16,
    /// The optimizer steps that were done.
    pub steps: u32,
    /// How the program ended.
    pub end: End,
    /// The error that ended it, in its own words.
    pub error: Option<String>,
    /// Where the program was, in order.
    pub marks: Vec<RunMark>,
    /// What lives where.
    pub labels: Vec<RunLabel>,
    /// Every request that found no room.
    pub ooms: Vec<RunOom>,
    /// The parameters of the models that ran.
    pub parameters: Option<RunParameters>,
    /// PyTorch's own figures at the end, by their names there.
    #[serde(rename = "final")]
    pub statistics: BTreeMap<String, i64>,
}

/// The parameters of the models that ran, each once.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct RunParameters {
    /// All of them, as the model has them.
    pub total: u64,
    /// Those that require a gradient.
    pub trainable: u64,
    /// The bytes of them that lie on this device.
    pub bytes: u64,
}

/// How a recorded program ended.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// The recorder ended it after the wanted steps.
    Stopped,
    /// It came to its own end.
    Finished,
    /// An error ended it.
    Failed,
}

/// Where the program was from one moment on, and PyTorch's figures at that moment.
#[derive(Clone, Debug, Deserialize)]
pub struct RunMark {
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1; none in load and update.
    pub micro_batch: Option<u32>,
    /// The phase: one of a training step, or `end` for what comes after the last step.
    pub phase: String,
    /// `memory_allocated`.
    pub allocated_bytes: u64,
    /// Bytes asked for, of blocks in use or awaiting free.
    pub requested_bytes: u64,
    /// `memory_reserved`.
    pub reserved_bytes: u64,
    /// Bytes of blocks in use or awaiting free.
    pub active_bytes: u64,
}

/// Names for the blocks at some addresses when a mark was set.
#[derive(Clone, Debug, Deserialize)]
pub struct RunLabel {
    /// The number of the mark.
    pub mark: usize,
    /// What they are for.
    pub category: String,
    /// Addresses and names.
    pub objects: Vec<(u64, String)>,
}

/// A request that found no room.
#[derive(Clone, Debug, Deserialize)]
pub struct RunOom {
    /// The step.
    pub step: u32,
    /// The micro-batch.
    pub micro_batch: Option<u32>,
    /// The phase.
    pub phase: String,
    /// The CUDA device.
    pub device: u16,
    /// Bytes asked for, as the allocator had rounded them.
    pub requested_bytes: u64,
    /// All memory of the device.
    pub capacity_bytes: u64,
    /// What of it was free.
    pub free_bytes: u64,
    /// The innermost module at work, or whose operator is in backward; empty outside of one.
    pub module: String,
    /// The node of the backward pass at work.
    pub operator: Option<String>,
}

/// Why a recording cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum RecordingError {
    #[error("the recording's snapshot cannot be read: {0}")]
    Snapshot(#[from] SnapshotError),
    #[error("the recording's `run.json` is not of the form `vramledger-recording/1`: {0}")]
    Run(#[from] serde_json::Error),
    #[error("the recording is of the form `{format}`; `vramledger-recording/1` is read")]
    Format { format: String },
    #[error("mark {mark} of the recording is in the phase `{phase}`, which is no phase of a training step")]
    Phase { mark: usize, phase: String },
    #[error("a label of the recording has the category `{category}`, which is none")]
    Category { category: String },
    #[error("the recording is larger than a tape can be: {0}")]
    Tape(#[from] TapeError),
}

/// The phase of what comes after the last step.
const END: &str = "end";

impl Recording {
    /// Reads a recording from the bytes of its `snapshot.pickle` and its `run.json`.
    ///
    /// # Errors
    /// Where either cannot be read.
    pub fn read(snapshot: &[u8], run: &[u8]) -> Result<Self, RecordingError> {
        let run: Run = serde_json::from_slice(run)?;
        if run.format != "vramledger-recording/1" {
            return Err(RecordingError::Format { format: run.format });
        }
        let snapshot = Snapshot::read(snapshot)?;
        let mut scribe = Scribe::new(&run, &snapshot)?;
        let mut taped = snapshot.tape(&mut scribe)?;
        let Scribe { names, unplaced, noted, .. } = scribe;
        if unplaced > 0 {
            taped.warnings.push(Warning::UnplacedLabels { count: unplaced });
        }
        classify::label(&mut taped, &snapshot, &names);
        let recording = Self { taped, snapshot, run, noted };
        let disagreements = recording.disagreements();
        Ok(recording.with_warnings(disagreements))
    }

    fn with_warnings(mut self, warnings: Vec<Warning>) -> Self {
        self.taped.warnings.extend(warnings);
        self
    }

    /// The device of the tape that the program used.
    pub fn device(&self) -> Option<DeviceId> {
        let used = Some(usize::from(self.run.device));
        self.taped.devices.iter().position(|index| *index == used).map(|index| DeviceId(index as u16))
    }

    /// What the recorder noted at a mark of the tape; none where the mark is not the recorder's.
    pub fn noted(&self, mark: MarkId) -> Option<&RunMark> {
        self.noted.get(mark.0 as usize).copied().flatten().map(|number| &self.run.marks[number])
    }

    /// Where the figures that PyTorch gave at a mark are not those of the entries before it.
    fn disagreements(&self) -> Vec<Warning> {
        let (Some(of), tape) = (self.device(), &self.taped.tape) else { return Vec::new() };
        let mut sizes = vec![0; tape.objects().len()];
        let (mut requested, mut reserved) = (0_u64, 0_u64);
        let mut warnings = Vec::new();
        for event in tape.events() {
            match event {
                Event::Alloc { object, bytes, device, .. } if device == of => {
                    sizes[object.0 as usize] = bytes.get();
                    requested += bytes.get();
                }
                Event::Free(object) => requested -= sizes[object.0 as usize],
                Event::SegmentAlloc(segment) | Event::SegmentMap(segment) if segment.device == of => {
                    reserved += segment.bytes.get();
                }
                Event::SegmentFree(segment) | Event::SegmentUnmap(segment) if segment.device == of => {
                    reserved -= segment.bytes.get();
                }
                Event::Mark(mark) => {
                    let Some(noted) = self.noted(mark) else { continue };
                    let pairs = [
                        ("requested", noted.requested_bytes, requested),
                        ("reserved", noted.reserved_bytes, reserved),
                    ];
                    warnings.extend(pairs.into_iter().filter(|(_, noted, found)| noted != found).map(
                        |(measure, noted, found)| Warning::MarkDisagrees {
                            mark: mark.0,
                            measure,
                            noted: Bytes::new(noted),
                            found: Bytes::new(found),
                        },
                    ));
                }
                _ => {}
            }
        }
        warnings
    }
}

/// What labels say of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Named {
    category: Category,
    name: String,
}

/// A category, and the addresses and names that have it.
type Labelled<'a> = (Category, &'a [(u64, String)]);

/// Sets the marks where the entries' notes say, and finds what the labels name.
struct Scribe<'a> {
    snapshot: &'a Snapshot,
    marks: Vec<Mark>,
    /// The mark with which the last step is over.
    end: Option<usize>,
    /// The labels of each mark.
    labels: Vec<Vec<Labelled<'a>>>,
    /// The mark to set next.
    next: usize,
    /// For each mark of the tape the mark of the recorder that it is.
    noted: Vec<Option<usize>>,
    /// The forward phases that begin before their marks, the next one last.
    borders: Vec<Border>,
    names: BTreeMap<ObjectId, Named>,
    unplaced: u64,
    /// The entries to come that take memory.
    takes: usize,
}

impl<'a> Scribe<'a> {
    fn new(run: &'a Run, snapshot: &'a Snapshot) -> Result<Self, RecordingError> {
        let mut marks = Vec::new();
        let end = run.marks.iter().position(|mark| mark.phase == END);
        for (number, mark) in run.marks.iter().enumerate().take(end.unwrap_or(run.marks.len())) {
            let phase = Phase::NAMES.iter().position(|name| *name == mark.phase);
            let unknown = || RecordingError::Phase { mark: number, phase: mark.phase.clone() };
            let phase = Phase(phase.ok_or_else(unknown)? as u16);
            marks.push(Mark { step: mark.step, micro_batch: mark.micro_batch, phase, text: None });
        }
        let mut labels = vec![Vec::new(); marks.len()];
        let mut unplaced = 0;
        for label in &run.labels {
            let category = label.category.parse();
            let category =
                category.map_err(|()| RecordingError::Category { category: label.category.clone() })?;
            match labels.get_mut(label.mark) {
                Some(labels) => labels.push((category, label.objects.as_slice())),
                // After the last step everything has its name.
                None if end.is_some() => {}
                None => unplaced += label.objects.len() as u64,
            }
        }
        let traces = snapshot.traces.iter().chain([&snapshot.host_trace]);
        let entries = traces.flat_map(|trace| snapshot.entries(trace));
        let takes = entries.filter(|entry| takes(entry.action)).count();
        let mut borders = borders(run, snapshot);
        borders.reverse();
        Ok(Self {
            snapshot,
            marks,
            end,
            labels,
            next: 0,
            noted: Vec::new(),
            borders,
            names: BTreeMap::new(),
            unplaced,
            takes,
        })
    }

    /// Sets mark `number` on the tape; `noted` is the recorder's mark that it is.
    fn set(&mut self, tape: &mut Tape, number: usize, noted: Option<usize>, time_us: u64) {
        let mark = tape.new_mark(self.marks[number]);
        self.noted.push(noted);
        if time_us > 0 {
            tape.push_at(Event::Mark(mark), time_us);
        } else {
            tape.push(Event::Mark(mark));
        }
    }

    /// Sets the marks up to the one of number `number`.
    fn advance(&mut self, tape: &mut Tape, alive: &Alive, number: usize, time_us: u64) {
        while self.next < self.marks.len() && self.next <= number {
            self.set(tape, self.next, Some(self.next), time_us);
            for (category, objects) in &self.labels[self.next] {
                for (address, name) in *objects {
                    match alive.at(*address) {
                        // A model may be called with what has a name already.
                        Some(object) if *category == Category::Input && self.names.contains_key(&object) => {}
                        Some(object) => {
                            self.names.insert(object, Named { category: *category, name: name.clone() });
                        }
                        None => self.unplaced += 1,
                    }
                }
            }
            self.next += 1;
        }
    }
}

impl Narrator for Scribe<'_> {
    fn before(
        &mut self,
        tape: &mut Tape,
        alive: &Alive,
        _: DeviceId,
        index: usize,
        entry: &Entry,
    ) -> ControlFlow<()> {
        if let Some(border) = self.borders.last().copied()
            && (border.index, border.entry) == (index, *entry)
        {
            self.advance(tape, alive, border.mark - 1, entry.time_us);
            if self.end.is_some_and(|end| border.mark >= end) {
                return ControlFlow::Break(());
            }
            self.set(tape, border.mark, None, entry.time_us);
            self.borders.pop();
        }
        // Autograd's threads have no notes, or old ones: marks only go forward.
        if let Some((mark, _)) = note(self.snapshot.text(entry.user_metadata)) {
            self.advance(tape, alive, mark, entry.time_us);
            if self.end.is_some_and(|end| mark >= end) {
                return ControlFlow::Break(());
            }
        }
        if takes(entry.action) {
            self.takes -= 1;
        } else if self.end.is_none() && self.takes == 0 && self.next == self.marks.len() {
            // What a program lets go of at its own end is no part of its last phase.
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn end(&mut self, tape: &mut Tape, alive: &Alive) {
        let last = tape.len().checked_sub(1).and_then(|last| tape.time_us(last));
        self.advance(tape, alive, usize::MAX, last.unwrap_or(0));
    }
}

/// Whether an entry of this action asks for memory.
fn takes(action: Action) -> bool {
    matches!(action, Action::Alloc | Action::SegmentAlloc | Action::SegmentMap | Action::Oom)
}

/// The number of the mark and the module that an entry's note names.
fn note(text: &str) -> Option<(usize, &str)> {
    let (mark, module) = text.split_once(':')?;
    Some((mark.parse().ok()?, module))
}
