//! The catalogue of GPUs.

use ledger::Bytes;

/// A kind of GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name used on the command line: `H100-80GB`.
    pub name: &'static str,
    /// All memory the driver reports (`cudaDeviceProp::totalGlobalMem`).
    pub capacity: Bytes,
    /// The card's nominal size in decimal bytes: 80 GB is 80 * 10^9.
    pub nominal: Bytes,
    /// Compute capability, major and minor.
    pub compute_capability: (u8, u8),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Where the figures come from.
    pub source: &'static str,
}

/// Every GPU of the catalogue.
pub const GPUS: &[Gpu] = &[Gpu {
    name: "H100-80GB",
    capacity: Bytes::new(85_520_809_984),
    nominal: Bytes::new(80_000_000_000),
    compute_capability: (9, 0),
    multiprocessors: 132,
    source: "cudaGetDeviceProperties of an H100 80GB HBM3 SXM5",
}];
