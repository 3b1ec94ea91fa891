//! The answer for evidence that is a series: step logs, sums over time, cards that are asked again and again.

use evidence::series::Figure;
use evidence::{Series, StepLog};
use ledger::Bytes;
use wire::{SeriesColumn, SeriesExtra, SeriesFigure, SeriesOf, SeriesPoint};

use crate::growth;

/// The document of a step log.
pub(super) fn step_log(log: &StepLog, file_bytes: u64, capacity: Option<Bytes>) -> wire::Series {
    let columns = log.columns.iter().map(|column| SeriesColumn {
        name: column.name.clone(),
        figure: column.figure.as_str().into(),
        unit_bytes: column.unit.get(),
        unit_is_said: column.unit_is_said,
    });
    let limits =
        ["a log has what was there at the moments that it tells of, and nothing of what was between them"];
    wire::Series {
        columns: columns.collect(),
        ..series("step_log", file_bytes, &log.series, &log.warnings, &limits, capacity)
    }
}

/// The document of `found`; `capacity` is that of its devices, where the file does not tell it.
pub(super) fn series(
    form: &str,
    file_bytes: u64,
    found: &[Series],
    warnings: &[evidence::Warning],
    limits: &[&str],
    capacity: Option<Bytes>,
) -> wire::Series {
    wire::Series {
        format: wire::Series::FORMAT.into(),
        form: form.into(),
        file_bytes,
        columns: Vec::new(),
        series: found.iter().map(|found| of(found, capacity)).collect(),
        interpretation_limits: limits.iter().map(|limit| (*limit).to_owned()).collect(),
        warnings: warnings.iter().map(ToString::to_string).collect(),
    }
}

fn of(series: &Series, capacity: Option<Bytes>) -> SeriesOf {
    let bytes = |bytes: Option<Bytes>| bytes.map(Bytes::get);
    SeriesOf {
        of: series.of.clone(),
        first_step: series.points.first().map(|point| point.step),
        last_step: series.points.last().map(|point| point.step),
        figures: Figure::ALL.iter().filter_map(|figure| of_figure(series, *figure)).collect(),
        growth: growth::of_log(series, capacity),
        points: series
            .points
            .iter()
            .map(|point| SeriesPoint {
                step: point.step,
                allocated_bytes: bytes(point.allocated),
                reserved_bytes: bytes(point.reserved),
                peak_allocated_bytes: bytes(point.peak_allocated),
                peak_reserved_bytes: bytes(point.peak_reserved),
                used_bytes: bytes(point.used),
                capacity_bytes: bytes(point.capacity),
            })
            .collect(),
        extras: series
            .extras
            .iter()
            .map(|extra| SeriesExtra { name: extra.name.clone(), values: extra.values.clone() })
            .collect(),
    }
}

/// What is known of `figure` over all points; none where no point has it.
fn of_figure(series: &Series, figure: Figure) -> Option<SeriesFigure> {
    let column = || series.column(figure).map(|(step, bytes)| (step, bytes.get()));
    let (_, first_bytes) = column().next()?;
    let (_, last_bytes) = column().last()?;
    let (most_at_step, most_bytes) = column().reduce(|a, b| if b.1 > a.1 { b } else { a })?;
    Some(SeriesFigure {
        figure: figure.as_str().into(),
        points: column().count() as u64,
        first_bytes,
        last_bytes,
        least_bytes: column().map(|(_, bytes)| bytes).min()?,
        most_bytes,
        most_at_step,
    })
}
