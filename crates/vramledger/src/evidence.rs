//! A ledger from whatever holds one: a ledger document, a tape, hand-written states, a snapshot.

use evidence::recognise::Form;
use ledger::{DeviceKind, Provenance, Tape, Unit};
use wire::{About, Document, Ledger};

use crate::Error;
use crate::{Answer, DEPTH, ReadQuestion, read};

/// The ledger in `bytes`, which are a ledger document, a tape file, hand-written states, or evidence that
/// has objects: a memory snapshot, a trace, a timeline. `name` is what to call them where they are none.
///
/// # Errors
/// What is wrong with them and where.
pub fn read_ledger(name: &str, bytes: &[u8]) -> Result<Ledger, Error> {
    if evidence::recognise::recognise(&bytes[..bytes.len().min(evidence::recognise::HEAD)]) != Form::Document
    {
        let question = ReadQuestion { depth: DEPTH, ..ReadQuestion::default() };
        return match read(name, bytes, &question)? {
            Answer::Ledger(read) => Ok(read.ledger),
            Answer::Series(_) => Err(Error::NoLedger { name: name.into(), what: "a step log" }),
            Answer::Instants(_) => {
                Err(Error::NoLedger { name: name.into(), what: "a message or an account" })
            }
        };
    }
    let document = Document::read(bytes).map_err(|problem| Error::Document { name: name.into(), problem })?;
    of_document(name, document)
}

/// The ledger of `document`.
///
/// # Errors
/// Hand-written states that are no timeline.
pub(crate) fn of_document(name: &str, document: Document) -> Result<Ledger, Error> {
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

/// The tape of requested bytes in `bytes`, which are a tape file; `name` is what to call them where
/// they are none.
///
/// # Errors
/// What is wrong with them and where, or what they are instead.
pub(crate) fn read_tape(name: &str, bytes: &[u8]) -> Result<(About, Tape), Error> {
    let no_tape = |what, tape| Err(Error::NoTape { name: name.into(), what, tape });
    let document = Document::read(bytes).map_err(|problem| Error::Document { name: name.into(), problem })?;
    match document {
        Document::Ledger(ledger) => no_tape("is a ledger, which has totals and no requests", ledger.tape),
        Document::States(_) => {
            no_tape("holds hand-written states, whose sizes are blocks and not requests", None)
        }
        Document::Tape(read) if read.1.unit != Unit::Requested => {
            no_tape("is a tape of blocks, which has lost the sizes of the requests", None)
        }
        Document::Tape(read) if read.1.devices.iter().all(|device| device.kind != DeviceKind::Gpu) => {
            no_tape("is a tape without a GPU", None)
        }
        Document::Tape(read) => Ok(*read),
    }
}
