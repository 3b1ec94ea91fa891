//! The report of a plan: a ledger and what it means.

use wire::explanation::{Explanation, Owner, Span};
use wire::{Ledger, Totals};

use crate::units::{Unit, count, flops, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most levers that are shown.
const MOST_LEVERS: usize = 4;

/// A ledger and what it means.
#[derive(Clone, Copy, Debug)]
pub struct PlanReport<'a> {
    /// The ledger.
    pub ledger: &'a Ledger,
    /// What it means.
    pub explanation: &'a Explanation,
}

impl Report for PlanReport<'_> {
    fn page(&self) -> Page {
        let mut blocks = vec![self.verdict(), Block::Line(self.what())];
        blocks.push(self.phases());
        blocks.push(self.owners());
        if !self.explanation.levers.is_empty() {
            blocks.push(self.levers());
        }
        blocks.push(Block::List { title: "Assumed".into(), items: self.ledger.assumptions.clone() });
        blocks.push(Block::List {
            title: "Not in these figures".into(),
            items: self.ledger.interpretation_limits.clone(),
        });
        blocks.retain(|block| !matches!(block, Block::List { items, .. } if items.is_empty()));
        Page { blocks }
    }

    /// A row for each phase, every step of its own.
    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let totals = |totals: &Totals| {
            [totals.requested_bytes, totals.allocated_bytes, totals.reserved_bytes].map(number)
        };
        let rows = self.ledger.phases.iter().map(|row| {
            let mut fields = vec![
                row.device.to_string(),
                row.step.to_string(),
                row.micro_batch.map(|at| at.to_string()).unwrap_or_default(),
                row.phase.clone(),
            ];
            fields.extend(totals(&row.peak));
            fields.extend(totals(&row.end));
            fields
        });
        Sheet {
            head: vec![
                "device",
                "step",
                "micro_batch",
                "phase",
                "peak_requested_bytes",
                "peak_allocated_bytes",
                "peak_reserved_bytes",
                "end_requested_bytes",
                "end_allocated_bytes",
                "end_reserved_bytes",
            ],
            rows: rows.collect(),
        }
    }
}

impl PlanReport<'_> {
    fn text(&self, part: &str, key: &str) -> Option<&str> {
        self.ledger.subject.get(part)?.get(key)?.as_str()
    }

    /// The unit of the page: the one in which the peak is easiest to read.
    fn unit(&self) -> Unit {
        Unit::of_largest(self.explanation.peak.as_ref().map(|peak| peak.bytes))
    }

    fn verdict(&self) -> Block {
        let model = self.text("model", "name").unwrap_or("this run");
        let Some(peak) = &self.explanation.peak else {
            return Block::Verdict { good: None, text: format!("{model}: nothing is allocated") };
        };
        let device = self.ledger.devices.first().map_or("the device", |device| device.name.as_str());
        let mut place = Vec::new();
        place.extend(peak.phase.clone());
        place.extend(peak.step.map(|step| if step == 0 { String::new() } else { format!("step {step}") }));
        place.extend(peak.micro_batch.filter(|at| *at > 1).map(|at| format!("micro-batch {at}")));
        place.retain(|part| !part.is_empty());
        let unit = self.unit();
        let needs =
            format!("{model} peaks at {} {} ({})", unit.size(peak.bytes), peak.measure, place.join(", "));
        let (good, fits) = match (self.ledger.fits, self.explanation.left_bytes) {
            (Some(true), _) => (Some(true), format!("it fits on {device}")),
            (Some(false), _) => (Some(false), format!("it does not fit on {device}")),
            (None, Some(left)) if left < 0 => {
                (Some(false), format!("that is {} more than {device} has for it", size(left.unsigned_abs())))
            }
            (None, Some(left)) => {
                let left = left.unsigned_abs();
                let left = Unit::of_largest([peak.bytes, left]).size(left);
                (None, format!("{left} of {device} are left for what the allocator adds"))
            }
            (None, None) => (None, format!("the memory of {device} is not known")),
        };
        Block::Verdict { good, text: format!("{needs}; {fits}") }
    }

    /// What was planned, in a line or two.
    fn what(&self) -> String {
        let mut parts = Vec::new();
        if let Some(parameters) = &self.ledger.parameters {
            parts.push(format!("{} parameters ({})", count(parameters.total), size(parameters.bytes)));
        }
        if let Some(batch) = &self.ledger.batch {
            let mut text = format!("micro-batch {}", batch.micro_batch);
            if batch.effective_batch != batch.micro_batch {
                let rounds = plural(batch.forward_backward_rounds, "round");
                let ranks = plural(batch.world_size, "rank");
                text.push_str(&format!(
                    " x {rounds} x {ranks} = {} samples an update",
                    batch.effective_batch
                ));
            }
            parts.push(text);
        }
        let setup = self.ledger.subject.get("setup");
        let lengths =
            setup.and_then(|setup| setup.get("seqs")?.as_array()).map(Vec::as_slice).unwrap_or_default();
        if !lengths.is_empty() {
            let lengths: Vec<String> = lengths.iter().map(ToString::to_string).collect();
            parts.push(format!("length {}", lengths.join(", ")));
        }
        let words = ["dtype", "optimizer"].into_iter().filter_map(|key| self.text("setup", key));
        parts.extend(words.map(ToOwned::to_owned));
        parts.extend(self.text("setup", "autocast").map(|dtype| format!("autocast {dtype}")));
        parts.extend(self.text("setup", "attention").map(|kind| format!("attention {kind}")));
        if self.text("setup", "checkpoint") == Some("full") {
            parts.push("checkpointed".into());
        }
        parts.extend(self.text("software", "torch").map(|version| format!("torch {version}")));
        if let Some(work) = &self.ledger.flops {
            let step =
                [work.forward, work.backward, work.recompute].into_iter().fold(0_u64, u64::saturating_add);
            parts.push(format!("{} a step", flops(step)));
        }
        if let (Some(available), Some(device)) =
            (self.explanation.available_bytes, self.ledger.devices.first())
        {
            let total = device.capacity_bytes.map(size).unwrap_or_default();
            parts.push(format!("{} {total}, of which {} for the allocator", device.name, size(available)));
        }
        parts.join("; ")
    }

    fn phases(&self) -> Block {
        let spans = &self.explanation.timeline;
        let unit = self.unit();
        let measure = self.explanation.peak.as_ref().map_or("", |peak| peak.measure.as_str());
        let mut left_out = String::new();
        if self.explanation.steps_left_out > 0 {
            left_out = format!("; {} steps between are not shown", self.explanation.steps_left_out);
        }
        let mut step_before = None;
        let row = |span: &Span| {
            let repeated = step_before == Some(span.steps);
            step_before = Some(span.steps);
            let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".into(), |bytes| unit.number(bytes));
            vec![
                if repeated { String::new() } else { range(span.steps) },
                match span.micro_batches {
                    Some((first, last)) if first < last => format!("{} x {}", span.phase, last - first + 1),
                    _ => span.phase.clone(),
                },
                known(span.peak_bytes),
                if span.holds_peak { "<- peak".into() } else { String::new() },
                known(span.end_bytes),
                unit.number(span.weights_bytes),
                unit.number(span.gradient_bytes),
                unit.number(span.optimizer_bytes),
                unit.number(span.other_bytes),
            ]
        };
        Block::Table {
            title: Some(format!("Phases, {measure} {}{left_out}", unit.name())),
            rows: spans.iter().map(row).collect(),
            columns: vec![
                Column::numbers("step"),
                Column::words("phase"),
                Column::numbers("largest"),
                Column::words(""),
                Column::numbers("at its end"),
                Column::numbers("weights"),
                Column::numbers("gradients"),
                Column::numbers("optimizer"),
                Column::numbers("other"),
            ],
        }
    }

    fn owners(&self) -> Block {
        let owners = &self.explanation.owners;
        let unit = self.unit();
        let row = |owner: &Owner, indent: &str| {
            vec![
                format!("{indent}{}", owner.name),
                unit.number(owner.bytes),
                format!("{:.1} %", owner.share * 100.0),
            ]
        };
        let mut rows = Vec::new();
        for owner in owners {
            rows.push(row(owner, ""));
            rows.extend(owner.parts.iter().map(|part| row(part, "  ")));
        }
        Block::Table {
            title: Some(format!("At the peak, {}", unit.name())),
            columns: vec![Column::words("what"), Column::numbers("held"), Column::numbers("share")],
            rows,
        }
    }

    fn levers(&self) -> Block {
        let unit = self.unit();
        let row = |lever: &wire::explanation::Lever| {
            vec![
                lever.setting.clone(),
                unit.difference(-lever.saving_bytes),
                unit.number(lever.peak_bytes),
                lever.phase.clone().unwrap_or_default(),
            ]
        };
        Block::Table {
            title: Some(format!("What would change it most, {}", unit.name())),
            columns: vec![
                Column::words("setting"),
                Column::numbers("peak changes by"),
                Column::numbers("to"),
                Column::words("in"),
            ],
            rows: self.explanation.levers.iter().take(MOST_LEVERS).map(row).collect(),
        }
    }
}

/// `1 rank`, or `2 ranks`.
fn plural(number: u64, word: &str) -> String {
    let end = if number == 1 { "" } else { "s" };
    format!("{} {word}{end}", thousands(number))
}

/// `3`, or `2-3`.
fn range((first, last): (u32, u32)) -> String {
    let text = |number: u32| thousands(number.into());
    if first == last { text(first) } else { format!("{}-{}", text(first), text(last)) }
}
