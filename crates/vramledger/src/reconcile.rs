//! A prediction beside what an allocator said.

use ledger::Found;
use wire::{Ledger, Reconciliation};

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
    if reconciliation.measure == ledger::Measure::Requested {
        limits.push(
            "the prediction counts requested bytes, which the allocator rounds up, usually by 0 to 2 %"
                .into(),
        );
    }
    Ok(Reconciliation::new(&reconciliation, limits))
}
