//! The kernels around FSDP2's collectives, as far as they touch memory: how many blocks they run in decides what
//! they bring to the device beside the data.

use std::rc::Rc;

use engine::{Session, Tensor};
use ledger::{Category, Dtype};

/// Threads of a block.
const BLOCK: u64 = 128;
/// Bytes that a thread moves at once.
const BYTES_OF_THREAD: u64 = 16;

/// The table that a kernel reads addresses and sizes from: so many numbers of 8 bytes, dead at once.
fn table(session: &Rc<Session>, what: &'static str, numbers: u64) {
    drop(Tensor::of_category(session, what, Category::Workspace, [numbers], Dtype::Int64));
}

/// `split_with_sizes_copy`: what was gathered, `ranks` rows of `parts` bytes each, goes to a tensor each.
pub(super) fn split_copy(session: &Rc<Session>, parts: &[u64], ranks: u64) {
    let hardware = &session.hardware;
    let count = parts.len() as u64;
    let of_block = BLOCK * BYTES_OF_THREAD;
    let blocks: u64 = parts.iter().map(|part| part.div_ceil(of_block)).sum();
    // Twice the blocks that are resident at once.
    let most = hardware.multiprocessors * hardware.threads_per_multiprocessor / BLOCK * 2;
    let turns = (blocks * ranks).div_ceil(most);
    let root = turns.isqrt();
    let rows_of_block = (root + u64::from(root * root < turns)).min(ranks);
    let turns_of_row = turns.div_ceil(rows_of_block.max(1));
    let blocks: u64 = parts.iter().map(|part| part.div_ceil(of_block * turns_of_row.max(1))).sum();
    table(session, "split_copy", 3 * count + blocks + (count + 1));
}

/// `_chunk_cat`: gradients go to one buffer of `into`, padded to `wholes` elements, a part for each of `ranks`.
pub(super) fn chunk_cat(session: &Rc<Session>, grads: &[Tensor], wholes: &[u64], ranks: u64, into: Dtype) {
    let from = grads[0].dtype();
    let same = grads.iter().all(|grad| grad.dtype() == from);
    let widens = |grad: &Tensor| grad.dtype() == into || (grad.dtype() == Dtype::Bf16 && into == Dtype::Fp32);
    let temporary =
        |what, elements, dtype| Tensor::of_category(session, what, Category::Temporary, [elements], dtype);
    if same && !widens(&grads[0]) {
        // Copied one by one, the uneven ones padded first.
        let pad = |(grad, whole): (&Tensor, &u64)| {
            (*whole != grad.numel()).then(|| temporary("padded", *whole, from))
        };
        let padded: Vec<Option<Tensor>> = grads.iter().zip(wholes).map(pad).collect();
        return drop(padded);
    }
    // Of several dtypes, what the kernel does not widen itself is cast first.
    let cast = |grad: &Tensor| (grad.dtype() != into).then(|| temporary("cast", grad.numel(), into));
    let casts = !same && !grads.iter().all(widens);
    let cast: Vec<Option<Tensor>> = if casts { grads.iter().map(cast).collect() } else { Vec::new() };
    let count = grads.len() as u64;
    let blocks = |whole: &u64| (whole / ranks * into.size()).div_ceil(BLOCK * BYTES_OF_THREAD);
    let blocks: u64 = wholes.iter().map(blocks).sum();
    table(session, "chunk_cat", 4 * count + 2 * (count + 1) + blocks);
    drop(cast);
}
