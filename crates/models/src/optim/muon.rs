//! `torch.optim.Muon`: a momentum buffer, and an update that Newton and Schulz's iteration makes orthogonal in
//! bf16.

use engine::{Tensor, release};
use ledger::Dtype;

use super::{Slot, temporary};

/// Iterations where nothing else is said.
const ITERATIONS: usize = 5;

pub(super) fn step(slots: &mut [Slot]) {
    for slot in slots.iter_mut().filter(|slot| slot.state.is_empty()) {
        slot.keep_like("momentum_buffer");
    }
    let mut update: Option<Tensor> = None;
    for Slot { parameter, .. } in slots {
        let ahead = temporary(parameter, "optimizer.nesterov_grad");
        let made = orthogonal(update.insert(ahead));
        update = Some(made);
    }
    release!(update);
}

/// The names of the iteration live until the next one binds them anew.
fn orthogonal(update: &Tensor) -> Tensor {
    let mut matrix = update.copied(Dtype::Bf16);
    if matrix.size(0) > matrix.size(1) {
        matrix = matrix.t();
    }
    let norm = matrix.norm_all();
    let clamped = norm.beside("norm", ledger::Category::Temporary, [], norm.dtype());
    release!(norm, clamped);
    let (mut gram, mut gram_update) = (None, None);
    for _ in 0..ITERATIONS {
        let gram = gram.insert(matrix.mm(&matrix.t()));
        let gram_update = gram_update.insert(Tensor::addmm(gram, gram, gram));
        matrix = Tensor::addmm(&matrix, gram_update, &matrix);
    }
    release!(gram, gram_update);
    matrix
}
