//! Concatenation.

use crate::dims::Dims;
use crate::graph::Op;
use crate::ops::elementwise::wider;
use crate::tensor::Tensor;

/// `parts` joined along `dim`, in the widest of their types; backward gives views of the gradient.
pub fn cat(parts: &[&Tensor], dim: isize) -> Tensor {
    let session = parts[0].session();
    let op = Op::new(session, parts);
    let dim = parts[0].dim(dim);
    let lengths: Vec<u64> = parts.iter().map(|part| part.shape()[dim]).collect();
    let mut shape: Dims = parts[0].shape();
    shape[dim] = lengths.iter().sum();
    let dtype = parts[1..].iter().fold(parts[0].dtype(), |dtype, part| wider(dtype, part.dtype()));
    let out = Tensor::empty(session, "cat", shape, dtype);
    op.finish(out, move |call| {
        let mut start = 0;
        lengths
            .iter()
            .enumerate()
            .map(|(index, length)| {
                let from = start;
                start += length;
                call.when(index, || call.grad().narrow(dim as isize, from, *length))
            })
            .collect()
    })
}
