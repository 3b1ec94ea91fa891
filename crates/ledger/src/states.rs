//! Hand-written states: what lives on which device from which phase to which, as a tape.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use thiserror::Error;

use crate::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Mark, Object, ObjectId, Phase, Pool, Stream,
    Tape, TapeError, Unit,
};

/// One state as somebody wrote it down. [`States::push`] checks it.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Its name, unlike every other.
    pub name: &'a str,
    /// One of the seven categories of a hand-written state.
    pub category: &'a str,
    /// Its size in MiB, finite and not negative.
    pub size_mib: f64,
    /// The first phase it is there in.
    pub start_phase: &'a str,
    /// The last phase it is there in.
    pub end_phase: &'a str,
    /// `gpu` or `cpu`.
    pub device: &'a str,
    /// Whether it lives on from step to step. Totals of phases do not depend on it.
    pub persistent: bool,
}

/// One state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub category: Category,
    /// Its size.
    pub bytes: Bytes,
    /// Where it lives.
    pub device: DeviceKind,
    /// The first phase it is there in.
    pub start: Phase,
    /// The last phase it is there in.
    pub end: Phase,
    /// Whether it lives on from step to step.
    pub persistent: bool,
}

/// States on one timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct States {
    phases: Vec<String>,
    places: FxHashMap<String, Phase>,
    states: Vec<State>,
    names: BTreeSet<String>,
}

/// Why states cannot be accepted.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum StateError {
    #[error("there is no state")]
    Empty,
    #[error("there is no phase")]
    NoPhases,
    #[error("phase {index} has an empty name")]
    EmptyPhase { index: usize },
    #[error("phase `{name}` is listed twice")]
    DoubledPhase { name: String },
    #[error("there are {count} phases; a timeline holds at most 65,535")]
    TooManyPhases { count: usize },
    #[error("state {index} has an empty name")]
    EmptyName { index: usize },
    #[error("state {index}: `{name}` is the name of an earlier state; every state needs its own")]
    DoubledName { index: usize, name: String },
    #[error("state {index} (`{name}`): {problem}")]
    Bad { index: usize, name: String, problem: StateProblem },
    #[error("the states are too large together: {0}")]
    TooLarge(TapeError),
}

/// What is wrong with a state.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum StateProblem {
    #[error("unknown category `{category}`; use one of {}", hand_written())]
    Category { category: String },
    #[error("`size_mb` is {size:?}; a size is a finite number")]
    NotFinite { size: f64 },
    #[error("`size_mb` is {size:?}; a size is not negative")]
    Negative { size: f64 },
    #[error("`size_mb` is {size:?}; a size is below 2^53 bytes")]
    TooLarge { size: f64 },
    #[error("unknown device `{device}`; use `gpu` or `cpu`")]
    Device { device: String },
    #[error("`{field}` is `{phase}`, which is no phase of the timeline ({phases})")]
    Phase { field: &'static str, phase: String, phases: String },
    #[error("`start_phase` `{start}` comes after `end_phase` `{end}`")]
    Reversed { start: String, end: String },
}

impl Default for States {
    /// No states on the six phases of a training step.
    fn default() -> Self {
        Self::on(Phase::NAMES.map(String::from).to_vec())
    }
}

impl States {
    /// No states on a timeline with its own phase names.
    ///
    /// # Errors
    /// No phase, an empty or doubled name, or too many.
    pub fn with_phases(phases: Vec<String>) -> Result<Self, StateError> {
        if phases.is_empty() {
            return Err(StateError::NoPhases);
        }
        let count = phases.len();
        if u16::try_from(count).is_err() {
            return Err(StateError::TooManyPhases { count });
        }
        if let Some(index) = phases.iter().position(String::is_empty) {
            return Err(StateError::EmptyPhase { index });
        }
        let mut names = BTreeSet::new();
        if let Some(name) = phases.iter().find(|name| !names.insert(*name)) {
            return Err(StateError::DoubledPhase { name: clip(name) });
        }
        Ok(Self::on(phases))
    }

    fn on(phases: Vec<String>) -> Self {
        let places = (0..).map(Phase);
        let places = phases.iter().cloned().zip(places).collect();
        Self { phases, places, states: Vec::new(), names: BTreeSet::new() }
    }

    /// Adds a state.
    ///
    /// # Errors
    /// What is wrong with it, its name being another's included, with its index and name.
    pub fn push(&mut self, entry: Entry<'_>) -> Result<(), StateError> {
        let index = self.states.len();
        if entry.name.is_empty() {
            return Err(StateError::EmptyName { index });
        }
        let bad = |problem| StateError::Bad { index, name: clip(entry.name), problem };
        let state = self.checked(entry).map_err(bad)?;
        if !self.names.insert(entry.name.into()) {
            return Err(StateError::DoubledName { index, name: clip(entry.name) });
        }
        self.states.push(state);
        Ok(())
    }

    fn checked(&self, entry: Entry<'_>) -> Result<State, StateProblem> {
        let category = (entry.category.parse().ok())
            .filter(|category: &Category| category.is_hand_written())
            .ok_or_else(|| StateProblem::Category { category: clip(entry.category) })?;
        let device = match entry.device {
            "gpu" => DeviceKind::Gpu,
            "cpu" => DeviceKind::Cpu,
            device => return Err(StateProblem::Device { device: clip(device) }),
        };
        let phase = |field, phase: &str| {
            let unknown =
                || StateProblem::Phase { field, phase: clip(phase), phases: clip(&self.phases.join(", ")) };
            self.places.get(phase).copied().ok_or_else(unknown)
        };
        let start = phase("start_phase", entry.start_phase)?;
        let end = phase("end_phase", entry.end_phase)?;
        if start > end {
            return Err(StateProblem::Reversed {
                start: entry.start_phase.into(),
                end: entry.end_phase.into(),
            });
        }
        Ok(State {
            name: entry.name.into(),
            category,
            bytes: bytes_of_mib(entry.size_mib)?,
            device,
            start,
            end,
            persistent: entry.persistent,
        })
    }

    /// The names of the phases, in the order of the timeline.
    pub fn phases(&self) -> &[String] {
        &self.phases
    }

    /// The states in the order they were written.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// The tape of the states, in bytes of blocks on one GPU, and on the host where a state is there.
    ///
    /// Intervals are closed: what begins in a phase is made at its start and what ends in it goes at
    /// its end, so that all of a phase is there at once. The load is step 0, the rest one step.
    ///
    /// # Errors
    /// No states, or 2^63 bytes together.
    pub fn tape(&self) -> Result<Tape, StateError> {
        if self.states.is_empty() {
            return Err(StateError::Empty);
        }
        let device = |kind, name: &str| Device { name: name.into(), kind, capacity: None, context: None };
        let mut devices = vec![device(DeviceKind::Gpu, "gpu")];
        if self.states.iter().any(|state| state.device == DeviceKind::Cpu) {
            devices.push(device(DeviceKind::Cpu, "cpu"));
        }
        let mut tape = Tape::new(Unit::Block, devices);
        tape.phases.clone_from(&self.phases);
        for state in &self.states {
            let name = tape.intern(&state.name);
            let label =
                tape.intern_label(Label { name, owner: None, category: state.category, saved: false });
            tape.new_object(Object { label, layout: None }).map_err(StateError::TooLarge)?;
        }
        let training_step = self.phases == Phase::NAMES;
        // By first phase, those of no bytes first: so all of a phase are there when its peak is reached.
        let mut births: Vec<usize> = (0..self.states.len()).collect();
        births.sort_by_key(|index| (self.states[*index].start, self.states[*index].bytes > Bytes::ZERO));
        let mut deaths: Vec<usize> = (0..self.states.len()).collect();
        deaths.sort_by_key(|index| self.states[*index].end);
        let (mut births, mut deaths) = (births.into_iter().peekable(), deaths.into_iter().peekable());
        for place in 0..self.phases.len() {
            let phase = Phase(place as u16);
            tape.mark(mark(phase, training_step));
            while let Some(index) = births.next_if(|index| self.states[*index].start == phase) {
                let State { bytes, device, .. } = self.states[index];
                let device = DeviceId(u16::from(device == DeviceKind::Cpu));
                let object = ObjectId(index as u32);
                tape.push(Event::Alloc { object, bytes, device, stream: Stream(0), pool: Pool(0) });
            }
            while let Some(index) = deaths.next_if(|index| self.states[*index].end == phase) {
                tape.push(Event::Free(ObjectId(index as u32)));
            }
        }
        tape.validate().map_err(StateError::TooLarge)?;
        Ok(tape)
    }
}

/// The mark of a phase. On a timeline with its own names all is one step.
fn mark(phase: Phase, training_step: bool) -> Mark {
    let (step, micro_batch) = match phase {
        Phase::LOAD if training_step => (0, None),
        Phase::FORWARD | Phase::LOSS | Phase::BACKWARD if training_step => (1, Some(1)),
        _ => (1, None),
    };
    Mark { step, micro_batch, phase, text: None }
}

/// The bytes of `mib` MiB, rounded to the nearest.
fn bytes_of_mib(size: f64) -> Result<Bytes, StateProblem> {
    const BELOW: f64 = (1_u64 << 53) as f64;
    if !size.is_finite() {
        return Err(StateProblem::NotFinite { size });
    }
    if size < 0.0 {
        return Err(StateProblem::Negative { size });
    }
    let bytes = (size * 1_048_576.0).round();
    if bytes >= BELOW { Err(StateProblem::TooLarge { size }) } else { Ok(Bytes::new(bytes as u64)) }
}

/// Enough of a text for a message: what somebody wrote may be of any length and steer a terminal.
pub fn clip(text: &str) -> String {
    const ENOUGH: usize = 100;
    let plain = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let mut clipped: String = text.chars().take(ENOUGH).map(plain).collect();
    if text.chars().nth(ENOUGH).is_some() {
        clipped.push('…');
    }
    clipped
}

/// The categories a hand-written state may have.
fn hand_written() -> String {
    let names: Vec<&str> =
        Category::ALL.iter().filter(|category| category.is_hand_written()).map(|c| c.as_str()).collect();
    names.join(", ")
}
