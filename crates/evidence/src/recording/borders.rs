//! Where a forward phase begins, and the last step ends: with the first tensor that a model is called with.
//!
//! The recorder notices a forward pass when a model is called; by then the batch has been fetched,
//! under the mark of what came before. The allocator's entries tell where the batch was made.

use std::collections::HashMap;

use super::{END, Run, RunLabel, RunMark, note};
use crate::snapshot::{Action, Entry, Snapshot};

/// An entry before which a forward phase begins, or the last step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Border {
    /// Its place in the trace of the device that the program used.
    pub(super) index: usize,
    /// What tells it from the entry of that place on another device.
    pub(super) entry: Entry,
    /// The mark with which the recorder noticed the phase.
    pub(super) mark: usize,
}

const FORWARD: &str = "forward";
/// The category of labels that name inputs.
const INPUT: &str = "input";

/// A block in use.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// The entry that made it, and how many marks came before.
    index: usize,
    passed: usize,
    /// Whether a module was at work.
    in_module: bool,
    /// Whether a label names it as something that lasts.
    lasts: bool,
}

/// A block that is no longer in use: the entries that made it and let go of it.
type Past = (usize, usize);

/// Follows the blocks of a trace from mark to mark.
struct Walk<'a> {
    run: &'a Run,
    /// The labels of each mark.
    labels: Vec<Vec<&'a RunLabel>>,
    alive: HashMap<u64, Block>,
    /// What was made and let go of since the last mark.
    past: Vec<Past>,
    /// The last entry that let go of something that lasts: of gradients, in `zero_grad`.
    let_go: Option<usize>,
}

/// Where each such phase of `run` begins, in order; one whose mark is at its place is left out.
pub(super) fn borders(run: &Run, snapshot: &Snapshot) -> Vec<Border> {
    let Some(trace) = snapshot.traces.get(usize::from(run.device)) else { return Vec::new() };
    let mut walk = Walk::new(run);
    let mut borders = Vec::new();
    let mut passed = 0;
    for (index, entry) in snapshot.entries(trace).enumerate() {
        let noted = note(snapshot.text(entry.user_metadata));
        if let Some((mark, _)) = noted {
            while passed <= mark && passed < run.marks.len() {
                borders.extend(walk.pass(passed).map(|mut index| {
                    // A segment taken for a block comes with it.
                    let is_for_block = |action| {
                        !matches!(action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted)
                    };
                    while index > 0 && is_for_block(snapshot.entry(trace, index - 1).action) {
                        index -= 1;
                    }
                    Border { index, entry: snapshot.entry(trace, index), mark: passed }
                }));
                passed += 1;
            }
        }
        let in_module = noted.is_some_and(|(_, module)| !module.is_empty());
        walk.follow(index, &entry, passed, in_module);
    }
    borders
}

impl<'a> Walk<'a> {
    fn new(run: &'a Run) -> Self {
        let mut labels = vec![Vec::new(); run.marks.len()];
        for label in &run.labels {
            if let Some(labels) = labels.get_mut(label.mark) {
                labels.push(label);
            }
        }
        Self { run, labels, alive: HashMap::new(), past: Vec::new(), let_go: None }
    }

    /// Takes over an entry that follows the first `passed` marks.
    fn follow(&mut self, index: usize, entry: &Entry, passed: usize, in_module: bool) {
        match entry.action {
            Action::Alloc => {
                self.alive.insert(entry.address, Block { index, passed, in_module, lasts: false });
            }
            Action::FreeRequested => {
                let Some(block) = self.alive.remove(&entry.address) else { return };
                if block.lasts {
                    self.let_go = Some(index);
                } else if block.passed == passed {
                    self.past.push((block.index, index));
                }
            }
            _ => {}
        }
    }

    /// The entry that begins the phase of mark `number`, where the mark comes too late.
    fn pass(&mut self, number: usize) -> Option<usize> {
        let marks = &self.run.marks;
        let begins = matches!(marks[number].phase.as_str(), FORWARD | END) && number > 0;
        let begins = begins && !same_place(&marks[number - 1], &marks[number]);
        let border = if begins { self.border(number) } else { None };
        for (address, _) in self.objects(number, false) {
            if let Some(block) = self.alive.get_mut(address) {
                block.lasts = true;
            }
        }
        self.past.clear();
        border
    }

    /// What the labels of a mark name: inputs, or all else.
    fn objects(&self, number: usize, inputs: bool) -> impl Iterator<Item = &'a (u64, String)> + use<'a> {
        let labels = self.labels[number].clone().into_iter();
        labels.filter(move |label| (label.category == INPUT) == inputs).flat_map(|label| &label.objects)
    }

    fn border(&self, number: usize) -> Option<usize> {
        let marks = &self.run.marks;
        let place = (number..marks.len()).take_while(|next| same_place(&marks[*next], &marks[number]));
        let at = |(address, _): &(u64, String)| self.alive.get(address);
        let named = self.objects(number, false).filter_map(at);
        let lasting = named.chain(self.alive.values().filter(|block| block.lasts));
        // What was made before something that lasts came or went belongs to the phase of that.
        let after = lasting.map(|block| block.index).chain(self.let_go).max();
        let is_after = |index| after.is_none_or(|after| index > after);
        let inputs = place.flat_map(|next| self.objects(next, true)).filter_map(at);
        let made = inputs.filter(|block| block.passed == number && !block.in_module);
        let first = made.map(|block| block.index).filter(|index| is_after(*index)).min()?;
        // What a first tensor was made of, a copy in another dtype for one, comes with it.
        let sources = self.past.iter().rev();
        Some(sources.fold(first, |first, (made, gone)| {
            if *made < first && *gone > first && is_after(*made) { *made } else { first }
        }))
    }
}

fn same_place(a: &RunMark, b: &RunMark) -> bool {
    (a.step, a.micro_batch, &a.phase) == (b.step, b.micro_batch, &b.phase)
}
