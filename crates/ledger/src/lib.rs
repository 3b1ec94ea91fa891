//! The vocabulary of GPU training memory and the tape that records it.
//!
//! Memory over time is a [`Tape`]: an ordered record of allocations, frees and marks. Every answer
//! about a moment, a peak or a phase is one replay of a tape. This crate does no I/O.

mod bytes;
mod category;
mod compare;
mod measure;
mod meter;
mod model;
mod phase;
mod reconcile;
mod replay;
mod states;
mod tape;
mod words;

pub use bytes::{ByteDelta, Bytes};
pub use category::Category;
pub use compare::{Candidate, CompareError, Comparison, Difference, Named, compare};
pub use measure::{Measure, Provenance, Signal};
pub use meter::{Meter, Oom, Reading};
pub use model::{Contributor, Failure, Ladder, Ledger, Peak, Peaks, PhaseRow, Position, Totals};
pub use phase::Phase;
pub use reconcile::{Found, Prediction, ReconcileError, Reconciliation, Row, reconcile};
pub use replay::{holders, replay};
pub use states::{Entry, State, StateError, StateProblem, States, clip};
pub use tape::{
    Device, DeviceId, DeviceKind, Dtype, Event, Label, LabelId, Layout, LayoutId, Mark, MarkId, Name, Object,
    ObjectId, Pool, Segment, SegmentId, Stream, Tape, TapeError, Unit,
};
