//! A prediction beside what an allocator said, or beside the ledger of a run.

mod asked;
mod lines;
mod message;
mod reasons;
mod settings;
mod sides;
mod steps;
mod totals;

use std::collections::{BTreeMap, BTreeSet};

use ledger::{Found, Measure};
use wire::{CategoryLine, Compared, Ledger, Mismatch, PhaseLine, Reconciliation};

use self::asked::Asked;
pub use self::sides::reconcile_evidence;
use self::totals::Total;
use crate::Error;

/// Holds what was found against what `predicted` says of its peak, or of `phase`.
///
/// `name` is what to call the ledger where it contradicts itself.
///
/// # Errors
/// Totals that cannot be of one instant, an unknown phase, a ledger that knows no total.
pub fn reconcile(
    name: &str,
    predicted: &Ledger,
    found: Found,
    phase: Option<&str>,
) -> Result<Reconciliation, Error> {
    let books = predicted.books().map_err(|problem| Error::Document { name: name.into(), problem })?;
    let reconciliation = ledger::reconcile(&books.prediction(phase)?, found, None)?;
    let mut limits = vec![
        "a difference that nothing explains is neither a leak nor fragmentation".into(),
        "reserved less allocated is what the allocator keeps at that instant; the margin is of the given capacity, not of the card"
            .into(),
    ];
    if reconciliation.measure == Measure::Requested {
        limits.push(
            "the prediction counts requested bytes, which the allocator rounds up, usually by 0 to 2 %"
                .into(),
        );
    }
    Ok(Reconciliation::new(&reconciliation, limits))
}

/// Holds the ledger of a run, `found`, against `predicted`: phases, categories and objects at the peaks of both, and
/// why they differ. Each comes with what to call it.
///
/// # Errors
/// Ledgers that know no common measure, or that contradict themselves.
pub fn reconcile_ledgers(
    (predicted_name, predicted): (&str, &Ledger),
    (found_name, found): (&str, &Ledger),
) -> Result<Reconciliation, Error> {
    let measure = [Measure::Allocated, Measure::Requested, Measure::Reserved]
        .into_iter()
        .find(|measure| predicted.peaks.get(*measure).is_some() && found.peaks.get(*measure).is_some());
    let what =
        || "no measure that the other one has too: one of requested, allocated and reserved bytes".into();
    let Some(measure) = measure else { return Err(Error::NoSuch { name: found_name.into(), what: what() }) };
    let (Some(ours), Some(theirs)) = (predicted.peaks.get(measure), found.peaks.get(measure)) else {
        return Err(Error::NoSuch { name: found_name.into(), what: what() });
    };
    let mut answer = numbers(predicted_name, predicted, found, measure)?;
    let mut rows = lines::lines(&ours.contributors, &theirs.contributors);
    let asked = Asked::of(&predicted.subject);
    let now = distance(predicted, found);
    let other = asked.as_ref().filter(|_| now > 0).and_then(|asked| {
        let other = settings::nearest(asked, now, &|ledger| distance(ledger, found))?;
        // What is next to nothing is put down to a setting that leaves nothing of it.
        (now > theirs.bytes / 1000 || other.distance <= now / 16).then_some(other)
    });
    reasons::give(
        &mut rows,
        &reasons::Sides { found, measure, keeps: steps::keeps_more(predicted, found), other: other.as_ref() },
    );
    let by_reason = reasons::sums(&rows);
    let unexplained = rows.iter().filter(|row| row.reason == Some(wire::Reason::Unexplained));
    answer.evidence = Some(Compared {
        mismatches: mismatches(predicted, found),
        phases: phases(predicted, found, measure),
        categories: categories(&ours.by_category, &theirs.by_category),
        setting: other.map(|other| {
            let bytes = other.ledger.peaks.get(measure).map_or(0, |peak| peak.bytes);
            let difference_bytes = theirs.bytes.cast_signed() - bytes.cast_signed();
            wire::OtherSetting { setting: other.setting, predicted_bytes: bytes, difference_bytes }
        }),
        unexplained_bytes: unexplained.map(|row| row.difference_bytes.unwrap_or(0).unsigned_abs()).sum(),
        by_reason,
        device_free_bytes: found.oom.as_ref().and_then(|oom| oom.device_free_bytes?.try_into().ok()),
        ..Compared::default()
    });
    answer.rows = rows;
    Ok(answer)
}

/// The totals of both sides, each at its own peak of `measure`.
fn numbers(
    name: &str,
    predicted: &Ledger,
    found: &Ledger,
    measure: Measure,
) -> Result<Reconciliation, Error> {
    let books = predicted.books().map_err(|problem| Error::Document { name: name.into(), problem })?;
    let peak = books.peaks.get(measure);
    let prediction = match peak {
        Some(peak) => ledger::Prediction {
            measure,
            bytes: peak.bytes,
            at: peak.at.as_ref(),
            contributors: &peak.contributors,
        },
        None => books.prediction(None)?,
    };
    let reserved = found.peaks.reserved.as_ref().map(|peak| peak.bytes);
    let ours = Total { capacity: totals::usable(predicted), ..Total::default() };
    let theirs = Total {
        bytes: found.peaks.get(measure).map_or(0, |peak| peak.bytes),
        reserved,
        capacity: totals::usable(found),
        ..Total::default()
    };
    let (totals, told) = totals::found_totals(&ours, &theirs);
    let mut limits = vec![
        "both sides are taken at their own peaks, which need not be of one phase".to_owned(),
        "objects are paired by name, module and size, and what is left by category: which of them are the same is known by name alone".into(),
        "a difference that nothing explains is neither a leak nor fragmentation".into(),
    ];
    limits.extend(told.map(Into::into));
    if found.peaks.reserved.is_none() {
        limits.push("the evidence does not say what was reserved".into());
    }
    let mut answer = Reconciliation::new(&ledger::reconcile(&prediction, totals, None)?, limits);
    totals::quiet(&mut answer, &ours, &theirs);
    Ok(answer)
}

/// How far the phases of `predicted` are from those of `found`, in bytes: peaks and ends of both, of the steps that
/// both have. A phase that one side lacks counts in full.
fn distance(predicted: &Ledger, found: &Ledger) -> u64 {
    let of = |ledger: &Ledger| -> BTreeMap<(u32, Option<u32>, String), [u64; 2]> {
        let rows = ledger.phases.iter().filter(|row| row.device == 0);
        rows.map(|row| {
            let bytes =
                |totals: &wire::Totals| totals.requested_bytes.or(totals.allocated_bytes).unwrap_or(0);
            ((row.step, row.micro_batch, row.phase.clone()), [bytes(&row.peak), bytes(&row.end)])
        })
        .collect()
    };
    let (ours, theirs) = (of(predicted), of(found));
    let last = |side: &BTreeMap<(u32, Option<u32>, String), [u64; 2]>| side.keys().map(|key| key.0).max();
    let steps = last(&ours).min(last(&theirs)).unwrap_or(0);
    let keys: BTreeSet<_> = ours.keys().chain(theirs.keys()).filter(|key| key.0 <= steps).collect();
    let order =
        |key: &&(u32, Option<u32>, String)| (key.0, key.1.is_none() && key.0 > 0, key.1, key.2 != "forward");
    let broken = found.oom.as_ref().and_then(|_| theirs.keys().max_by_key(order));
    let off = |key: &&(u32, Option<u32>, String)| {
        let side = |side: &BTreeMap<_, [u64; 2]>| side.get(*key).copied().unwrap_or([0, 0]);
        let (ours, theirs) = (side(&ours), side(&theirs));
        // Where a run breaks off, what is still held depends on how the error is handled.
        let end = if Some(*key) == broken { 0 } else { ours[1].abs_diff(theirs[1]) };
        ours[0].abs_diff(theirs[0]) + end
    };
    keys.iter().map(off).sum()
}

/// Where the two sides speak of different workloads, as far as both say.
fn mismatches(predicted: &Ledger, found: &Ledger) -> Vec<Mismatch> {
    let mut mismatches = Vec::new();
    let mut differ = |what: &str, predicted: Option<String>, found: Option<String>| {
        if let (Some(predicted), Some(found)) = (predicted, found)
            && predicted != found
        {
            mismatches.push(Mismatch { what: what.into(), predicted, found });
        }
    };
    let parameters = |ledger: &Ledger| ledger.parameters.map(|parameters| parameters.total.to_string());
    differ("parameters", parameters(predicted), parameters(found));
    let torch = |ledger: &Ledger| {
        let version = ledger.subject.get("software")?.get("torch")?.as_str()?;
        let (major, minor) = crate::fit::release(version)?;
        Some(format!("{major}.{minor}"))
    };
    differ("torch", torch(predicted), torch(found));
    let gpu = |ledger: &Ledger| totals::card(ledger)?.capacity_bytes.map(|bytes| bytes.to_string());
    differ("bytes of the card", gpu(predicted), gpu(found));
    for key in ["batch", "world_size", "accumulate", "alloc_conf"] {
        let of = |ledger: &Ledger| {
            let value = ledger.subject.get("setup")?.get(key).filter(|value| !value.is_null())?;
            Some(value.to_string())
        };
        differ(key, of(predicted), of(found));
    }
    mismatches
}

/// A phase in the order of the run: step, whether it has no micro-batch, micro-batch, name.
type PhaseKey = (u32, u8, Option<u32>, String);

/// The peaks of each phase of the GPU that the sides begin with.
fn phases(predicted: &Ledger, found: &Ledger, measure: Measure) -> Vec<PhaseLine> {
    let mut lines: BTreeMap<PhaseKey, [Option<u64>; 2]> = BTreeMap::new();
    // In the order in which phases come; update has no micro-batch and comes last.
    let order = |row: &wire::PhaseRow| u8::from(row.micro_batch.is_none() && row.step > 0);
    for (side, ledger) in [predicted, found].into_iter().enumerate() {
        for row in ledger.phases.iter().filter(|row| row.device == 0) {
            let bytes = match measure {
                Measure::Requested => row.peak.requested_bytes,
                Measure::Allocated => row.peak.allocated_bytes,
                Measure::Reserved => row.peak.reserved_bytes,
            };
            let rank = if row.phase == "forward" { "0forward" } else { row.phase.as_str() };
            lines.entry((row.step, order(row), row.micro_batch, rank.into())).or_default()[side] = bytes;
        }
    }
    let line = |((step, _, micro_batch, phase), [ours, theirs]): (_, [Option<u64>; 2])| {
        let phase: String = phase;
        PhaseLine {
            step,
            micro_batch,
            phase: phase.trim_start_matches('0').to_owned(),
            predicted_bytes: ours,
            found_bytes: theirs,
            difference_bytes: ours
                .zip(theirs)
                .map(|(ours, theirs)| theirs.cast_signed() - ours.cast_signed()),
        }
    };
    lines.into_iter().map(line).collect()
}

/// The categories of both peaks.
fn categories(
    ours: &BTreeMap<wire::Category, u64>,
    theirs: &BTreeMap<wire::Category, u64>,
) -> Vec<CategoryLine> {
    let all: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
    let line = |category: &&wire::Category| {
        let of = |side: &BTreeMap<wire::Category, u64>| side.get(*category).copied().unwrap_or(0);
        let (predicted, found) = (of(ours), of(theirs));
        CategoryLine {
            category: **category,
            predicted_bytes: predicted,
            found_bytes: found,
            difference_bytes: found.cast_signed() - predicted.cast_signed(),
        }
    };
    all.iter().map(line).collect()
}
