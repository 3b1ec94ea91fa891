//! Steps of a recording whose stacks tell no phases: by the profiler's annotations, else by what it
//! repeats.
//!
//! A step asks for the same sizes in the same order as the one before. A size that is asked for once
//! a step comes back at an even distance; the distance that most sizes agree on is the period, where
//! the sizes then repeat themselves with it.

use std::collections::{BTreeMap, HashMap};

use ledger::Phase;

use super::phases::Begin;
use crate::snapshot::{Action, Entry, Snapshot, Trace};

/// The name of the one phase of such a step.
pub(super) const STEP: &str = "step";
/// Its place behind the phases that every tape has.
pub(super) const PHASE: Phase = Phase(Phase::NAMES.len() as u16);

/// The fewest equal distances that make a period, and so steps.
const LEAST_REPEATS: usize = 3;
/// The fewest requests of a step: less repeats by chance.
const LEAST_PERIOD: usize = 8;
/// The share of sizes that repeat within a step that counts.
const SAME: f64 = 0.9;

/// Where the steps of `trace` begin; nothing where that cannot be told.
pub(super) fn steps(snapshot: &Snapshot, trace: &Trace) -> Vec<Begin> {
    let annotated = annotated(snapshot, trace);
    if !annotated.is_empty() {
        return annotated;
    }
    let starts = repeated(snapshot, trace);
    let load = Begin { entry: 0, step: 0, micro_batch: None, phase: Phase::LOAD };
    let loads = starts.first().is_some_and(|start| *start > 0).then_some(load);
    let begins =
        (1..).zip(starts).map(|(step, entry)| Begin { entry, step, micro_batch: None, phase: PHASE });
    loads.into_iter().chain(begins).collect()
}

/// The steps by the annotations of the optimizer, else by those of the profiler. What comes before the
/// first update is of the first step, the load too.
fn annotated(snapshot: &Snapshot, trace: &Trace) -> Vec<Begin> {
    let first = snapshot.entries(trace).next().map_or(0, |entry| entry.time_us);
    let named = |name: &'static str| {
        let annotations = snapshot.annotations.iter().filter(move |it| it.time_us >= first);
        annotations.filter(move |it| snapshot.text(it.name).starts_with(name))
    };
    let mut begins: Vec<Begin> = Vec::new();
    let mut begin = |entry: usize, step: u32, phase: Phase| {
        if begins.last().is_none_or(|last| (last.step, last.phase) != (step, phase)) {
            begins.push(Begin { entry, step, micro_batch: None, phase });
        }
    };
    if named("Optimizer.step").next().is_some() {
        let mut annotations = named("Optimizer.step").peekable();
        let (mut step, mut over) = (1, false);
        for (index, entry) in snapshot.entries(trace).enumerate() {
            if index == 0 {
                begin(index, step, PHASE);
            }
            while let Some(annotation) = annotations.next_if(|it| it.time_us <= entry.time_us) {
                if annotation.starts {
                    begin(index, step, Phase::UPDATE);
                }
                over = !annotation.starts;
            }
            // What is let go of after the step is of the update: gradients.
            if over && entry.action == Action::Alloc {
                (step, over) = (step + 1, false);
                begin(index, step, PHASE);
            }
        }
        return begins;
    }
    let mut profiled = named("ProfilerStep#").filter(|annotation| annotation.starts).peekable();
    let mut step = 0;
    for (index, entry) in snapshot.entries(trace).enumerate() {
        if profiled.next_if(|annotation| annotation.time_us <= entry.time_us).is_some() {
            step += 1;
            begin(index, step, PHASE);
        }
    }
    begins
}

/// The entries with which what repeats begins again.
fn repeated(snapshot: &Snapshot, trace: &Trace) -> Vec<usize> {
    let made =
        |(index, entry): (usize, Entry)| (entry.action == Action::Alloc).then_some((index, entry.size.get()));
    let requests: Vec<(usize, u64)> = snapshot.entries(trace).enumerate().filter_map(made).collect();
    let Some(period) = period(&requests) else { return Vec::new() };
    // Backward from the end, as far as it repeats.
    let repeats = |end: usize| {
        end >= 2 * period && {
            let same = (end - period..end).filter(|at| requests[*at].1 == requests[at - period].1).count();
            same as f64 >= SAME * period as f64
        }
    };
    let mut first = requests.len() - period;
    while repeats(first + period) {
        first -= period;
    }
    let held = held(snapshot, trace);
    // A step begins where the least is held.
    let last = requests.len() - period;
    let least = (last..requests.len()).min_by_key(|at| held[requests[*at].0]).unwrap_or(last);
    let mut starts: Vec<usize> =
        (first..=least).rev().filter(|at| (least - at).is_multiple_of(period)).collect();
    starts.reverse();
    starts.into_iter().map(|at| requests[at].0).collect()
}

/// The number of requests after which they repeat themselves.
fn period(requests: &[(usize, u64)]) -> Option<usize> {
    let mut places: HashMap<u64, Vec<usize>> = HashMap::new();
    for (place, (_, size)) in requests.iter().enumerate() {
        places.entry(*size).or_default().push(place);
    }
    let mut votes: BTreeMap<usize, usize> = BTreeMap::new();
    for places in places.values().filter(|places| places.len() > LEAST_REPEATS) {
        let last = &places[places.len() - LEAST_REPEATS - 1..];
        let distance = last[1] - last[0];
        if distance >= LEAST_PERIOD && last.windows(2).all(|pair| pair[1] - pair[0] == distance) {
            *votes.entry(distance).or_default() += 1;
        }
    }
    let (period, _) = votes.into_iter().max_by_key(|(distance, votes)| (*votes, *distance))?;
    let end = requests.len();
    let compared = (end.saturating_sub(2 * period)).max(period)..end;
    let same = compared.clone().filter(|at| requests[*at].1 == requests[at - period].1).count();
    (same as f64 >= SAME * compared.len() as f64).then_some(period)
}

/// The bytes that are held before each entry more than before the first.
fn held(snapshot: &Snapshot, trace: &Trace) -> Vec<i128> {
    let mut held = 0_i128;
    let before = |entry: Entry| {
        let now = held;
        match entry.action {
            Action::Alloc => held += i128::from(entry.size.get()),
            Action::FreeRequested => held -= i128::from(entry.size.get()),
            _ => {}
        }
        now
    };
    snapshot.entries(trace).map(before).collect()
}
