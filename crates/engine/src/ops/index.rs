//! Rows chosen by index, and the largest of a row.

use std::rc::Rc;

use ledger::Dtype;

use crate::dims::Dims;
use crate::graph::Op;
use crate::ops::elementwise::pointwise;
use crate::session::Session;
use crate::tensor::Tensor;

/// Elements up to which a one-dimensional sort is done by one block, without a workspace of its own.
const SORTED_BY_ONE_BLOCK: u64 = 4096;

impl Tensor {
    /// The `count` largest of the last dimension and where they stand; keeps the places.
    pub fn top_k(&self, count: u64) -> (Self, Self) {
        let session = self.session();
        let op = Op::new(session, &[self]);
        let shape = self.shape_with_last(count);
        let values = Self::empty(session, "topk", shape, self.dtype());
        let places = Self::empty(session, "topk.indices", shape, Dtype::Int64);
        op.save_result(&places);
        let from = self.shape();
        let values = op.finish(values, move |call| {
            let grad = call.grad();
            vec![Some(Self::empty(grad.session(), "topk_backward", from, grad.dtype()))]
        });
        (values, places)
    }

    /// These integers (n) in order, and where they stood; without history.
    pub fn sort(&self) -> (Self, Self) {
        let session = self.session();
        let count = self.numel();
        let like = |what| Self::empty(session, what, [count], Dtype::Int64);
        let sorted = like("sorted");
        let places = like("sorted.indices");
        let range = like("sort.range");
        if count > SORTED_BY_ONE_BLOCK {
            drop(session.scratch(session.sort_workspace(count, u64::BITS), "sort.workspace"));
        }
        drop(range);
        (sorted, places)
    }

    /// The rows of this tensor at the places of `indices` (n), as `self[indices]`; keeps the indices.
    /// Backward sorts them, to add equal rows in order.
    pub fn rows_at(&self, indices: &Self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self]);
        op.save(indices);
        let from = self.shape();
        let mut shape = from;
        shape[0] = indices.numel();
        let out = Self::empty(session, "index", shape, self.dtype());
        op.finish(out, move |call| {
            let grad = call.grad();
            let gradient = Self::empty(grad.session(), "index_backward", from, grad.dtype());
            add_rows(grad.session(), call.saved(0).numel(), from);
            vec![Some(gradient)]
        })
    }

    /// `self /= other`, which keeps a copy of what it overwrites, and the divisor.
    pub fn div_in_place(&self, other: &Self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self, other]);
        op.save(other);
        if op.needs(1) {
            op.save_result(&self.like("div.before"));
        }
        let out = self.view_as(self.shape(), self.strides(), self.offset());
        op.finish(out, |call| {
            let (grad, other, before) = (call.grad(), call.saved(0), call.saved(1));
            let negative = pointwise("div_backward.negative", &[grad], grad.dtype());
            let quotient = pointwise("div_backward.quotient", &[before, other], before.dtype());
            let again = pointwise("div_backward.quotient", &[&quotient, other], before.dtype());
            let of_other = pointwise("div_backward.other", &[&negative, &again], grad.dtype());
            crate::release!(again, quotient, negative);
            vec![Some(pointwise("div_backward", &[grad, other], grad.dtype())), Some(of_other)]
        })
    }
}

/// `index_put_` with accumulation of `count` rows into a tensor of `shape`.
fn add_rows(session: &Rc<Session>, count: u64, shape: Dims) {
    let indices = |what| session.scratch(count * 8, what);
    let wrapped = indices("index_backward.wrapped");
    let linear = indices("index_backward.linear");
    drop(wrapped);
    let sorted = indices("index_backward.sorted");
    let original = indices("index_backward.original");
    let range = indices("index_backward.range");
    let bits = u64::BITS - (shape[0] - 1).max(1).leading_zeros();
    drop(session.scratch(session.sort_workspace(count, bits), "index_backward.sort"));
    crate::release!(range, original, sorted, linear);
}
