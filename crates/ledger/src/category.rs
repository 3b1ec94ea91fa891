//! What an object is for.

use std::fmt;
use std::str::FromStr;

macro_rules! categories {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        /// What an object is for. The order is the order of reports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Category { $($(#[$doc])* $variant),+ }

        impl Category {
            /// Every category, in report order.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name used in documents.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl FromStr for Category {
            type Err = ();
            fn from_str(name: &str) -> Result<Self, ()> {
                match name { $($name => Ok(Self::$variant),)+ _ => Err(()) }
            }
        }
    };
}

categories! {
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

impl Category {
    /// Whether a hand-written state may have this category: the seven of the specification.
    pub const fn is_hand_written(self) -> bool {
        (self as u8) <= Self::CommunicationBuffer as u8
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
