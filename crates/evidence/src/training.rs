//! A snapshot as a training run: its steps and phases, and what every object is for.
//!
//! A snapshot has no word for a step, a parameter or a gradient. All of it is inferred: from the
//! stacks of who asks and who lets go, from annotations, lifetimes and sizes.

mod category;
mod periods;
mod phases;
mod role;
mod shards;

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use ledger::{DeviceId, Event, Phase, Tape, TapeError};

use self::phases::{Begin, phases};
use self::role::Role;
use crate::Warning;
use crate::snapshot::{Alive, Entry, Narrator, Snapshot, Stack, Taped};

/// The most phases times devices: a ledger has a row for each.
const MAX_ROWS: usize = 1 << 20;

impl Snapshot {
    /// The tape of this snapshot with the phases of its training steps and the categories of its
    /// objects, as far as they can be inferred.
    ///
    /// The first step that is seen is step 1, and what comes before it is step 0.
    ///
    /// # Errors
    /// More than a tape holds.
    pub fn training(&self) -> Result<Taped, TapeError> {
        let roles: Vec<Role> = (0..self.stacks()).map(|stack| Role::of(self, Stack(stack as u32))).collect();
        // One process runs one program, and the device that did most tells what it did.
        let most =
            self.traces.iter().enumerate().max_by_key(|(index, trace)| (trace.len(), usize::MAX - index));
        let mut begins = most.map_or_else(Vec::new, |(_, trace)| phases(self, trace, &roles));
        if begins.is_empty() {
            begins = most.map_or_else(Vec::new, |(_, trace)| periods::steps(self, trace));
        }
        let devices = self.used_devices();
        let too_many = begins.len().saturating_mul(devices) > MAX_ROWS;
        let phases = begins.len() as u64;
        if too_many {
            begins.clear();
        }
        let mut marker = Marker { trace: most.map(|(index, _)| index), begins, next: 0 };
        let mut taped = self.tape(&mut marker)?;
        if too_many {
            taped.warnings.push(Warning::TooManyPhases { phases, devices: devices as u64 });
        }
        category::label(&mut taped, self, &roles);
        shards::wait(&mut taped, &roles);
        Ok(taped)
    }
}

impl Snapshot {
    /// How many devices have entries or segments, host memory included.
    fn used_devices(&self) -> usize {
        let traces = self.traces.iter().enumerate().filter(|(_, trace)| !trace.is_empty());
        let segments = self.segments.iter().filter_map(|segment| segment.device.map(usize::from));
        let used: BTreeSet<usize> = traces.map(|(index, _)| index).chain(segments).collect();
        used.len() + 1
    }
}

/// Sets the marks of phases.
struct Marker {
    /// The trace that the phases are counted in.
    trace: Option<usize>,
    begins: Vec<Begin>,
    next: usize,
}

impl Narrator for Marker {
    fn before(
        &mut self,
        tape: &mut Tape,
        _: &Alive,
        device: DeviceId,
        index: usize,
        entry: &Entry,
    ) -> ControlFlow<()> {
        while let Some(begin) = self.begins.get(self.next).filter(|begin| begin.entry <= index) {
            let name = &tape.devices[usize::from(device.0)].name;
            if self.trace.is_none_or(|trace| *name != Snapshot::device_name(trace)) {
                break;
            }
            if begin.phase == periods::PHASE && tape.phases.len() == Phase::NAMES.len() {
                tape.phases.push(periods::STEP.into());
            }
            let mark = tape.new_mark(begin.mark());
            if entry.time_us > 0 {
                tape.push_at(Event::Mark(mark), entry.time_us);
            } else {
                tape.push(Event::Mark(mark));
            }
            self.next += 1;
        }
        ControlFlow::Continue(())
    }
}
