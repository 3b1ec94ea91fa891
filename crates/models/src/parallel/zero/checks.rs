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
    let (session, count) = (x.session(), x.numel());
    let magnitude = values(session, count, x.dtype());
    let below = values(session, count, Dtype::Bool);
    let number = values(session, count, Dtype::Bool);
    let both = values(session, count, Dtype::Bool);
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
    let norm = combined(std::slice::from_ref(&root));
    release!(root);
    norm
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
    let coefficient = reciprocal(&shifted);
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

/// The norm of groups with these norms.
pub(super) fn combined(norms: &[Tensor]) -> Tensor {
    let Some(first) = norms.first() else { unreachable!("a model without parameters is not trained") };
    let (session, dtype) = (first.session(), first.dtype());
    let stacked = values(session, norms.len() as u64, dtype);
    let invalid = invalid(&stacked);
    let combined = stacked.norm_all();
    let infinite = value(session, dtype);
    let chosen = value(session, dtype);
    release!(infinite, stacked, invalid, combined);
    chosen
}

/// Whether any of `norm` is negative or not finite.
fn invalid(norm: &Tensor) -> Tensor {
    let session = norm.session();
    let count = norm.numel();
    let finite = is_finite(norm);
    let not_finite = values(session, count, Dtype::Bool);
    release!(finite);
    let negative = values(session, count, Dtype::Bool);
    let either = values(session, count, Dtype::Bool);
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
    validate(norm);
    scale_and_clip(norm);
}

/// The same without a look at the norm.
pub(super) fn scale_and_clip(norm: &Tensor) {
    let session = norm.session();
    let one = || value(session, norm.dtype());
    let unscaled = one();
    let shifted = one();
    release!(unscaled);
    let quotient = one();
    release!(shifted);
    let clip = one();
    release!(quotient);
    let combined = one();
    release!(reciprocal(&combined));
    release!(combined, clip);
}

/// A number divided by a value: the product of its reciprocal.
fn reciprocal(of: &Tensor) -> Tensor {
    let reciprocal = value(of.session(), of.dtype());
    let product = value(of.session(), of.dtype());
    release!(reciprocal);
    product
}

/// The norm of the gradients of one group in stage 3, in fp64.
pub(super) fn norm_of_parts(session: &Rc<Session>, gradients: &[Tensor]) -> Tensor {
    let norms: List = gradients.iter().map(norm_of).collect();
    let stacked = values(session, gradients.len() as u64, Dtype::Fp64);
    let squares = stacked.like("zero.squares");
    release!(stacked);
    let sum = squares.total();
    release!(squares);
    session.collective(Collective::AllReduce, sum.nbytes());
    let root = value(session, Dtype::Fp64);
    let magnitude = value(session, Dtype::Fp64);
    let infinite = value(session, Dtype::Bool);
    release!(magnitude);
    let nan = value(session, Dtype::Bool);
    let either = value(session, Dtype::Bool);
    let mark = value(session, Dtype::Fp32);
    let wide = value(session, Dtype::Fp64);
    let chosen = value(session, Dtype::Fp64);
    release!(wide, root, sum, norms, infinite, nan, either, mark);
    chosen
}

/// The norm of a gradient on its way to the host: squares of its pieces are added up.
pub(super) fn norm_by_squares(gradient: &Tensor) -> Tensor {
    let session = gradient.session();
    let norm = norm_of(gradient);
    let square = value(session, Dtype::Fp64);
    release!(norm);
    let root = value(session, Dtype::Fp64);
    release!(square);
    root
}

/// The norm of the gradients of all ranks, where those of this rank are known one by one; it goes to the host.
pub(super) fn norm_of_host(session: &Rc<Session>, norms: &[Tensor]) {
    let mut sum = None;
    for _ in norms {
        let square = value(session, Dtype::Fp64);
        if sum.is_none() {
            sum = Some(value(session, Dtype::Fp64));
        }
        release!(square);
    }
    let total = value(session, Dtype::Fp32);
    session.collective(Collective::AllReduce, total.nbytes());
    let root = value(session, Dtype::Fp32);
    release!(sum);
    mask_unless_finite(&root);
    release!(root, total);
}

/// Whether `count` gradients of the partition in `dtype` are all finite.
pub(super) fn overflow_of_partition(session: &Rc<Session>, count: u64, dtype: Dtype, on_host: bool) {
    let any = Tensor::extreme_all;
    if !on_host {
        let magnitude = values(session, count, dtype);
        let infinite = values(session, count, Dtype::Bool);
        release!(magnitude);
        let some = any(&infinite);
        release!(infinite, some);
        let nan = values(session, count, Dtype::Bool);
        let some = any(&nan);
        release!(nan, some);
    }
    let tracker = value(session, Dtype::Bool);
    let byte = value(session, Dtype::Uint8);
    release!(tracker);
    session.collective(Collective::AllReduce, byte.nbytes());
    release!(byte);
}
