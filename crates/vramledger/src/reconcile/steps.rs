//! A prediction beside a log of steps: totals at each of them, and no objects.

use std::collections::BTreeMap;

use ledger::{Category, Contributor, Measure, Position};
use wire::{Ledger, OtherSetting, PhaseRow, Reason, Reconciliation, Series, SeriesOf, SeriesPoint, StepLine};

use super::asked::Asked;
use super::settings;
use super::totals::{Total, beside, of_category, put_down_to, usable};
use crate::Error;

/// The figures of the allocator: allocated, reserved and the most of both so far.
const FIGURES: [&str; 4] = ["allocated", "reserved", "peak_allocated", "peak_reserved"];

/// What is known of [`FIGURES`] at one step.
type Figures = [Option<u64>; 4];

/// Rows of growing differences that it takes to say that something is kept.
const LEAST_GROWING: usize = 4;

/// Holds `found`, whose figures may be off by `slack`, against `predicted`.
///
/// # Errors
/// A log without figures of the allocator, or a prediction without totals.
pub(super) fn reconcile(
    predicted: &Ledger,
    (name, found): (&str, &SeriesOf),
    slack: u64,
) -> Result<Reconciliation, Error> {
    let lines = nearest(predicted, found);
    let mut answer = headline(name, &lines, found, slack, |line| ours(predicted, line))?;
    let now = distance(&lines);
    let close = lines.iter().all(|line| line.difference_bytes.unsigned_abs() <= slack);
    let open = answer.evidence.as_ref().is_some_and(|compared| compared.unexplained_bytes > 0);
    let asked = Asked::of(&predicted.subject).filter(|_| !close);
    let other = asked.and_then(|asked| {
        let other = settings::nearest(&asked, now, &|ledger| distance(&nearest(ledger, found)))?;
        (other.distance <= slack * lines.len() as u64 + now / 100).then_some(other)
    });
    let mut setting = None;
    if let Some(other) = other {
        put_down_to(&mut answer, Some(other.reason));
        let with = nearest(&other.ledger, found);
        if let Some(line) = most(&with) {
            setting = Some(OtherSetting {
                setting: other.setting,
                predicted_bytes: line.predicted_bytes,
                difference_bytes: line.difference_bytes,
            });
        }
    } else if open {
        put_down_to(&mut answer, Some(reason(predicted, &lines, slack)));
    }
    let limits = &mut answer.interpretation_limits;
    if let Some(phase) = lines.iter().find_map(|line| line.end_of.as_ref()) {
        limits.push(format!(
            "the log does not say when in a step it was written: the end of {phase} is the nearest of those that the prediction knows"
        ));
    }
    if found.last_step > found.first_step {
        limits.push("steps after the last that is predicted are held against that one".into());
    }
    if let Some(compared) = &mut answer.evidence {
        compared.setting = setting;
        compared.steps = lines;
    }
    Ok(answer)
}

/// Holds a log against a log.
///
/// # Errors
/// Logs without a common figure of the allocator at a common step.
pub(super) fn logs(
    predicted: &SeriesOf,
    (name, found): (&str, &SeriesOf),
    slack: u64,
) -> Result<Reconciliation, Error> {
    let ours: BTreeMap<u64, Figures> =
        predicted.points.iter().map(|point| (point.step, figures(point))).collect();
    let lines: Vec<StepLine> = found
        .points
        .iter()
        .filter_map(|point| Some((point, ours.get(&point.step)?)))
        .flat_map(|(point, ours)| beside_each(point.step, *ours, figures(point), None))
        .collect();
    let of = |line: &StepLine| Total {
        measure: Some(Measure::Allocated),
        bytes: line.predicted_bytes,
        ..Total::default()
    };
    let mut answer = headline(name, &lines, found, slack, of)?;
    if answer.evidence.as_ref().is_some_and(|compared| compared.unexplained_bytes > 0) && keeps(&lines, slack)
    {
        put_down_to(&mut answer, Some(Reason::KeptByReference));
    }
    if let Some(compared) = &mut answer.evidence {
        compared.steps = lines;
    }
    Ok(answer)
}

/// By how much a figure of `series` may be off: half of the last digit in which the log has it.
pub(super) fn slack(series: &Series) -> u64 {
    let of = |column: &wire::SeriesColumn| {
        let place = FIGURES.iter().position(|figure| *figure == column.figure)?;
        let points = series.series.iter().flat_map(|series| &series.points);
        let values: Vec<u64> = points.filter_map(|point| figures(point)[place]).collect();
        let unit = column.unit_bytes;
        let fits = |parts: u64| {
            values.iter().all(|bytes| {
                let whole =
                    (u128::from(*bytes) * u128::from(parts) + u128::from(unit) / 2) / u128::from(unit);
                (whole * u128::from(unit) / u128::from(parts)).abs_diff(u128::from(*bytes)) <= 1
            })
        };
        let parts = [1, 10, 100, 1000, 10_000].into_iter().find(|parts| fits(*parts))?;
        (unit > 1).then(|| unit / (2 * parts) + 1)
    };
    series.columns.iter().filter_map(of).max().unwrap_or(0)
}

const fn figures(point: &SeriesPoint) -> Figures {
    [point.allocated_bytes, point.reserved_bytes, point.peak_allocated_bytes, point.peak_reserved_bytes]
}

fn beside_each(step: u64, ours: Figures, theirs: Figures, end_of: Option<&str>) -> Vec<StepLine> {
    let line = |(place, figure): (usize, &&str)| {
        let (predicted_bytes, found_bytes) = ours[place].zip(theirs[place])?;
        Some(StepLine {
            step,
            figure: (**figure).to_owned(),
            end_of: end_of.filter(|_| place < 2).map(Into::into),
            predicted_bytes,
            found_bytes,
            difference_bytes: found_bytes.cast_signed() - predicted_bytes.cast_signed(),
        })
    };
    FIGURES.iter().enumerate().filter_map(line).collect()
}

/// The lines of `found` against `predicted`, as of the end of the phase with which they come nearest.
fn nearest(predicted: &Ledger, found: &SeriesOf) -> Vec<StepLine> {
    let mut borders: Vec<&str> = Vec::new();
    for row in rows(predicted).filter(|row| row.step > 0) {
        if !borders.contains(&row.phase.as_str()) {
            borders.push(&row.phase);
        }
    }
    let all = borders.iter().map(|border| lines(predicted, found, border));
    // By the first row, before anything can have grown; of equal ones the last: most logs are written when a step is
    // over.
    let first = |lines: &Vec<StepLine>| {
        let step = lines.first().map(|line| line.step);
        let rows = lines.iter().filter(|line| Some(line.step) == step).cloned().collect::<Vec<_>>();
        distance(&rows)
    };
    all.rev().min_by_key(first).unwrap_or_default()
}

fn distance(lines: &[StepLine]) -> u64 {
    lines.iter().map(|line| line.difference_bytes.unsigned_abs()).fold(0, u64::saturating_add)
}

/// The rows of the first GPU.
fn rows(ledger: &Ledger) -> impl Iterator<Item = &PhaseRow> {
    ledger.phases.iter().filter(|row| row.device == 0)
}

/// What `row` says: allocated bytes where they are known, else requested ones.
fn allocated(totals: &wire::Totals) -> Option<u64> {
    totals.allocated_bytes.or(totals.requested_bytes)
}

/// The lines of `found` against `predicted`, at the end of the phase `border` of each step.
fn lines(predicted: &Ledger, found: &SeriesOf, border: &str) -> Vec<StepLine> {
    let mut steps: BTreeMap<u32, Figures> = BTreeMap::new();
    for row in rows(predicted) {
        let known = steps.entry(row.step).or_default();
        known[2] = known[2].max(allocated(&row.peak));
        known[3] = known[3].max(row.peak.reserved_bytes);
        if row.phase == border {
            (known[0], known[1]) = (allocated(&row.end), row.end.reserved_bytes);
        }
    }
    let falls = |place: usize| {
        let values: Vec<u64> = found.points.iter().filter_map(|point| figures(point)[place]).collect();
        values.windows(2).any(|pair| pair[1] < pair[0])
    };
    // A peak that never falls is the most so far.
    let (mut most, resets) = ([None, None], falls(2) || falls(3));
    for known in steps.values_mut() {
        for (place, most) in most.iter_mut().enumerate() {
            *most = (*most).max(known[place + 2]);
            known[place + 2] = if resets { known[place + 2] } else { *most };
        }
    }
    let Some(last) = steps.keys().next_back().copied() else { return Vec::new() };
    let first = found.first_step.unwrap_or(0);
    let step_of = |step: u64| match first {
        0 | 1 => u32::try_from(step.saturating_sub(first) + 1).unwrap_or(last).clamp(1, last),
        _ => last,
    };
    let of = |point: &SeriesPoint| {
        let ours = steps.get(&step_of(point.step)).copied().unwrap_or_default();
        beside_each(point.step, ours, figures(point), Some(border))
    };
    found.points.iter().flat_map(of).collect()
}

/// The line that stands at the top: the largest peak that was found, else the most that was allocated.
fn most(lines: &[StepLine]) -> Option<&StepLine> {
    let of = |figure: &str| {
        let all = lines.iter().filter(|line| line.figure == figure);
        all.reduce(|a, b| if b.found_bytes > a.found_bytes { b } else { a })
    };
    of("peak_allocated").or_else(|| of("allocated"))
}

fn headline(
    name: &str,
    lines: &[StepLine],
    found: &SeriesOf,
    slack: u64,
    ours: impl Fn(&StepLine) -> Total,
) -> Result<Reconciliation, Error> {
    let nothing = || Error::NoSuch {
        name: name.into(),
        what: "no allocated bytes of a step that the prediction has too".into(),
    };
    let line = most(lines).ok_or_else(nothing)?;
    let at = found.points.iter().find(|point| point.step == line.step);
    let reserved = at.and_then(|point| match line.end_of {
        Some(_) => point.reserved_bytes,
        None => point.peak_reserved_bytes.or(point.reserved_bytes),
    });
    let theirs = Total {
        bytes: line.found_bytes,
        reserved,
        capacity: at.and_then(|point| point.capacity_bytes),
        slack,
        ..Total::default()
    };
    beside(&ours(line), &theirs)
}

/// What `predicted` has at `line`, by its objects where it is its peak, else by category.
fn ours(predicted: &Ledger, line: &StepLine) -> Total {
    let measure = if predicted.peaks.allocated.is_some() { Measure::Allocated } else { Measure::Requested };
    if line.end_of.is_none() {
        let peak = Total::of_peak(predicted, measure).filter(|peak| peak.bytes == line.predicted_bytes);
        return peak.unwrap_or(Total {
            measure: Some(measure),
            bytes: line.predicted_bytes,
            ..Total::default()
        });
    }
    let row = rows(predicted)
        .filter(|row| Some(&row.phase) == line.end_of.as_ref())
        .find(|row| allocated(&row.end) == Some(line.predicted_bytes));
    let mut contributors: Vec<Contributor> = row
        .into_iter()
        .flat_map(|row| &row.end_by_category)
        .map(|(category, bytes)| of_category(category.0, *bytes))
        .collect();
    let known: u64 = contributors.iter().map(|row| row.bytes.get()).sum();
    if let Some(rest) = line.predicted_bytes.checked_sub(known).filter(|rest| *rest > 0) {
        let row = of_category(Category::Unattributed, rest);
        contributors.push(Contributor { name: Contributor::ROUNDING.into(), count: 0, ..row });
    }
    Total {
        measure: Some(measure),
        bytes: line.predicted_bytes,
        capacity: usable(predicted),
        at: row.map(|row| Position {
            step: row.step,
            micro_batch: row.micro_batch,
            phase: row.phase.clone(),
        }),
        contributors,
        ..Total::default()
    }
}

/// What the totals of the lines alone explain.
fn reason(predicted: &Ledger, lines: &[StepLine], slack: u64) -> Reason {
    let state = wire::Category(Category::OptimizerState);
    let state = rows(predicted).filter_map(|row| row.end_by_category.get(&state)).max().copied().unwrap_or(0);
    let lacks = |line: &StepLine| {
        line.difference_bytes.saturating_add_unsigned(state).unsigned_abs() <= slack + state / 100
    };
    if state > 0 && most(lines).is_some_and(lacks) {
        return Reason::OptimizerStateNotCreated;
    }
    if keeps(lines, slack) { Reason::KeptByReference } else { Reason::Unexplained }
}

/// Whether what is allocated goes further and further above the prediction.
fn keeps(lines: &[StepLine], slack: u64) -> bool {
    let above = |figure: &str| -> Vec<i64> {
        lines.iter().filter(|line| line.figure == figure).map(|line| line.difference_bytes).collect()
    };
    ["allocated", "peak_allocated"].into_iter().any(|figure| grows(&above(figure), slack))
}

/// Whether what `found` holds at the ends of its steps goes further and further above what `predicted` does.
pub(super) fn keeps_more(predicted: &Ledger, found: &Ledger) -> bool {
    let ends = |ledger: &Ledger| -> BTreeMap<u32, u64> {
        rows(ledger)
            .filter(|row| row.step > 0)
            .filter_map(|row| Some((row.step, allocated(&row.end)?)))
            .collect()
    };
    let (ours, theirs) = (ends(predicted), ends(found));
    // Steps after the last that is predicted are held against that one.
    let of = |step: &u32| ours.range(..=*step).next_back().map(|(_, bytes)| bytes.cast_signed());
    // The last of the found steps may have broken off.
    let above: Vec<i64> =
        theirs.iter().filter_map(|(step, bytes)| Some(bytes.cast_signed() - of(step)?)).collect();
    grows(&above[..above.len() - usize::from(found.oom.is_some() && !above.is_empty())], 0)
}

fn grows(above: &[i64], slack: u64) -> bool {
    let slack = slack.cast_signed();
    above.len() >= LEAST_GROWING
        && above.windows(2).all(|pair| pair[1] >= pair[0] - slack)
        && above[above.len() - 1] - above[0] > 2 * slack
        && above.windows(2).filter(|pair| pair[1] > pair[0]).count() * 2 >= above.len()
}
