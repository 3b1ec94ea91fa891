//! What grows from step to step, as a part of other reports.

use wire::{Growing, Growth, Slope, Trend};

use crate::read::short;
use crate::units::{Unit, difference, size, thousands};
use crate::{Block, Column};

/// The most places that are shown.
const MOST_ROWS: usize = 8;

/// What `growth` says; `of` is whose it is, where several are told.
pub(crate) fn blocks(growth: &Growth, of: Option<&str>) -> Vec<Block> {
    if growth.verdict == Trend::TooFewSteps && growth.steps == 0 {
        return Vec::new();
    }
    let per = &growth.per;
    let slope = |slope: &Option<Slope>| slope.as_ref().map_or(0, |slope| slope.bytes_per_step.unsigned_abs());
    let head = match growth.verdict {
        Trend::TooFewSteps => "Growth is not known".to_owned(),
        Trend::Steady => format!("Nothing grows from {per} to {per}"),
        Trend::WarmUp => "Nothing grows any more".into(),
        Trend::LongestInput => "It grows with the longest input alone".into(),
        Trend::Stranding => format!("Reserved memory strands, {} a {per}", size(slope(&growth.reserved))),
        Trend::Growing => {
            let figure = if growth.allocated.is_some() { &growth.allocated } else { &growth.reserved };
            let bytes = if growth.rows.is_empty() { slope(figure) } else { growth.bytes_per_step };
            format!("It grows by {} a {per}", size(bytes))
        }
    };
    let of = of.map(|of| format!("{of}: ")).unwrap_or_default();
    let good = matches!(growth.verdict, Trend::Growing | Trend::Stranding).then_some(false);
    let mut blocks = vec![Block::Verdict { good, text: format!("{of}{head}: {}.", growth.explanation) }];
    // Where nothing grows, an interval around nothing tells no one anything.
    if !matches!(growth.verdict, Trend::Steady | Trend::TooFewSteps) {
        blocks.extend(slopes(growth).map(Block::Line));
    }
    if let Some(advice) = &growth.advice {
        blocks.push(Block::Line(format!("What is kept how: {advice}.")));
    }
    let title = if growth.verdict == Trend::Stranding { "What stays meanwhile" } else { "What grows" };
    blocks.extend(table(title, per, &growth.rows));
    if growth.verdict != Trend::Growing {
        blocks.extend(table("What grew and is at rest", per, &growth.settled));
    }
    blocks.extend(table("Too little to matter", per, &growth.trifles));
    blocks
}

/// How fast, and when the device is full.
fn slopes(growth: &Growth) -> Option<String> {
    let slopes = [&growth.allocated, &growth.reserved];
    let told: Vec<String> = slopes.into_iter().flatten().map(slope).collect();
    let first = growth.allocated.as_ref().or(growth.reserved.as_ref())?;
    let per = &growth.per;
    let mut text = format!(
        "A {per}, from {per} {} to {}, with intervals of 95 %: {}",
        first.from_step,
        first.to_step,
        told.join("; ")
    );
    if let Some(((steps, at), capacity)) =
        growth.steps_until_full.zip(growth.full_at_step).zip(growth.capacity_bytes)
    {
        text.push_str(&format!(
            ". At that pace {} are full at about {per} {}, {} from the last",
            size(capacity),
            thousands(at),
            thousands(steps)
        ));
    }
    Some(text + ".")
}

/// `reserved +138.46 MiB (+137.32 MiB to +139.59 MiB)`; no interval where it is too narrow to be seen.
fn slope(slope: &Slope) -> String {
    let figure = slope.figure.replace('_', " ");
    let Slope { bytes_per_step: bytes, low_bytes_per_step: low, high_bytes_per_step: high, .. } = *slope;
    let [bytes, low, high] = [bytes, low, high].map(difference);
    if low == high { format!("{figure} {bytes}") } else { format!("{figure} {bytes} ({low} to {high})") }
}

fn table(title: &str, per: &str, rows: &[Growing]) -> Option<Block> {
    let unit = Unit::of_largest(rows.iter().map(|row| row.bytes));
    let cells = |row: &Growing| {
        vec![
            short(&row.name),
            row.category.0.as_str().to_owned(),
            unit.number(row.bytes_per_step),
            number(row.objects_per_step),
            size(row.object_bytes),
            format!("{}-{}", row.first_step, row.last_step),
            thousands(row.count),
            unit.number(row.bytes),
        ]
    };
    let shown = if rows.len() == MOST_ROWS + 1 { MOST_ROWS + 1 } else { MOST_ROWS };
    let mut lines: Vec<Vec<String>> = rows.iter().take(shown).map(cells).collect();
    let rest = rows.get(shown..).unwrap_or_default();
    if !rest.is_empty() {
        lines.push(vec![
            format!("{} more", thousands(rest.len() as u64)),
            String::new(),
            unit.number(rest.iter().map(|row| row.bytes_per_step).sum()),
            number(rest.iter().map(|row| row.objects_per_step).sum()),
            String::new(),
            String::new(),
            thousands(rest.iter().map(|row| row.count).sum()),
            unit.number(rest.iter().map(|row| row.bytes).sum()),
        ]);
    }
    (!lines.is_empty()).then(|| Block::Table {
        title: Some(format!("{title}, requested {}", unit.name())),
        columns: vec![
            Column::words("made at"),
            Column::words("category"),
            Column::numbers(format!("a {per}")),
            Column::numbers("objects"),
            Column::numbers("of"),
            Column::numbers(format!("in {per}s")),
            Column::numbers("count"),
            Column::numbers("now"),
        ],
        rows: lines,
    })
}

/// A number of objects, whole where it is.
fn number(objects: f64) -> String {
    let text = format!("{objects:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
