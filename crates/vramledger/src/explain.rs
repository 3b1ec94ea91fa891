//! What a ledger means: the peak in short, and its owners as a person thinks of them.

use ledger::Category;
use wire::explanation::{Explanation, Owner, PeakSummary};
use wire::{Contributor, Ledger, Peak, Peaks, Totals};

use crate::timeline::timeline;

/// The least share of the peak that makes a part worth a row of its own.
const LEAST_SHARE: f64 = 0.01;

/// What `ledger` means, without levers.
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
