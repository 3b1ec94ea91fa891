//! The operators: each knows its result, its temporaries, what it saves, its backward and its FLOPs.

pub(crate) mod attention;
mod elementwise;
pub(crate) use elementwise::is_floating;
mod embedding;
pub(crate) mod four_bit;
pub(crate) mod fused_loss;
mod grouped;
mod index;
pub(crate) mod join;
pub(crate) mod kernel;
mod loss;
mod norm;
mod product;
mod reduce;
mod view;
