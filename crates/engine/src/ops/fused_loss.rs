//! The head and the cross-entropy loss in one, as Liger-Kernel runs them.

use ledger::Dtype;

use crate::graph::{Grads, Op};
use crate::ops::product::{multiply, multiply_into};
use crate::tensor::Tensor;

/// What the forward pass leaves: the loss and the gradients of hidden states and weight.
struct Fused {
    loss: Tensor,
    hidden_gradient: Tensor,
    weight_gradient: Option<Tensor>,
}

impl Tensor {
    /// The mean cross entropy of `self @ weight.t()` against `target`, for (N, H) hidden states and a (V, H)
    /// weight. The logits exist in chunks of about N * H elements, and both gradients are made in the forward
    /// pass; nothing else is kept.
    pub fn fused_linear_cross_entropy(&self, weight: &Self, target: &Self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self, weight]);
        let wanted = op.needs(0).then(|| op.needs(1));
        let fused = session.with_grad(false, || forward(self, weight, target, wanted));
        op.save_result(&fused.hidden_gradient);
        if let Some(gradient) = &fused.weight_gradient {
            op.save_result(gradient);
        }
        op.finish_custom(fused.loss, |call, saved| {
            // The gradients are scaled in place unless the incoming one equals 1.
            let grad = call.grad();
            let one = grad.scalar("loss_backward.one", Dtype::Fp32);
            let equal = grad.scalar("loss_backward.equal", Dtype::Bool);
            let all = grad.scalar("loss_backward.all_equal", Dtype::Bool);
            crate::release!(all, equal, one);
            let mut gradients: Grads = saved.into_iter().map(Some).collect();
            gradients.resize(2, None);
            gradients
        })
    }
}

/// Rows of logits that exist at a time: as many as make about as many elements as the hidden states have.
pub fn loss_chunk(rows: u64, width: u64, vocabulary: u64) -> u64 {
    rows.div_ceil(vocabulary.div_ceil(width.max(1)).max(1)).next_power_of_two().min(rows)
}

/// `wanted` is none where the hidden states want no gradient, else whether the weight does.
fn forward(hidden: &Tensor, weight: &Tensor, target: &Tensor, wanted: Option<bool>) -> Fused {
    let session = hidden.session();
    let [rows, width, vocabulary] = [hidden.size(0), hidden.size(1), weight.size(0)];
    let chunk = loss_chunk(rows, width, vocabulary);
    let hidden_gradient = hidden.empty_like("head_backward", hidden.dtype());
    let weight_gradient = (wanted == Some(true)).then(|| weight.empty_like("head_backward", weight.dtype()));
    let losses = Tensor::empty(session, "losses", [rows], Dtype::Fp32);
    let counted = target.empty_like("counted", Dtype::Bool);
    crate::release!(counted.count());
    let into_buffer = hidden.dtype() == weight.dtype()
        && session.autocast_dtype().is_none_or(|dtype| dtype == hidden.dtype());
    let buffer = into_buffer.then(|| Tensor::empty(session, "logits", [chunk, vocabulary], hidden.dtype()));
    for start in (0..rows).step_by(chunk as usize) {
        let part = hidden.narrow(0, start, chunk.min(rows - start));
        let logits = if let Some(buffer) = &buffer {
            multiply_into(&part, &weight.t());
            buffer.narrow(0, 0, part.size(0))
        } else {
            product("logits", &part, &weight.t())
        };
        match wanted {
            Some(_) if into_buffer => multiply_into(&logits, weight),
            Some(_) => drop(product("head_backward.part", &logits, weight)),
            None => {}
        }
        if let Some(gradient) = &weight_gradient {
            add_product(gradient, &logits.t(), &part);
        }
    }
    crate::release!(buffer);
    let loss = losses.sum_all();
    crate::release!(counted, losses);
    Fused { loss, hidden_gradient, weight_gradient }
}

/// `a @ b`, whose operands autocast casts from the right.
fn product(what: &'static str, a: &Tensor, b: &Tensor) -> Tensor {
    let session = a.session();
    let right = session.autocast_low(b);
    let left = session.autocast_low(a);
    let out = multiply(what, &left, &right);
    crate::release!(left, right);
    out
}

/// `sum += logits @ hidden`: by one kernel where it takes their types, else by way of the product in fp32.
fn add_product(sum: &Tensor, logits: &Tensor, hidden: &Tensor) {
    let session = sum.session();
    let takes =
        sum.dtype() == logits.dtype() || (sum.dtype() == Dtype::Fp32 && session.profile.widening_products);
    if logits.is_half() && takes && session.hardware.compute_capability.0 >= 8 {
        let hidden = hidden.to(logits.dtype());
        multiply_into(logits, &hidden);
    } else {
        let part = product("head_backward.part", logits, hidden);
        let wide = part.to(Dtype::Fp32);
        crate::release!(part, wide);
    }
}
