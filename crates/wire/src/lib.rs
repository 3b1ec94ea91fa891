//! The documents: versioned JSON and the tape's file form.

pub mod answers;
mod books;
mod compare;
mod document;
mod error;
pub mod explanation;
mod growth;
mod instants;
mod rank;
mod ranks;
mod read_ranks;
mod reading;
mod reconcile;
mod series;
mod simulate;
mod states;
mod tape;
mod vary;
mod words;

pub use books::{
    About, Batch, Contributor, Device, DeviceKind, Flops, Ladder, Ledger, Oom, Outside, Parameters, Peak,
    Peaks, PhaseRow, Totals, Traffic,
};
pub use compare::{Baseline, Candidate, Comparison, Difference};
pub use document::{Document, schemas, to_json};
pub use error::{ReadError, WriteError};
pub use growth::{Growing, Growth, Slope, Trend};
pub use instants::{DeviceInstant, Instants, OtherProcess, ProgramNeeds, SizedObject, StackFrame};
pub use rank::{RankBuffers, RankCollective, RankState, Ranks};
pub use ranks::{RankBudget, RankBytes, RankModel, RankPart, RankRate};
pub use read_ranks::{Alike, RankOom, RankOutlier, RankReading, RankReadings, RankStage, UnreadRank};
pub use reading::{
    Evidence, Instant, InstantRow, Pin, Reading, Remedy, Start, Step, Stranded, Stranding, WhatIf,
};
pub use reconcile::{
    At, CategoryLine, Compared, Found, Mismatch, OtherSetting, PhaseLine, Reason, ReasonLine, Reconciliation,
    RequestLine, Row, StepLine,
};
pub use series::{Series, SeriesColumn, SeriesExtra, SeriesFigure, SeriesOf, SeriesPoint};
pub use simulate::{Simulated, SimulatedDevice, Simulation};
pub use tape::{read_tape, write_tape};
pub use vary::{Costs, Largest, SettingValue, Try, Variation, VariationOutcome, Variations};
pub use words::{Category, Measure, Provenance, Signal};
