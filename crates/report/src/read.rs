//! The report of a reading: what a recording of a run says.

use wire::{
    Evidence, Instant, InstantRow, Ladder, Ledger, Peak, Pin, Reading, Step, Stranded, Stranding, Totals,
    WhatIf,
};

use crate::growth;
use crate::plan::request;
use crate::units::{Unit, size, spelled, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most owners that are shown.
const MOST_ROWS: usize = 20;
/// The part of the reserved bytes beyond which what is in no block is worth a word.
const WORTH_A_TRY: u64 = 5;
/// The most letters of a place in the program.
const WIDEST_NAME: usize = 60;
/// The least share of the total that makes a row.
const LEAST_SHARE: f64 = 0.0005;
/// The most segments that are shown.
const MOST_SEGMENTS: usize = 5;
/// The most steps that are all shown; of more, so many from the start and from the end.
const MOST_STEPS: usize = 8;
const FIRST_STEPS: usize = 4;
const LAST_STEPS: usize = 2;

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

    /// All of it in one table of sections.
    fn sheet(&self) -> Sheet {
        let mut sheet = Sheet { head: HEAD.to_vec(), rows: Vec::new() };
        let peaks = &self.ledger.peaks;
        let peaks =
            [("requested", &peaks.requested), ("allocated", &peaks.allocated), ("reserved", &peaks.reserved)];
        for (measure, peak) in peaks.iter().filter_map(|(measure, peak)| Some((measure, peak.as_ref()?))) {
            let at = Line { section: "peak", device: peak.device, ..Line::default() };
            let at =
                Line { step: peak.step, micro_batch: peak.micro_batch, phase: peak.phase.as_deref(), ..at };
            sheet.rows.push(
                Line { event: Some(peak.event), measure, bytes: Some(signed(peak.bytes)), ..at }.fields(),
            );
            for (category, bytes) in &peak.by_category {
                let category = Some(category.0.as_str());
                let line = Line {
                    section: "peak_by_category",
                    measure,
                    category,
                    bytes: Some(signed(*bytes)),
                    ..at
                };
                sheet.rows.push(Line { event: Some(peak.event), ..line }.fields());
            }
        }
        if let Some(instant) = &self.reading.instant {
            for row in &instant.rows {
                let line = Line {
                    section: "instant",
                    device: instant.device,
                    step: instant.step,
                    micro_batch: instant.micro_batch,
                    phase: instant.phase.as_deref(),
                    event: Some(instant.event),
                    measure: instant.measure.0.as_str(),
                    name: &row.name,
                    category: row.category.map(|category| category.0.as_str()),
                    bytes: Some(signed(row.bytes)),
                    count: Some(row.count),
                };
                sheet.rows.push(line.fields());
            }
        }
        for step in &self.reading.steps {
            let at = Line { device: step.device, step: Some(step.step), ..Line::default() };
            let mut totals = |section, totals: &Totals, phase| {
                for (measure, bytes) in measures(totals) {
                    let line = Line { section, measure, phase, bytes: Some(signed(bytes)), ..at };
                    sheet.rows.push(line.fields());
                }
            };
            totals("step_peak", &step.peak, Some(step.peak_phase.as_str()));
            totals("step_end", &step.end, None);
            if let Some(bytes) = step.grown_bytes {
                sheet.rows.push(
                    Line { section: "step_growth", measure: "requested", bytes: Some(bytes), ..at }.fields(),
                );
            }
        }
        for row in &self.ledger.phases {
            let at = Line {
                device: row.device,
                step: Some(row.step),
                micro_batch: row.micro_batch,
                ..Line::default()
            };
            let at = Line { phase: Some(&row.phase), ..at };
            for (section, totals) in [("phase_peak", &row.peak), ("phase_end", &row.end)] {
                for (measure, bytes) in measures(totals) {
                    sheet.rows.push(Line { section, measure, bytes: Some(signed(bytes)), ..at }.fields());
                }
            }
            for (category, bytes) in &row.end_by_category {
                let category = Some(category.0.as_str());
                let line = Line { section: "phase_end_by_category", measure: "requested", category, ..at };
                sheet.rows.push(Line { bytes: Some(signed(*bytes)), ..line }.fields());
            }
        }
        for row in &self.reading.growth.rows {
            let line = Line {
                section: "growth_per_step",
                step: Some(row.last_step),
                measure: "requested",
                name: &row.name,
                category: Some(row.category.0.as_str()),
                bytes: Some(signed(row.bytes_per_step)),
                count: Some(row.count),
                ..Line::default()
            };
            sheet.rows.push(line.fields());
        }
        for slope in self.reading.growth.allocated.iter().chain(&self.reading.growth.reserved) {
            let line = Line { section: "slope", step: u32::try_from(slope.to_step).ok(), ..Line::default() };
            let line = Line { measure: &slope.figure, bytes: Some(slope.bytes_per_step), ..line };
            sheet.rows.push(line.fields());
        }
        for stranding in &self.reading.stranding {
            for segment in &stranding.segments {
                let address = format!("{:#x}", segment.address);
                let at = Line { device: stranding.device, event: Some(stranding.event), ..Line::default() };
                let line = Line { section: "stranded", phase: Some(&stranding.at), name: &address, ..at };
                sheet.rows.push(Line { bytes: Some(signed(segment.free_bytes)), ..line }.fields());
                for pin in &segment.pins {
                    let line = Line {
                        section: "pin",
                        phase: Some(&stranding.at),
                        name: &pin.name,
                        category: Some(pin.category.0.as_str()),
                        bytes: Some(signed(pin.bytes)),
                        count: Some(pin.count),
                        step: pin.since_step,
                        ..at
                    };
                    sheet.rows.push(line.fields());
                }
            }
        }
        let settings = self.reading.what_if.iter().flat_map(|what_if| &what_if.settings);
        for (settings, device) in settings.flat_map(|row| row.devices.iter().map(move |device| (row, device)))
        {
            let totals = [
                ("allocated", device.peak_allocated_bytes),
                ("reserved", device.peak_reserved_bytes),
                ("stranded", device.stranded_at_peak_bytes),
            ];
            for (measure, bytes) in totals {
                let line = Line { section: "what_if", device: device.device, measure, ..Line::default() };
                sheet
                    .rows
                    .push(Line { name: &settings.alloc_conf, bytes: Some(signed(bytes)), ..line }.fields());
            }
        }
        sheet
    }
}

/// The form of a trace, in [`Evidence::form`].
const PROFILER_TRACE: &str = "profiler_trace";

const HEAD: [&str; 11] = [
    "section",
    "device",
    "step",
    "micro_batch",
    "phase",
    "event",
    "measure",
    "name",
    "category",
    "bytes",
    "count",
];

/// A row of the sheet.
#[derive(Clone, Copy, Default)]
struct Line<'a> {
    section: &'a str,
    device: u16,
    step: Option<u32>,
    micro_batch: Option<u32>,
    phase: Option<&'a str>,
    event: Option<u64>,
    measure: &'a str,
    name: &'a str,
    category: Option<&'a str>,
    bytes: Option<i64>,
    count: Option<u64>,
}

impl Line<'_> {
    fn fields(&self) -> Vec<String> {
        let number = |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
        vec![
            self.section.to_owned(),
            self.device.to_string(),
            number(self.step.map(u64::from)),
            number(self.micro_batch.map(u64::from)),
            self.phase.unwrap_or_default().to_owned(),
            number(self.event),
            self.measure.to_owned(),
            self.name.to_owned(),
            self.category.unwrap_or_default().to_owned(),
            self.bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
            number(self.count),
        ]
    }
}

/// An amount of a ledger, which is below 2^63.
const fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}

/// One of the totals of a step.
type Total = fn(&Totals) -> Option<u64>;

const TOTALS: [(&str, Total); 3] = [
    ("requested", |totals| totals.requested_bytes),
    ("allocated", |totals| totals.allocated_bytes),
    ("reserved", |totals| totals.reserved_bytes),
];

fn measures(totals: &Totals) -> impl Iterator<Item = (&'static str, u64)> {
    TOTALS.into_iter().filter_map(|(measure, total)| Some((measure, total(totals)?)))
}

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

    /// What is there by category, where the rows are not told apart by category themselves.
    fn categories(&self, instant: &Instant) -> Option<Block> {
        let unit = Unit::of_largest([instant.bytes]);
        let mut rows: Vec<(&str, u64)> =
            instant.by_category.iter().map(|(category, bytes)| (category.0.as_str(), *bytes)).collect();
        rows.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        let row = |(name, bytes): (&str, u64)| {
            vec![name.to_owned(), unit.number(bytes), share(bytes, instant.bytes)]
        };
        (instant.by != "category" && !rows.is_empty()).then(|| Block::Table {
            title: Some(format!("{}, {} {}", self.moment(instant), instant.measure.0.as_str(), unit.name())),
            columns: vec![Column::words("category"), Column::numbers("held"), Column::numbers("share")],
            rows: rows.into_iter().map(row).collect(),
        })
    }

    /// `Who is there (event 186, step 2, backward, at 1.53 s)`.
    fn moment(&self, instant: &Instant) -> String {
        let failed = self.ledger.oom.as_ref().is_some_and(|oom| oom.event == instant.event);
        let mut when = vec![format!("event {}", thousands(instant.event))];
        when.extend(instant.step.filter(|step| *step > 0).map(|step| format!("step {step}")));
        when.extend(instant.micro_batch.filter(|at| *at > 1).map(|at| format!("micro-batch {at}")));
        when.extend(instant.phase.clone());
        when.extend(self.several().then(|| self.device(instant.device).to_owned()));
        when.extend(instant.microseconds.map(|time| format!("at {}", duration(time))));
        let head = if failed { "Who was there when it failed" } else { "Who is there" };
        format!("{head} ({})", when.join(", "))
    }

    fn owners(&self, instant: &Instant) -> Block {
        let unit = Unit::of_largest([instant.bytes]);
        let by_category = instant.by == "category";
        let cells = |name: String, category: &str, count: u64, bytes: u64| {
            let mut cells = vec![name];
            if !by_category {
                cells.push(category.to_owned());
            }
            cells.extend([thousands(count), unit.number(bytes), share(bytes, instant.bytes)]);
            cells
        };
        let row = |row: &InstantRow| {
            let name = if instant.by == "size" { named_size(&row.name) } else { short(&row.name) };
            let category = row.category.map_or("any", |category| category.0.as_str());
            cells(name, category, row.count, row.bytes)
        };
        let worth = |row: &&InstantRow| row.bytes as f64 >= LEAST_SHARE * instant.bytes as f64;
        let shown = instant.rows.iter().take(MOST_ROWS).take_while(worth).count();
        // One more row says more than that there is one.
        let shown = if shown + 1 == instant.rows.len() { shown + 1 } else { shown };
        let (shown, rest) = instant.rows.split_at(shown);
        let mut rows: Vec<Vec<String>> = shown.iter().map(row).collect();
        let count = |rows: &[InstantRow]| rows.iter().map(|row| row.count).sum();
        if !rest.is_empty() {
            let name = format!("{} more", thousands(rest.len() as u64));
            rows.push(cells(name, "", count(rest), rest.iter().map(|row| row.bytes).sum()));
        }
        rows.push(cells("all".into(), "", count(&instant.rows), instant.bytes));
        let title = match by_category {
            true => format!("{}, {} {}", self.moment(instant), instant.measure.0.as_str(), unit.name()),
            false => format!("The same by {}, {}", instant.by, unit.name()),
        };
        let mut columns = vec![Column::words(instant.by.clone())];
        if !by_category {
            columns.push(Column::words("category"));
        }
        columns.extend([Column::numbers("count"), Column::numbers("held"), Column::numbers("share")]);
        Block::Table { title: Some(title), columns, rows }
    }

    fn steps(&self) -> Option<Block> {
        let unit = self.unit();
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".into(), |bytes| unit.number(bytes));
        let steps = &self.reading.steps;
        // What has no requests has blocks, and a measure that no step knows has no column.
        let totals: Vec<(&str, Total)> = TOTALS
            .into_iter()
            .filter(|(_, total)| steps.iter().any(|step| total(&step.peak).is_some()))
            .collect();
        let requested = steps.iter().any(|step| step.end.requested_bytes.is_some());
        let peak = self.ledger.peaks.allocated.as_ref().and_then(|peak| peak.step);
        let shown = |(index, step): &(usize, &Step)| {
            steps.len() <= MOST_STEPS
                || *index < FIRST_STEPS
                || index + LAST_STEPS >= steps.len()
                || Some(step.step) == peak
        };
        let row = |(_, step): (usize, &Step)| {
            let mut cells = vec![if step.step == 0 { "before".into() } else { step.step.to_string() }];
            if self.several() {
                cells.push(self.device(step.device).to_owned());
            }
            cells.push(step.micro_batches.to_string());
            cells.extend(totals.iter().map(|(_, total)| known(total(&step.peak))));
            cells.extend([
                step.peak_phase.clone(),
                known(step.end.requested_bytes.or(step.end.allocated_bytes)),
                step.grown_bytes.map(|bytes| unit.difference(bytes)).unwrap_or_default(),
            ]);
            cells
        };
        let rows: Vec<Vec<String>> = steps.iter().enumerate().filter(shown).map(row).collect();
        let left_out = match steps.len() - rows.len() {
            0 => String::new(),
            rows => format!("; {} not shown", plural(rows as u64, "row", "rows")),
        };
        let mut columns = vec![Column::numbers("step")];
        if self.several() {
            columns.push(Column::words("device"));
        }
        columns.push(Column::numbers("passes"));
        columns.extend(totals.iter().map(|(name, _)| Column::numbers(*name)));
        columns.extend([Column::words("in"), Column::numbers("at the end"), Column::numbers("change")]);
        (!rows.is_empty()).then(|| Block::Table {
            title: Some(format!(
                "Steps, {}: the largest totals, and what is {} and held at the end{left_out}",
                unit.name(),
                if requested { "requested" } else { "allocated" }
            )),
            columns,
            rows,
        })
    }

    fn stranding(&self, stranding: &Stranding) -> Vec<Block> {
        let unit = self.unit();
        let when = if stranding.at == "end" { "at the end" } else { "when most is reserved" };
        let device =
            if self.several() { format!(" on {}", self.device(stranding.device)) } else { String::new() };
        let mut text = format!(
            "Reserved and in no block {when}{device}: {} of {}",
            unit.size(stranding.stranded_bytes),
            unit.size(stranding.reserved_bytes),
        );
        let pinned: Vec<&Stranded> = stranding.segments.iter().filter(|row| !row.pins.is_empty()).collect();
        if stranding.whole_bytes > 0 {
            let what = ", of which {} are whole segments that the allocator can give back";
            text.push_str(&what.replace("{}", &unit.size(stranding.whole_bytes)));
        }
        if !pinned.is_empty() {
            text.push_str(&format!(
                ", and {} lie beside blocks in use in {}",
                unit.size(stranding.pinned_bytes),
                plural(pinned.len() as u64, "segment", "segments")
            ));
        }
        text.push_str(&format!(
            ". The largest free block has {}.",
            unit.size(stranding.largest_free_block_bytes)
        ));
        let mut blocks = vec![Block::Verdict { good: None, text }];
        let unit = Unit::of_largest(pinned.iter().map(|segment| segment.bytes));
        let row = |segment: &&Stranded| {
            let others: u64 = segment.pins.iter().skip(1).map(|pin| pin.count).sum();
            let others = (others > 0).then(|| plural(others, "other block", "other blocks"));
            let pins: Vec<String> = segment.pins.first().map(pin).into_iter().chain(others).collect();
            vec![
                unit.number(segment.bytes),
                unit.number(segment.free_bytes),
                unit.number(segment.largest_free_block_bytes),
                pins.join("; "),
            ]
        };
        if !pinned.is_empty() {
            let more = match pinned.len().saturating_sub(MOST_SEGMENTS) {
                0 => String::new(),
                rows => format!("; {} more not shown", thousands(rows as u64)),
            };
            blocks.push(Block::Table {
                title: Some(format!("Segments that are kept, {}{more}", unit.name())),
                columns: vec![
                    Column::numbers("segment"),
                    Column::numbers("free"),
                    Column::numbers("largest"),
                    Column::words("kept by"),
                ],
                rows: pinned.iter().take(MOST_SEGMENTS).map(row).collect(),
            });
        }
        blocks
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

/// `512.00 KiB optimizer_state from step 1, adam.py:179 _init_group`.
fn pin(pin: &Pin) -> String {
    let since = match pin.since_step {
        None => String::new(),
        Some(0) => " from before the steps".into(),
        Some(step) => format!(" from step {step}"),
    };
    let place = pin.name.split(" < ").next().unwrap_or_default();
    format!("{} {}{since}, {place}", size(pin.bytes), pin.category.0.as_str())
}

/// All measures at the instant, where more than the one that is told already are known.
fn ladder(instant: &Instant) -> Option<Block> {
    let Ladder { requested_bytes, allocated_bytes, active_bytes, reserved_bytes, .. } = instant.held;
    let rungs = [
        ("requested", requested_bytes, "asked for by the program"),
        ("allocated", allocated_bytes, "rounding up to blocks"),
        ("active", active_bytes, "blocks that wait for other streams"),
        ("reserved", reserved_bytes, "cached by the allocator"),
    ];
    let unit = Unit::of_largest(rungs.iter().filter_map(|rung| rung.1));
    let mut below = None;
    let row = |(measure, bytes, what): (&str, Option<u64>, &str)| {
        let bytes = bytes?;
        let more = below.replace(bytes).map(|below| format!("+{}", unit.number(bytes.saturating_sub(below))));
        let what = if more.is_none() && measure != "requested" { "held in blocks" } else { what };
        Some(vec![measure.to_owned(), unit.number(bytes), more.unwrap_or_default(), what.to_owned()])
    };
    let rows: Vec<Vec<String>> = rungs.into_iter().filter_map(row).collect();
    (rows.len() > 1).then(|| Block::Table {
        title: Some(format!("All measures at that instant, {}", unit.name())),
        columns: vec![
            Column::words("measure"),
            Column::numbers("total"),
            Column::numbers("more"),
            Column::words("which is"),
        ],
        rows,
    })
}

/// The recorded requests under other settings.
fn what_if(of: &WhatIf) -> Vec<Block> {
    let all = || std::iter::once(&of.recorded).chain(&of.settings);
    let unit =
        Unit::of_largest(all().flat_map(|row| row.devices.iter().map(|device| device.peak_reserved_bytes)));
    let several = of.recorded.devices.len() > 1;
    let rows = all().enumerate().flat_map(|(index, row)| {
        row.devices.iter().map(move |device| {
            let name = match (index, row.alloc_conf.is_empty()) {
                (0, true) => "(as recorded)".to_owned(),
                (0, false) => format!("{} (as recorded)", row.alloc_conf),
                _ => row.alloc_conf.clone(),
            };
            let mut cells = vec![name];
            if several {
                cells.push(device.device.to_string());
            }
            cells.extend([
                unit.number(device.peak_allocated_bytes),
                unit.number(device.peak_reserved_bytes),
                unit.number(device.stranded_at_peak_bytes),
                match (&row.oom, of.capacity_bytes) {
                    (Some(oom), _) => format!("yes, at event {}", thousands(oom.event)),
                    (None, Some(_)) => "no".into(),
                    (None, None) => "no (on a card without end)".into(),
                },
            ]);
            cells
        })
    });
    let mut columns = vec![Column::words("settings")];
    if several {
        columns.push(Column::numbers("device"));
    }
    columns.extend(["allocated", "reserved", "stranded"].map(Column::numbers));
    columns.push(Column::words("out of memory"));
    let how = match of.differs_from {
        None => {
            "The replay under the recorded settings takes and gives back the recorded segments.".to_owned()
        }
        Some(event) => format!(
            "The replay under the recorded settings takes other segments than recorded from event {} on: these figures are near and not exact.",
            thousands(event)
        ),
    };
    let title = Some(format!("The same requests under other settings, {}", unit.name()));
    vec![Block::Table { title, columns, rows: rows.collect() }, Block::Line(how)]
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

fn share(bytes: u64, total: u64) -> String {
    if total == 0 { String::new() } else { format!("{:.1} %", bytes as f64 / total as f64 * 100.0) }
}

fn named_size(name: &str) -> String {
    match name.parse() {
        Ok(bytes) => format!("{} ({} B)", size(bytes), thousands(bytes)),
        Err(_) => name.to_owned(),
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
