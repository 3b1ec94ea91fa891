//! The steps of a run: the largest totals of each, and what is held at its end.

use wire::Step;

use super::{ReadReport, TOTALS, Total, plural};
use crate::{Block, Column};

/// The most steps that are all shown; of more, so many from the start and from the end.
const MOST_STEPS: usize = 8;
const FIRST_STEPS: usize = 4;
const LAST_STEPS: usize = 2;

impl ReadReport<'_> {
    pub(super) fn steps(&self) -> Option<Block> {
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
}
