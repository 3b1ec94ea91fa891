//! The report of a reconciliation: line by line, the difference explained or left open.

use ledger::Signal;
use wire::Reconciliation;

use crate::units::{difference, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most objects that are shown.
const MOST_ROWS: usize = 20;
/// The most objects that are shown of a prediction beside totals alone.
const MOST_UNKNOWN: usize = 6;
/// The most objects that are named for a request.
const MOST_OBJECTS: usize = 4;

impl Report for Reconciliation {
    fn page(&self) -> Page {
        let off = self.signals.iter().any(|signal| signal.0 == Signal::InspectEstimateDifference);
        let agrees = self.agrees();
        let place = match (&self.at.phase, self.at.step) {
            (Some(phase), Some(step)) => format!(" in step {step}, {phase}"),
            (Some(phase), None) => format!(" in {phase}"),
            _ => String::new(),
        };
        let percent = self.alert_fraction * 100.0;
        let verdict = format!(
            "{} are predicted{place}, {} are allocated: {}",
            size(self.predicted_bytes),
            size(self.found.allocated_bytes),
            match (off, agrees, self.evidence.as_ref().and_then(|compared| compared.setting.as_ref())) {
                (true, _, None) => format!("more than {percent} % above the prediction"),
                (_, _, Some(other)) => format!("what was found looks like `{}`", other.setting),
                (false, false, None) => "part of the difference is unexplained".into(),
                (false, true, None) => "the books agree".into(),
            }
        );
        let line = |name: &str, bytes: u64, step: &str, change: i64| {
            vec![name.to_owned(), size(bytes), step.to_owned(), difference(change)]
        };
        let mut rows = vec![vec![
            format!("predicted ({})", self.measure.0.as_str()),
            size(self.predicted_bytes),
            String::new(),
            String::new(),
        ]];
        let found = &self.found;
        rows.push(line(
            "allocated",
            found.allocated_bytes,
            "above the prediction",
            self.estimate_difference_bytes,
        ));
        rows.push(line("reserved", found.reserved_bytes, "kept by the allocator", self.allocator_gap_bytes));
        rows.push(line("capacity", found.capacity_bytes, "left of it", self.budget_margin_bytes));
        let mut blocks = vec![
            Block::Verdict { good: Some(agrees), text: verdict },
            Block::Table {
                title: None,
                columns: vec![
                    Column::words("measure"),
                    Column::numbers("size"),
                    Column::words("step"),
                    Column::numbers("difference"),
                ],
                rows,
            },
        ];
        if let Some(compared) = &self.evidence {
            blocks.extend(beside(compared));
        }
        if !self.signals.is_empty() {
            let items =
                self.signals.iter().map(|signal| format!("{}: {}", signal.0.as_str(), advice(signal.0)));
            blocks.push(Block::List { title: "Worth a look".into(), items: items.collect() });
        }
        if !self.rows.is_empty() {
            let known = |bytes: Option<u64>| bytes.map_or_else(|| "not known".into(), size);
            let row = |row: &wire::Row| {
                vec![
                    row.name.clone(),
                    row.category.0.as_str().to_owned(),
                    known(row.predicted_bytes),
                    known(row.found_bytes),
                    row.difference_bytes.map_or_else(|| "not known".into(), difference),
                    row.reason.map_or("", wire::Reason::told).to_owned(),
                ]
            };
            let most =
                if self.rows.iter().any(|row| row.found_bytes.is_some()) { MOST_ROWS } else { MOST_UNKNOWN };
            // What is left open stands last, and is shown in any case.
            let shown = self
                .rows
                .iter()
                .enumerate()
                .filter(|(index, row)| *index < most || row.category.0 == ledger::Category::Unattributed);
            let shown: Vec<Vec<String>> = shown.map(|(_, shown)| row(shown)).collect();
            let title = match self.rows.len() - shown.len() {
                0 => "Line by line".to_owned(),
                left_out => format!("Line by line; {} not shown", thousands(left_out as u64)),
            };
            blocks.push(Block::Table {
                title: Some(title),
                columns: vec![
                    Column::words("object"),
                    Column::words("category"),
                    Column::numbers("predicted"),
                    Column::numbers("found"),
                    Column::numbers("difference"),
                    Column::words("reason"),
                ],
                rows: shown,
            });
        }
        blocks.push(Block::List {
            title: "Not to be read into it".into(),
            items: self.interpretation_limits.clone(),
        });
        Page { blocks }
    }

    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let signed = |bytes: Option<i64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let total = |name: &str, predicted: Option<u64>, found: u64, change: i64| {
            let (found, change) = (found.to_string(), change.to_string());
            vec![name.into(), String::new(), number(predicted), found, change, String::new()]
        };
        let found = &self.found;
        let mut rows = vec![
            total(
                "allocated",
                Some(self.predicted_bytes),
                found.allocated_bytes,
                self.estimate_difference_bytes,
            ),
            total("reserved", None, found.reserved_bytes, self.allocator_gap_bytes),
            total("capacity", None, found.capacity_bytes, self.budget_margin_bytes),
        ];
        rows.extend(self.rows.iter().map(|row| {
            vec![
                row.name.clone(),
                row.category.0.as_str().to_owned(),
                number(row.predicted_bytes),
                number(row.found_bytes),
                signed(row.difference_bytes),
                row.reason.map_or("", wire::Reason::told).to_owned(),
            ]
        }));
        let head = vec!["name", "category", "predicted_bytes", "found_bytes", "difference_bytes", "reason"];
        Sheet { head, rows }
    }
}

/// What the ledger of a run says beside the prediction, but for the objects.
fn beside(compared: &wire::Compared) -> Vec<Block> {
    let mut blocks = Vec::new();
    if !compared.mismatches.is_empty() {
        let told = |mismatch: &wire::Mismatch| {
            format!("{}: {} predicted, {} found", mismatch.what, mismatch.predicted, mismatch.found)
        };
        let items = compared.mismatches.iter().map(told).collect();
        blocks.push(Block::List { title: "Not the same workload".into(), items });
    }
    if let Some(other) = &compared.setting {
        blocks.push(Block::Line(format!(
            "With `{}` the prediction is {}, and {} are left of the difference.",
            other.setting,
            size(other.predicted_bytes),
            difference(other.difference_bytes),
        )));
    }
    if let Some(free) = compared.device_free_bytes {
        blocks
            .push(Block::Line(format!("The card had {} left for all processes.", difference_or_size(free))));
    }
    if let Some(request) = &compared.request {
        blocks.push(Block::Line(asked(request)));
    }
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "none".into(), size);
    let columns = |first: &[&'static str]| {
        let words = first.iter().map(|name| Column::words(*name));
        words.chain(["predicted", "found", "difference"].map(Column::numbers)).collect::<Vec<_>>()
    };
    let phase = |line: &wire::PhaseLine| {
        vec![
            line.step.to_string(),
            line.micro_batch.map(|at| at.to_string()).unwrap_or_default(),
            line.phase.clone(),
            known(line.predicted_bytes),
            known(line.found_bytes),
            line.difference_bytes.map_or_else(|| "not known".into(), difference),
        ]
    };
    table(
        &mut blocks,
        "Peaks of phases",
        columns(&["step", "micro-batch", "phase"]),
        compared.phases.iter().map(phase),
    );
    let step = |line: &wire::StepLine| {
        let figure = line.figure.replace('_', " ");
        vec![
            line.step.to_string(),
            line.end_of.as_ref().map_or_else(|| figure.clone(), |phase| format!("{figure} after {phase}")),
            size(line.predicted_bytes),
            size(line.found_bytes),
            difference(line.difference_bytes),
        ]
    };
    let mut heads = columns(&["figure"]);
    heads.insert(0, Column::numbers("step"));
    table(&mut blocks, "Steps", heads, compared.steps.iter().map(step));
    let category = |line: &wire::CategoryLine| {
        vec![
            line.category.0.as_str().to_owned(),
            size(line.predicted_bytes),
            size(line.found_bytes),
            difference(line.difference_bytes),
        ]
    };
    table(
        &mut blocks,
        "At the peaks, by category",
        columns(&["category"]),
        compared.categories.iter().map(category),
    );
    if !compared.by_reason.is_empty() {
        let reason =
            |line: &wire::ReasonLine| vec![line.reason.told().to_owned(), difference(line.difference_bytes)];
        blocks.push(Block::Table {
            title: Some("Why they differ".into()),
            columns: vec![Column::words("reason"), Column::numbers("difference")],
            rows: compared.by_reason.iter().map(reason).collect(),
        });
    }
    blocks
}

/// A table of `rows`, where there are any; of many, the first and the last.
fn table(
    blocks: &mut Vec<Block>,
    title: &str,
    columns: Vec<Column>,
    rows: impl Iterator<Item = Vec<String>>,
) {
    let mut rows: Vec<Vec<String>> = rows.collect();
    let left_out = rows.len().saturating_sub(MOST_ROWS);
    if rows.is_empty() {
        return;
    }
    rows.drain(MOST_ROWS.min(rows.len()) / 2..MOST_ROWS.min(rows.len()) / 2 + left_out);
    let title = match left_out {
        0 => title.to_owned(),
        _ => format!("{title}; {} not shown", thousands(left_out as u64)),
    };
    blocks.push(Block::Table { title: Some(title), columns, rows });
}

/// What could not be had, on both sides.
fn asked(request: &wire::RequestLine) -> String {
    let found = request.found_bytes.map_or_else(
        || "The run ran out of memory".into(),
        |bytes| format!("The run asked the device for {} and had no room", size(bytes)),
    );
    let predicted = request.predicted_bytes.map_or_else(
        || "the prediction fits".into(),
        |bytes| format!("the prediction has no room for {}", size(bytes)),
    );
    let objects: Vec<String> = request
        .objects
        .iter()
        .take(MOST_OBJECTS)
        .map(|object| format!("{} ({})", object.name, size(object.bytes)))
        .collect();
    let more = request.objects.len().saturating_sub(MOST_OBJECTS);
    let objects = match (objects.as_slice(), more) {
        ([], _) => String::new(),
        (objects, 0) => format!(" As much is asked for by {}.", objects.join(", ")),
        (objects, more) => format!(" As much is asked for by {} and {more} more.", objects.join(", ")),
    };
    format!("{found}; {predicted}.{objects}")
}

/// What is left of a card, which some drivers count below zero.
fn difference_or_size(bytes: i64) -> String {
    u64::try_from(bytes).map_or_else(|_| difference(bytes), size)
}

/// What to look at next.
const fn advice(signal: Signal) -> &'static str {
    match signal {
        Signal::InspectEstimateDifference => {
            "check the states, the saved tensors, the temporaries and what the prediction assumed"
        }
        Signal::InspectAllocatorRetainedSpace => {
            "look at the cache and at the history of allocations; it is no proof of fragmentation"
        }
        Signal::CapacityPressure => {
            "little of the capacity is left; other processes and the context take more of the card"
        }
    }
}
