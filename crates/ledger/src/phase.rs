//! The phases of a training step.

/// A phase of a tape: an index into the tape's phase names, in the order of the timeline.
///
/// The first six are those of a training step; a hand-written timeline may bring its own names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Phase(pub u16);

impl Phase {
    /// The weights are brought to the device; step 0.
    pub const LOAD: Self = Self(0);
    /// The forward pass; with the loss, where no loss phase is marked.
    pub const FORWARD: Self = Self(1);
    /// The loss.
    pub const LOSS: Self = Self(2);
    /// The backward pass.
    pub const BACKWARD: Self = Self(3);
    /// Clipping and the optimizer; with zero_grad, where no zero_grad phase is marked.
    pub const UPDATE: Self = Self(4);
    /// The gradients are let go or zeroed.
    pub const ZERO_GRAD: Self = Self(5);

    /// The names of the phases of a training step, in order.
    pub const NAMES: [&str; 6] = ["load", "forward", "loss", "backward", "update", "zero_grad"];
}
