//! Eager autograd on shapes: emits a tape of what a training step allocates and frees.
