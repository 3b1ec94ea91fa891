//! CUDACachingAllocator over a tape: allocated, reserved, whether it fits.
//!
//! Requested bytes are not what runs out: reserved bytes are. [`CachingAllocator`] follows a tape
//! with the rules of PyTorch's CUDA caching allocator and predicts every block and segment, to the
//! byte; it is a [`ledger::Meter`], so that the one replay can ask it. [`simulate`] compares what a
//! tape would need under several [`Settings`].

mod arena;
mod blocks;
mod device;
mod expandable;
mod free_set;
mod layout;
mod meter;
mod placed;
mod rules;
mod settings;
mod simulate;
mod stats;
mod undo;

pub use arena::AddressOrder;
pub use blocks::State;
pub use device::{Action, DeviceMemory, Shortage, TieRule};
pub use layout::{BlockLayout, SegmentLayout};
pub use meter::{CachingAllocator, OutOfMemory};
pub use placed::{PlacedAllocator, Places};
pub use settings::{Settings, SettingsError, SettingsWarning};
pub use simulate::{DeviceReport, Report, first_difference, memory_of, simulate};
pub use stats::{PoolStat, Stat, Stats};
pub use undo::requests_behind;
