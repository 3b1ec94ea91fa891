//! The phases of a ledger with equal steps and equal micro-batches folded into one.

use ledger::Category;
use wire::explanation::Span;
use wire::{Peak, PhaseRow, Totals};

/// The most groups of equal steps, the load among them, that are all shown.
const MOST_STEPS: usize = 4;

/// Equal steps, one after the other.
struct Steps<'a> {
    first: u32,
    last: u32,
    rounds: Vec<Rounds<'a>>,
}

/// Equal micro-batches of a step, one after the other, or what of the step is in none.
struct Rounds<'a> {
    micro_batches: Option<(u32, u32)>,
    /// The phases of the first of them.
    rows: Vec<&'a PhaseRow>,
}

/// The rows that a page shows, in the measure that `amount` picks, and how many steps have none:
/// where they are many, only the load, the first step, the last and the one of the peak are shown.
pub(crate) fn timeline(
    phases: &[PhaseRow],
    peak: &Peak,
    amount: fn(&Totals) -> Option<u64>,
) -> (Vec<Span>, u32) {
    let rows: Vec<&PhaseRow> = phases.iter().filter(|row| row.device == peak.device).collect();
    let mut folded: Vec<Steps<'_>> = Vec::new();
    for step in rows.chunk_by(|a, b| a.step == b.step) {
        let rounds = rounds(step);
        match folded.last_mut().filter(|before| same(&before.rounds, &rounds)) {
            Some(before) => before.last = step[0].step,
            None => folded.push(Steps { first: step[0].step, last: step[0].step, rounds }),
        }
    }
    let total = folded.len();
    let mut left_out = 0;
    let mut spans = Vec::new();
    for (index, step) in folded.iter().enumerate() {
        let range = Some((step.first, step.last));
        let peak_here = within(peak.step, range);
        if total <= MOST_STEPS || index <= 1 || index + 1 == total || peak_here {
            for round in &step.rounds {
                let here = peak_here && within(peak.micro_batch, round.micro_batches);
                let spans_here = round.rows.iter().map(|row| {
                    let holds_peak = here && peak.phase.as_deref() == Some(row.phase.as_str());
                    span((step.first, step.last), round.micro_batches, row, holds_peak, amount)
                });
                spans.extend(spans_here);
            }
        } else {
            left_out += step.last - step.first + 1;
        }
    }
    (spans, left_out)
}

/// The micro-batches of a step, equal neighbours folded.
fn rounds<'a>(step: &[&'a PhaseRow]) -> Vec<Rounds<'a>> {
    let mut folded: Vec<Rounds<'_>> = Vec::new();
    for rows in step.chunk_by(|a, b| a.micro_batch == b.micro_batch) {
        let at = rows[0].micro_batch;
        match (at, folded.last_mut()) {
            (Some(at), Some(Rounds { micro_batches: Some((_, last)), rows: before }))
                if alike(before, rows) =>
            {
                *last = at
            }
            _ => folded.push(Rounds { micro_batches: at.map(|at| (at, at)), rows: rows.to_vec() }),
        }
    }
    folded
}

fn same(a: &[Rounds<'_>], b: &[Rounds<'_>]) -> bool {
    let equal =
        |(a, b): (&Rounds<'_>, &Rounds<'_>)| a.micro_batches == b.micro_batches && alike(&a.rows, &b.rows);
    a.len() == b.len() && a.iter().zip(b).all(equal)
}

/// Whether two lists of phases are equal but for where they stand.
fn alike(a: &[&PhaseRow], b: &[&PhaseRow]) -> bool {
    let equal = |(a, b): (&&PhaseRow, &&PhaseRow)| {
        a.phase == b.phase && a.peak == b.peak && a.end == b.end && a.end_by_category == b.end_by_category
    };
    a.len() == b.len() && a.iter().zip(b).all(equal)
}

/// Whether a step or micro-batch is in a range; nowhere is in no range.
fn within(at: Option<u32>, range: Option<(u32, u32)>) -> bool {
    match (at, range) {
        (Some(at), Some((first, last))) => (first..=last).contains(&at),
        (at, range) => at.is_none() && range.is_none(),
    }
}

fn span(
    steps: (u32, u32),
    micro_batches: Option<(u32, u32)>,
    row: &PhaseRow,
    holds_peak: bool,
    amount: fn(&Totals) -> Option<u64>,
) -> Span {
    let of = |categories: &[Category]| -> u64 {
        let held = row.end_by_category.iter().filter(|(category, _)| categories.contains(&category.0));
        held.map(|(_, bytes)| bytes).sum()
    };
    let weights_bytes = of(&[Category::Parameter, Category::Buffer, Category::MasterWeight]);
    let (gradient_bytes, optimizer_bytes) = (of(&[Category::Gradient]), of(&[Category::OptimizerState]));
    Span {
        steps,
        micro_batches,
        phase: row.phase.clone(),
        peak_bytes: amount(&row.peak),
        end_bytes: amount(&row.end),
        weights_bytes,
        gradient_bytes,
        optimizer_bytes,
        other_bytes: of(Category::ALL) - weights_bytes - gradient_bytes - optimizer_bytes,
        holds_peak,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn row(step: u32, micro_batch: Option<u32>, phase: &str, bytes: u64) -> PhaseRow {
        let totals = Totals { requested_bytes: Some(bytes), ..Totals::default() };
        let end_by_category = BTreeMap::from([(wire::Category(Category::Parameter), bytes)]);
        PhaseRow {
            device: 0,
            step,
            micro_batch,
            phase: phase.into(),
            peak: totals,
            end: totals,
            end_by_category,
        }
    }

    fn peak(step: u32, micro_batch: Option<u32>, phase: &str) -> Peak {
        Peak {
            bytes: 0,
            device: 0,
            step: Some(step),
            micro_batch,
            phase: Some(phase.into()),
            event: 0,
            at_peak: wire::Ladder::default(),
            by_category: BTreeMap::new(),
            contributors: Vec::new(),
        }
    }

    /// Steps, micro-batches, phase and whether the peak is there.
    type Shown = ((u32, u32), Option<(u32, u32)>, String, bool);

    fn shown(rows: &[PhaseRow], peak: &Peak) -> (Vec<Shown>, u32) {
        let (spans, left_out) = timeline(rows, peak, |totals| totals.requested_bytes);
        let spans =
            spans.into_iter().map(|span| (span.steps, span.micro_batches, span.phase, span.holds_peak));
        (spans.collect(), left_out)
    }

    #[test]
    fn equal_steps_and_micro_batches_are_one_row() {
        let mut rows = vec![row(0, None, "load", 1)];
        for step in 1..=3 {
            let state = u64::from(step > 1);
            for micro_batch in 1..=4 {
                let gradient = u64::from(micro_batch > 1);
                rows.push(row(step, Some(micro_batch), "forward", 10 + state + gradient));
                rows.push(row(step, Some(micro_batch), "backward", 20 + state + gradient));
            }
            rows.push(row(step, None, "update", 5 + state));
        }
        let (spans, left_out) = shown(&rows, &peak(2, Some(2), "backward"));
        let expected = [
            ((0, 0), None, "load", false),
            ((1, 1), Some((1, 1)), "forward", false),
            ((1, 1), Some((1, 1)), "backward", false),
            ((1, 1), Some((2, 4)), "forward", false),
            ((1, 1), Some((2, 4)), "backward", false),
            ((1, 1), None, "update", false),
            ((2, 3), Some((1, 1)), "forward", false),
            ((2, 3), Some((1, 1)), "backward", false),
            ((2, 3), Some((2, 4)), "forward", false),
            ((2, 3), Some((2, 4)), "backward", true),
            ((2, 3), None, "update", false),
        ];
        assert_eq!(spans, expected.map(|(steps, of, phase, peak)| (steps, of, phase.to_owned(), peak)));
        assert_eq!(left_out, 0);
    }

    #[test]
    fn of_many_different_steps_the_first_the_last_and_the_one_of_the_peak_are_shown() {
        let rows: Vec<PhaseRow> = (0..=9).map(|step| row(step, None, "update", u64::from(step))).collect();
        let (spans, left_out) = shown(&rows, &peak(7, None, "update"));
        assert_eq!(spans.iter().map(|span| span.0.0).collect::<Vec<_>>(), [0, 1, 7, 9]);
        assert_eq!(left_out, 6);
    }
}
