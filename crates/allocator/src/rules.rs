//! The constants of PyTorch's CUDA caching allocator (`c10/core/AllocatorConfig.h`).

/// 2^20 bytes.
pub(crate) const MIB: u64 = 1 << 20;
/// Every block is a multiple of this.
pub(crate) const MIN_BLOCK: u64 = 512;
/// The largest block of the small pool; a remainder in the large pool is split off above it.
pub(crate) const SMALL_LIMIT: u64 = MIB;
/// A segment of the small pool, and the page of its expandable segments.
pub(crate) const SMALL_SEGMENT: u64 = 2 * MIB;
/// Blocks of the large pool below this share a large segment.
pub(crate) const MIN_LARGE: u64 = 10 * MIB;
/// The large segment, unless the settings say otherwise.
pub(crate) const LARGE_SEGMENT: u64 = 20 * MIB;
/// Larger segments are multiples of this.
pub(crate) const ROUND_LARGE: u64 = 2 * MIB;
/// What the device hands out is a multiple of this.
pub(crate) const DEVICE_PAGE: u64 = 2 * MIB;
