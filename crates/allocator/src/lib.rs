//! CUDACachingAllocator over a tape: allocated, reserved, whether it fits.
