//! The report of a plan: a ledger and what it means.

use wire::explanation::{Explanation, Owner, PeakSummary, Rung, Span};
use wire::{Batch, Contributor, Ledger, Oom, Totals};

use crate::growth;
use crate::rank::rank_of;
use crate::units::{Unit, count, flops, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most levers that are shown.
const MOST_LEVERS: usize = 4;
/// The most holders of a device that is full that are shown.
const MOST_HOLDERS: usize = 5;

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
        let mut blocks = vec![self.verdict()];
        blocks.extend(self.failure());
        blocks.push(Block::Line(self.what()));
        blocks.push(self.phases());
        blocks.extend(self.hosts());
        blocks.extend(self.ladder());
        blocks.extend(self.streams());
        blocks.extend(self.ledger.ranks.iter().map(|ranks| rank_of(ranks, self.ledger, self.unit())));
        blocks.push(self.owners());
        blocks.extend(self.holders());
        if !self.explanation.levers.is_empty() {
            blocks.push(self.levers());
        }
        blocks.push(Block::List { title: "Assumed".into(), items: self.ledger.assumptions.clone() });
        blocks.extend(self.ledger.growth.iter().flat_map(|growth| growth::blocks(growth, None)));
        blocks.push(Block::List {
            title: "Not in these figures".into(),
            items: self.ledger.interpretation_limits.clone(),
        });
        Page::of(blocks)
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

    /// What was run: a model, or a program with its arguments.
    fn name(&self) -> String {
        let words = self.ledger.subject.get("program").and_then(|program| program.as_array());
        let words: Vec<&str> = words.into_iter().flatten().filter_map(|word| word.as_str()).collect();
        match self.text("model", "name") {
            Some(model) => model.to_owned(),
            None if words.is_empty() => "this run".into(),
            None => format!("`{}`", words.join(" ")),
        }
    }

    fn verdict(&self) -> Block {
        let model = self.name();
        let Some(peak) = &self.explanation.peak else {
            return Block::Verdict { good: None, text: format!("{model}: nothing is allocated") };
        };
        let device = self.ledger.devices.first().map_or("the device", |device| device.name.as_str());
        let unit = self.unit();
        let peaks = format!("{} peaks at {} ({})", peak.measure, unit.size(peak.bytes), place(peak));
        let text = match self.ledger.fits {
            Some(true) => {
                let reserved = self.ledger.peaks.reserved.as_ref().map(|peak| unit.size(peak.bytes));
                let spare = self.ledger.headroom_bytes.map(|bytes| size(bytes.unsigned_abs()));
                let known = |amount: Option<String>| amount.unwrap_or_else(|| "an unknown amount".into());
                format!(
                    "{model} fits on {device}: reserves {}, {} to spare; {peaks}",
                    known(reserved),
                    known(spare)
                )
            }
            Some(false) => match &self.ledger.oom {
                Some(oom) => {
                    let phase = oom.phase.as_deref().unwrap_or("an unknown phase");
                    let step = oom.step.map(|step| format!(" of step {step}")).unwrap_or_default();
                    format!("{model} does not fit on {device}: out of memory in {phase}{step}")
                }
                None => format!("{model} does not fit on {device}: {peaks}"),
            },
            None => match self.explanation.left_bytes {
                Some(left) if left < 0 => {
                    format!("{model}: {peaks}, {} more than {device} has for it", size(left.unsigned_abs()))
                }
                _ => format!("{model}: {peaks}; whether it fits on {device} is not known"),
            },
        };
        Block::Verdict { good: self.ledger.fits, text }
    }

    /// Which request found no room, and what the run would need.
    fn failure(&self) -> Option<Block> {
        let oom = self.ledger.oom.as_ref()?;
        let mut text = format!("It {}.", request(oom, self.ledger.headroom_bytes));
        if let Some(demand) = &self.explanation.demand {
            let amount = size(demand.bytes);
            text.push_str(&format!(" Given room it would peak at {amount} requested ({}).", place(demand)));
        }
        Some(Block::Line(text))
    }

    /// What was planned, in a line or two.
    fn what(&self) -> String {
        let mut parts = Vec::new();
        if let Some(parameters) = &self.ledger.parameters {
            parts.push(format!("{} parameters ({})", count(parameters.total), size(parameters.bytes)));
        }
        parts.extend(self.ledger.batch.as_ref().and_then(batch));
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
        parts.extend(self.strategies());
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

    /// What is recomputed, where the optimizer steps, and what waits on the host.
    fn strategies(&self) -> Vec<String> {
        let mut parts = Vec::new();
        let setup = self.ledger.subject.get("setup");
        let flag = |key: &str| setup.and_then(|setup| setup.get(key)?.as_bool()) == Some(true);
        match self.text("setup", "checkpoint") {
            None | Some("none") => {}
            Some("full") => parts.push("checkpointed".into()),
            Some(form) => parts.push(format!("checkpointed {form}")),
        }
        if flag("checkpoint_reentrant") {
            parts.push("reentrant".into());
        }
        if flag("optimizer_in_backward") {
            parts.push("optimizer in backward".into());
        }
        let offload = setup.and_then(|setup| setup.get("offload")?.as_array()).into_iter().flatten();
        let offload: Vec<&str> = offload.filter_map(|what| what.as_str()).collect();
        if !offload.is_empty() {
            parts.push(format!("on the host: {}", offload.join(", ")));
        }
        parts
    }

    /// The most that memory of the host holds.
    fn hosts(&self) -> Vec<Block> {
        let unit = self.unit();
        let line = |(name, peak): &(String, PeakSummary)| {
            let bytes = unit.size(peak.bytes);
            Block::Line(format!("Memory of the {name} peaks at {bytes} requested ({}).", place(peak)))
        };
        self.explanation.hosts.iter().map(line).collect()
    }

    fn phases(&self) -> Block {
        let spans = &self.explanation.timeline;
        let unit = self.unit();
        let measure = self.explanation.peak.as_ref().map_or("", |peak| peak.measure.as_str());
        let mut left_out = String::new();
        if self.explanation.steps_left_out > 0 {
            left_out = format!("; {} steps between are not shown", self.explanation.steps_left_out);
        }
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".into(), |bytes| unit.number(bytes));
        let mut step_before = None;
        let row = |span: &Span| {
            let repeated = step_before == Some(span.steps);
            step_before = Some(span.steps);
            vec![
                if repeated { String::new() } else { range(span.steps) },
                match span.micro_batches {
                    Some((first, last)) if first < last => format!("{} x {}", span.phase, last - first + 1),
                    _ => span.phase.clone(),
                },
                known(span.peak_reserved_bytes),
                known(span.peak_bytes),
                if span.holds_peak { "<- peak".into() } else { String::new() },
                unit.number(span.end_bytes),
                unit.number(span.weights_bytes),
                unit.number(span.gradient_bytes),
                unit.number(span.optimizer_bytes),
                unit.number(span.other_bytes),
            ]
        };
        Block::Table {
            title: Some(format!(
                "Phases, {}: the largest totals, and what is held at the end{left_out}",
                unit.name()
            )),
            rows: spans.iter().map(row).collect(),
            columns: vec![
                Column::numbers("step"),
                Column::words("phase"),
                Column::numbers("reserved"),
                Column::numbers(measure),
                Column::words(""),
                Column::numbers("at the end"),
                Column::numbers("weights"),
                Column::numbers("gradients"),
                Column::numbers("optimizer"),
                Column::numbers("other"),
            ],
        }
    }

    /// The measures from the bytes asked for up to the whole card.
    fn ladder(&self) -> Option<Block> {
        let rungs = &self.explanation.ladder;
        let unit = self.unit();
        let row = |(index, rung): (usize, &Rung)| {
            let more = match index {
                0 => String::new(),
                _ => format!("+{}", unit.number(rung.more_bytes)),
            };
            vec![rung.measure.clone(), unit.number(rung.bytes), more, rung.what.clone()]
        };
        let when = if self.ledger.oom.is_some() { "when it failed" } else { "when most is reserved" };
        (!rungs.is_empty()).then(|| Block::Table {
            title: Some(format!("The card {when}, {}", unit.name())),
            columns: vec![
                Column::words("measure"),
                Column::numbers("total"),
                Column::numbers("more"),
                Column::words("which is"),
            ],
            rows: rungs.iter().enumerate().map(row).collect(),
        })
    }

    /// What it costs that streams keep their blocks apart.
    fn streams(&self) -> Option<Block> {
        let reserved = self.ledger.peaks.reserved.as_ref()?;
        let bytes = self.explanation.one_stream_bytes?;
        let unit = self.unit();
        Some(Block::Line(format!(
            "Blocks freed on the streams of collectives serve no other stream: on one stream {} {} would be reserved, {} less.",
            unit.number(bytes),
            unit.name(),
            unit.number(reserved.bytes.saturating_sub(bytes)),
        )))
    }

    /// The largest of what stood in the way of a request that found no room.
    fn holders(&self) -> Option<Block> {
        let holders = &self.ledger.oom.as_ref()?.holders;
        let unit = self.unit();
        let row = |holder: &Contributor| {
            let category = holder.category.0.as_str().to_owned();
            vec![holder.name.clone(), category, thousands(holder.count), unit.number(holder.bytes)]
        };
        (!holders.is_empty()).then(|| Block::Table {
            title: Some(format!("The largest holders when it failed, {}", unit.name())),
            columns: vec![
                Column::words("objects"),
                Column::words("category"),
                Column::numbers("count"),
                Column::numbers("held"),
            ],
            rows: holders.iter().take(MOST_HOLDERS).map(row).collect(),
        })
    }

    fn owners(&self) -> Block {
        let owners = &self.explanation.owners;
        let unit = self.unit();
        let failed = self.ledger.oom.as_ref().is_some_and(|oom| !oom.holders.is_empty());
        let when = if failed { "Allocated when it failed" } else { "At the peak" };
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
            title: Some(format!("{when}, {}", unit.name())),
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
                lever.fits.map(|fits| if fits { "fits" } else { "does not fit" }).unwrap_or_default().into(),
            ]
        };
        Block::Table {
            title: Some(format!("What would change it most, requested {}", unit.name())),
            columns: vec![
                Column::words("setting"),
                Column::numbers("peak changes by"),
                Column::numbers("to"),
                Column::words("in"),
                Column::words(""),
            ],
            rows: self.explanation.levers.iter().take(MOST_LEVERS).map(row).collect(),
        }
    }
}

/// `asks for 9.00 MiB for x (event 8,214), …`: what a request that found no room wanted, and what
/// there was; `headroom` is negative.
pub(crate) fn request(oom: &Oom, headroom: Option<i64>) -> String {
    let object = oom.object.as_ref().map(|name| format!(" for {name}")).unwrap_or_default();
    let mut text = format!("asks for {}{object} (event {})", size(oom.requested_bytes), thousands(oom.event));
    if let Some(bytes) = oom.rounded_bytes.filter(|bytes| *bytes != oom.requested_bytes) {
        text.push_str(&format!(", a block of {}", size(bytes)));
    }
    if let Some(bytes) = oom.device_request_bytes {
        text.push_str(&format!(", for which the allocator tries to take {} of the card", size(bytes)));
    }
    if let Some(short) = headroom.filter(|bytes| *bytes < 0) {
        text.push_str(&format!(": {} more than is left", size(short.unsigned_abs())));
    }
    if let Some(bytes) = oom.held.reserved_bytes {
        text.push_str(&format!("; {} are reserved", size(bytes)));
    }
    match oom.largest_free_block_bytes {
        Some(0) => text.push_str(", with no free block of its kind"),
        Some(bytes) => {
            text.push_str(&format!(", and the largest free block of its kind has {}", size(bytes)));
        }
        None => {}
    }
    text
}

/// `backward, step 2, micro-batch 3`.
fn place(peak: &PeakSummary) -> String {
    let mut place: Vec<String> = peak.phase.iter().cloned().collect();
    place.extend(peak.step.filter(|step| *step > 0).map(|step| format!("step {step}")));
    place.extend(peak.micro_batch.filter(|at| *at > 1).map(|at| format!("micro-batch {at}")));
    place.join(", ")
}

/// `1 rank`, or `2 ranks`.
pub(crate) fn plural(number: u64, word: &str) -> String {
    let end = if number == 1 { "" } else { "s" };
    format!("{} {word}{end}", thousands(number))
}

/// `3`, or `2-3`.
fn range((first, last): (u32, u32)) -> String {
    let text = |number: u32| thousands(number.into());
    if first == last { text(first) } else { format!("{}-{}", text(first), text(last)) }
}

/// The batch of an update: `micro-batch 4 x 8 rounds x 1 rank = 32 samples an update`.
fn batch(batch: &Batch) -> Option<String> {
    let samples = batch.micro_batch.map(|samples| format!("micro-batch {samples}"));
    if batch.forward_backward_rounds * batch.world_size <= 1 {
        return samples;
    }
    let rounds = plural(batch.forward_backward_rounds, "round");
    let ranks = plural(batch.world_size, "rank");
    let factors: Vec<String> = samples.into_iter().chain([rounds, ranks]).collect();
    let total = batch.effective_batch.map(|total| format!(" = {total} samples")).unwrap_or_default();
    Some(format!("{}{total} an update", factors.join(" x ")))
}
