//! What a number counts, and where it comes from.

use crate::words::words;

words! {
    /// What a total of a ledger counts. At one instant each is at least the one before.
    Measure {
        /// Bytes the program asked for.
        Requested = "requested",
        /// Bytes of the allocator's blocks: `memory_allocated`.
        Allocated = "allocated",
        /// Bytes of the allocator's segments: `memory_reserved`.
        Reserved = "reserved",
    }
}

words! {
    /// Where the numbers of a ledger come from.
    Provenance {
        /// Predicted from a model's config.
        Estimated = "estimated",
        /// A real program on an emulated device.
        Emulated = "emulated",
        /// A real device.
        Measured = "measured",
        /// An example somebody wrote.
        Constructed = "constructed",
    }
}

words! {
    /// What a reconciliation asks to look at.
    Signal {
        /// More was allocated than predicted, by more than the alert fraction of the prediction.
        InspectEstimateDifference = "inspect_estimate_difference",
        /// The allocator keeps more than the alert fraction of the capacity beyond what is allocated.
        InspectAllocatorRetainedSpace = "inspect_allocator_retained_space",
        /// Less than the alert fraction of the capacity is left.
        CapacityPressure = "capacity_pressure",
    }
}
