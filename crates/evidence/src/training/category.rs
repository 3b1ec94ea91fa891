//! What each object of a training run is for: from where it was made, how long it lived, who let go
//! of it, and its size.
//!
//! An optimizer's state is made in its step and stays; a gradient is made by autograd and outlives
//! the backward pass; an activation is made by a module in the forward pass; parameters and buffers
//! are there before the first step. What none of this tells stays unattributed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ledger::{Category, Event, Label, MarkId, ObjectId, Phase, Tape};

use super::role::{Role, Thread, Work, walk};
use crate::snapshot::{Frame, Origin, Snapshot, Stack, Taped};

/// Workspaces of cuBLAS that PyTorch keeps for each handle and stream before 2.15, in bytes: 32 MiB on
/// Hopper and Blackwell, 4096 KiB twice and 16 KiB eight times elsewhere.
const KEPT_WORKSPACES: [u64; 2] = [32 << 20, 8_519_680];
/// And that of cublasLt.
const WORKSPACES: [u64; 3] = [KEPT_WORKSPACES[0], KEPT_WORKSPACES[1], 1 << 20];

/// The life of one object.
#[derive(Clone, Copy, Debug, Default)]
struct Life {
    bytes: u64,
    /// The number of the phase it was made in, from 1; 0 is before the first.
    born: u32,
    /// The number of the phase it was let go in; none while it lives.
    gone: Option<u32>,
    /// Whether a module had run in its phase before it was made, or makes it.
    after_modules: bool,
    /// Whether nothing else was made while it lived.
    alone: bool,
    role: Role,
    /// What was at work when it was let go.
    end: Work,
}

impl Life {
    /// Whether it lived when the phase that it was made in was over.
    fn outlives(&self, last: u32) -> bool {
        self.gone.map_or(self.born < last, |gone| gone > self.born)
    }
}

/// The lives of all objects of a tape, and the phases they are counted by.
struct Lives {
    lives: Vec<Life>,
    /// The phases of the tape in order, by their number; the first is none.
    phases: Vec<Option<MarkId>>,
    /// Whether a module ran in each of them.
    has_modules: Vec<bool>,
}

/// Gives every object of `taped` its name and category.
pub(super) fn label(taped: &mut Taped, snapshot: &Snapshot, roles: &[Role]) {
    let lives = Lives::of(taped, snapshot, roles);
    let mut categories = Categories {
        taped,
        snapshot,
        last: lives.phases.len() as u32 - 1,
        lives: &lives,
        of: vec![None; lives.lives.len()],
        passing: HashSet::new(),
        kept: HashMap::new(),
        gradients: BTreeMap::new(),
    };
    categories.find();
    let found = categories.of;
    let mut names = Names { sites: vec![None; snapshot.stacks()] };
    for (index, category) in found.into_iter().enumerate() {
        let object = ObjectId(index as u32);
        let category = category.unwrap_or(Category::Unattributed);
        let saved = category == Category::Activation && lives.is_saved(&taped.tape, index);
        let name = names.of(taped, snapshot, &lives, index);
        let label = taped.tape.intern_label(Label { name, owner: None, category, saved });
        taped.tape.set_label(object, label);
    }
}

impl Lives {
    fn of(taped: &Taped, snapshot: &Snapshot, roles: &[Role]) -> Self {
        let tape = &taped.tape;
        let mut lives = vec![Life::default(); tape.objects().len()];
        let (mut phases, mut has_modules) = (vec![None], vec![false]);
        let mut objects = 0_u64;
        let mut made = vec![0_u64; lives.len()];
        let mut after_modules = false;
        for event in tape.events() {
            match event {
                Event::Mark(mark) => {
                    phases.push(Some(mark));
                    has_modules.push(false);
                    after_modules = false;
                }
                Event::Alloc { object, bytes, .. } => {
                    let index = object.0 as usize;
                    let role = roles[taped.origins[index].stack.0 as usize];
                    after_modules |= role.work == Work::Forward;
                    if let Some(has) = has_modules.last_mut() {
                        *has |= after_modules;
                    }
                    objects += 1;
                    made[index] = objects;
                    lives[index] = Life {
                        bytes: bytes.get(),
                        born: phases.len() as u32 - 1,
                        after_modules,
                        role,
                        ..Life::default()
                    };
                }
                Event::FreeRequested(object) | Event::Free(object) => {
                    let index = object.0 as usize;
                    let life = &mut lives[index];
                    if life.gone.is_none() {
                        life.gone = Some(phases.len() as u32 - 1);
                        life.alone = made[index] == objects;
                        life.end = end(taped, snapshot, roles, taped.origins[index]);
                    }
                }
                // What lives while a request fails is not the scratch of a kernel that ran.
                Event::Oom { .. } => objects += 1,
                _ => {}
            }
        }
        Self { lives, phases, has_modules }
    }

    fn phase(&self, tape: &Tape, number: u32) -> Option<Phase> {
        self.phases[number as usize].map(|mark| tape.mark_of(mark).phase)
    }

    /// Whether the backward pass of the micro-batch it was made for let go of an object.
    fn is_saved(&self, tape: &Tape, index: usize) -> bool {
        let life = &self.lives[index];
        let mark = |number: u32| self.phases[number as usize].map(|mark| tape.mark_of(mark));
        let (Some(born), Some(gone)) = (mark(life.born), life.gone.and_then(mark)) else { return false };
        born.phase == Phase::FORWARD
            && gone.phase == Phase::BACKWARD
            && (born.step, born.micro_batch) == (gone.step, gone.micro_batch)
    }
}

/// What was at work when an object was let go.
fn end(taped: &Taped, snapshot: &Snapshot, roles: &[Role], origin: Origin) -> Work {
    let trace = match taped.devices[usize::from(origin.device.0)] {
        Some(index) => snapshot.traces.get(index),
        None => Some(&snapshot.host_trace),
    };
    let entry = trace.zip(origin.end).map(|(trace, entry)| snapshot.entry(trace, entry as usize));
    entry.map_or(Work::Program, |entry| roles[entry.stack.0 as usize].work)
}

struct Categories<'a> {
    taped: &'a Taped,
    snapshot: &'a Snapshot,
    lives: &'a Lives,
    /// The number of the last phase.
    last: u32,
    of: Vec<Option<Category>>,
    /// Stacks of a step with which something was made that did not outlive it.
    passing: HashSet<Stack>,
    /// How often something of a stack and a size was never let go.
    kept: HashMap<(Stack, u64), u32>,
    /// How many gradients of a size there were at once.
    gradients: BTreeMap<u64, u32>,
}

impl Categories<'_> {
    fn stack(&self, index: usize) -> Stack {
        self.taped.origins[index].stack
    }

    fn find(&mut self) {
        for (index, life) in self.lives.lives.iter().enumerate() {
            if life.gone.is_none() {
                *self.kept.entry((self.stack(index), life.bytes)).or_default() += 1;
            }
            if life.role.work == Work::Step && life.gone.is_some_and(|gone| gone == life.born) {
                self.passing.insert(self.stack(index));
            }
        }
        for index in 0..self.of.len() {
            self.of[index] = self.by_phase(index);
        }
        self.count_gradients();
        self.there_before_the_steps();
        self.there_before_the_recording();
        self.unfinished_backward();
        self.kept_past_zero_grad();
    }

    /// What the phase and the stack that an object was made in tell alone.
    fn by_phase(&self, index: usize) -> Option<Category> {
        let life = &self.lives.lives[index];
        let (role, outlives) = (life.role, life.outlives(self.last));
        let phase = self.lives.phase(&self.taped.tape, life.born);
        if role.gathers {
            return Some(Category::Parameter);
        }
        if role.collective {
            let reduced = phase == Some(Phase::BACKWARD) && outlives;
            return Some(if reduced { Category::Gradient } else { Category::CommunicationBuffer });
        }
        match role.work {
            Work::LoadState => return Some(Category::OptimizerState),
            Work::Step => {
                let stays = outlives || life.gone.is_none() && !self.passing.contains(&self.stack(index));
                return Some(if stays { Category::OptimizerState } else { Category::Temporary });
            }
            _ => {}
        }
        if life.end == Work::ZeroGrad && role.work != Work::Load {
            return Some(Category::Gradient);
        }
        if self.taped.origins[index].entry.is_none() {
            return (role.work == Work::Forward).then_some(Category::Activation);
        }
        let in_pass = matches!(phase, Some(Phase::FORWARD | Phase::BACKWARD));
        if in_pass && self.is_workspace(index) {
            return Some(Category::Workspace);
        }
        match phase {
            Some(Phase::FORWARD) if life.after_modules => Some(Category::Activation),
            Some(Phase::FORWARD) if role.is_plain() && self.lives.has_modules[life.born as usize] => {
                Some(Category::Input)
            }
            // A forward pass that the program makes of functions alone.
            Some(Phase::FORWARD) if self.lives.is_saved(&self.taped.tape, index) => {
                Some(Category::Activation)
            }
            Some(Phase::BACKWARD) if role.work == Work::Forward => Some(Category::Activation),
            Some(Phase::BACKWARD) if outlives && role.is_plain() => None,
            Some(Phase::BACKWARD) if outlives => Some(Category::Gradient),
            Some(Phase::LOAD) | None if outlives => None,
            Some(_) if life.gone.is_some_and(|gone| gone == life.born) => Some(Category::Temporary),
            None if role.work == Work::Forward => Some(Category::Activation),
            _ => None,
        }
    }

    fn is_workspace(&self, index: usize) -> bool {
        let life = &self.lives.lives[index];
        let kept_once = || {
            KEPT_WORKSPACES.contains(&life.bytes)
                && self.kept.get(&(self.stack(index), life.bytes)) == Some(&1)
        };
        WORKSPACES.contains(&life.bytes)
            && match life.gone {
                Some(_) => life.alone,
                None => kept_once(),
            }
    }

    /// The sizes of the gradients that are there together: the most of each size in any phase.
    fn count_gradients(&mut self) {
        let mut alive: BTreeMap<u64, u32> = BTreeMap::new();
        for event in self.taped.tape.events() {
            let (object, made) = match event {
                Event::Alloc { object, .. } => (object, true),
                Event::Free(object) => (object, false),
                _ => continue,
            };
            let index = object.0 as usize;
            if self.of[index] != Some(Category::Gradient) {
                continue;
            }
            let bytes = self.lives.lives[index].bytes;
            let count = alive.entry(bytes).or_default();
            *count = if made { *count + 1 } else { count.saturating_sub(1) };
            let most = self.gradients.entry(bytes).or_default();
            *most = (*most).max(*count);
        }
    }

    /// Parameters and buffers: what is made before the first step, or by moving and loading modules.
    fn there_before_the_steps(&mut self) {
        /// Where a walk over modules makes what: the line of its branch.
        type Branches = BTreeMap<i64, Vec<usize>>;
        let mut walks: HashMap<Stack, Option<Frame>> = HashMap::new();
        let mut families: BTreeMap<(u32, u32), Branches> = BTreeMap::new();
        for index in 0..self.of.len() {
            let life = &self.lives.lives[index];
            let phase = self.lives.phase(&self.taped.tape, life.born);
            let before = self.taped.origins[index].entry.is_none() && life.gone.is_none();
            let known = self.taped.origins[index].entry.is_some() || life.role.thread == Thread::Program;
            let stays = life.outlives(self.last) || life.gone.is_none();
            let loads = phase == Some(Phase::LOAD) || before || life.role.work == Work::Load;
            if self.of[index].is_some() || !known || !stays || !loads {
                continue;
            }
            let has_gradient = self.gradients.contains_key(&life.bytes);
            let stack = self.stack(index);
            let walk = walks.entry(stack).or_insert_with(|| walk(self.snapshot, stack));
            match *walk {
                Some(turn) => {
                    let branches = families.entry((turn.file.0, turn.name.0)).or_default();
                    branches.entry(turn.line).or_default().push(index);
                }
                None if life.role.work == Work::Load || has_gradient => {
                    self.of[index] = Some(Category::Parameter);
                }
                None => {}
            }
        }
        for branches in families.into_values() {
            // A walk comes to the parameters of a module before its buffers: gradients are the earlier
            // branch's first, where buffers have sizes of parameters.
            let mut open = self.gradients.clone();
            let mut has_gradient = |objects: &[usize]| {
                let mut has = false;
                for index in objects {
                    if let Some(count) =
                        open.get_mut(&self.lives.lives[*index].bytes).filter(|count| **count > 0)
                    {
                        (*count, has) = (*count - 1, true);
                    }
                }
                has
            };
            let branches: Vec<(Vec<usize>, bool)> = branches
                .into_values()
                .map(|objects| {
                    let has = has_gradient(&objects);
                    (objects, has)
                })
                .collect();
            let trained = branches.iter().any(|(_, has_gradient)| *has_gradient);
            for (place, (objects, has_gradient)) in branches.into_iter().enumerate() {
                let parameters = if trained { has_gradient } else { place == 0 };
                let category = if parameters { Category::Parameter } else { Category::Buffer };
                objects.into_iter().for_each(|index| self.of[index] = Some(category));
            }
        }
    }

    /// What was there before the recording and stays to its end: of each size as many parameters as
    /// there are gradients, and whole sets of that number more are the optimizer's. Which is which
    /// does not tell, but their sums do.
    fn there_before_the_recording(&mut self) {
        let phases = (1..=self.last).filter_map(|number| self.lives.phase(&self.taped.tape, number));
        if phases.filter(|phase| *phase == Phase::UPDATE).count() == 0 {
            return;
        }
        let knows_state = self.of.contains(&Some(Category::OptimizerState));
        let mut open = self.gradients.clone();
        let mut before: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (index, life) in self.lives.lives.iter().enumerate().filter(|(_, life)| life.gone.is_none()) {
            match (self.of[index], open.get_mut(&life.bytes)) {
                (Some(Category::Parameter), Some(count)) => *count = count.saturating_sub(1),
                (None, Some(_)) if self.taped.origins[index].entry.is_none() => {
                    before.entry(life.bytes).or_default().push(index);
                }
                _ => {}
            }
        }
        for (bytes, objects) in before {
            let (parameters, set) = (open[&bytes] as usize, self.gradients[&bytes] as usize);
            let more = objects.len().saturating_sub(parameters);
            let state = if knows_state || set == 0 { 0 } else { more / set * set };
            for (place, index) in objects.into_iter().take(parameters + state).enumerate() {
                let category =
                    if place < parameters { Category::Parameter } else { Category::OptimizerState };
                self.of[index] = Some(category);
            }
        }
    }

    /// What autograd made and a `zero_grad` passed over is of no parameter, where no parameter has its
    /// size: the gradient of an input that was made to require one.
    fn kept_past_zero_grad(&mut self) {
        let lives = &self.lives.lives;
        let zeroed: BTreeSet<u32> =
            lives.iter().filter(|life| life.end == Work::ZeroGrad).filter_map(|life| life.gone).collect();
        let parameters = lives.iter().zip(&self.of).filter(|(_, of)| **of == Some(Category::Parameter));
        let parameters: HashSet<u64> = parameters.map(|(life, _)| life.bytes).collect();
        if parameters.is_empty() {
            return;
        }
        for (life, of) in lives.iter().zip(&mut self.of) {
            let passed_over = || zeroed.range(life.born + 1..life.gone.unwrap_or(u32::MAX)).next().is_some();
            if *of == Some(Category::Gradient)
                && life.end != Work::ZeroGrad
                && !life.role.collective
                && !parameters.contains(&life.bytes)
                && life.gone.is_none_or(|gone| gone > life.born)
                && passed_over()
            {
                *of = Some(Category::Temporary);
            }
        }
    }

    /// Where the recording ends within a backward pass, what it made so far of the size of a
    /// parameter that has no gradient yet is its gradient.
    fn unfinished_backward(&mut self) {
        if self.lives.phase(&self.taped.tape, self.last) != Some(Phase::BACKWARD) {
            return;
        }
        let mut open: BTreeMap<u64, u32> = BTreeMap::new();
        for (index, life) in self.lives.lives.iter().enumerate().filter(|(_, life)| life.gone.is_none()) {
            match self.of[index] {
                Some(Category::Parameter) => *open.entry(life.bytes).or_default() += 1,
                Some(Category::Gradient) => {
                    let count = open.entry(life.bytes).or_default();
                    *count = count.saturating_sub(1);
                }
                _ => {}
            }
        }
        for index in 0..self.of.len() {
            let life = &self.lives.lives[index];
            if self.of[index].is_none()
                && life.born == self.last
                && life.gone.is_none()
                && let Some(count) = open.get_mut(&life.bytes).filter(|count| **count > 0)
            {
                *count -= 1;
                self.of[index] = Some(Category::Gradient);
            }
        }
    }
}

/// The names of objects: the place in the program, or the phase where no stack tells it.
struct Names {
    sites: Vec<Option<ledger::Name>>,
}

impl Names {
    fn of(&mut self, taped: &mut Taped, snapshot: &Snapshot, lives: &Lives, index: usize) -> ledger::Name {
        let origin = taped.origins[index];
        let known = &mut self.sites[origin.stack.0 as usize];
        if let Some(name) = known {
            return *name;
        }
        if let Some(site) = snapshot.site(origin.stack, 2) {
            return *known.insert(taped.tape.intern(&site));
        }
        let tape = &mut taped.tape;
        if origin.entry.is_none() {
            return tape.intern(BEFORE);
        }
        match lives.phase(tape, lives.lives[index].born) {
            Some(phase) => {
                let name = format!("made in {}", tape.phase_name(phase));
                tape.intern(&name)
            }
            None => tape.intern(NOWHERE),
        }
    }
}

/// The name of what was there before the recording, where nothing tells who made it.
const BEFORE: &str = "made before the recording";
/// The name of what has neither a stack nor a phase.
const NOWHERE: &str = "made without a stack";
