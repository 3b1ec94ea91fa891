//! The report of a reconciliation: line by line, the difference explained or left open.

use ledger::Signal;
use wire::Reconciliation;

use crate::units::{difference, size};
use crate::{Block, Column, Page, Report, Sheet};

/// The most objects that are shown.
const MOST_ROWS: usize = 20;

impl Report for Reconciliation {
    fn page(&self) -> Page {
        let off = self.signals.iter().any(|signal| signal.0 == Signal::InspectEstimateDifference);
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
            if off {
                format!("more than {percent} % above the prediction")
            } else {
                "the books agree".into()
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
            Block::Verdict { good: Some(!off), text: verdict },
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
                ]
            };
            // What is left open stands last, and is shown in any case.
            let shown = self.rows.iter().enumerate().filter(|(index, row)| {
                *index < MOST_ROWS || row.category.0 == ledger::Category::Unattributed
            });
            blocks.push(Block::Table {
                title: Some("Line by line".into()),
                columns: vec![
                    Column::words("object"),
                    Column::words("category"),
                    Column::numbers("predicted"),
                    Column::numbers("found"),
                    Column::numbers("difference"),
                ],
                rows: shown.map(|(_, shown)| row(shown)).collect(),
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
            vec![name.into(), String::new(), number(predicted), found.to_string(), change.to_string()]
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
            ]
        }));
        Sheet { head: vec!["name", "category", "predicted_bytes", "found_bytes", "difference_bytes"], rows }
    }
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
