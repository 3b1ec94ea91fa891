//! Readers of what runs leave behind: bytes in, evidence and structured warnings out.
//!
//! A reader takes what a file says and no more: what it could not tell is a [`Warning`], what it
//! cannot read at all is one sentence. No input may panic, hang, run code or exhaust memory.

mod instant;
pub mod log;
pub mod oom;
pub mod pickle;
pub mod recognise;
pub mod recording;
pub mod series;
pub mod smi;
pub mod snapshot;
pub mod summary;
pub mod timeline;
pub mod trace;
mod training;
mod warning;

pub use instant::{Instant, Process, Source};
pub use log::{LogError, StepLog};
pub use oom::{looks_like_oom, read_oom};
pub use recording::{Recording, RecordingError};
pub use series::Series;
pub use smi::Smi;
pub use snapshot::{Snapshot, SnapshotError};
pub use timeline::{RawTimeline, Timeline, TimelineError};
pub use trace::{Trace, TraceError};
pub use warning::Warning;
