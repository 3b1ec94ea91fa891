//! Who is there at one instant.

use wire::{Instant, InstantRow, Ladder};

use super::{ReadReport, duration, short};
use crate::units::{Unit, size, thousands};
use crate::{Block, Column};

/// The most owners that are shown.
const MOST_ROWS: usize = 20;
/// The least share of the total that makes a row.
const LEAST_SHARE: f64 = 0.0005;

impl ReadReport<'_> {
    /// What is there by category, where the rows are not told apart by category themselves.
    pub(super) fn categories(&self, instant: &Instant) -> Option<Block> {
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

    pub(super) fn owners(&self, instant: &Instant) -> Block {
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
}

/// All measures at the instant, where more than the one that is told already are known.
pub(super) fn ladder(instant: &Instant) -> Option<Block> {
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

fn share(bytes: u64, total: u64) -> String {
    if total == 0 { String::new() } else { format!("{:.1} %", bytes as f64 / total as f64 * 100.0) }
}

fn named_size(name: &str) -> String {
    match name.parse() {
        Ok(bytes) => format!("{} ({} B)", size(bytes), thousands(bytes)),
        Err(_) => name.to_owned(),
    }
}
