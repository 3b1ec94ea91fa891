//! The report of a comparison: ledgers side by side.

use wire::{Comparison, Contributor, Difference, Peak};

use crate::units::{Unit, difference, size};
use crate::{Block, Column, Page, Report, Sheet};

/// The most owners that are shown.
const MOST_OWNERS: usize = 20;
/// The most differences that are shown.
const MOST_DIFFERENCES: usize = 12;

impl Report for Comparison {
    fn page(&self) -> Page {
        let base = &self.baseline;
        let verdict = format!(
            "{} peaks at {} {}{}",
            base.name,
            size(base.peak.bytes),
            self.measure.0.as_str(),
            place(&base.peak)
        );
        let candidates = self.candidates.iter().map(|candidate| {
            vec![
                candidate.name.clone(),
                size(candidate.peak.bytes),
                candidate.peak.phase.clone().unwrap_or_default(),
                difference(candidate.saving_bytes),
            ]
        });
        let names = self.candidates.iter().map(|candidate| candidate.name.as_str());
        let categories = self.candidates.iter().flat_map(|candidate| candidate.saving_by_category.keys());
        let categories: std::collections::BTreeSet<_> = categories.collect();
        let mut savings = Vec::new();
        for category in categories {
            let of = |candidate: &wire::Candidate| {
                candidate.saving_by_category.get(category).copied().unwrap_or(0)
            };
            let mut cells = vec![category.0.as_str().to_owned()];
            cells.extend(self.candidates.iter().map(|candidate| match of(candidate) {
                0 => "unchanged".into(),
                saving => difference(saving),
            }));
            savings.push(cells);
        }
        Page {
            blocks: vec![
                Block::Verdict { good: None, text: verdict },
                Block::Table {
                    title: Some("Candidates".into()),
                    columns: vec![
                        Column::words("name"),
                        Column::numbers("peak"),
                        Column::words("in"),
                        Column::numbers("saves"),
                    ],
                    rows: candidates.collect(),
                },
                Block::Table {
                    title: Some("Saved, by category".into()),
                    columns: std::iter::once(Column::words("category"))
                        .chain(names.map(Column::numbers))
                        .collect(),
                    rows: savings,
                },
                owners(self),
            ]
            .into_iter()
            .chain(self.candidates.iter().filter_map(|candidate| differences(self, candidate)))
            .collect(),
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |name: &str, peak: &Peak, saving: Option<i64>| {
            vec![
                name.to_owned(),
                self.measure.0.as_str().to_owned(),
                peak.bytes.to_string(),
                peak.step.map(|step| step.to_string()).unwrap_or_default(),
                peak.phase.clone().unwrap_or_default(),
                saving.map(|saving| saving.to_string()).unwrap_or_default(),
            ]
        };
        let base = row(&self.baseline.name, &self.baseline.peak, None);
        let others = self.candidates.iter();
        let others =
            others.map(|candidate| row(&candidate.name, &candidate.peak, Some(candidate.saving_bytes)));
        Sheet {
            head: vec!["name", "measure", "peak_bytes", "step", "phase", "saving_bytes"],
            rows: std::iter::once(base).chain(others).collect(),
        }
    }
}

/// Who is there at each peak, in the order of the baseline's contributors.
fn owners(of: &Comparison) -> Block {
    let peaks: Vec<&Peak> = std::iter::once(&of.baseline.peak)
        .chain(of.candidates.iter().map(|candidate| &candidate.peak))
        .collect();
    let unit = Unit::of_largest(peaks.iter().map(|peak| peak.bytes));
    let mut shown: Vec<&Contributor> = Vec::new();
    let same = |a: &Contributor, b: &Contributor| a.name == b.name && a.category == b.category;
    for peak in &peaks {
        for contributor in peak.contributors.iter().take(MOST_OWNERS) {
            if !shown.iter().any(|known| same(known, contributor)) {
                shown.push(contributor);
            }
        }
    }
    let cell = |peak: &Peak, wanted: &Contributor| {
        let found = peak.contributors.iter().find(|contributor| same(contributor, wanted));
        found.map_or_else(|| "-".into(), |contributor| unit.number(contributor.bytes))
    };
    let rows = shown.iter().take(MOST_OWNERS).map(|wanted| {
        let mut cells = vec![wanted.name.clone(), wanted.category.0.as_str().to_owned()];
        cells.extend(peaks.iter().map(|peak| cell(peak, wanted)));
        cells
    });
    let names =
        std::iter::once(&of.baseline.name).chain(of.candidates.iter().map(|candidate| &candidate.name));
    let mut columns = vec![Column::words("object"), Column::words("category")];
    columns.extend(names.map(Column::numbers));
    Block::Table {
        title: Some(format!("Who is there at each peak, {}", unit.name())),
        columns,
        rows: rows.collect(),
    }
}

/// What makes the difference of one candidate; none where nothing differs.
fn differences(of: &Comparison, candidate: &wire::Candidate) -> Option<Block> {
    let unit = Unit::of_largest([of.baseline.peak.bytes, candidate.peak.bytes]);
    let row = |row: &Difference| {
        vec![
            row.name.clone(),
            row.category.0.as_str().to_owned(),
            unit.number(row.baseline_bytes),
            unit.number(row.bytes),
            unit.difference(row.difference_bytes),
        ]
    };
    let mut rows: Vec<Vec<String>> = candidate.differences.iter().take(MOST_DIFFERENCES).map(row).collect();
    let rest = candidate.differences.get(MOST_DIFFERENCES..).unwrap_or_default();
    let sum = |rows: &[Difference]| rows.iter().map(|row| row.difference_bytes).sum();
    let total = |name: String, bytes: i64| {
        vec![name, String::new(), String::new(), String::new(), unit.difference(bytes)]
    };
    if !rest.is_empty() {
        rows.push(total(format!("{} more", rest.len()), sum(rest)));
    }
    if rows.is_empty() {
        return None;
    }
    rows.push(total("all".into(), sum(&candidate.differences)));
    let columns = vec![
        Column::words("object"),
        Column::words("category"),
        Column::numbers(of.baseline.name.clone()),
        Column::numbers(candidate.name.clone()),
        Column::numbers("difference"),
    ];
    let title = format!("What {} has more or less at its peak, {}", candidate.name, unit.name());
    Some(Block::Table { title: Some(title), columns, rows })
}

/// Where a peak is: ` in step 2, backward`.
fn place(peak: &Peak) -> String {
    match (&peak.phase, peak.step) {
        (Some(phase), Some(step)) => format!(" in step {step}, {phase}"),
        (Some(phase), None) => format!(" in {phase}"),
        _ => String::new(),
    }
}
