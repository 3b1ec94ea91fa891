//! Two files, whatever they are: which form is held against which.

use wire::{DeviceInstant, Ledger, Reconciliation, SeriesOf};

use super::{asked::Asked, message, reconcile_ledgers, steps, totals};
use crate::read::{Answer, DEPTH, ReadQuestion, read};
use crate::{Error, Known};

/// What one side is.
enum Side {
    Ledger(Box<Ledger>),
    /// Totals at steps, and by how much a figure of them may be off.
    Steps(Box<SeriesOf>, u64),
    Moment(Box<DeviceInstant>),
}

/// Holds `found` against `predicted`, each a name and the bytes of a ledger, a tape, a recording, an out-of-memory
/// message or a step log.
///
/// # Errors
/// What is wrong with the bytes, or that the two have nothing that can be held against each other.
pub fn reconcile_evidence(predicted: (&str, &[u8]), found: (&str, &[u8])) -> Result<Reconciliation, Error> {
    let ours = Side::read(predicted, None, None)?;
    let rank = match &ours {
        Side::Ledger(ledger) => ledger.ranks.as_ref().and_then(|ranks| u32::try_from(ranks.rank).ok()),
        _ => None,
    };
    let mut theirs = Side::read(found, None, rank)?;
    if let (Side::Ledger(ledger), Side::Moment(moment)) = (&ours, &theirs)
        && moment.source == "oom"
    {
        // What the prediction makes names what the message asked for.
        theirs = Side::read(found, Some(known(ledger)?), rank)?;
    }
    match (&ours, &theirs) {
        (Side::Ledger(ours), Side::Ledger(theirs)) => {
            reconcile_ledgers((predicted.0, ours), (found.0, theirs))
        }
        (Side::Ledger(ours), Side::Moment(theirs)) => {
            message::reconcile((predicted.0, ours), (found.0, theirs))
        }
        (Side::Ledger(ours), Side::Steps(theirs, slack)) => steps::reconcile(ours, (found.0, theirs), *slack),
        (Side::Steps(ours, rough), Side::Steps(theirs, slack)) => {
            steps::logs(ours, (found.0, theirs), rough + slack)
        }
        _ => totals::reconcile(&ours.total(predicted.0)?, &theirs.total(found.0)?),
    }
}

/// What `ledger` makes: all that its plan does, where it tells of what it is the plan.
fn known(ledger: &Ledger) -> Result<Known, Error> {
    let mut known = match Asked::of(&ledger.subject) {
        Some(asked) => Known::of_plan(asked.with(asked.setup().clone()))?,
        None => Known::of_ledger(ledger),
    };
    known.takes_nearest = true;
    Ok(known)
}

impl Side {
    /// The side in `bytes`, which are called `name`; of several ranks, `rank`.
    fn read((name, bytes): (&str, &[u8]), known: Option<Known>, rank: Option<u32>) -> Result<Self, Error> {
        let question = ReadQuestion { depth: DEPTH, known, ..ReadQuestion::default() };
        let nothing = |what: &str| Error::NoSuch { name: name.into(), what: what.into() };
        match read(name, bytes, &question)? {
            Answer::Ledger(read) => Ok(Self::Ledger(Box::new(read.ledger))),
            Answer::Series(series) => {
                let is = |series: &&SeriesOf| {
                    let of = series.of.as_deref().unwrap_or_default();
                    let number = of.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().ok();
                    number.is_some() && number == rank
                };
                let (all, slack) = (&series.series, steps::slack(&series));
                let one = all.iter().find(is).or_else(|| all.first());
                let one = one.cloned().map(|series| Self::Steps(Box::new(series), slack));
                one.ok_or_else(|| nothing("no rows"))
            }
            Answer::Instants(instants) => {
                let mut all = instants.instants.into_iter().filter(|one| one.allocated_bytes.is_some());
                let first = all.next().ok_or_else(|| nothing("no allocated bytes"))?;
                let own = |one: &DeviceInstant| rank.is_some() && one.rank == rank;
                let one = if own(&first) { None } else { all.find(own) };
                Ok(Self::Moment(Box::new(one.unwrap_or(first))))
            }
        }
    }

    /// The most that this side holds at once, or what it holds at its one moment.
    fn total(&self, name: &str) -> Result<totals::Total, Error> {
        match self {
            Self::Ledger(ledger) => totals::Total::of_ledger(ledger),
            Self::Steps(series, slack) => totals::Total::of_series(series, *slack),
            Self::Moment(moment) => totals::Total::of_moment(moment),
        }
        .ok_or_else(|| Error::NoSuch { name: name.into(), what: "no allocated bytes".into() })
    }
}
