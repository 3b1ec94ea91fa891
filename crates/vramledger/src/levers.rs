//! What other settings would save: each that can save anything is run as the plan was.

use std::num::NonZeroUsize;
use std::thread;

use ledger::{Bytes, Dtype, Phase};
use models::{Attention, Checkpoint, Ddp, Lora, Loss, Optimizer, OptimizerImpl, Parallel, Setup};
use wire::explanation::{Explanation, Lever, PeakSummary};

use crate::explain::{explain, summary};
use crate::plan::{fitted, run};
use crate::{Plan, PlanQuestion};

/// The events that the other settings may cost together: some tens of milliseconds. One is tried in
/// any case, but for runs that take a good part of a second themselves.
const MOST_EVENTS: usize = 45_000;
const LONG_RUN: usize = 500_000;
/// The share of the peak that a saving must be beyond to be worth a row.
const LEAST_SHARE: f64 = 0.01;
/// Steps and micro-batches after which nothing new happens: the state exists from the second step
/// on, the gradients from the second micro-batch on.
pub(crate) const STEADY: u32 = 2;

/// What the ledger of `plan` means, and what else its tape tells: what a run that found no room would
/// need, and what other settings would save.
pub fn explain_plan(plan: &Plan<'_>) -> Explanation {
    let mut explanation = explain(&plan.ledger);
    let books = ledger::replay(&plan.tape, None);
    let Some(peak) = &books.peaks.requested else { return explanation };
    let peak = summary(&peak.into(), "requested");
    explanation.levers = levers(plan, &peak, &books);
    explanation.one_stream_bytes = on_one_stream(plan);
    explanation.demand = plan.ledger.oom.is_some().then_some(peak);
    explanation
}

/// The reserved peak if nothing had been made on streams of their own; none where nothing was, or where that is no
/// less.
fn on_one_stream(plan: &Plan<'_>) -> Option<u64> {
    let reserved = plan.ledger.peaks.reserved.as_ref().filter(|_| plan.tape.has_streams())?;
    let fit = fitted(&plan.question, &plan.tape.on_one_stream()).ok()?;
    fit.books.peaks.reserved.map(|peak| peak.bytes.get()).filter(|bytes| *bytes < reserved.bytes)
}

/// What other settings would save of `peak`, the most first, and only what saves something worth a
/// row. Where the plan does not fit, each tells whether it would. `books` are those of a card
/// without end.
///
/// The settings are tried in the order of what they cost a user, as many as [`MOST_EVENTS`] allows.
fn levers(plan: &Plan<'_>, peak: &PeakSummary, books: &ledger::Ledger) -> Vec<Lever> {
    let mut question = plan.question.clone();
    let rounds = |setup: &Setup| setup.steps as usize * setup.accumulate as usize;
    shorten(&mut question.setup, peak);
    let events = plan.tape.len() * rounds(&question.setup) / rounds(&plan.question.setup);
    let mut left = if events > LONG_RUN { 0 } else { (MOST_EVENTS / events.max(1)).max(1) };
    let fp32 = plan.ledger.parameters.is_some_and(|parameters| parameters.bytes == 4 * parameters.total);
    let worth_a_row = |saving: i64| saving as f64 > LEAST_SHARE * peak.bytes as f64;
    // What a setting does not move stays: it can save no more than the peak of that is lower.
    let can_win = |other: &Other| {
        let stays = |row: &&ledger::PhaseRow| !other.moves.phase(&row.at.phase);
        let least = books.phases.iter().filter(stays).filter_map(|row| row.peak.requested).max();
        worth_a_row(peak.bytes.cast_signed() - least.map_or(0, Bytes::get).cast_signed())
    };
    let mut others = others(&question, plan.question.setup.accumulate, fp32);
    others.retain(|other| question.model.model.contradiction(&other.setup).is_none());
    // Two settings together are a try only once neither saves more alone.
    let together = together(&others);
    others.retain(can_win);
    let alone =
        together.as_ref().and_then(|both| others.iter().find(|other| both.is_more_than(&other.setting)));
    let alone = alone.map(|other| (other.setting.clone(), other.moves));
    let mut waiting = together;
    if alone.is_none() {
        others.splice(0..0, waiting.take());
    }
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut levers: Vec<Lever> = Vec::new();
    while left > 0 && !others.is_empty() {
        let tries: Vec<Other> = others.drain(..others.len().min(threads).min(left)).collect();
        left -= tries.len();
        levers.extend(attempt(&question, tries, peak.bytes, plan.ledger.oom.is_some()));
        if let Some((setting, moves)) = &alone
            && let Some(done) = levers.iter().find(|lever| lever.setting == *setting)
            && done.phase.as_ref().is_some_and(|phase| !moves.phase(phase))
        {
            others.splice(0..0, waiting.take());
        }
    }
    // Two settings that save no more than one of them are not worth a row either.
    let all = levers.clone();
    let redundant = |lever: &Lever| {
        let as_good =
            |other: &Lever| other.saving_bytes >= lever.saving_bytes && other.setting != lever.setting;
        all.iter().any(|other| as_good(other) && lever.setting.contains(&other.setting))
    };
    levers.retain(|lever| worth_a_row(lever.saving_bytes) && !redundant(lever));
    levers.sort_by(|a, b| b.saving_bytes.cmp(&a.saving_bytes).then_with(|| a.setting.cmp(&b.setting)));
    levers
}

/// The peak of each of `tries` beside one of `peak` bytes, a thread each.
fn attempt(
    question: &PlanQuestion<'_>,
    tries: Vec<Other>,
    peak: u64,
    ask_whether_it_fits: bool,
) -> Vec<Lever> {
    thread::scope(|scope| {
        let start = |other: Other| {
            let question = PlanQuestion { setup: other.setup, ..question.clone() };
            scope.spawn(move || lever(other.setting, &question, peak, ask_whether_it_fits))
        };
        let running: Vec<_> = tries.into_iter().map(start).collect();
        running.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
    })
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

/// A setup that differs from the plan's, and the flags that make it.
struct Other {
    setting: String,
    setup: Setup,
    moves: Moves,
}

impl Other {
    /// Whether `setting` is a part of this one.
    fn is_more_than(&self, setting: &str) -> bool {
        self.setting.contains(setting) && self.setting != setting
    }
}

/// Which phases a setting can make smaller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moves {
    /// Forward and backward.
    Passes,
    /// The optimizer's step.
    Update,
    All,
}

impl Moves {
    fn phase(self, phase: &str) -> bool {
        match self {
            Self::Passes => phase != UPDATE,
            Self::Update => phase == UPDATE,
            Self::All => true,
        }
    }
}

const UPDATE: &str = Phase::NAMES[Phase::UPDATE.0 as usize];

const CHECKPOINT: &str = "--checkpoint full";
const FUSED: &str = "--optimizer-impl fused";

/// Both settings that change nothing but memory and time, where both are there.
fn together(others: &[Other]) -> Option<Other> {
    let find = |setting: &str| others.iter().find(|other| other.setting == setting);
    let (checkpointed, fused) = (find(CHECKPOINT)?, find(FUSED)?);
    Some(Other {
        setting: format!("{CHECKPOINT} {FUSED}"),
        setup: Setup { optimizer_impl: fused.setup.optimizer_impl, ..checkpointed.setup.clone() },
        moves: Moves::All,
    })
}

/// Setups that differ from the one of `question`: first what changes nothing but memory and time,
/// then what changes the arithmetic, then what changes the training.
///
/// `accumulate` is what the user set, which `question` may have shortened; `fp32` is whether the
/// weights are.
fn others(question: &PlanQuestion<'_>, accumulate: u32, fp32: bool) -> Vec<Other> {
    let setup = &question.setup;
    let text = question.model.model.max_seq().is_some();
    let adam = matches!(setup.optimizer, Optimizer::Adam | Optimizer::AdamW);
    // The input of a language model is nothing beside the rest; what else a batch makes is gone by
    // the update, unless the outputs are kept.
    let of_the_batch = if text && !setup.keep_outputs { Moves::Passes } else { Moves::All };
    let mut others = Vec::new();
    let mut with = |setting: String, moves: Moves, change: &dyn Fn(&mut Setup)| {
        let mut other = setup.clone();
        change(&mut other);
        others.push(Other { setting, setup: other, moves });
    };
    if let Some(Parallel::Ddp(ddp)) = &setup.parallel {
        let view = Ddp { gradient_as_bucket_view: true, ..ddp.clone() };
        let lazy = Ddp { lazy_bucket_allocation: true, ..ddp.clone() };
        for (setting, changed) in [("--gradient-as-bucket-view", view), ("--lazy-bucket-allocation", lazy)] {
            if changed != *ddp {
                with(setting.into(), Moves::All, &|other| {
                    other.parallel = Some(Parallel::Ddp(changed.clone()));
                });
            }
        }
    }
    if text && setup.checkpoint == Checkpoint::None {
        with(CHECKPOINT.into(), Moves::Passes, &|other| other.checkpoint = Checkpoint::Full);
    }
    if adam && setup.optimizer_impl != Some(OptimizerImpl::Fused) {
        with(FUSED.into(), Moves::Update, &|other| other.optimizer_impl = Some(OptimizerImpl::Fused));
    }
    let whole_logits = matches!(setup.loss, None | Some(Loss::Default | Loss::Fp32Logits));
    if text && whole_logits && !setup.keep_outputs {
        with("--loss fused-linear".into(), Moves::Passes, &|other| other.loss = Some(Loss::FusedLinear));
    }
    let sdpa = question.model.model.attention_of(Attention::Sdpa) == Attention::Sdpa;
    if text && sdpa && setup.attention == Attention::Eager {
        with("--attention sdpa".into(), Moves::Passes, &|other| other.attention = Attention::Sdpa);
    }
    if setup.keep_outputs {
        with("without --keep-outputs".into(), Moves::All, &|other| other.keep_outputs = false);
    }
    if setup.batch > 1 {
        let (batch, accumulate) = (setup.batch / 2, accumulate.saturating_mul(2));
        with(format!("--batch {batch} --accumulate {accumulate}"), of_the_batch, &|other| {
            other.batch = batch;
            other.accumulate = STEADY;
        });
    }
    if text && fp32 && setup.autocast.is_none() {
        with("--dtype bf16".into(), Moves::All, &|other| other.dtype = Some(Dtype::Bf16));
    }
    if adam {
        with("--optimizer adafactor".into(), Moves::All, &|other| {
            other.optimizer = Optimizer::Adafactor;
            (other.optimizer_impl, other.amsgrad, other.capturable) = (None, false, false);
        });
    }
    if let [seq] = setup.seqs[..]
        && seq > 1
    {
        with(format!("--seq {}", seq / 2), of_the_batch, &|other| other.seqs = vec![seq / 2]);
    }
    if text && setup.lora.is_none() && setup.freeze.is_empty() {
        with("--lora-rank 16".into(), Moves::All, &|other| other.lora = Some(Lora::of_rank(16)));
    }
    others
}
