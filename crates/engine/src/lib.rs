//! Eager autograd on shapes.
//!
//! A [`Tensor`] has a shape, a dtype, a storage and perhaps a gradient function, and no data. Operators
//! allocate, keep and free what PyTorch's CUDA operators do, in the same order, and a [`Session`]
//! writes it to a tape. No model is known here.

mod checkpoint;
mod dims;
mod graph;
mod hardware;
mod host;
mod ops;
mod session;
mod tensor;

pub use checkpoint::{KEEPABLE, Recompute, checkpoint};
pub use dims::Dims;
pub use graph::{backward, copies, with_backward};
pub use hardware::{Hardware, Lifetime, Profile};
pub use host::Pinning;
pub use ops::attention::Attention;
pub use ops::four_bit::FourBit;
pub use ops::fused_loss::loss_chunk;
pub use ops::join::cat;
pub use ops::kernel::{Kernel, Problem};
pub use session::{Collective, FlopCount, Messages, Scope, Session, Traffic};
pub use tensor::Tensor;

/// Lets go of names in the order given, as a Python frame does when it returns.
#[macro_export]
macro_rules! release {
    ($($name:expr),+ $(,)?) => { $( drop($name); )+ };
}
