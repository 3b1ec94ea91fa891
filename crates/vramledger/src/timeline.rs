//! The phases of a ledger for a page: the micro-batches of a step as one, equal steps as one.

use ledger::Category;
use wire::explanation::Span;
use wire::{Peak, PhaseRow, Totals};

/// The most groups of equal steps, the load among them, that are all shown.
const MOST_STEPS: usize = 4;

/// The rows that a page shows, in the measure that `amount` picks, and how many steps have none:
/// where they are many, only the load, the first step, the last and the one of the peak are shown.
pub(crate) fn timeline(
    phases: &[PhaseRow],
    peak: &Peak,
    amount: fn(&Totals) -> Option<u64>,
) -> (Vec<Span>, u32) {
    let rows: Vec<&PhaseRow> = phases.iter().filter(|row| row.device == peak.device).collect();
    let mut folded: Vec<Vec<Span>> = Vec::new();
    for step in rows.chunk_by(|a, b| a.step == b.step) {
        let spans = spans(step, peak, amount);
        match folded.last_mut().filter(|before| equal(before, &spans)) {
            Some(before) => {
                for (span, later) in before.iter_mut().zip(spans) {
                    span.steps.1 = later.steps.1;
                    span.holds_peak |= later.holds_peak;
                    span.peak_reserved_bytes = span.peak_reserved_bytes.max(later.peak_reserved_bytes);
                }
            }
            None => folded.push(spans),
        }
    }
    let total = folded.len();
    let mut left_out = 0;
    let mut shown = Vec::new();
    for (index, step) in folded.into_iter().enumerate() {
        let holds_peak = step.iter().any(|span| span.holds_peak);
        if total <= MOST_STEPS || index <= 1 || index + 1 == total || holds_peak {
            shown.extend(step);
        } else {
            left_out += step.first().map_or(0, |span| span.steps.1 - span.steps.0 + 1);
        }
    }
    (shown, left_out)
}

/// Whether two steps are equal but for where they stand and what the allocator keeps, which has a
/// history of its own.
fn equal(a: &[Span], b: &[Span]) -> bool {
    let placeless =
        |span: &Span| Span { steps: (0, 0), holds_peak: false, peak_reserved_bytes: None, ..span.clone() };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| placeless(a) == placeless(b))
}

/// The phases of a step, each once: the largest total of its micro-batches, and how the last one ends.
fn spans(step: &[&PhaseRow], peak: &Peak, amount: fn(&Totals) -> Option<u64>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for row in step {
        let mut span = span(row, peak, amount);
        match spans.iter_mut().find(|before| before.phase == row.phase) {
            Some(before) => {
                span.micro_batches =
                    before.micro_batches.zip(row.micro_batch).map(|((first, _), last)| (first, last));
                span.peak_bytes = before.peak_bytes.max(span.peak_bytes);
                span.peak_reserved_bytes = before.peak_reserved_bytes.max(span.peak_reserved_bytes);
                span.holds_peak |= before.holds_peak;
                *before = span;
            }
            None => spans.push(span),
        }
    }
    spans
}

fn span(row: &PhaseRow, peak: &Peak, amount: fn(&Totals) -> Option<u64>) -> Span {
    let of = |categories: &[Category]| -> u64 {
        let held = row.end_by_category.iter().filter(|(category, _)| categories.contains(&category.0));
        held.map(|(_, bytes)| bytes).sum()
    };
    let end_bytes = of(Category::ALL);
    let weights_bytes = of(&[Category::Parameter, Category::Buffer, Category::MasterWeight]);
    let (gradient_bytes, optimizer_bytes) = (of(&[Category::Gradient]), of(&[Category::OptimizerState]));
    let here = (peak.step, peak.micro_batch, peak.phase.as_deref());
    Span {
        steps: (row.step, row.step),
        micro_batches: row.micro_batch.map(|at| (at, at)),
        phase: row.phase.clone(),
        peak_bytes: amount(&row.peak),
        peak_reserved_bytes: row.peak.reserved_bytes,
        end_bytes,
        weights_bytes,
        gradient_bytes,
        optimizer_bytes,
        other_bytes: end_bytes - weights_bytes - gradient_bytes - optimizer_bytes,
        holds_peak: here == (Some(row.step), row.micro_batch, Some(row.phase.as_str())),
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

    /// Steps, micro-batches, phase, largest total and whether the peak is there.
    type Shown = ((u32, u32), Option<(u32, u32)>, String, u64, bool);

    fn shown(rows: &[PhaseRow], peak: &Peak) -> (Vec<Shown>, u32) {
        let (spans, left_out) = timeline(rows, peak, |totals| totals.requested_bytes);
        let shown = |span: Span| {
            (span.steps, span.micro_batches, span.phase, span.peak_bytes.unwrap_or_default(), span.holds_peak)
        };
        (spans.into_iter().map(shown).collect(), left_out)
    }

    #[test]
    fn the_micro_batches_of_a_step_and_equal_steps_are_one_row() {
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
        let all = Some((1, 4));
        let expected = [
            ((0, 0), None, "load", 1, false),
            ((1, 1), all, "forward", 11, false),
            ((1, 1), all, "backward", 21, false),
            ((1, 1), None, "update", 5, false),
            ((2, 3), all, "forward", 12, false),
            ((2, 3), all, "backward", 22, true),
            ((2, 3), None, "update", 6, false),
        ];
        assert_eq!(
            spans,
            expected.map(|(steps, of, phase, most, peak)| (steps, of, phase.to_owned(), most, peak))
        );
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
