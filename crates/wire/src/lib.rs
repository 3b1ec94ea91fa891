//! The documents: versioned JSON and the tape's file form.

mod books;
mod error;
mod words;

pub use books::{
    About, Batch, Contributor, Device, DeviceKind, Flops, Ladder, Ledger, Oom, Parameters, Peak, Peaks,
    PhaseRow, Totals,
};
pub use error::ReadError;
pub use words::{Category, Measure, Provenance, Signal};
