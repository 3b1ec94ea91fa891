//! The steps and phases of a trace: by the profiler's steps, and by what is at work.

use std::collections::BTreeSet;

use ledger::Phase;

use super::attribute::Around;
use super::{Instant, Kept, SpanKind};

/// A mark, and the instant before which it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) instant: usize,
    pub(super) step: u32,
    pub(super) micro_batch: Option<u32>,
    pub(super) phase: Phase,
}

/// What the part of a program that an instant is in does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Backward,
    Update,
    ZeroGrad,
    /// Operators of the program itself: a forward pass, or what prepares an update.
    Plain,
    /// Nothing that tells.
    Other,
}

/// Where steps and phases begin among the instants at `order`, which is the order of time, and
/// whether the profiler's steps count from 0 and are told as counted from 1.
pub(super) fn phases(kept: &Kept, around: &[Around], order: &[usize]) -> (Vec<Begin>, bool) {
    let mut steps: Vec<(f64, f64, u32, u32)> = Vec::new();
    for span in &kept.spans {
        if let SpanKind::Step(step) = span.kind {
            steps.push((span.start, span.end, step, span.thread));
        }
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let from_zero = steps.iter().any(|step| step.2 == 0);
    // Threads that train: others copy and log.
    let mut training: BTreeSet<u32> = steps.iter().map(|step| step.3).collect();
    training.extend(kept.spans.iter().filter(|span| span.kind == SpanKind::Update).map(|span| span.thread));
    let work: Vec<Work> =
        order.iter().map(|index| work(&kept.instants[*index], &around[*index], &training)).collect();
    let ahead = ahead(&work);
    let mut begins: Vec<Begin> = Vec::new();
    let mut at = Begin { instant: 0, step: 0, micro_batch: None, phase: Phase::LOAD };
    let (mut next_step, mut ends) = (0, f64::INFINITY);
    for (place, index) in order.iter().enumerate() {
        let time = kept.instants[*index].time;
        let mut now = at;
        while let Some((start, end, step, _)) = steps.get(next_step).copied().filter(|step| step.0 <= time) {
            let step = step.saturating_add(u32::from(from_zero));
            now = Begin { step, micro_batch: None, phase: Phase::FORWARD, ..now };
            (next_step, ends) = (next_step + 1, end);
            debug_assert!(start <= time);
        }
        if !steps.is_empty() && (next_step == 0 || time > ends) {
            // Before the first step, between two, or after the last.
            continue;
        }
        let forward = |mut now: Begin| {
            if now.phase != Phase::FORWARD {
                if steps.is_empty() && matches!(now.phase, Phase::UPDATE | Phase::ZERO_GRAD | Phase::LOAD) {
                    (now.step, now.micro_batch) = (now.step + 1, None);
                }
                now.phase = Phase::FORWARD;
            }
            now
        };
        match work[place] {
            Work::Backward => {
                if now.phase == Phase::LOAD {
                    (now.step, now.micro_batch) = (1, None);
                }
                now.phase = Phase::BACKWARD;
            }
            Work::Update => now.phase = Phase::UPDATE,
            Work::ZeroGrad => now.phase = Phase::ZERO_GRAD,
            Work::Plain if now.phase != Phase::FORWARD => match ahead[place] {
                Work::Backward => now = forward(now),
                // Gradients are clipped before the optimizer takes them.
                Work::Update if now.phase == Phase::BACKWARD => now.phase = Phase::UPDATE,
                _ => {}
            },
            Work::Plain | Work::Other => {}
        }
        if (now.step, now.phase) != (at.step, at.phase) {
            if now.phase == Phase::FORWARD {
                let before = if now.step == at.step { at.micro_batch.unwrap_or(0) } else { 0 };
                now.micro_batch = Some(before + 1);
            } else if matches!(now.phase, Phase::UPDATE | Phase::ZERO_GRAD) {
                now.micro_batch = None;
            } else if now.micro_batch.is_none() {
                now.micro_batch = Some(1);
            }
            now.instant = place;
            begins.push(now);
            at = now;
        }
    }
    (begins, from_zero)
}

/// What an instant is in.
fn work(instant: &Instant, around: &Around, training: &BTreeSet<u32>) -> Work {
    if around.update {
        Work::Update
    } else if around.zero_grad {
        Work::ZeroGrad
    } else if around.backward {
        Work::Backward
    } else if instant.bytes > 0 && around.operator.is_some() && training.contains(&instant.thread) {
        Work::Plain
    } else {
        Work::Other
    }
}

/// For each instant the next work that is neither plain nor other.
fn ahead(work: &[Work]) -> Vec<Work> {
    let mut ahead = vec![Work::Other; work.len()];
    let mut next = Work::Other;
    for (place, work) in work.iter().enumerate().rev() {
        if !matches!(work, Work::Plain | Work::Other) {
            next = *work;
        }
        ahead[place] = next;
    }
    ahead
}
