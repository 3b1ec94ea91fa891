//! Recognising a document by its first bytes and its format.

use ledger::{States, Tape};
use schemars::{Schema, schema_for};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::answers::{Budget, CheckpointBudget, CheckpointPlan, GpuCatalogue, ModelCatalogue, Tradeoff};
use crate::states::{self, Field, StatesSchema};
use crate::{
    About, Comparison, Instants, Largest, Ledger, RankBudget, RankReadings, ReadError, Reconciliation,
    Series, Simulation, Variations, read_tape, tape,
};

/// What every command reads.
#[derive(Debug)]
pub enum Document {
    /// A ledger.
    Ledger(Box<Ledger>),
    /// A tape, and what is known of its run besides.
    Tape(Box<(About, Tape)>),
    /// Hand-written states.
    States(Box<States>),
}

/// The keys that tell what a JSON object is.
#[derive(Deserialize)]
struct Probe {
    #[serde(default = "missing")]
    format: Field,
    states: Option<IgnoredAny>,
}

fn missing() -> Field {
    Field::Missing
}

impl Document {
    /// Reads a ledger, a tape or states, whichever `bytes` are.
    ///
    /// # Errors
    /// What is wrong and where. No input makes it panic, or take more memory than its limits.
    pub fn read(bytes: &[u8]) -> Result<Self, ReadError> {
        if bytes.starts_with(tape::FAMILY) {
            return Ok(Self::Tape(Box::new(read_tape(bytes)?)));
        }
        let json = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        match json.iter().find(|byte| !byte.is_ascii_whitespace()) {
            None => Err(ReadError::Empty),
            Some(b'[') => Ok(Self::States(Box::new(states::read_list(json)?))),
            Some(b'{') => Self::read_object(json),
            Some(_) => Err(ReadError::Unrecognised),
        }
    }

    fn read_object(json: &[u8]) -> Result<Self, ReadError> {
        let probe: Probe = serde_json::from_slice(json).map_err(|error| ReadError::json("JSON", &error))?;
        let format = match probe.format {
            Field::Text(format) => format,
            Field::Missing if probe.states.is_some() => {
                return Ok(Self::States(Box::new(states::read_timeline(json)?)));
            }
            Field::Missing => return Err(ReadError::NoFormat),
            other => return Err(ReadError::UnknownFormat { format: other.kind().into() }),
        };
        match format.as_str() {
            Ledger::FORMAT => Ok(Self::Ledger(Box::new(Ledger::read(json)?))),
            Comparison::FORMAT => Err(ReadError::OtherDocument { format, what: "a comparison" }),
            Reconciliation::FORMAT => Err(ReadError::OtherDocument { format, what: "a reconciliation" }),
            Simulation::FORMAT => Err(ReadError::OtherDocument { format, what: "a simulation" }),
            Instants::FORMAT => Err(ReadError::OtherDocument { format, what: "a list of instants" }),
            RankReadings::FORMAT => Err(ReadError::OtherDocument { format, what: "a reading of many ranks" }),
            Series::FORMAT => Err(ReadError::OtherDocument { format, what: "a series" }),
            other => match other.strip_prefix("vramledger/") {
                Some(_) => {
                    Err(ReadError::UnknownVersion { format: ledger::clip(other), known: Ledger::FORMAT })
                }
                None => Err(ReadError::UnknownFormat { format: ledger::clip(other) }),
            },
        }
    }
}

impl Ledger {
    fn read(json: &[u8]) -> Result<Self, ReadError> {
        let ledger: Self = serde_json::from_slice(json).map_err(|error| ReadError::json("ledger", &error))?;
        ledger.books()?;
        Ok(ledger)
    }
}

/// The JSON of a document: two spaces of indent, and a line end at its end.
///
/// # Panics
/// Never for the documents of this crate: each of them has a JSON form.
pub fn to_json(document: &impl Serialize) -> String {
    let mut json = serde_json::to_string_pretty(document).expect("a document has a JSON form");
    json.push('\n');
    json
}

/// The JSON schema of each document, by the name of its format.
pub fn schemas() -> Vec<(&'static str, Schema)> {
    vec![
        (Ledger::FORMAT, schema_for!(Ledger)),
        (Comparison::FORMAT, schema_for!(Comparison)),
        (Reconciliation::FORMAT, schema_for!(Reconciliation)),
        (Series::FORMAT, schema_for!(Series)),
        (RankReadings::FORMAT, schema_for!(RankReadings)),
        (Simulation::FORMAT, schema_for!(Simulation)),
        (Instants::FORMAT, schema_for!(Instants)),
        (Variations::FORMAT, schema_for!(Variations)),
        (Largest::FORMAT, schema_for!(Largest)),
        (Budget::FORMAT, schema_for!(Budget)),
        (RankBudget::FORMAT, schema_for!(RankBudget)),
        (CheckpointPlan::FORMAT, schema_for!(CheckpointPlan)),
        (CheckpointBudget::FORMAT, schema_for!(CheckpointBudget)),
        (Tradeoff::FORMAT, schema_for!(Tradeoff)),
        (ModelCatalogue::FORMAT, schema_for!(ModelCatalogue)),
        (GpuCatalogue::FORMAT, schema_for!(GpuCatalogue)),
        ("states", schema_for!(StatesSchema)),
    ]
}
