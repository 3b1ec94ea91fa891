//! Why a line of a reconciliation differs: from a closed list, and unexplained where nothing known does.

use std::collections::BTreeMap;

use ledger::{Category, Measure};
use wire::{Ledger, Reason, ReasonLine, Row};

use super::lines::lines;
use super::settings::Try;

/// What reasons are looked for in.
pub(super) struct Sides<'a> {
    pub(super) found: &'a Ledger,
    pub(super) measure: Measure,
    /// Whether what is found at the ends of steps goes further and further above the prediction.
    pub(super) keeps: bool,
    /// The setting with which the prediction comes much nearer.
    pub(super) other: Option<&'a Try>,
}

/// Gives every row that differs its reason.
pub(super) fn give(rows: &mut [Row], sides: &Sides<'_>) {
    let left = sides.other.and_then(|other| left(other, sides));
    for row in rows.iter_mut() {
        if row.difference_bytes.unwrap_or(0) != 0 {
            row.reason = Some(reason(row, sides, left.as_ref()));
        }
    }
}

/// What each reason sums to.
pub(super) fn sums(rows: &[Row]) -> Vec<ReasonLine> {
    let mut sums: BTreeMap<Reason, i64> = BTreeMap::new();
    for row in rows {
        if let (Some(reason), Some(difference)) = (row.reason, row.difference_bytes) {
            *sums.entry(reason).or_default() += difference;
        }
    }
    sums.into_iter().map(|(reason, difference_bytes)| ReasonLine { reason, difference_bytes }).collect()
}

/// What would still differ, by name and category, with the other setting.
fn left(other: &Try, sides: &Sides<'_>) -> Option<BTreeMap<(String, wire::Category), u64>> {
    let theirs = sides.found.peaks.get(sides.measure)?;
    let ours = other.ledger.peaks.get(sides.measure)?;
    let rows = lines(&ours.contributors, &theirs.contributors).into_iter();
    let off = rows.filter(|row| row.difference_bytes.unwrap_or(0) != 0);
    Some(
        off.map(|row| ((row.name, row.category), row.difference_bytes.unwrap_or(0).unsigned_abs())).collect(),
    )
}

fn reason(row: &Row, sides: &Sides<'_>, left: Option<&BTreeMap<(String, wire::Category), u64>>) -> Reason {
    let difference = row.difference_bytes.unwrap_or(0);
    if let (Some(other), Some(left)) = (sides.other, left) {
        let still = left.get(&(row.name.clone(), row.category)).copied().unwrap_or(0);
        if still * 2 <= difference.unsigned_abs() {
            return other.reason;
        }
    }
    match row.category.0 {
        Category::OptimizerState if row.found_bytes == Some(0) && before_first_update(sides.found) => {
            return Reason::OptimizerStateNotCreated;
        }
        Category::Workspace => return Reason::Workspace,
        Category::Unattributed if row.name.contains("round") => return Reason::Rounding,
        Category::Unattributed => {
            let mut starts = sides.found.reading.iter().flat_map(|reading| &reading.file.devices);
            let middle = starts.any(|start| start.bytes_before > 0);
            return if middle { Reason::RecordedFromMiddle } else { Reason::Unexplained };
        }
        _ => {}
    }
    let grows = sides.found.reading.as_ref().into_iter().flat_map(|reading| &reading.growth.rows);
    if difference > 0 && grows.into_iter().any(|grown| grown.name == row.name) {
        return Reason::KeptByReference;
    }
    let of_steps = [Category::Activation, Category::Temporary, Category::Input];
    if difference > 0 && sides.keeps && of_steps.contains(&row.category.0) {
        return Reason::KeptByReference;
    }
    // Bytes in blocks against bytes asked for: less than the block size for each object.
    if row
        .predicted_bytes
        .zip(row.found_bytes)
        .is_some_and(|(ours, theirs)| ours > 0 && ours.abs_diff(theirs) * 512 <= ours)
    {
        return Reason::Rounding;
    }
    Reason::Unexplained
}

/// Whether `found` ends before an optimizer has made its first step, or peaks before it.
fn before_first_update(found: &Ledger) -> bool {
    !found
        .phases
        .iter()
        .any(|row| row.end_by_category.contains_key(&wire::Category(Category::OptimizerState)))
        || found.peaks.allocated.as_ref().is_some_and(|peak| peak.step.unwrap_or(0) <= 1)
}
