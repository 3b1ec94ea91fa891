//! Ledgers side by side.

use ledger::Named;
use wire::{Comparison, Ledger};

use crate::Error;

/// The savings of each of `candidates` against `baseline`, every one at its own peak.
///
/// # Errors
/// No candidate, an empty or doubled name, or no measure that all of them know.
pub fn compare(baseline: (&str, &Ledger), candidates: &[(&str, &Ledger)]) -> Result<Comparison, Error> {
    let books = |(name, ledger): (&str, &Ledger)| {
        let books = ledger.books().map_err(|problem| Error::Document { name: name.into(), problem })?;
        Ok((name.to_owned(), books.peaks))
    };
    let base = books(baseline)?;
    let others = candidates.iter().copied().map(books).collect::<Result<Vec<_>, Error>>()?;
    let named: Vec<Named<'_>> = others.iter().map(|(name, peaks)| Named { name, peaks }).collect();
    let comparison = ledger::compare(Named { name: &base.0, peaks: &base.1 }, &named)?;
    Ok(Comparison::from(&comparison))
}
