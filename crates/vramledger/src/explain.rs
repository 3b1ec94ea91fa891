//! What a ledger means: the timeline with equal steps folded, the owners of the peak as a person
//! thinks of them, and what other settings would save.

use std::num::NonZeroUsize;
use std::thread;

use ledger::Category;
use models::{Attention, Checkpoint, Optimizer, OptimizerImpl, Setup};
use wire::explanation::{Explanation, Lever, Owner, PeakSummary, Span};
use wire::{Contributor, Ledger, Peak, PhaseRow};

use crate::plan::replayed;
use crate::{Plan, PlanQuestion};

/// The most groups of equal steps, the load among them, that are all shown.
const MOST_STEPS: usize = 4;
/// The least share of the peak that makes a part worth a row of its own.
const LEAST_SHARE: f64 = 0.01;
/// The most events of a tape for which other settings are tried as well: they cost as much again each.
const MOST_EVENTS: usize = 2_000_000;

/// What `ledger` means, without levers.
pub fn explain(ledger: &Ledger) -> Explanation {
    let peak = [&ledger.peaks.allocated, &ledger.peaks.requested, &ledger.peaks.reserved];
    let names = ["allocated", "requested", "reserved"];
    let Some((peak, measure)) =
        peak.into_iter().zip(names).find_map(|(peak, name)| Some((peak.as_ref()?, name)))
    else {
        return Explanation::default();
    };
    let device = ledger.devices.get(usize::from(peak.device));
    let available =
        device.and_then(|device| device.capacity_bytes?.checked_sub(device.context_bytes.unwrap_or(0)));
    let (timeline, steps_left_out) = timeline(&ledger.phases, peak, measure);
    Explanation {
        peak: Some(PeakSummary {
            measure: measure.into(),
            bytes: peak.bytes,
            step: peak.step,
            micro_batch: peak.micro_batch,
            phase: peak.phase.clone(),
        }),
        available_bytes: available,
        left_bytes: available.map(|available| available.cast_signed() - peak.bytes.cast_signed()),
        timeline,
        steps_left_out,
        owners: owners(peak),
        levers: Vec::new(),
    }
}

/// The rows of one device, a step each, and which steps they stand for.
struct Steps<'a> {
    first: u32,
    last: u32,
    rows: Vec<&'a PhaseRow>,
}

fn timeline(phases: &[PhaseRow], peak: &Peak, measure: &str) -> (Vec<Span>, u32) {
    let mut steps: Vec<Steps<'_>> = Vec::new();
    for row in phases.iter().filter(|row| row.device == peak.device) {
        match steps.last_mut().filter(|step| step.first == row.step) {
            Some(step) => step.rows.push(row),
            None => steps.push(Steps { first: row.step, last: row.step, rows: vec![row] }),
        }
    }
    let mut folded: Vec<Steps<'_>> = Vec::new();
    for step in steps {
        match folded.last_mut().filter(|before| same(&before.rows, &step.rows)) {
            Some(before) => before.last = step.last,
            None => folded.push(step),
        }
    }
    let has_peak = |step: &Steps<'_>| peak.step.is_some_and(|at| (step.first..=step.last).contains(&at));
    let (total, all) = (folded.len(), folded.len() <= MOST_STEPS);
    let mut left_out = 0;
    let mut spans = Vec::new();
    for (index, step) in folded.iter().enumerate() {
        // The load, the first step, the last and the one of the peak.
        if all || index <= 1 || index + 1 == total || has_peak(step) {
            spans.extend(micro_batches(step, peak, measure));
        } else {
            left_out += step.last - step.first + 1;
        }
    }
    (spans, left_out)
}

/// Whether two lists of phases are equal but for their steps.
fn same(a: &[&PhaseRow], b: &[&PhaseRow]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.micro_batch == b.micro_batch && alike(a, b))
}

/// Whether two rows are equal but for where they stand.
fn alike(a: &PhaseRow, b: &PhaseRow) -> bool {
    a.phase == b.phase && a.peak == b.peak && a.end == b.end && a.end_by_category == b.end_by_category
}

/// The rows of a step, with neighbouring micro-batches that are equal in all their phases as one.
fn micro_batches(step: &Steps<'_>, peak: &Peak, measure: &str) -> Vec<Span> {
    let mut groups: Vec<(Option<(u32, u32)>, Vec<&PhaseRow>)> = Vec::new();
    for row in &step.rows {
        match groups.last_mut().filter(|(of, _)| of.map(|(_, last)| last) == row.micro_batch) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((row.micro_batch.map(|at| (at, at)), vec![row])),
        }
    }
    let mut folded: Vec<(Option<(u32, u32)>, Vec<&PhaseRow>)> = Vec::new();
    for (of, rows) in groups {
        let equal = |before: &[&PhaseRow]| {
            before.len() == rows.len() && before.iter().zip(&rows).all(|(a, b)| alike(a, b))
        };
        match (of, folded.last_mut()) {
            (Some((_, last)), Some((Some(before), earlier))) if equal(earlier) => before.1 = last,
            _ => folded.push((of, rows)),
        }
    }
    let mut spans = Vec::new();
    for (micro_batches, rows) in folded {
        for row in rows {
            let here = |at: Option<u32>, range: Option<(u32, u32)>| match (at, range) {
                (Some(at), Some((first, last))) => (first..=last).contains(&at),
                (at, range) => at.is_none() && range.is_none(),
            };
            let amount = |totals: &wire::Totals| match measure {
                "allocated" => totals.allocated_bytes,
                "requested" => totals.requested_bytes,
                _ => totals.reserved_bytes,
            };
            let of = |categories: &[Category]| -> u64 {
                let known = |(category, bytes): (&wire::Category, &u64)| {
                    categories.contains(&category.0).then_some(*bytes)
                };
                row.end_by_category.iter().filter_map(known).sum()
            };
            let weights_bytes = of(&[Category::Parameter, Category::Buffer, Category::MasterWeight]);
            let (gradient_bytes, optimizer_bytes) =
                (of(&[Category::Gradient]), of(&[Category::OptimizerState]));
            let all: u64 = row.end_by_category.values().sum();
            spans.push(Span {
                steps: (step.first, step.last),
                micro_batches,
                phase: row.phase.clone(),
                peak_bytes: amount(&row.peak),
                end_bytes: amount(&row.end),
                weights_bytes,
                gradient_bytes,
                optimizer_bytes,
                other_bytes: all - weights_bytes - gradient_bytes - optimizer_bytes,
                holds_peak: here(peak.step, Some((step.first, step.last)))
                    && here(peak.micro_batch, micro_batches)
                    && peak.phase.as_deref() == Some(row.phase.as_str()),
            });
        }
    }
    spans
}

/// What a person calls an object: a group, and a part of it where the group has parts.
fn place(contributor: &Contributor) -> (&'static str, Option<&'static str>) {
    let kind = kind(&contributor.name);
    match contributor.category.0 {
        Category::Parameter => ("weights", None),
        Category::Buffer => ("buffers", None),
        Category::MasterWeight => ("master weights", None),
        Category::Gradient => ("gradients", None),
        Category::OptimizerState => ("optimizer state", None),
        Category::Input => ("input", None),
        Category::Workspace => ("workspace of kernels", None),
        Category::CommunicationBuffer => ("communication buffers", None),
        Category::Unattributed => ("unattributed", None),
        Category::Activation | Category::Temporary if kind == LOSS => (LOSS, None),
        Category::Activation => ("activations", Some(kind)),
        Category::Temporary => ("temporaries", Some(kind)),
    }
}

/// The groups in the order they are shown.
const GROUPS: [&str; 12] = [
    "weights",
    "buffers",
    "master weights",
    "gradients",
    "optimizer state",
    "input",
    "activations",
    LOSS,
    "temporaries",
    "workspace of kernels",
    "communication buffers",
    "unattributed",
];

const LOSS: &str = "logits and loss";

/// The kind of layer that a module path speaks of: `model.layers.*.mlp.act_fn.silu` is of an MLP.
fn kind(name: &str) -> &'static str {
    let has = |wanted: fn(&str) -> bool| name.split('.').any(wanted);
    if has(|part| matches!(part, "lm_head" | "loss" | "logits") || part.contains("cross_entropy")) {
        LOSS
    } else if has(|part| matches!(part, "self_attn" | "attn" | "attention") || part.contains("rotary")) {
        "attention"
    } else if has(|part| part == "mlp") {
        "mlp"
    } else if has(|part| part.contains("norm") || part.starts_with("ln_")) {
        "norms"
    } else if has(|part| part.contains("embed") || matches!(part, "wte" | "wpe")) {
        "embeddings"
    } else if has(|part| part == "optimizer") {
        "optimizer step"
    } else if has(|part| part == "*") {
        "between layers"
    } else {
        "other"
    }
}

fn owners(peak: &Peak) -> Vec<Owner> {
    let share = |bytes: u64| if peak.bytes == 0 { 0.0 } else { bytes as f64 / peak.bytes as f64 };
    let owner =
        |name: &str, bytes: u64| Owner { name: name.into(), bytes, share: share(bytes), parts: Vec::new() };
    let mut owners = Vec::new();
    for group in GROUPS {
        let mut whole = owner(group, 0);
        for contributor in &peak.contributors {
            let (of, part) = place(contributor);
            if of != group {
                continue;
            }
            whole.bytes += contributor.bytes;
            let Some(part) = part else { continue };
            match whole.parts.iter_mut().find(|known| known.name == part) {
                Some(known) => known.bytes += contributor.bytes,
                None => whole.parts.push(owner(part, contributor.bytes)),
            }
        }
        if whole.bytes == 0 {
            continue;
        }
        whole.share = share(whole.bytes);
        whole.parts = worth_a_row(whole.parts, share);
        owners.push(whole);
    }
    owners
}

/// The parts, largest first; the smallest together as the last, and none where there is only one.
fn worth_a_row(mut parts: Vec<Owner>, share: impl Fn(u64) -> f64) -> Vec<Owner> {
    for part in &mut parts {
        part.share = share(part.bytes);
    }
    parts.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let shown = parts.iter().take_while(|part| part.share >= LEAST_SHARE).count();
    let rest: u64 = parts[shown..].iter().map(|part| part.bytes).sum();
    if parts.len() - shown > 1 {
        parts.truncate(shown);
        parts.push(Owner { name: "the rest".into(), bytes: rest, share: share(rest), parts: Vec::new() });
    }
    if parts.len() == 1 { Vec::new() } else { parts }
}

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
