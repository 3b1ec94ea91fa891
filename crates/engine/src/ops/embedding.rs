//! Embedding look-up.

use std::rc::Rc;

use ledger::Dtype;

use crate::dims::Dims;
use crate::graph::Op;
use crate::hardware::Profile;
use crate::session::Session;
use crate::tensor::Tensor;

/// Indices from which the backward sorts them instead of walking the rows.
const SORTED_FROM: u64 = 3072;

const fn align256(bytes: u64) -> u64 {
    bytes.next_multiple_of(256)
}

/// Temporary storage of a CUB pass with decoupled look-back over `count` items in tiles of `tile`, each
/// with a state of `state` bytes.
fn look_back_workspace(profile: &Profile, count: u64, tile: u64, state: u64) -> u64 {
    profile.look_back_base + align256(state * (32 + count.div_ceil(tile)))
}

impl Session {
    /// Temporary storage of CUB's device scan over `count` int64 or int32 values, in bytes.
    pub fn scan_workspace(&self, count: u64, dtype: Dtype) -> u64 {
        look_back_workspace(&self.profile, count, 896, 2 * dtype.size())
    }

    /// Temporary storage of CUB's radix sort of `count` pairs with keys of `bits` bits, in bytes: next to none
    /// where one block sorts them all.
    pub(crate) fn sort_workspace(&self, count: u64, bits: u32) -> u64 {
        let tile = self.hardware.sort_tile();
        if count <= tile / 2 {
            return 1;
        }
        let passes = u64::from(bits).div_ceil(8);
        let double_buffer = if passes > 1 { 2 * align256(count * 8) } else { 0 };
        255 + 256 * (1 + 8 * passes) + 1024 * count.div_ceil(tile) + double_buffer
    }

    /// Temporary storage of CUB's unique-by-key over `count` int64 values, in bytes.
    fn unique_workspace(&self, count: u64) -> u64 {
        let profile = &self.profile;
        look_back_workspace(profile, count, self.hardware.unique_tile(profile), profile.unique_state)
    }
}

impl Tensor {
    /// Rows of this (V, D) weight, one for each of `indices`; keeps the indices.
    pub fn embedding(&self, indices: &Self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self]);
        op.save(indices);
        let mut shape = indices.shape();
        shape = shape.with(self.size(-1));
        let out = Self::empty(session, "embedding", shape, self.dtype());
        let (weight, dtype) = (self.shape(), self.dtype());
        op.finish(out, move |call| {
            let session = call.grad().session();
            let count = call.saved(0).numel();
            // A gradient in another layout is copied first.
            let grad = call.grad().contiguous();
            let gradient = if count <= SORTED_FROM {
                Self::empty(session, "embedding_backward", weight, dtype)
            } else {
                sorted_backward(session, count, weight, dtype)
            };
            crate::release!(grad);
            vec![Some(gradient)]
        })
    }
}

/// The gradient of many indices: they are sorted, segments of equal ones are found, and each segment
/// is summed in fp32 by parts of ten.
fn sorted_backward(session: &Rc<Session>, count: u64, weight: Dims, dtype: Dtype) -> Tensor {
    let (rows, width) = (weight[0], weight[1]);
    let indices = |what| session.scratch(count * 8, what);
    let sorted = indices("embedding_backward.sorted");
    let original = indices("embedding_backward.original");
    let iota = indices("embedding_backward.iota");
    let bits = if session.profile.sorts_used_bits { u64::BITS - rows.leading_zeros() } else { u64::BITS };
    drop(session.scratch(session.sort_workspace(count, bits), "embedding_backward.sort"));
    drop(iota);
    let gradient = Tensor::empty(session, "embedding_backward", weight, dtype);
    let segments = count.min(rows);
    let parts = count / 10 + segments;
    let offsets = indices("embedding_backward.offsets");
    let found = session.scratch(8, "embedding_backward.count");
    let dummy = indices("embedding_backward.offsets");
    drop(session.scratch(session.unique_workspace(count), "embedding_backward.unique"));
    drop(dummy);
    let part_counts = session.scratch(segments * 8, "embedding_backward.parts");
    let part_offsets = session.scratch(segments * 8, "embedding_backward.parts");
    drop(session.scratch(session.scan_workspace(segments, Dtype::Int64), "embedding_backward.scan"));
    let part_total = session.scratch(8, "embedding_backward.count");
    let part_starts = session.scratch(parts * 8, "embedding_backward.parts");
    let sums = session.scratch(parts * width * 4, "embedding_backward.sums");
    crate::release!(
        sums,
        part_starts,
        part_total,
        part_offsets,
        part_counts,
        found,
        offsets,
        original,
        sorted
    );
    gradient
}
