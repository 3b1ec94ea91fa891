//! What an update does before it steps, a scalar on the device at each operator: whether gradients overflowed,
//! their norm, and the factor that clips them.

use std::rc::Rc;

use engine::{Collective, Session, Tensor, release};
use ledger::{Category, Dtype};

use crate::optim::List;

/// A value on the device.
fn value(session: &Rc<Session>, dtype: Dtype) -> Tensor {
    values(session, 1, dtype)
}

fn values(session: &Rc<Session>, count: u64, dtype: Dtype) -> Tensor {
    Tensor::of_category(session, "zero.scalar", Category::Temporary, [count], dtype)
}

/// `torch.isfinite(x)` of a value of floating point.
fn is_finite(x: &Tensor) -> Tensor {
    let session = x.session();
    let magnitude = value(session, x.dtype());
    let below = value(session, Dtype::Bool);
    let number = value(session, Dtype::Bool);
    let both = value(session, Dtype::Bool);
    release!(number, below, magnitude);
    both
}

/// Whether a gradient has a value that is not finite.
pub(super) fn has_inf_or_nan(gradient: &Tensor) -> Tensor {
    let session = gradient.session();
    let extreme = || {
        let extreme = gradient.extreme_all();
        let finite = is_finite(&extreme);
        release!(extreme);
        finite
    };
    let largest = extreme();
    let smallest = extreme();
    let finite = value(session, Dtype::Bool);
    release!(largest, smallest);
    let not = value(session, Dtype::Bool);
    release!(finite);
    not
}

/// Whether any rank has gradients that are not finite.
pub(super) fn overflow(session: &Rc<Session>, gradients: &[Tensor]) {
    let count = value(session, Dtype::Fp32);
    for gradient in gradients {
        release!(has_inf_or_nan(gradient));
    }
    let any = value(session, Dtype::Bool);
    release!(count);
    let byte = value(session, Dtype::Uint8);
    release!(any);
    session.collective(Collective::AllReduce, byte.nbytes());
    release!(byte);
}

/// The same where each gradient was looked at on its way to the host.
pub(super) fn overflow_of_host(session: &Rc<Session>) {
    let byte = value(session, Dtype::Uint8);
    session.collective(Collective::AllReduce, byte.nbytes());
    release!(byte);
}

/// The 2-norm of a gradient, added up in fp64.
pub(super) fn norm_of(gradient: &Tensor) -> Tensor {
    let wide = gradient.to(Dtype::Fp64);
    let norm = wide.norm_all();
    release!(wide);
    norm
}

/// The norm of the gradients of all ranks, and again as the only one of a list of groups.
pub(super) fn global_norm(session: &Rc<Session>, gradients: &[Tensor]) -> Tensor {
    let norms: List = gradients.iter().map(norm_of).collect();
    let total = if gradients.is_empty() {
        value(session, Dtype::Fp32)
    } else {
        let stacked = values(session, gradients.len() as u64, Dtype::Fp64);
        let squares = stacked.like("zero.squares");
        release!(stacked);
        let sum = squares.total();
        release!(squares);
        let narrow = value(session, Dtype::Fp32);
        release!(sum);
        narrow
    };
    session.collective(Collective::AllReduce, total.nbytes());
    let root = value(session, Dtype::Fp32);
    release!(total);
    mask_unless_finite(&root);
    release!(norms);
    combined(root)
}

/// The norm of the gradients of `parameters`, added up in fp32 (`get_global_norm_of_tensors`).
pub(super) fn norm_in_fp32(session: &Rc<Session>, parameters: &[Tensor]) -> Tensor {
    let norm = |parameter: &Tensor| {
        let sum = Tensor::without_storage(session, [parameter.numel()], Dtype::Fp32, false);
        sum.norm_all()
    };
    let norms: List = parameters.iter().map(norm).collect();
    let last = norms.last().cloned();
    let stacked = values(session, norms.len() as u64, Dtype::Fp32);
    let squares = stacked.like("zero.squares");
    release!(stacked);
    let sum = squares.total();
    let root = value(session, Dtype::Fp32);
    mask_unless_finite(&root);
    release!(norms, sum, last, squares);
    root
}

/// Clips by a norm where it is above the largest one that is allowed (`clip_tensors_by_global_norm`).
pub(super) fn clip_by(norm: &Tensor) {
    let session = norm.session();
    let shifted = value(session, Dtype::Fp32);
    let coefficient = reciprocal(session);
    release!(shifted);
    let above = value(session, Dtype::Bool);
    release!(above);
    release!(coefficient);
}

/// Writes a mark over a norm that is not finite.
fn mask_unless_finite(norm: &Tensor) {
    let session = norm.session();
    let magnitude = value(session, norm.dtype());
    let infinite = value(session, Dtype::Bool);
    release!(magnitude);
    let nan = value(session, Dtype::Bool);
    let either = value(session, Dtype::Bool);
    let mark = value(session, Dtype::Fp32);
    release!(infinite, nan, either, mark);
}

/// The norm of groups of which there is one.
fn combined(norm: Tensor) -> Tensor {
    let session = Rc::clone(norm.session());
    let stacked = value(&session, Dtype::Fp32);
    let invalid = invalid(&stacked);
    let combined = value(&session, Dtype::Fp32);
    let infinite = value(&session, Dtype::Fp32);
    let chosen = value(&session, Dtype::Fp32);
    release!(infinite, stacked, invalid, combined, norm);
    chosen
}

/// Whether any of `norm` is negative or not finite.
fn invalid(norm: &Tensor) -> Tensor {
    let session = norm.session();
    let finite = is_finite(norm);
    let not_finite = value(session, Dtype::Bool);
    release!(finite);
    let negative = value(session, Dtype::Bool);
    let either = value(session, Dtype::Bool);
    release!(not_finite, negative);
    let any = value(session, Dtype::Bool);
    release!(either);
    any
}

/// `if is_invalid_grad_norm(norm)`.
pub(super) fn validate(norm: &Tensor) {
    release!(invalid(norm));
}

/// Divides gradients by the scale of the loss and clips them, in place.
pub(super) fn unscale_and_clip(norm: &Tensor) {
    let session = norm.session();
    validate(norm);
    let one = || value(session, Dtype::Fp32);
    let unscaled = one();
    let shifted = one();
    release!(unscaled);
    let quotient = one();
    release!(shifted);
    let clip = one();
    release!(quotient);
    let combined = one();
    release!(reciprocal(session));
    release!(combined, clip);
}

/// A number divided by a value: the product of its reciprocal.
fn reciprocal(session: &Rc<Session>) -> Tensor {
    let reciprocal = value(session, Dtype::Fp32);
    let product = value(session, Dtype::Fp32);
    release!(reciprocal);
    product
}
