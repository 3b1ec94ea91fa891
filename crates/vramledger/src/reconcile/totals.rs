//! A total beside a total, where neither side, or only one, has objects.

use ledger::{Bytes, Category, Contributor, Found, Measure, Prediction};
use wire::{Compared, Device, DeviceInstant, DeviceKind, Ledger, Reason, Reconciliation, SeriesOf};

use super::reasons;
use crate::Error;
pub(super) use crate::read::printed_slack as printed;

/// What one side holds at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Total {
    pub(super) measure: Option<Measure>,
    pub(super) bytes: u64,
    pub(super) reserved: Option<u64>,
    /// What the process may use.
    pub(super) capacity: Option<u64>,
    /// What the card has left for anyone.
    pub(super) device_free: Option<i64>,
    pub(super) at: Option<ledger::Position>,
    pub(super) contributors: Vec<Contributor>,
    /// By how much a figure may be off: half of the last digit that is printed.
    pub(super) slack: u64,
}

impl Total {
    /// The peak of `ledger`, or what it held when a request found no room.
    pub(super) fn of_ledger(ledger: &Ledger) -> Option<Self> {
        if let Some(oom) = &ledger.oom
            && let Some(bytes) = oom.held.allocated_bytes
        {
            return Some(Self {
                measure: Some(Measure::Allocated),
                bytes,
                reserved: oom.held.reserved_bytes,
                capacity: usable(ledger),
                device_free: oom.device_free_bytes.and_then(|bytes| i64::try_from(bytes).ok()),
                at: oom.step.zip(oom.phase.clone()).map(|(step, phase)| ledger::Position {
                    step,
                    micro_batch: oom.micro_batch,
                    phase,
                }),
                contributors: contributors(&oom.holders),
                slack: 0,
            });
        }
        let known = [Measure::Allocated, Measure::Requested];
        known.into_iter().find_map(|measure| Self::of_peak(ledger, measure))
    }

    /// The peak of `ledger` in `measure`.
    pub(super) fn of_peak(ledger: &Ledger, measure: Measure) -> Option<Self> {
        let peak = ledger.peaks.get(measure)?;
        Some(Self {
            measure: Some(measure),
            bytes: peak.bytes,
            reserved: ledger.peaks.reserved.as_ref().map(|peak| peak.bytes),
            capacity: usable(ledger),
            device_free: None,
            at: peak.step.zip(peak.phase.clone()).map(|(step, phase)| ledger::Position {
                step,
                micro_batch: peak.micro_batch,
                phase,
            }),
            contributors: contributors(&peak.contributors),
            slack: 0,
        })
    }

    /// The most that `series` tells of.
    pub(super) fn of_series(series: &SeriesOf, slack: u64) -> Option<Self> {
        let most =
            |figure: fn(&wire::SeriesPoint) -> Option<u64>| series.points.iter().filter_map(figure).max();
        Some(Self {
            measure: Some(Measure::Allocated),
            bytes: most(|point| point.peak_allocated_bytes)
                .or_else(|| most(|point| point.allocated_bytes))?,
            reserved: most(|point| point.peak_reserved_bytes).or_else(|| most(|point| point.reserved_bytes)),
            capacity: most(|point| point.capacity_bytes),
            slack,
            ..Self::default()
        })
    }

    /// What `moment` tells of.
    pub(super) fn of_moment(moment: &DeviceInstant) -> Option<Self> {
        Some(Self {
            measure: Some(Measure::Allocated),
            bytes: moment.allocated_bytes?,
            reserved: moment.reserved_bytes,
            // What lies outside the allocator is no one's to use.
            capacity: moment
                .allowed_bytes
                .or(moment.capacity_bytes)
                .and_then(|capacity| capacity.checked_sub(moment.outside_bytes.unwrap_or(0))),
            device_free: moment.free_bytes,
            slack: match moment.unit_bytes {
                Some(unit) => unit,
                None if moment.source == "oom" => moment.allocated_bytes.map_or(0, printed),
                None => 0,
            },
            ..Self::default()
        })
    }
}

/// The first GPU of `ledger`.
pub(super) fn card(ledger: &Ledger) -> Option<&Device> {
    ledger.devices.iter().find(|device| device.kind == DeviceKind::Gpu)
}

/// What the process may use of the first GPU of `ledger`.
pub(super) fn usable(ledger: &Ledger) -> Option<u64> {
    let device = card(ledger)?;
    device.capacity_bytes?.checked_sub(device.context_bytes.unwrap_or(0))
}

fn contributors(rows: &[wire::Contributor]) -> Vec<Contributor> {
    let row = |row: &wire::Contributor| Contributor {
        name: row.name.clone(),
        category: row.category.0,
        bytes: Bytes::new(row.bytes),
        count: row.count,
        saved: Bytes::new(row.saved),
    };
    rows.iter().map(row).collect()
}

/// The total of one category, as a row.
pub(super) fn of_category(category: Category, bytes: u64) -> Contributor {
    Contributor {
        name: category.as_str().into(),
        category,
        bytes: Bytes::new(bytes),
        count: 1,
        saved: Bytes::new(0),
    }
}

/// `found` beside `predicted`, at moments that need not be the same.
pub(super) fn reconcile(predicted: &Total, found: &Total) -> Result<Reconciliation, Error> {
    let mut answer = beside(predicted, found)?;
    answer
        .interpretation_limits
        .push("each side is taken at the moment it tells of: the moments need not be the same".into());
    Ok(answer)
}

/// `found` beside `predicted`, with what their totals alone explain.
pub(super) fn beside(predicted: &Total, found: &Total) -> Result<Reconciliation, Error> {
    let prediction = Prediction {
        measure: predicted.measure.unwrap_or(Measure::Allocated),
        bytes: Bytes::new(predicted.bytes),
        at: predicted.at.as_ref(),
        contributors: &predicted.contributors,
    };
    let (totals, told) = found_totals(predicted, found);
    let mut limits =
        vec!["the evidence has totals and no objects: which of them differ it cannot tell".to_owned()];
    if found.reserved.is_none() {
        limits.push("the evidence does not say what was reserved".into());
    }
    limits.extend(told.map(Into::into));
    limits.push(match found.device_free {
        Some(_) => "what is free on the card is less than the process's margin where others use the card, or where memory lies outside the allocator",
        None => "what was free on the card is not known: the margin is of the process alone",
    }.into());
    if predicted.measure == Some(Measure::Requested) {
        limits.push(
            "the prediction counts requested bytes, which the allocator rounds up, usually by 0 to 2 %"
                .into(),
        );
    }
    limits.push("a difference that nothing explains is neither a leak nor fragmentation".into());
    let mut answer = Reconciliation::new(&ledger::reconcile(&prediction, totals, None)?, limits);
    quiet(&mut answer, predicted, found);
    let difference = answer.estimate_difference_bytes;
    let slack = predicted.slack + found.slack;
    let rounded = predicted.measure == Some(Measure::Requested)
        && difference >= 0
        && difference.unsigned_abs() <= predicted.bytes / 50;
    let reason = (difference != 0).then_some(match difference.unsigned_abs() <= slack || rounded {
        true => Reason::Rounding,
        false => Reason::Unexplained,
    });
    answer.evidence = Some(Compared { device_free_bytes: found.device_free, ..Compared::default() });
    put_down_to(&mut answer, reason);
    Ok(answer)
}

/// The totals of `found`, and what has to be said of the capacity: where the evidence does not know it, it is the one
/// of the prediction, and where neither does, what was reserved.
pub(super) fn found_totals(predicted: &Total, found: &Total) -> (Found, Option<&'static str>) {
    let reserved = found.reserved.unwrap_or(found.bytes).max(found.bytes);
    let fits = |capacity: &u64| *capacity >= reserved;
    let (own, theirs) = (found.capacity.filter(fits), predicted.capacity.filter(fits));
    let told = match (own, theirs) {
        (Some(_), _) => None,
        (None, Some(_)) => Some(
            "the evidence does not say how much the process may use: the margin is of what was predicted that it may",
        ),
        (None, None) => {
            Some("neither side says how much the process may use: the margin is of what was reserved")
        }
    };
    let totals = Found {
        allocated: Bytes::new(found.bytes),
        reserved: Bytes::new(reserved),
        capacity: Bytes::new(own.or(theirs).unwrap_or(reserved).max(1)),
    };
    (totals, told)
}

/// Takes back the signal on a capacity that nobody knows.
pub(super) fn quiet(answer: &mut Reconciliation, predicted: &Total, found: &Total) {
    if predicted.capacity.is_none() && found.capacity.is_none() {
        answer.signals.retain(|signal| signal.0 != ledger::Signal::CapacityPressure);
    }
}

/// Puts the difference of the totals down to `reason`.
pub(super) fn put_down_to(answer: &mut Reconciliation, reason: Option<Reason>) {
    for row in answer.rows.iter_mut().filter(|row| row.difference_bytes.is_some_and(|bytes| bytes != 0)) {
        row.reason = reason;
    }
    if let Some(compared) = &mut answer.evidence {
        compared.by_reason = reasons::sums(&answer.rows);
        compared.unexplained_bytes = match reason {
            Some(Reason::Unexplained) => answer.estimate_difference_bytes.unsigned_abs(),
            _ => 0,
        };
    }
}
