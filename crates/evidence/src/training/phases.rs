//! Where the steps of a training run and their phases begin, told by stacks and annotations.
//!
//! A module at work is a forward pass, autograd at work a backward pass, an optimizer at work an
//! update. What the program does itself, outside of these, belongs to what follows: a batch is
//! fetched for the pass that uses it.

use std::collections::HashSet;

use ledger::{Mark, Phase};

use super::role::{Role, Thread, Work, call_of_backward, caller_of_modules};
use crate::snapshot::{Action, Entry, Snapshot, Stack, Trace};

/// A phase and the entry it begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) entry: usize,
    pub(super) step: u32,
    pub(super) micro_batch: Option<u32>,
    pub(super) phase: Phase,
}

impl Begin {
    pub(super) const fn mark(self) -> Mark {
        Mark { step: self.step, micro_batch: self.micro_batch, phase: self.phase, text: None }
    }
}

/// What an entry is evidence of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    Load,
    Forward,
    Backward,
    Update,
    ZeroGrad,
    /// The program itself takes memory.
    Plain,
}

/// The phases of `trace`, in order. `roles` are those of the snapshot's stacks.
pub(super) fn phases(snapshot: &Snapshot, trace: &Trace, roles: &[Role]) -> Vec<Begin> {
    let begins = find(snapshot, trace, roles, false);
    let trains = begins.iter().any(|begin| matches!(begin.phase, Phase::BACKWARD | Phase::UPDATE));
    let runs = begins.iter().any(|begin| begin.phase == Phase::FORWARD);
    if trains || !runs { begins } else { find(snapshot, trace, roles, true) }
}

/// The phases of `trace`; where it `only_runs` models, each call of one from the same line is a pass.
fn find(snapshot: &Snapshot, trace: &Trace, roles: &[Role], only_runs: bool) -> Vec<Begin> {
    let mut finder = Finder {
        snapshot,
        trace,
        roles,
        begins: Vec::new(),
        at: None,
        step: 0,
        micro_batch: 0,
        plain: None,
        first: None,
        fetching: HashSet::new(),
        only_runs,
    };
    // Without any stack of the program the absence of one says nothing.
    if roles.iter().all(|role| role.thread != Thread::Program) {
        return Vec::new();
    }
    // The oldest entries may be gone while the annotations of their time are there.
    let first = snapshot.entries(trace).next().map_or(0, |entry| entry.time_us);
    let annotations = snapshot.annotations.iter();
    let mut annotations =
        annotations.filter(|annotation| annotation.starts && annotation.time_us >= first).peekable();
    for (index, entry) in snapshot.entries(trace).enumerate() {
        while let Some(annotation) = annotations.next_if(|annotation| annotation.time_us <= entry.time_us) {
            match snapshot.text(annotation.name) {
                name if name.starts_with("Optimizer.step") => finder.see(index, Evidence::Update),
                name if name.starts_with("Optimizer.zero_grad") => finder.see(index, Evidence::ZeroGrad),
                _ => {}
            }
        }
        if let Some(evidence) = evidence(&entry, roles[entry.stack.0 as usize]) {
            finder.see(index, evidence);
        }
    }
    finder.finish()
}

/// What `entry` is evidence of.
fn evidence(entry: &Entry, role: Role) -> Option<Evidence> {
    let takes =
        matches!(entry.action, Action::Alloc | Action::SegmentAlloc | Action::SegmentMap | Action::Oom);
    match (role.thread, role.work) {
        // Autograd's own threads run no Python but for hooks.
        (Thread::Autograd | Thread::Unknown, _) if takes => Some(Evidence::Backward),
        (Thread::Autograd | Thread::Unknown, _) => None,
        (Thread::Program, Work::Step | Work::Clip) => Some(Evidence::Update),
        (Thread::Program, Work::ZeroGrad) => Some(Evidence::ZeroGrad),
        // What is let go of may be so late, and anywhere.
        _ if !takes => None,
        (Thread::Program, Work::Forward) => Some(Evidence::Forward),
        (Thread::Program, Work::Backward) => Some(Evidence::Backward),
        (Thread::Program, Work::Load | Work::LoadState) => Some(Evidence::Load),
        (Thread::Program, Work::Program) => Some(Evidence::Plain),
    }
}

struct Finder<'a> {
    snapshot: &'a Snapshot,
    trace: &'a Trace,
    roles: &'a [Role],
    begins: Vec<Begin>,
    /// The phase that runs; none before the first.
    at: Option<Phase>,
    step: u32,
    micro_batch: u32,
    /// The first entry since the last other evidence with which the program itself took memory.
    plain: Option<usize>,
    /// The entry that showed the first forward or backward pass.
    first: Option<usize>,
    /// The stacks with which the program itself takes memory before a forward pass.
    fetching: HashSet<Stack>,
    /// Whether nothing is trained.
    only_runs: bool,
}

impl Finder<'_> {
    fn see(&mut self, index: usize, evidence: Evidence) {
        let running = self.at.filter(|at| *at != Phase::LOAD);
        match (evidence, running) {
            (Evidence::Plain, Some(Phase::FORWARD)) if !self.only_runs => {}
            (Evidence::Plain, _) => {
                self.plain.get_or_insert(index);
            }
            (Evidence::Load, None) => (self.at, self.plain) = (Some(Phase::LOAD), None),
            (Evidence::Load, _) => {}
            (Evidence::ZeroGrad, Some(Phase::BACKWARD)) => self.update(index),
            (Evidence::ZeroGrad, _) => {}
            // A state that is made before the first step is part of the load.
            (Evidence::Update, None) if self.at == Some(Phase::LOAD) => self.plain = None,
            (Evidence::Update, Some(Phase::UPDATE)) => self.plain = None,
            (Evidence::Update, _) => self.update(index),
            (Evidence::Forward, Some(Phase::FORWARD)) => {
                if self.plain.is_some() && self.first.is_some_and(|first| self.same_call(first, index)) {
                    self.forward(index);
                }
            }
            (Evidence::Forward, _) => self.forward(index),
            (Evidence::Backward, Some(Phase::BACKWARD)) => self.plain = None,
            (Evidence::Backward, running) => {
                let start = self.line_of_backward(index);
                if running != Some(Phase::FORWARD) && self.plain.is_some_and(|plain| plain < start) {
                    // A forward pass without modules.
                    self.forward(start);
                }
                self.backward(start);
            }
        }
    }

    fn forward(&mut self, index: usize) {
        let start = self.plain.take().unwrap_or(index);
        match self.at {
            Some(Phase::BACKWARD | Phase::FORWARD) => self.micro_batch += 1,
            _ => (self.step, self.micro_batch) = (self.step + 1, 1),
        }
        if self.at.is_none_or(|at| at == Phase::LOAD) {
            self.first = Some(index);
        } else {
            for entry in (start..index).map(|entry| self.snapshot.entry(self.trace, entry)) {
                if self.roles[entry.stack.0 as usize].is_plain() {
                    self.fetching.insert(entry.stack);
                }
            }
        }
        self.begin(start, Phase::FORWARD, Some(self.micro_batch));
    }

    /// Whether the modules at work at two entries were called from the same line.
    fn same_call(&self, one: usize, other: usize) -> bool {
        let call = |at: usize| caller_of_modules(self.snapshot, self.snapshot.entry(self.trace, at).stack);
        call(one).is_some_and(|line| call(other) == Some(line))
    }

    fn backward(&mut self, index: usize) {
        if self.at != Some(Phase::FORWARD) {
            // The recording begins in the middle, or a step goes backward twice.
            (self.step, self.micro_batch) = (self.step + 1, 1);
        }
        self.plain = None;
        self.begin(index, Phase::BACKWARD, Some(self.micro_batch));
    }

    fn update(&mut self, index: usize) {
        let start = match self.at {
            // What the program does between its passes and the step is of the update.
            Some(Phase::BACKWARD) => self.plain.unwrap_or(index),
            _ => index,
        };
        self.step = self.step.max(1);
        self.plain = None;
        self.begin(start, Phase::UPDATE, None);
    }

    fn begin(&mut self, entry: usize, phase: Phase, micro_batch: Option<u32>) {
        self.at = Some(phase);
        self.begins.push(Begin { entry, step: self.step, micro_batch, phase });
    }

    /// The first of the entries from the line of the program that began the backward pass which the
    /// entry at `index` is of.
    fn line_of_backward(&self, index: usize) -> usize {
        let stack = |at: usize| self.snapshot.entry(self.trace, at).stack;
        let Some(call) = call_of_backward(self.snapshot, stack(index)) else { return index };
        let of_the_line = |at: &usize| {
            let stack = stack(*at);
            self.roles[stack.0 as usize].is_plain() && {
                let frames = self.snapshot.stack(stack);
                frames.len() >= call.len() && frames.rev().zip(call.iter().rev()).all(|(a, b)| a == b)
            }
        };
        let least = self.begins.last().map_or(0, |begin| begin.entry);
        (least..index).rev().take_while(of_the_line).last().unwrap_or(index)
    }

    /// The phases, with the load before the first.
    fn finish(mut self) -> Vec<Begin> {
        let load = Begin { entry: 0, step: 0, micro_batch: None, phase: Phase::LOAD };
        if self.begins.is_empty() {
            // No step was reached.
            let failed = || self.snapshot.entries(self.trace).any(|entry| entry.action == Action::Oom);
            return if self.at == Some(Phase::LOAD) || failed() { vec![load] } else { Vec::new() };
        }
        // An update that takes and gives nothing back is not seen: then each pass is a step.
        if self.begins.iter().all(|begin| begin.phase != Phase::UPDATE) {
            for begin in &mut self.begins {
                begin.step = begin.micro_batch.unwrap_or(begin.step);
                begin.micro_batch = begin.micro_batch.map(|_| 1);
            }
        }
        if let (Some(seen), Some(start)) = (self.first, self.start_of_first()) {
            if let Some(first) = self.begins.iter_mut().find(|begin| begin.entry <= seen) {
                first.entry = start;
            }
            let loads = |entry: usize| {
                let action = self.snapshot.entry(self.trace, entry).action;
                matches!(action, Action::Alloc | Action::SegmentAlloc | Action::SegmentMap)
            };
            if (0..start).any(loads) {
                self.begins.insert(0, load);
            }
        }
        self.begins
    }

    /// Where the first forward pass begins: what is fetched before every other one is fetched before
    /// the first too. Where there is no other, the function that calls the model fetches for it.
    fn start_of_first(&self) -> Option<usize> {
        let seen = self.first?;
        let stack = |at: usize| self.snapshot.entry(self.trace, at).stack;
        let role = |at: usize| self.roles[stack(at).0 as usize];
        let function = |at: usize| role(at).program.map(|frame| (frame.file, frame.name));
        let caller = caller_of_modules(self.snapshot, stack(seen)).map(|frame| (frame.file, frame.name));
        let fetches = |at: &usize| {
            let entry = self.snapshot.entry(self.trace, *at);
            let takes = matches!(entry.action, Action::Alloc | Action::SegmentAlloc | Action::SegmentMap);
            if !takes {
                return true;
            }
            match self.fetching.is_empty() {
                true => role(*at).is_plain() && caller.is_some() && function(*at) == caller,
                false => self.fetching.contains(&entry.stack),
            }
        };
        let run = (0..seen).rev().take_while(fetches);
        // What is let go of before the first fetch is of the load.
        let takes = |at: &usize| {
            self.snapshot.entry(self.trace, *at).action != Action::FreeCompleted
                && self.snapshot.entry(self.trace, *at).action != Action::FreeRequested
        };
        Some(run.filter(takes).last().unwrap_or(seen))
    }
}
