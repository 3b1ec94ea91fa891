//! What an object is for.

use crate::words::words;

words! {
    /// What an object is for. The order is the order of reports.
    Category {
        /// Weights of the model.
        Parameter = "parameter",
        /// An fp32 copy of the weights kept by the optimizer.
        MasterWeight = "master_weight",
        /// Gradients of parameters, and of nothing else.
        Gradient = "gradient",
        /// What an optimizer keeps between steps.
        OptimizerState = "optimizer_state",
        /// A result of the forward pass, recomputed or not.
        Activation = "activation",
        /// Scratch memory of one kernel.
        Workspace = "workspace",
        /// Buffers of collectives.
        CommunicationBuffer = "communication_buffer",
        /// Buffers of a module: running statistics, frequencies.
        Buffer = "buffer",
        /// The batch.
        Input = "input",
        /// Activation gradients, casts, foreach copies: what dies inside an operator or a phase.
        Temporary = "temporary",
        /// Not known.
        Unattributed = "unattributed",
    }
}

impl Category {
    /// Whether a hand-written state may have this category: the seven of the specification.
    pub const fn is_hand_written(self) -> bool {
        (self as u8) <= Self::CommunicationBuffer as u8
    }
}
