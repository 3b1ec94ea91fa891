//! The report of a reading: what a recording of a run says.

mod instant;
mod sheet;
mod steps;
mod stranding;
mod what_if;

use wire::{Evidence, Ledger, Peak, Reading, Stranding, Totals};

use self::instant::ladder;
use self::what_if::what_if;

use crate::growth;
use crate::plan::request;
use crate::units::{Unit, size, spelled, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The part of the reserved bytes beyond which what is in no block is worth a word.
const WORTH_A_TRY: u64 = 5;
/// The most letters of a place in the program.
const WIDEST_NAME: usize = 60;

/// A ledger that was read from a recording, and what the recording says besides.
#[derive(Clone, Copy, Debug)]
pub struct ReadReport<'a> {
    /// What to call the recording.
    pub name: &'a str,
    /// The ledger.
    pub ledger: &'a Ledger,
    /// What the recording says besides.
    pub reading: &'a Reading,
}

impl Report for ReadReport<'_> {
    fn page(&self) -> Page {
        let mut blocks = vec![self.verdict(), Block::Line(self.file())];
        blocks.extend(self.failure().map(Block::Line));
        blocks.extend(self.peaks());
        if let Some(instant) = &self.reading.instant {
            blocks.extend(self.categories(instant));
            blocks.push(self.owners(instant));
            blocks.extend(ladder(instant));
        }
        blocks.extend(self.steps());
        blocks.extend(growth::blocks(&self.reading.growth, None));
        for stranding in self.reading.stranding.iter().filter(|stranding| stranding.stranded_bytes > 0) {
            blocks.extend(self.stranding(stranding));
        }
        if let Some(remedy) = &self.reading.remedy {
            blocks.push(Block::Line(format!(
                "Would a setting have helped? {}.",
                capitalized(&remedy.explanation)
            )));
            blocks.extend(remedy.tried.iter().flat_map(what_if));
        }
        if self.reading.what_if.is_none() && self.reading.remedy.is_none() && self.strands() {
            let hint =
                "`--what-if expandable_segments:True` tells what the same requests would have reserved then.";
            blocks.push(Block::Line(hint.into()));
        }
        blocks.extend(self.reading.what_if.iter().flat_map(what_if));
        blocks.push(Block::List {
            title: "What the file does not tell".into(),
            items: self.ledger.warnings.iter().map(|warning| spelled(warning)).collect(),
        });
        blocks.push(Block::List {
            title: "How to read this".into(),
            items: self.ledger.interpretation_limits.clone(),
        });
        Page::of(blocks)
    }

    fn sheet(&self) -> Sheet {
        sheet::sheet(self)
    }
}

/// The form of a trace, in [`Evidence::form`].
const PROFILER_TRACE: &str = "profiler_trace";

/// One of the totals of a step.
type Total = fn(&Totals) -> Option<u64>;

const TOTALS: [(&str, Total); 3] = [
    ("requested", |totals| totals.requested_bytes),
    ("allocated", |totals| totals.allocated_bytes),
    ("reserved", |totals| totals.reserved_bytes),
];

impl ReadReport<'_> {
    /// The unit of the page.
    fn unit(&self) -> Unit {
        let peaks = &self.ledger.peaks;
        let peaks = [&peaks.reserved, &peaks.allocated, &peaks.requested];
        Unit::of_largest(peaks.into_iter().flatten().map(|peak| peak.bytes))
    }

    /// Whether so much is reserved in vain that other settings are worth a try.
    fn strands(&self) -> bool {
        let expandable =
            self.reading.file.settings.get("expandable_segments").and_then(|value| value.as_bool());
        let worth = |stranding: &Stranding| {
            stranding.at == "reserved_peak"
                && stranding.stranded_bytes > stranding.reserved_bytes / WORTH_A_TRY
        };
        expandable != Some(true) && self.reading.stranding.iter().any(worth)
    }

    fn several(&self) -> bool {
        self.ledger.devices.len() > 1
    }

    fn device(&self, index: u16) -> &str {
        self.ledger.devices.get(usize::from(index)).map_or("?", |device| device.name.as_str())
    }

    fn verdict(&self) -> Block {
        let unit = self.unit();
        let peaks = &self.ledger.peaks;
        let text = match (&self.ledger.oom, peaks.allocated.as_ref().or(peaks.requested.as_ref())) {
            (Some(oom), _) => format!(
                "{}: out of memory{} on {}: a request of {} found no room",
                self.name,
                place(oom.step, oom.micro_batch, oom.phase.as_deref()),
                self.device(oom.device),
                size(oom.requested_bytes)
            ),
            (None, Some(peak)) => {
                let measure = if peaks.allocated.is_some() { "allocated" } else { "requested" };
                let reserved =
                    peaks.reserved.as_ref().map(|peak| format!(", {} reserved", unit.size(peak.bytes)));
                format!(
                    "{} peaks at {} {measure}{}{}",
                    self.name,
                    unit.size(peak.bytes),
                    place(peak.step, peak.micro_batch, peak.phase.as_deref()),
                    reserved.unwrap_or_default()
                )
            }
            (None, None) => format!("{}: nothing is allocated", self.name),
        };
        Block::Verdict { good: self.ledger.fits.filter(|fits| !fits), text }
    }

    /// What the file is and how good it is.
    fn file(&self) -> String {
        let Evidence { entries, devices, requests, requests_without_stack, .. } = &self.reading.file;
        let form = &self.reading.file.form;
        let what = match form.as_str() {
            PROFILER_TRACE => "a profiler trace of PyTorch".into(),
            "memory_timeline" => "a memory timeline of PyTorch's profiler".into(),
            _ => {
                format!(
                    "a memory snapshot of {}",
                    self.reading.file.written_by.as_deref().unwrap_or("PyTorch")
                )
            }
        };
        let mut parts = vec![format!("{what}, {}", size(self.reading.file.file_bytes))];
        let over = self.reading.file.microseconds.map(|time| format!(" over {}", duration(time)));
        parts.push(format!("{}{}", plural(*entries, "entry", "entries"), over.unwrap_or_default()));
        let steps = self.reading.steps.iter().map(|step| step.step).max().unwrap_or(0);
        let updates = self.reading.file.updates;
        match (steps, updates) {
            (1.., Some(0)) => parts.push("no optimizer step".into()),
            _ if *entries == 0 => {}
            (0, None) => parts.push("steps are not told".into()),
            (0, Some(_)) => parts.push("no training step found".into()),
            _ => parts.push(plural(u64::from(steps), "training step", "training steps")),
        }
        if *entries > 0 {
            for start in devices {
                let name = self.device(start.device);
                parts.push(match start.objects_before {
                    0 => format!("{name} is empty at the first entry"),
                    objects => format!(
                        "{name} holds {} of {} at the first entry already",
                        plural(objects, "object", "objects"),
                        size(start.bytes_before)
                    ),
                });
            }
        }
        if let Some(without) = requests_without_stack.filter(|without| *requests > 0 && *without > 0) {
            let share = without as f64 / *requests as f64 * 100.0;
            parts.push(match form.as_str() {
                PROFILER_TRACE => format!("{share:.0} % of the requests are made inside no operator"),
                _ => format!("{share:.0} % of the requests have no stack, as on autograd's threads"),
            });
        }
        if let Some(settings) = self.reading.file.alloc_conf.as_ref().filter(|settings| !settings.is_empty())
        {
            parts.push(format!("allocator settings {settings}"));
        }
        if let Some(hidden) = self.reading.file.hidden_block_bytes.filter(|hidden| *hidden > 0) {
            let hidden = size(hidden);
            parts.push(format!("early allocated bytes may be up to {hidden} more"));
        }
        if self.reading.file.block_disagreements.is_some_and(|count| count > 0)
            || self.reading.file.blocks_agree == Some(false)
        {
            parts.push("not every block is told, so that allocated bytes may be off".into());
        }
        parts.join("; ")
    }

    fn failure(&self) -> Option<String> {
        let oom = self.ledger.oom.as_ref()?;
        let mut text = format!("It {}", request(oom, self.ledger.headroom_bytes));
        if let Some(free) = oom.device_free_bytes {
            text.push_str(&format!("; the device has {} left", size(free)));
        }
        Some(text + ".")
    }

    fn peaks(&self) -> Option<Block> {
        let unit = self.unit();
        let peaks = &self.ledger.peaks;
        let rows =
            [("requested", &peaks.requested), ("allocated", &peaks.allocated), ("reserved", &peaks.reserved)];
        let known = rows.into_iter().filter_map(|(measure, peak)| Some((measure, peak.as_ref()?)));
        let known: Vec<(&str, &Peak)> = known.collect();
        // Before the first mark of a tape there is no step, and a tape may have none.
        let marked = !self.reading.steps.is_empty();
        let row = |(measure, peak): &(&str, &Peak)| {
            let mut cells = vec![(*measure).to_owned(), unit.number(peak.bytes)];
            if self.several() {
                cells.push(self.device(peak.device).to_owned());
            }
            if marked {
                cells.extend([
                    peak.step.map(|step| step.to_string()).unwrap_or_default(),
                    peak.micro_batch.map(|at| at.to_string()).unwrap_or_default(),
                    peak.phase.clone().unwrap_or_else(|| "before the first step".into()),
                ]);
            }
            cells.push(thousands(peak.event));
            cells
        };
        let rows: Vec<Vec<String>> = known.iter().map(row).collect();
        let mut columns = vec![Column::words("measure"), Column::numbers("peak")];
        if self.several() {
            columns.push(Column::words("on"));
        }
        if marked {
            columns.extend([Column::numbers("step"), Column::numbers("micro-batch"), Column::words("phase")]);
        }
        columns.push(Column::numbers("event"));
        (!rows.is_empty()).then(|| Block::Table {
            title: Some(format!("Peaks, {}", unit.name())),
            columns,
            rows,
        })
    }
}

/// The frames of a place that fit into a page, the innermost first; at least that one.
pub(crate) fn short(name: &str) -> String {
    let mut shown = String::new();
    for (index, frame) in name.split(" < ").enumerate() {
        if index > 0 && shown.len() + frame.len() + 3 > WIDEST_NAME {
            return shown + " < …";
        }
        let between = if index > 0 { " < " } else { "" };
        shown = format!("{shown}{between}{frame}");
    }
    shown
}

/// `in step 2, backward of micro-batch 3`.
fn place(step: Option<u32>, micro_batch: Option<u32>, phase: Option<&str>) -> String {
    let batch =
        micro_batch.filter(|at| *at > 1).map(|at| format!(" of micro-batch {at}")).unwrap_or_default();
    match (step, phase) {
        (Some(0), Some(phase)) => format!(" in {phase}, before the first step"),
        (Some(step), Some(phase)) => format!(" in step {step}, {phase}{batch}"),
        _ => String::new(),
    }
}

fn plural(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", thousands(count), if count == 1 { one } else { many })
}

/// `1.25 s`, `12 ms`, `3 min 20 s`.
fn duration(microseconds: u64) -> String {
    match microseconds {
        0..1000 => format!("{microseconds} us"),
        1000..1_000_000 => format!("{} ms", microseconds / 1000),
        1_000_000..120_000_000 => format!("{:.2} s", microseconds as f64 / 1e6),
        _ => {
            let seconds = microseconds / 1_000_000;
            format!("{} min {} s", thousands(seconds / 60), seconds % 60)
        }
    }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
