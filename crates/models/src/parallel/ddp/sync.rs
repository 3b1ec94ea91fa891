//! What ranks send each other besides gradients: shapes, and what rank 0 holds.

use std::collections::VecDeque;
use std::rc::Rc;

use engine::{Collective, Session, Tensor, release};
use ledger::{Category, Dtype};

use super::buckets::assign_in_order;

/// Bytes that are sent together.
const BROADCAST_CAP: u64 = 250 << 20;
/// Broadcasts under way at once.
const IN_FLIGHT: usize = 2;

pub(super) fn buffer(session: &Rc<Session>, what: &'static str, elements: u64, dtype: Dtype) -> Tensor {
    Tensor::of_category(session, what, Category::CommunicationBuffer, [elements], dtype)
}

/// Every rank tells how many parameters it has, and rank 0 their shapes (`_verify_params_across_processes`).
pub(super) fn verify(session: &Rc<Session>, parameters: &[Tensor], world: u32) {
    let count = buffer(session, "parameter_count", 1, Dtype::Int64);
    let counts: Vec<Tensor> =
        (0..world).map(|_| buffer(session, "parameter_counts", 1, Dtype::Int64)).collect();
    session.collective(Collective::AllGather, u64::from(world) * count.nbytes());
    // Of each dimension its extent and its stride.
    let numbers = parameters.iter().map(|parameter| 2 * parameter.shape().len() as u64).sum();
    let shapes = buffer(session, "parameter_shapes", numbers, Dtype::Int64);
    session.collective(Collective::Broadcast, shapes.nbytes());
    release!(shapes);
    for one in counts {
        drop(one);
    }
    drop(count);
}

/// Rank 0 sends tensors of a dtype and so many bytes to all, copied together where there are several.
pub(super) fn broadcast(session: &Rc<Session>, tensors: &[(Dtype, u64)]) {
    let mut under_way: VecDeque<Option<Tensor>> = VecDeque::new();
    for members in assign_in_order(tensors, &[BROADCAST_CAP]) {
        if under_way.len() == IN_FLIGHT {
            drop(under_way.pop_front());
        }
        let bytes: u64 = members.iter().map(|index| tensors[*index].1).sum();
        let dtype = tensors[members[0]].0;
        let flat = (members.len() > 1).then(|| buffer(session, "broadcast", bytes / dtype.size(), dtype));
        session.collective(Collective::Broadcast, bytes);
        under_way.push_back(flat);
    }
    for flat in under_way {
        drop(flat);
    }
}

/// Rank 0 tells all of them the `buckets` that it has made of so many parameters.
pub(super) fn tell_buckets(session: &Rc<Session>, buckets: usize, parameters: usize) {
    let indices = buffer(session, "bucket_indices", parameters as u64 + 1, Dtype::Int32);
    session.collective(Collective::Broadcast, indices.nbytes());
    let sizes = buffer(session, "bucket_sizes", buckets as u64, Dtype::Int32);
    session.collective(Collective::Broadcast, sizes.nbytes());
    release!(sizes, indices);
}
