//! `torch.nn.utils.clip_grad_norm_` with foreach.

use engine::{Collective, Tensor, release};
use ledger::{Category, Dtype};

use super::List;

/// Clips the gradients of `parameters`, which are the shards of ranks that sum the squares of their norms where
/// `shared`.
pub(crate) fn clip_grad_norm(parameters: &[Tensor], shared: bool) {
    let grads: Vec<Tensor> = parameters.iter().filter_map(Tensor::grad).collect();
    let Some(first) = grads.first() else { return };
    let session = first.session();
    let (count, dtype) = (grads.len() as u64, first.dtype());
    let filled = grads.iter().filter(|grad| grad.numel() > 0).count();
    let bytes = |what, size| Tensor::of_category(session, what, Category::Temporary, [size], Dtype::Uint8);
    let chunks = grads.iter().map(|grad| grad.numel().div_ceil(65_536));
    let (addresses, partials) = if session.profile.listed_norms {
        let addresses = bytes("clip_grad_norm.addresses", (filled as u64 + 1) * 8);
        (Some(addresses), bytes("clip_grad_norm.partials", 4 * chunks.sum::<u64>()))
    } else {
        (None, bytes("clip_grad_norm.partials", 4 * filled as u64 * chunks.max().unwrap_or(0)))
    };
    let scalar = |what| Tensor::of_category(session, what, Category::Temporary, [], dtype);
    let mut norms: Vec<Tensor> = grads.iter().map(|_| scalar("clip_grad_norm.norm")).collect();
    // An empty gradient has a zero of its own: of the norms as many are left over at the end.
    let spare = norms.split_off(filled);
    let mut norms = norms.into_iter();
    let of = |grad: &Tensor| {
        let norm = if grad.numel() > 0 { norms.next() } else { None };
        norm.unwrap_or_else(|| scalar("clip_grad_norm.norm"))
    };
    let norms: List = grads.iter().map(of).collect();
    release!(spare, partials, addresses);
    let stacked = Tensor::of_category(session, "clip_grad_norm.stack", Category::Temporary, [count], dtype);
    let list = |what| Tensor::of_category(session, what, Category::Temporary, [count], dtype);
    let summed = shared.then(|| {
        let squares = list("clip_grad_norm.squares");
        let reduced = list("clip_grad_norm.all_reduce");
        session.collective(Collective::AllReduce, reduced.nbytes());
        let roots = list("clip_grad_norm.roots");
        release!(squares, reduced);
        roots
    });
    let total = scalar("clip_grad_norm.total");
    release!(summed);
    release!(stacked);
    release!(norms);
    let shifted = scalar("clip_grad_norm.coefficient");
    let reciprocal = scalar("clip_grad_norm.coefficient");
    let coefficient = scalar("clip_grad_norm.coefficient");
    release!(reciprocal, shifted);
    let clamped = scalar("clip_grad_norm.coefficient");
    release!(coefficient, clamped, total);
}
