//! What is said of growth.

use ledger::Category;
use wire::{Growth, Trend};

use super::LEAST_STEPS;

/// Growth over so few steps may be that of something bounded.
const FEW: u32 = 3;

/// What to know of keeping tensors.
const ADVICE: &str = "keeping a tensor, as `kept.append(loss)` does, keeps its storage on the device and, as long as it has a `grad_fn`, its graph with all that autograd saved for it and no backward pass has let go. `loss.item()` keeps a number on the host and nothing on the device. `loss.detach()` keeps the storage without the graph: little for a scalar, all of it for logits or features, which `.detach().cpu()` moves to the host. Under `torch.no_grad()` no graph is made, but a result that is kept is still there";

/// Completes `growth` of a tape; `trains` says that it has backward passes.
pub(super) fn tell(growth: &mut Growth, trains: bool) {
    growth.explanation = match growth.verdict {
        Trend::TooFewSteps if growth.steps >= LEAST_STEPS as u64 => {
            let steps = growth.steps;
            format!("with each of {steps} steps more is reserved; record 6 or more to tell whether it goes on")
        }
        Trend::TooFewSteps => {
            let steps = match growth.steps {
                0 => "no whole step tells".to_owned(),
                1 => "one whole step does not tell".into(),
                steps => format!("{steps} whole steps do not tell"),
            };
            format!("{steps} it from warm-up; record {LEAST_STEPS} or more")
        }
        Trend::Steady if !growth.trifles.is_empty() => {
            "nothing is kept but a few objects of the smallest block a step, such as losses whose graphs are gone: too little to matter".into()
        }
        Trend::Steady => "nothing that is made in a step is there when later ones are over".into(),
        Trend::Growing if growth.rows.iter().all(|row| row.last_step - row.first_step < FEW) => {
            format!("{}; in so few steps what fills up to a bound, such as a cache, looks the same", kept(growth, trains))
        }
        Trend::Growing => kept(growth, trains).into(),
        _ => common(growth),
    };
    let keeps = growth.verdict == Trend::Growing && !growth.rows.is_empty();
    growth.advice = keeps.then(|| ADVICE.into());
}

/// Who is behind what grows.
fn kept(growth: &Growth, trains: bool) -> &'static str {
    let results = growth.rows.iter().filter(|row| row.category.0 == Category::Activation);
    let results: u64 = results.map(|row| row.bytes_per_step).sum();
    let mostly_results = results.saturating_mul(2) > growth.bytes_per_step;
    match () {
        () if growth.rows.is_empty() => {
            "what is allocated rises step after step, and no one place in the program makes it"
        }
        () if growth.kept_graph && trains => {
            "every step leaves results of its forward pass behind, and what autograd saved among them, which its backward pass does not let go: something keeps the graph of each step, such as a list of losses without `.detach()` or `.item()`, or `retain_graph=True`"
        }
        () if growth.kept_graph => {
            "every pass leaves its results and what autograd saved behind: something keeps the graph of each, such as a list of outputs that are made without `torch.no_grad()`"
        }
        () if mostly_results && trains => {
            "results of forward passes are kept step after step, without the rest of their graphs: such as a list of features, logits or outputs that stay on the device"
        }
        () if mostly_results => {
            "every pass leaves results behind that no later one lets go: something keeps the outputs of each, such as a list"
        }
        () => "every step leaves something behind that no later one lets go",
    }
}

/// Completes `growth` of a log.
pub(super) fn tell_log(growth: &mut Growth) {
    growth.explanation = match (growth.verdict, &growth.allocated) {
        (Trend::TooFewSteps, _) => {
            "fewer than four rows after the warm-up do not tell growth from chance".to_owned()
        }
        (Trend::Steady, _) => "what is held does not rise from step to step".into(),
        (Trend::Growing, Some(_)) => {
            "what is allocated rises step after step: something is kept, and a memory snapshot tells who makes it".into()
        }
        (Trend::Growing, None) => {
            "what is held rises step after step; whether it is allocated, or reserved and in no block, the log does not tell".into()
        }
        _ => common(growth),
    };
}

/// What a tape and a log say alike.
fn common(growth: &Growth) -> String {
    match growth.verdict {
        Trend::WarmUp => {
            let step = growth.warm_up_steps.unwrap_or_default();
            format!("what grew at first grows no more after {} {step}", growth.per)
        }
        Trend::LongestInput => {
            let what = growth.bounded_by.as_deref().unwrap_or("input");
            format!(
                "the totals follow `{what}`, and the largest one seen bounds them; what is reserved beyond that is cached, and given back when the device is full"
            )
        }
        Trend::Stranding => {
            let how = match growth.times_faster {
                Some(times) => format!("reserved memory grows {times:.0} times faster than allocated memory"),
                None => "reserved memory grows, and allocated memory does not".into(),
            };
            format!(
                "{how}: the allocator takes more of the device while what it has lies free in pieces that do not fit, beside blocks that stay; it is not that the program keeps so much"
            )
        }
        Trend::TooFewSteps | Trend::Steady | Trend::Growing => String::new(),
    }
}
