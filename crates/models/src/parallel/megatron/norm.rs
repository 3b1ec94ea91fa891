//! The norm of the gradients and their clipping, as Megatron computes them without and with fused kernels.

use engine::{Session, Tensor, release};
use ledger::{Category, Dtype};

use crate::optim::List;

fn scalar(session: &std::rc::Rc<Session>, what: &'static str) -> Tensor {
    Tensor::of_category(session, what, Category::Temporary, [1], Dtype::Fp32)
}

/// The norm of all `grads`, which every step computes: of one after the other, or of all at once where fused.
pub(super) fn norm(session: &std::rc::Rc<Session>, grads: &[Tensor], fused: bool) {
    let flag = scalar(session, "grad_norm.flag");
    let each = || session.with_category(Category::Temporary, || grads.iter().map(Tensor::norm_all).collect());
    let norms: Option<List> = (!fused && !grads.is_empty()).then(each);
    let total = scalar(session, "grad_norm.total");
    release!(norms);
    release!(scalar(session, "grad_norm.square"));
    release!(flag, total);
}

/// Multiplies each of `grads`, through a copy where not fused.
pub(super) fn clip(session: &std::rc::Rc<Session>, grads: &[Tensor], fused: bool) {
    if grads.is_empty() {
        return;
    }
    let flag = scalar(session, "grad_norm.flag");
    for grad in grads.iter().filter(|_| !fused) {
        release!(grad.beside("grad_norm.scaled", Category::Temporary, grad.shape(), grad.dtype()));
    }
    release!(flag);
}
