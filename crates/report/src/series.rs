//! The report of a series: what each figure was at first, at last and at most.

use wire::{Series, SeriesFigure, SeriesOf, SeriesPoint};

use crate::growth;
use crate::units::{Unit, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most points that are shown; of more, the first and the last.
const MOST_POINTS: usize = 12;
/// The most devices or ranks whose points are shown.
const MOST_SERIES: usize = 4;

/// A series and what to call it.
#[derive(Clone, Copy, Debug)]
pub struct SeriesReport<'a> {
    /// What to call the file.
    pub name: &'a str,
    /// What it says.
    pub series: &'a Series,
}

impl Report for SeriesReport<'_> {
    fn page(&self) -> Page {
        let mut blocks = vec![self.verdict(), Block::Line(self.file())];
        for series in self.series.series.iter().take(MOST_SERIES) {
            blocks.extend(growth::blocks(&series.growth, series.of.as_deref()));
        }
        blocks.extend(self.figures());
        for series in self.series.series.iter().take(MOST_SERIES) {
            blocks.extend(points(series));
        }
        blocks.push(Block::List {
            title: "What the file does not tell".into(),
            items: self.series.warnings.clone(),
        });
        blocks.push(Block::List {
            title: "How to read this".into(),
            items: self.series.interpretation_limits.clone(),
        });
        Page::of(blocks)
    }

    /// A row for each point.
    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let row = |of: &Option<String>, point: &SeriesPoint| {
            let mut row = vec![of.clone().unwrap_or_default(), point.step.to_string()];
            row.extend(figures(point).map(number));
            row
        };
        let rows = self
            .series
            .series
            .iter()
            .flat_map(|series| series.points.iter().map(move |point| row(&series.of, point)));
        Sheet {
            head: vec![
                "of",
                "step",
                "allocated_bytes",
                "reserved_bytes",
                "peak_allocated_bytes",
                "peak_reserved_bytes",
                "used_bytes",
                "capacity_bytes",
            ],
            rows: rows.collect(),
        }
    }
}

/// The figures of `point`, in the order of the sheet.
const fn figures(point: &SeriesPoint) -> [Option<u64>; 6] {
    [
        point.allocated_bytes,
        point.reserved_bytes,
        point.peak_allocated_bytes,
        point.peak_reserved_bytes,
        point.used_bytes,
        point.capacity_bytes,
    ]
}

/// How the figures are called, in the order of the sheet.
const NAMES: [&str; 6] = ["allocated", "reserved", "peak allocated", "peak reserved", "used", "capacity"];

impl SeriesReport<'_> {
    fn verdict(&self) -> Block {
        let of = |series: &SeriesOf| series.of.as_ref().map(|of| format!("{of}: ")).unwrap_or_default();
        let told = |figure: &SeriesFigure| {
            let name = figure.figure.replace('_', " ");
            if figure.first_bytes == figure.last_bytes {
                format!("{name} {}", size(figure.last_bytes))
            } else {
                format!("{name} from {} to {}", size(figure.first_bytes), size(figure.last_bytes))
            }
        };
        let text = match self.series.series.as_slice() {
            [] => "nothing".into(),
            [series] => of(series) + &series.figures.iter().map(told).collect::<Vec<_>>().join(", "),
            several => {
                let most = several.iter().flat_map(|series| &series.figures);
                let most = most.filter(|figure| figure.figure != "capacity").map(|figure| figure.most_bytes);
                format!("{} devices or ranks, {} at most", several.len(), size(most.max().unwrap_or(0)))
            }
        };
        Block::Verdict { good: None, text: format!("{}: {text}", self.name) }
    }

    /// What the file is.
    fn file(&self) -> String {
        let what = match self.series.form.as_str() {
            "memory_timeline" => "a memory timeline of PyTorch's profiler, sums by category",
            "smi" => "queries of nvidia-smi",
            _ => "a step log",
        };
        let points: usize = self.series.series.iter().map(|series| series.points.len()).sum();
        let mut parts = vec![format!("{what}, {}", size(self.series.file_bytes))];
        let first = self.series.series.iter().filter_map(|series| series.first_step).min();
        let last = self.series.series.iter().filter_map(|series| series.last_step).max();
        let over = match first.zip(last) {
            Some((first, last)) => format!(" from {first} to {last}"),
            None => String::new(),
        };
        parts.push(format!("{} points{over}", thousands(points as u64)));
        let column =
            |column: &wire::SeriesColumn| format!("`{}` is {}", column.name, column.figure.replace('_', " "));
        parts.extend(self.series.columns.iter().map(column));
        parts.join("; ")
    }

    fn figures(&self) -> Option<Block> {
        let all = || self.series.series.iter().flat_map(|series| &series.figures);
        let unit = Unit::of_largest(all().map(|figure| figure.most_bytes));
        let several = self.series.series.len() > 1;
        let row = |of: &Option<String>, figure: &SeriesFigure| {
            let mut row = Vec::new();
            if several {
                row.push(of.clone().unwrap_or_default());
            }
            row.push(figure.figure.replace('_', " "));
            row.extend(
                [figure.first_bytes, figure.last_bytes, figure.least_bytes, figure.most_bytes]
                    .map(|bytes| unit.number(bytes)),
            );
            row.extend([figure.most_at_step.to_string(), thousands(figure.points)]);
            row
        };
        let rows: Vec<Vec<String>> = self
            .series
            .series
            .iter()
            .flat_map(|series| series.figures.iter().map(move |figure| row(&series.of, figure)))
            .collect();
        let mut columns = Vec::new();
        if several {
            columns.push(Column::words("of"));
        }
        columns.push(Column::words("figure"));
        columns.extend(["first", "last", "least", "most", "at step", "points"].map(Column::numbers));
        (!rows.is_empty()).then(|| Block::Table {
            title: Some(format!("Figures, {}", unit.name())),
            columns,
            rows,
        })
    }
}

/// The points of `series`: those at its ends where there are many.
fn points(series: &SeriesOf) -> Option<Block> {
    let known: Vec<usize> = (0..NAMES.len())
        .filter(|figure| series.points.iter().any(|point| figures(point)[*figure].is_some()))
        .collect();
    let all = || series.points.iter().flat_map(|point| figures(point).into_iter().flatten());
    let unit = Unit::of_largest(all());
    let row = |point: &SeriesPoint| {
        let mut row = vec![point.step.to_string()];
        let cell =
            |figure: &usize| figures(point)[*figure].map_or_else(|| "?".into(), |bytes| unit.number(bytes));
        row.extend(known.iter().map(cell));
        row
    };
    let count = series.points.len();
    let shown =
        |index: &usize| count <= MOST_POINTS || *index < MOST_POINTS / 2 || index + MOST_POINTS / 2 >= count;
    let rows: Vec<Vec<String>> = (0..count).filter(shown).map(|index| row(&series.points[index])).collect();
    let left_out = match count - rows.len() {
        0 => String::new(),
        left_out => format!("; {} not shown", thousands(left_out as u64)),
    };
    let of = series.of.as_ref().map(|of| format!(" of {of}")).unwrap_or_default();
    let mut columns = vec![Column::numbers("step")];
    columns.extend(known.iter().map(|figure| Column::numbers(NAMES[*figure])));
    (!rows.is_empty()).then(|| Block::Table {
        title: Some(format!("Points{of}, {}{left_out}", unit.name())),
        columns,
        rows,
    })
}
