//! A prediction beside an account of one moment: an out-of-memory message, a summary of the allocator.

use ledger::{Category, Measure};
use wire::{DeviceInstant, Ledger, Mismatch, OtherSetting, Reason, Reconciliation, RequestLine};

use super::asked::Asked;
use super::totals::{Total, beside, of_category, put_down_to, usable};
use super::{settings, totals};
use crate::Error;

/// Holds what `moment` says against `predicted`: against the request that finds no room in both, else against what
/// the prediction has in place before the object that was asked for, else against its peak.
///
/// # Errors
/// A prediction without totals, or totals that cannot be of one moment.
pub(super) fn reconcile(
    (name, predicted): (&str, &Ledger),
    (found_name, moment): (&str, &DeviceInstant),
) -> Result<Reconciliation, Error> {
    let nothing = |name: &str| Error::NoSuch { name: name.into(), what: "no allocated bytes".into() };
    let before = before(predicted, moment);
    let placed = before.is_some();
    let ours = before.or_else(|| Total::of_ledger(predicted)).ok_or_else(|| nothing(name))?;
    let mut theirs = Total::of_moment(moment).ok_or_else(|| nothing(found_name))?;
    if moment.source != "oom"
        && let Some(peak) = moment.peak_allocated_bytes
    {
        // An account that tells the most so far is held against the peak.
        (theirs.bytes, theirs.reserved) = (peak, moment.peak_reserved_bytes.or(theirs.reserved));
    }
    let mut answer = beside(&ours, &theirs)?;
    if placed {
        answer.at.phase.clone_from(&moment.phase);
        if !moment.candidates.iter().any(|object| object.decided == Some(true)) && moment.candidates.len() > 1
        {
            answer.interpretation_limits.push(format!(
                "no stack decides which of {} objects was asked for: the one is taken before which the prediction is nearest to the message",
                moment.candidates.len()
            ));
        }
    }
    let difference = answer.estimate_difference_bytes;
    let open = answer.evidence.as_ref().is_some_and(|compared| compared.unexplained_bytes > 0);
    let state: u64 = ours
        .contributors
        .iter()
        .filter(|row| row.category == Category::OptimizerState)
        .map(|row| row.bytes.get())
        .sum();
    let mut setting = None;
    if open
        && state > 0
        && difference.saturating_add_unsigned(state).unsigned_abs() <= theirs.slack + state / 100
    {
        put_down_to(&mut answer, Some(Reason::OptimizerStateNotCreated));
    } else if open && let Some(asked) = Asked::of(&predicted.subject) {
        let off = |ledger: &Ledger| off(ledger, moment, &theirs);
        let other = settings::nearest(&asked, difference.unsigned_abs(), &off);
        if let Some(other) = other.filter(|other| other.distance <= theirs.slack) {
            put_down_to(&mut answer, Some(other.reason));
            let bytes = Total::of_ledger(&other.ledger).map_or(0, |total| total.bytes);
            setting = Some(OtherSetting {
                setting: other.setting,
                predicted_bytes: bytes,
                difference_bytes: theirs.bytes.cast_signed() - bytes.cast_signed(),
            });
        }
    }
    if let Some(compared) = &mut answer.evidence {
        compared.setting = setting;
        compared.mismatches = mismatches(predicted, moment, theirs.slack);
        compared.request = (moment.source == "oom").then(|| RequestLine {
            predicted_bytes: predicted.oom.as_ref().and_then(|oom| oom.device_request_bytes),
            found_bytes: moment.requested_bytes,
            objects: moment.candidates.clone(),
        });
    }
    Ok(answer)
}

/// What the prediction has in place before the object that was asked for; none where it runs out itself, or where
/// nothing of it has the size.
fn before(predicted: &Ledger, moment: &DeviceInstant) -> Option<Total> {
    if predicted.oom.is_some() {
        return None;
    }
    let rows = moment.predicted_by_category.iter();
    Some(Total {
        measure: Some(Measure::Requested),
        bytes: moment.predicted_bytes?,
        capacity: usable(predicted),
        contributors: rows.map(|(category, bytes)| of_category(category.0, *bytes)).collect(),
        ..Total::default()
    })
}

/// How far a plan's own failure is from the one that `moment` tells of.
fn off(ledger: &Ledger, moment: &DeviceInstant, found: &Total) -> u64 {
    let Some(oom) = &ledger.oom else { return u64::MAX };
    let asked = oom.device_request_bytes.unwrap_or(0).abs_diff(moment.requested_bytes.unwrap_or(0));
    if asked > moment.requested_bytes.map_or(0, totals::printed) {
        return u64::MAX;
    }
    oom.held.allocated_bytes.map_or(u64::MAX, |bytes| bytes.abs_diff(found.bytes))
}

fn mismatches(predicted: &Ledger, moment: &DeviceInstant, slack: u64) -> Vec<Mismatch> {
    let mut mismatches = Vec::new();
    let card = totals::card(predicted).and_then(|device| device.capacity_bytes);
    if let Some((ours, theirs)) =
        card.zip(moment.capacity_bytes).filter(|(ours, theirs)| ours.abs_diff(*theirs) > slack)
    {
        mismatches.push(Mismatch {
            what: "bytes of the card".into(),
            predicted: ours.to_string(),
            found: theirs.to_string(),
        });
    }
    if moment.source == "oom" && predicted.fits == Some(true) {
        mismatches.push(Mismatch {
            what: "end".into(),
            predicted: "it fits".into(),
            found: "out of memory".into(),
        });
    }
    mismatches
}
