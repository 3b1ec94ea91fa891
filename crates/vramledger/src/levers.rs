//! What other settings would save: each is run as the plan was.

use std::num::NonZeroUsize;
use std::thread;

use ledger::Dtype;
use models::{Attention, Checkpoint, Optimizer, OptimizerImpl, Setup};
use wire::Peak;
use wire::explanation::{Lever, PeakSummary};

use crate::explain::summary;
use crate::plan::{fitted, run};
use crate::{Plan, PlanQuestion};

/// The events that the other settings may cost together: some tens of milliseconds. One is tried in
/// any case, but for runs that take seconds themselves.
const MOST_EVENTS: usize = 75_000;
const LONG_RUN: usize = 2_000_000;
/// The share of the peak that a saving must be beyond to be worth a row.
const LEAST_SHARE: f64 = 0.001;
/// Steps and micro-batches after which nothing new happens: the state exists from the second step
/// on, the gradients from the second micro-batch on.
const STEADY: u32 = 2;

/// The requested peak that a plan which found no room would have on a card without end.
pub fn demand(plan: &Plan<'_>) -> Option<PeakSummary> {
    plan.ledger.oom.as_ref()?;
    let books = ledger::replay(&plan.tape, None);
    books.peaks.requested.as_ref().map(|peak| summary(&Peak::from(peak), "requested"))
}

/// What other settings would save of the requested peak of `plan`, the most first, and only what
/// saves something worth a row. Where the plan does not fit, each tells whether it would.
///
/// The settings are tried in the order of what they cost a user, as many as [`MOST_EVENTS`] allows.
pub fn levers(plan: &Plan<'_>) -> Vec<Lever> {
    let known = plan.ledger.peaks.requested.as_ref().map(|peak| summary(peak, "requested"));
    let Some(peak) = demand(plan).or(known) else { return Vec::new() };
    let does_not_fit = plan.ledger.oom.is_some();
    let mut question = plan.question.clone();
    let rounds = |setup: &Setup| setup.steps as usize * setup.accumulate as usize;
    shorten(&mut question.setup, &peak);
    let events = plan.tape.len() * rounds(&question.setup) / rounds(&plan.question.setup);
    let fp32 = plan.ledger.parameters.is_some_and(|parameters| parameters.bytes == 4 * parameters.total);
    let mut tries = other_setups(&question, plan.question.setup.accumulate, fp32);
    tries.truncate(if events > LONG_RUN { 0 } else { (MOST_EVENTS / events.max(1)).max(1) });
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut levers = Vec::new();
    for some in tries.chunks(threads) {
        let found: Vec<Option<Lever>> = thread::scope(|scope| {
            let start = |(setting, setup): &(String, Setup)| {
                let (setting, other) =
                    (setting.clone(), PlanQuestion { setup: setup.clone(), ..question.clone() });
                let peak = peak.bytes;
                scope.spawn(move || lever(setting, &other, peak, does_not_fit))
            };
            let running: Vec<_> = some.iter().map(start).collect();
            running.into_iter().map(|thread| thread.join().ok().flatten()).collect()
        });
        levers.extend(found.into_iter().flatten());
    }
    let all = levers.clone();
    // Two settings that save no more than one of them are not worth a row.
    let redundant = |lever: &Lever| {
        let as_good =
            |other: &Lever| other.saving_bytes >= lever.saving_bytes && other.setting != lever.setting;
        all.iter().any(|other| as_good(other) && lever.setting.contains(&other.setting))
    };
    levers.retain(|lever| lever.saving_bytes as f64 > LEAST_SHARE * peak.bytes as f64 && !redundant(lever));
    levers.sort_by(|a, b| b.saving_bytes.cmp(&a.saving_bytes).then_with(|| a.setting.cmp(&b.setting)));
    levers
}

/// The peak of `other` beside one of `peak` bytes; none where it cannot be run.
fn lever(setting: String, other: &PlanQuestion<'_>, peak: u64, ask_whether_it_fits: bool) -> Option<Lever> {
    let run = run(other).ok()?;
    let fits = if ask_whether_it_fits { Some(fitted(other, &run.tape).ok()?.fits) } else { None };
    let other = ledger::replay(&run.tape, None).peaks.requested?;
    Some(Lever {
        setting,
        peak_bytes: other.bytes.get(),
        phase: other.at.map(|at| at.phase),
        saving_bytes: peak.cast_signed() - other.bytes.get().cast_signed(),
        fits,
    })
}

/// Leaves out of `setup` what only repeats, where the peak shows that it does.
fn shorten(setup: &mut Setup, peak: &PeakSummary) {
    let steady = |at: Option<u32>| at.is_none_or(|at| at <= STEADY);
    if setup.seqs.len() <= 1 && steady(peak.step) && steady(peak.micro_batch) {
        setup.steps = setup.steps.min(STEADY);
        setup.accumulate = setup.accumulate.min(STEADY);
    }
}

/// Setups that differ from the one of `question`, and the flags that make them: first what changes
/// nothing but memory and time, then what changes the arithmetic, then what changes the training.
///
/// `accumulate` is what the user set, which `question` may have shortened; `fp32` is whether the
/// weights are.
fn other_setups(question: &PlanQuestion<'_>, accumulate: u32, fp32: bool) -> Vec<(String, Setup)> {
    let setup = &question.setup;
    let text = question.model.model.max_seq().is_some();
    let adam = matches!(setup.optimizer, Optimizer::Adam | Optimizer::AdamW);
    let checkpoint = text && setup.checkpoint == Checkpoint::None;
    let fused = adam && setup.optimizer_impl != Some(OptimizerImpl::Fused);
    let mut others = Vec::new();
    let mut with = |setting: String, change: &dyn Fn(&mut Setup)| {
        let mut other = setup.clone();
        change(&mut other);
        others.push((setting, other));
    };
    let checkpointed = |other: &mut Setup| other.checkpoint = Checkpoint::Full;
    let in_one_kernel = |other: &mut Setup| other.optimizer_impl = Some(OptimizerImpl::Fused);
    if checkpoint && fused {
        with("--checkpoint full --optimizer-impl fused".into(), &|other| {
            checkpointed(other);
            in_one_kernel(other);
        });
    }
    if checkpoint {
        with("--checkpoint full".into(), &checkpointed);
    }
    if fused {
        with("--optimizer-impl fused".into(), &in_one_kernel);
    }
    if text && setup.attention == Attention::Eager {
        with("--attention sdpa".into(), &|other| other.attention = Attention::Sdpa);
    }
    if setup.keep_outputs {
        with("without --keep-outputs".into(), &|other| other.keep_outputs = false);
    }
    if setup.batch > 1 {
        let (batch, accumulate) = (setup.batch / 2, accumulate.saturating_mul(2));
        with(format!("--batch {batch} --accumulate {accumulate}"), &|other| {
            other.batch = batch;
            other.accumulate = STEADY;
        });
    }
    if text && fp32 && setup.autocast.is_none() {
        with("--dtype bf16".into(), &|other| other.dtype = Some(Dtype::Bf16));
    }
    if adam {
        with("--optimizer adafactor".into(), &|other| {
            other.optimizer = Optimizer::Adafactor;
            other.optimizer_impl = None;
        });
    }
    if let [seq] = setup.seqs[..]
        && seq > 1
    {
        with(format!("--seq {}", seq / 2), &|other| other.seqs = vec![seq / 2]);
    }
    others
}
