//! What a ledger means: the peak in short, and its owners as a person thinks of them.

use std::collections::BTreeMap;

use ledger::Category;
use wire::explanation::{Explanation, Owner, PeakSummary, Rung};
use wire::{Contributor, Ledger, Peak, Peaks, Totals};

use crate::timeline::timeline;

/// The least share of the peak that makes a group worth a row of its own.
const LEAST_GROUP: f64 = 0.0005;
/// The least share of the peak that makes a part of a group worth one.
const LEAST_PART: f64 = 0.01;
const REST: &str = "the rest";

/// What `ledger` means, as far as it says itself: [`crate::explain_plan`] knows the plan too.
pub fn explain(ledger: &Ledger) -> Explanation {
    let (peak, measure, amount): (&Peak, _, fn(&Totals) -> Option<u64>) = match &ledger.peaks {
        Peaks { allocated: Some(peak), .. } => (peak, "allocated", |totals| totals.allocated_bytes),
        Peaks { requested: Some(peak), .. } => (peak, "requested", |totals| totals.requested_bytes),
        Peaks { reserved: Some(peak), .. } => (peak, "reserved", |totals| totals.reserved_bytes),
        Peaks { allocated: None, requested: None, reserved: None } => return Explanation::default(),
    };
    let device = ledger.devices.get(usize::from(peak.device));
    let available =
        device.and_then(|device| device.capacity_bytes?.checked_sub(device.context_bytes.unwrap_or(0)));
    let (timeline, steps_left_out) = timeline(&ledger.phases, peak, amount);
    Explanation {
        peak: Some(summary(peak, measure)),
        available_bytes: available,
        left_bytes: available.map(|available| available.cast_signed() - peak.bytes.cast_signed()),
        timeline,
        steps_left_out,
        hosts: hosts(ledger),
        ladder: ladder(ledger),
        owners: match ledger.oom.as_ref().filter(|oom| !oom.holders.is_empty()) {
            Some(oom) => owners(&oom.holders, oom.held.allocated_bytes.unwrap_or_default()),
            None => owners(&peak.contributors, peak.bytes),
        },
        one_stream_bytes: None,
        demand: None,
        levers: Vec::new(),
    }
}

/// The largest requested total of each device that is memory of the host.
fn hosts(ledger: &Ledger) -> Vec<(String, PeakSummary)> {
    let of_host = |(index, device): (usize, &wire::Device)| {
        if device.kind != wire::DeviceKind::Cpu {
            return None;
        }
        let rows = ledger.phases.iter().filter(|row| usize::from(row.device) == index);
        let peak = rows.filter_map(|row| Some((row.peak.requested_bytes?, row)));
        // On ties the earliest, as of every peak.
        let (bytes, row) = peak.rev().max_by_key(|(bytes, _)| *bytes)?;
        let phase = Some(row.phase.clone());
        let (step, micro_batch) = (Some(row.step), row.micro_batch);
        let peak = PeakSummary { measure: "requested".into(), bytes, step, micro_batch, phase };
        Some((device.name.clone(), peak))
    };
    ledger.devices.iter().enumerate().filter_map(of_host).collect()
}

/// `peak` in short.
pub(crate) fn summary(peak: &Peak, measure: &str) -> PeakSummary {
    PeakSummary {
        measure: measure.into(),
        bytes: peak.bytes,
        step: peak.step,
        micro_batch: peak.micro_batch,
        phase: peak.phase.clone(),
    }
}

/// The measures when a request found no room, or else at the peak of the reserved bytes.
fn ladder(ledger: &Ledger) -> Vec<Rung> {
    let reserved = ledger.peaks.reserved.as_ref();
    let failed = ledger.oom.as_ref().filter(|oom| oom.held.reserved_bytes.is_some());
    let Some((device, held)) =
        failed.map(|oom| (oom.device, oom.held)).or(reserved.map(|peak| (peak.device, peak.at_peak)))
    else {
        return Vec::new();
    };
    let outside = ledger.outside.iter().filter(|row| row.device == device).map(|row| match &row.assumption {
        Some(assumption) => format!("{}: {assumption}", row.name),
        None => row.name.clone(),
    });
    let mut outside: Vec<String> = outside.collect();
    if outside.is_empty() {
        outside.push("outside the allocator".into());
    }
    let rungs = [
        ("requested", held.requested_bytes, "asked for by the program".to_owned()),
        ("allocated", held.allocated_bytes, ROUNDING.into()),
        ("active", held.active_bytes, "blocks that wait for other streams".into()),
        ("reserved", held.reserved_bytes, "cached by the allocator".into()),
        ("process", held.process_bytes, outside.join("; ")),
        ("device", held.device_bytes, "left of the card".into()),
    ];
    let mut below = 0;
    let known = rungs.into_iter().filter_map(|(measure, bytes, what)| {
        let bytes = bytes?;
        let more_bytes = bytes.saturating_sub(std::mem::replace(&mut below, bytes));
        Some(Rung { measure: measure.into(), bytes, more_bytes, what })
    });
    known.collect()
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
        Category::Unattributed if contributor.name == ledger::Contributor::ROUNDING => (ROUNDING, None),
        Category::Unattributed => ("unattributed", None),
        Category::Activation | Category::Temporary if kind == LOSS => (LOSS, None),
        Category::Temporary if kind == OPTIMIZER => (OPTIMIZER, None),
        Category::Activation => ("activations", Some(kind)),
        Category::Temporary => ("temporaries", Some(kind)),
    }
}

/// The groups in the order they are shown.
const GROUPS: [&str; 14] = [
    "weights",
    "buffers",
    "master weights",
    "gradients",
    "optimizer state",
    "input",
    "activations",
    LOSS,
    "temporaries",
    OPTIMIZER,
    "workspace of kernels",
    "communication buffers",
    ROUNDING,
    "unattributed",
];

const LOSS: &str = "logits and loss";
const ROUNDING: &str = "rounding up to blocks";
const OPTIMIZER: &str = "temporaries of the optimizer";

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
    } else if has(|part| matches!(part, "optimizer" | "clip_grad_norm")) {
        OPTIMIZER
    } else if has(|part| part == "*") {
        "residual stream"
    } else {
        "other"
    }
}

/// The groups of `contributors`, which sum to `total`.
fn owners(contributors: &[Contributor], total: u64) -> Vec<Owner> {
    let share = |bytes: u64| if total == 0 { 0.0 } else { bytes as f64 / total as f64 };
    let owner =
        |name: &str, bytes: u64| Owner { name: name.into(), bytes, share: share(bytes), parts: Vec::new() };
    let mut owners = Vec::new();
    let mut rest = 0;
    for group in GROUPS {
        let mut bytes = 0;
        let mut parts: BTreeMap<&str, u64> = BTreeMap::new();
        for contributor in contributors {
            let (of, part) = place(contributor);
            if of == group {
                bytes += contributor.bytes;
                *parts.entry(part.unwrap_or_default()).or_default() += contributor.bytes;
            }
        }
        if share(bytes) < LEAST_GROUP {
            rest += bytes;
            continue;
        }
        let parts = parts.into_iter().map(|(part, bytes)| owner(part, bytes)).collect();
        owners.push(Owner { parts: worth_a_row(parts, &owner), ..owner(group, bytes) });
    }
    if rest > 0 {
        owners.push(owner(REST, rest));
    }
    owners
}

/// The parts, largest first; the smallest together as the last, and none where there is only one.
fn worth_a_row(mut parts: Vec<Owner>, owner: &impl Fn(&str, u64) -> Owner) -> Vec<Owner> {
    parts.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let shown = parts.iter().take_while(|part| part.share >= LEAST_PART).count();
    if parts.len() - shown > 1 {
        let rest = parts.drain(shown..).map(|part| part.bytes).sum();
        parts.push(owner(REST, rest));
    }
    if parts.len() == 1 { Vec::new() } else { parts }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contributor(name: &str, category: Category, bytes: u64) -> Contributor {
        Contributor { name: name.into(), category: wire::Category(category), bytes, count: 1, saved: 0 }
    }

    #[test]
    fn owners_are_grouped_as_a_person_thinks_and_sum_to_the_peak() {
        let contributors = [
            contributor("model.layers.*.mlp.up_proj.weight", Category::Parameter, 4000),
            contributor("model.layers.*.mlp.act_fn.silu", Category::Activation, 3000),
            contributor("loss.log_softmax", Category::Activation, 1000),
            contributor("loss.nll_loss_backward", Category::Temporary, 1000),
            contributor("model.layers.*.self_attn.q_norm.to", Category::Activation, 500),
            contributor("transformer.h.*.ln_1.layer_norm", Category::Activation, 400),
            contributor("optimizer.sqrt", Category::Temporary, 50),
            contributor("model.layers.*.add", Category::Activation, 49),
            contributor("input_ids", Category::Input, 1),
        ];
        let owners = owners(&contributors, 10_000);
        let rows = |owners: &[Owner]| -> Vec<(String, u64)> {
            owners.iter().map(|owner| (owner.name.clone(), owner.bytes)).collect()
        };
        let expected = |rows: &[(&str, u64)]| -> Vec<(String, u64)> {
            rows.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
        };
        let groups = [
            ("weights", 4000),
            ("activations", 3949),
            ("logits and loss", 2000),
            ("temporaries of the optimizer", 50),
            ("the rest", 1),
        ];
        assert_eq!(rows(&owners), expected(&groups));
        let parts = [("mlp", 3000), ("attention", 500), ("norms", 400), ("residual stream", 49)];
        assert_eq!(rows(&owners[1].parts), expected(&parts));
        assert!(
            owners.iter().filter(|owner| owner.name != "activations").all(|owner| owner.parts.is_empty())
        );
        assert_eq!(owners.iter().map(|owner| owner.bytes).sum::<u64>(), 10_000);
    }
}
