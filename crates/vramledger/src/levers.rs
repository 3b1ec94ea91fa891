//! What other settings would save: each is run as the plan was.

use std::num::NonZeroUsize;
use std::thread;

use models::{Attention, Checkpoint, Optimizer, OptimizerImpl, Setup};
use wire::explanation::Lever;

use crate::plan::replayed;
use crate::{Plan, PlanQuestion, explain};

/// The least share of the peak that makes a saving worth a row.
const LEAST_SHARE: f64 = 0.01;
/// The most events of a tape for which other settings are tried as well: they cost as much again each.
const MOST_EVENTS: usize = 2_000_000;

/// What other settings would save of the peak of `plan`, the most first: each is run as the plan was.
///
/// None where the run is so long that this would be felt.
pub fn levers(question: &PlanQuestion<'_>, plan: &Plan) -> Vec<Lever> {
    let Some(peak) = explain(&plan.ledger).peak.filter(|_| plan.tape.len() <= MOST_EVENTS) else {
        return Vec::new();
    };
    let tries = other_setups(question);
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let mut levers = Vec::new();
    for some in tries.chunks(threads.max(1)) {
        let found: Vec<Option<Lever>> = thread::scope(|scope| {
            let running: Vec<_> = some
                .iter()
                .map(|(setting, setup)| {
                    scope.spawn(move || {
                        let other = PlanQuestion { setup: setup.clone(), ..question.clone() };
                        let (_, books) = replayed(&other).ok()?;
                        let other = books.peaks.allocated.or(books.peaks.requested)?;
                        Some(Lever {
                            setting: setting.clone(),
                            peak_bytes: other.bytes.get(),
                            phase: other.at.map(|at| at.phase),
                            saving_bytes: peak.bytes.cast_signed() - other.bytes.get().cast_signed(),
                        })
                    })
                })
                .collect();
            running.into_iter().map(|thread| thread.join().ok().flatten()).collect()
        });
        levers.extend(found.into_iter().flatten());
    }
    levers.retain(|lever| lever.saving_bytes as f64 >= LEAST_SHARE * peak.bytes as f64);
    levers.sort_by(|a, b| b.saving_bytes.cmp(&a.saving_bytes).then_with(|| a.setting.cmp(&b.setting)));
    levers
}

/// Setups that differ from the one of `question` in one setting, and the flags that make them.
fn other_setups(question: &PlanQuestion<'_>) -> Vec<(String, Setup)> {
    let setup = &question.setup;
    let text = question.model.model.max_seq().is_some();
    let mut others = Vec::new();
    let mut with = |setting: String, change: &dyn Fn(&mut Setup)| {
        let mut other = setup.clone();
        change(&mut other);
        others.push((setting, other));
    };
    if text && setup.checkpoint == Checkpoint::None {
        with("--checkpoint full".into(), &|other| other.checkpoint = Checkpoint::Full);
    }
    if text && setup.attention == Attention::Eager {
        with("--attention sdpa".into(), &|other| other.attention = Attention::Sdpa);
    }
    let adam = matches!(setup.optimizer, Optimizer::Adam | Optimizer::AdamW);
    if adam && setup.optimizer_impl != Some(OptimizerImpl::Fused) {
        with("--optimizer-impl fused".into(), &|other| other.optimizer_impl = Some(OptimizerImpl::Fused));
    }
    if adam {
        with("--optimizer adafactor".into(), &|other| {
            other.optimizer = Optimizer::Adafactor;
            other.optimizer_impl = None;
        });
    }
    if setup.batch > 1 {
        let (batch, accumulate) = (setup.batch / 2, setup.accumulate.saturating_mul(2));
        with(format!("--batch {batch} --accumulate {accumulate}"), &|other| {
            other.batch = batch;
            other.accumulate = accumulate;
        });
    }
    if let [seq] = setup.seqs[..]
        && seq > 1
    {
        with(format!("--seq {}", seq / 2), &|other| other.seqs = vec![seq / 2]);
    }
    if text && setup.autocast.is_none() && setup.dtype == Some(ledger::Dtype::Fp32) {
        with("--autocast bf16".into(), &|other| other.autocast = Some(ledger::Dtype::Bf16));
    }
    if text && setup.dtype != Some(ledger::Dtype::Bf16) && setup.dtype != Some(ledger::Dtype::Fp16) {
        with("--dtype bf16".into(), &|other| {
            other.dtype = Some(ledger::Dtype::Bf16);
            other.autocast = None;
        });
    }
    if setup.keep_outputs {
        with("without --keep-outputs".into(), &|other| other.keep_outputs = false);
    }
    others
}
