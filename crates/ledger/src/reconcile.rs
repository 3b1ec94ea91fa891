//! A prediction beside what an allocator said, at one instant.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::{ByteDelta, Bytes, Category, Contributor, Ledger, Measure, Position, Signal};

/// What an allocator said at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// `memory_allocated`.
    pub allocated: Bytes,
    /// `memory_reserved`, at the same instant.
    pub reserved: Bytes,
    /// What the process may use.
    pub capacity: Bytes,
}

/// The part of a ledger that a measurement is held against.
#[derive(Clone, Copy, Debug)]
pub struct Prediction<'a> {
    /// What its bytes count: allocated where the ledger knows, else requested.
    pub measure: Measure,
    /// The predicted total.
    pub bytes: Bytes,
    /// Where on the timeline, where the ledger knows.
    pub at: Option<&'a Position>,
    /// What makes the total; empty where the ledger knows only the total.
    pub contributors: &'a [Contributor],
}

/// A prediction beside what was found. Every difference keeps its sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconciliation {
    /// What the prediction counts.
    pub measure: Measure,
    /// Where on the timeline.
    pub at: Option<Position>,
    /// The predicted total.
    pub predicted: Bytes,
    /// What was found.
    pub found: Found,
    /// Allocated less predicted.
    pub estimate_difference: ByteDelta,
    /// Reserved less allocated: what the allocator keeps. Not proof of fragmentation.
    pub allocator_gap: ByteDelta,
    /// Capacity less reserved. Not what is free on the card.
    pub budget_margin: ByteDelta,
    /// What deserves a look, in the order of [`Signal`].
    pub signals: Vec<Signal>,
    /// Line by line: the differences that are known sum to `estimate_difference`.
    pub rows: Vec<Row>,
    /// The name of the largest contributor, where known.
    pub dominant_object: Option<String>,
}

/// One line of a reconciliation; none where one side does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The name of the objects.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// The predicted bytes.
    pub predicted: Option<Bytes>,
    /// The bytes found.
    pub found: Option<Bytes>,
    /// Found less predicted.
    pub difference: Option<ByteDelta>,
}

/// Why a prediction and a measurement cannot be reconciled.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum ReconcileError {
    #[error("the capacity must be more than 0 bytes")]
    NoCapacity,
    #[error("allocated ({allocated}) is more than reserved ({reserved}); take both at the same instant")]
    AllocatedBeyondReserved { allocated: Bytes, reserved: Bytes },
    #[error("reserved ({reserved}) is more than the capacity ({capacity})")]
    ReservedBeyondCapacity { reserved: Bytes, capacity: Bytes },
    #[error("{amount} is more than a ledger holds, which is 2^63 bytes")]
    TooLarge { amount: Bytes },
    #[error("the ledger has no phase `{phase}`; it has {known}")]
    UnknownPhase { phase: String, known: String },
    #[error("the ledger knows neither an allocated nor a requested peak of a GPU")]
    NoPeak,
}

/// The share of the prediction or the capacity beyond which a difference is a signal: one in this many.
const ALERT_ONE_IN: i128 = 10;

impl Reconciliation {
    /// The share of the prediction or the capacity beyond which a difference is a signal.
    pub const ALERT_FRACTION: f64 = 1.0 / ALERT_ONE_IN as f64;
}

impl Ledger {
    /// What this ledger predicts: the peak, or with `phase` the peak within the phase of that name,
    /// at the earliest step that reaches it.
    ///
    /// # Errors
    /// No such phase, or no known total of a GPU.
    pub fn prediction(&self, phase: Option<&str>) -> Result<Prediction<'_>, ReconcileError> {
        let known = [Measure::Allocated, Measure::Requested];
        let find = |measure: Measure| self.peaks.get(measure).map(|peak| (measure, peak));
        let (measure, peak) = known.into_iter().find_map(find).ok_or(ReconcileError::NoPeak)?;
        let whole =
            Prediction { measure, bytes: peak.bytes, at: peak.at.as_ref(), contributors: &peak.contributors };
        let Some(phase) = phase else { return Ok(whole) };
        if peak.at.as_ref().is_some_and(|at| at.phase == phase) {
            return Ok(whole);
        }
        let mut best: Option<Prediction<'_>> = None;
        for row in self.phases.iter().filter(|row| row.device == peak.device && row.at.phase == phase) {
            let Some(bytes) = row.peak.get(measure) else { continue };
            if best.is_none_or(|best| bytes > best.bytes) {
                best = Some(Prediction { measure, bytes, at: Some(&row.at), contributors: &[] });
            }
        }
        best.ok_or_else(|| {
            let mut known: Vec<&str> = Vec::new();
            for row in &self.phases {
                if !known.contains(&row.at.phase.as_str()) {
                    known.push(&row.at.phase);
                }
            }
            ReconcileError::UnknownPhase { phase: phase.into(), known: known.join(", ") }
        })
    }
}

/// Holds `found` against `predicted`, both of one instant; `owners` are the objects found, where known.
///
/// Only an allocated total above the prediction is a signal: below it the prediction was an upper
/// bound, which it may be.
///
/// # Errors
/// Totals that cannot be of one instant, or no capacity.
pub fn reconcile(
    predicted: &Prediction<'_>,
    found: Found,
    owners: Option<&[Contributor]>,
) -> Result<Reconciliation, ReconcileError> {
    let Found { allocated, reserved, capacity } = found;
    if let Some(amount) =
        [predicted.bytes, allocated, reserved, capacity].into_iter().find(|b| *b > Bytes::MAX)
    {
        return Err(ReconcileError::TooLarge { amount });
    }
    if capacity == Bytes::ZERO {
        return Err(ReconcileError::NoCapacity);
    }
    if allocated > reserved {
        return Err(ReconcileError::AllocatedBeyondReserved { allocated, reserved });
    }
    if reserved > capacity {
        return Err(ReconcileError::ReservedBeyondCapacity { reserved, capacity });
    }
    let estimate_difference = allocated.delta(predicted.bytes);
    let allocator_gap = reserved.delta(allocated);
    let budget_margin = capacity.delta(reserved);
    let scaled = |delta: ByteDelta| i128::from(delta.get()) * ALERT_ONE_IN;
    let signals = [
        (Signal::InspectEstimateDifference, scaled(estimate_difference) > i128::from(predicted.bytes.get())),
        (Signal::InspectAllocatorRetainedSpace, scaled(allocator_gap) > i128::from(capacity.get())),
        (Signal::CapacityPressure, scaled(budget_margin) < i128::from(capacity.get())),
    ];
    Ok(Reconciliation {
        measure: predicted.measure,
        at: predicted.at.cloned(),
        predicted: predicted.bytes,
        found,
        estimate_difference,
        allocator_gap,
        budget_margin,
        signals: signals.into_iter().filter(|(_, raised)| *raised).map(|(signal, _)| signal).collect(),
        rows: rows(predicted, allocated, owners),
        dominant_object: predicted.contributors.iter().find(|row| row.count > 0).map(|row| row.name.clone()),
    })
}

/// The lines of a reconciliation: predicted and found side by side by name and category, and what
/// neither names left open in a last line.
fn rows(predicted: &Prediction<'_>, allocated: Bytes, owners: Option<&[Contributor]>) -> Vec<Row> {
    let mut found: Option<BTreeMap<_, _>> = owners
        .map(|owners| owners.iter().map(|row| ((row.name.as_str(), row.category), row.bytes)).collect());
    let mut rows = Vec::new();
    for row in predicted.contributors {
        let bytes = found
            .as_mut()
            .map(|found| found.remove(&(row.name.as_str(), row.category)).unwrap_or(Bytes::ZERO));
        rows.push(Row {
            name: row.name.clone(),
            category: row.category,
            predicted: Some(row.bytes),
            found: bytes,
            difference: bytes.map(|found| found.delta(row.bytes)),
        });
    }
    for ((name, category), bytes) in found.into_iter().flatten() {
        rows.push(Row {
            name: name.into(),
            category,
            predicted: Some(Bytes::ZERO),
            found: Some(bytes),
            difference: Some(bytes.delta(Bytes::ZERO)),
        });
    }
    let known: i64 = rows.iter().filter_map(|row| row.difference).map(ByteDelta::get).sum();
    let open = allocated.delta(predicted.bytes).get() - known;
    if open != 0 {
        rows.push(Row {
            name: Contributor::UNATTRIBUTED.into(),
            category: Category::Unattributed,
            predicted: None,
            found: None,
            difference: Some(ByteDelta::new(open)),
        });
    }
    rows
}
