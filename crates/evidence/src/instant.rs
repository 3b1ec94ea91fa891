//! An instant: what one message or table says of one device at one moment.

use ledger::Bytes;

/// What is known of one device at one moment; what is not said is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instant {
    /// Who says it.
    pub source: Source,
    /// The library behind the device: `cuda`, `hip`, `xpu`, `mps`, `npu`, `jax`.
    pub backend: Option<String>,
    /// The device by its number.
    pub device: Option<u32>,
    /// The name of the device.
    pub device_name: Option<String>,
    /// What was asked of the device: "Tried to allocate".
    pub requested: Option<Bytes>,
    /// The least and the most bytes of the tensor behind the request.
    pub tensor: Option<(Bytes, Bytes)>,
    /// All memory of the device.
    pub capacity: Option<Bytes>,
    /// What of it is free; below zero where it is counted so.
    pub free: Option<i64>,
    /// What the card has in use, all processes together.
    pub used: Option<Bytes>,
    /// Bytes that the program asked for and holds.
    pub held: Option<Bytes>,
    /// Bytes of the allocator's blocks.
    pub allocated: Option<Bytes>,
    /// Blocks in use, and those that await their free.
    pub active: Option<Bytes>,
    /// Bytes of the allocator's segments.
    pub reserved: Option<Bytes>,
    /// Reserved and in no block: reserved less allocated.
    pub unallocated: Option<Bytes>,
    /// What of the allocated bytes is in private pools.
    pub private_pools: Option<Bytes>,
    /// What the process may use, where that is less than the device.
    pub allowed: Option<Bytes>,
    /// What this process holds, inside the allocator and out of it.
    pub process: Option<Bytes>,
    /// The processes on the card, by their number.
    pub processes: Vec<Process>,
    /// The most that was allocated up to that moment.
    pub peak_allocated: Option<Bytes>,
    /// The most that was reserved up to that moment.
    pub peak_reserved: Option<Bytes>,
    /// Free parts of segments that are in use: what cannot be given back.
    pub inactive_split: Option<Bytes>,
    /// Requests that found no room up to that moment.
    pub out_of_memory: Option<u64>,
    /// Times that the cache was given back to serve a request.
    pub retries: Option<u64>,
    /// The coarsest unit of the figures: what is printed in MiB may be off by one of them.
    pub unit: Option<Bytes>,
}

/// A process on a card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u64,
    /// Its name.
    pub name: Option<String>,
    /// What it holds.
    pub bytes: Option<Bytes>,
}

/// Who says what an instant knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// An out-of-memory message.
    #[default]
    OutOfMemory,
    /// `torch.cuda.memory_summary()`.
    Summary,
    /// `torch.cuda.memory_stats()`.
    Statistics,
    /// `nvidia-smi`.
    Smi,
}

impl Source {
    /// Its name in documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OutOfMemory => "oom",
            Self::Summary => "summary",
            Self::Statistics => "stats",
            Self::Smi => "smi",
        }
    }
}
