//! A ledger from whatever holds one: a ledger document, a tape, hand-written states.

use ledger::Provenance;
use wire::{About, Document, Ledger};

use crate::Error;

/// The ledger in `bytes`, which are a ledger document, a tape file or hand-written states; `name`
/// is what to call them where they are none.
///
/// # Errors
/// What is wrong with them and where.
pub fn read_ledger(name: &str, bytes: &[u8]) -> Result<Ledger, Error> {
    let document = Document::read(bytes).map_err(|problem| Error::Document { name: name.into(), problem })?;
    Ok(match document {
        Document::Ledger(ledger) => *ledger,
        Document::Tape(read) => {
            let (about, tape) = *read;
            Ledger { tape: Some(name.into()), ..Ledger::new(about, &ledger::replay(&tape, None)) }
        }
        Document::States(states) => {
            let tape = states.tape().map_err(|problem| Error::States { name: name.into(), problem })?;
            Ledger::new(About::new(Provenance::Constructed), &ledger::replay(&tape, None))
        }
    })
}
