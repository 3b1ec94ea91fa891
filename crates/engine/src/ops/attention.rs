//! Scaled dot-product attention and the kernels behind it.

use std::rc::Rc;

use ledger::Dtype;

use crate::dims::Dims;
use crate::graph::{Call, Op};
use crate::hardware::Hardware;
use crate::ops::elementwise::pointwise;
use crate::ops::kernel::{Kernel, Problem};
use crate::session::Session;
use crate::tensor::Tensor;

/// One attention: what the kernel is chosen by and given.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// A boolean mask; none: causal.
    pub mask: Option<&'a Tensor>,
    /// The dropout probability.
    pub dropout: f64,
    /// A forced kernel; none: the one PyTorch would choose.
    pub kernel: Option<Kernel>,
}

const fn up(value: u64, multiple: u64) -> u64 {
    value.next_multiple_of(multiple)
}

/// Extents of one attention: batch, heads, key-value heads, sequence, head size.
#[derive(Clone, Copy)]
struct Extents {
    b: u64,
    h: u64,
    hk: u64,
    s: u64,
    d: u64,
}

impl Extents {
    fn of(query: &Tensor, key: &Tensor) -> Self {
        let q = query.shape();
        Self { b: q[0], h: q[1], hk: key.shape()[1], s: q[2], d: q[3] }
    }

    /// A (b, heads, s, d) tensor on (b, s, heads, d) storage, as the kernels lay out their results.
    fn strided(self, session: &Rc<Session>, what: &'static str, heads: u64, dtype: Dtype) -> Tensor {
        let shape = Dims::from([self.b, heads, self.s, self.d]);
        let strides = Dims::from([self.s * heads * self.d, self.d, heads * self.d, 1]);
        Tensor::strided(session, what, shape, strides, dtype)
    }

    /// FLOPs of the two products of the forward pass, not halved for causality.
    fn flops(self) -> u64 {
        4 * self.b * self.h * self.s * self.s * self.d
    }
}

impl Tensor {
    /// Attention of (b, h, s, d) queries over (b, hk, s, d) keys and values, hk dividing h; under
    /// autocast the three are cast first (value, key, query).
    pub fn attend(&self, key: &Self, value: &Self, attention: Attention<'_>) -> Self {
        let session = Rc::clone(self.session());
        let value = session.autocast_low(value);
        let key = session.autocast_low(key);
        let query = session.autocast_low(self);
        let problem = Problem {
            dtype: query.dtype(),
            head: query.size(-1),
            grouped: key.size(1) < query.size(1),
            mask: attention.mask.is_some(),
            dropout: attention.dropout > 0.0,
            tokens: query.size(2),
            trains: session.grad_enabled()
                && [&query, &key, &value].iter().any(|input| input.requires_grad()),
        };
        let choose = || Kernel::choose(&session.hardware, &session.profile, problem);
        let kernel = attention.kernel.unwrap_or_else(choose);
        let out = session.without_autocast(|| match kernel {
            Kernel::Flash => flash(&query, &key, &value, attention.dropout),
            Kernel::Efficient => efficient(&query, &key, &value, attention),
            Kernel::Cudnn => cudnn(&query, &key, &value, attention.mask),
            Kernel::Math => math(&query, &key, &value, attention),
        });
        crate::release!(query, key, value);
        out
    }

    /// This tensor with its last dimension padded to `size`; the gradient is cut back by a copy.
    fn pad_last(&self, size: u64) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = Self::empty(self.session(), "pad", self.shape_with_last(size), self.dtype());
        let from = self.size(-1);
        op.finish(out, move |call| {
            let grad = call.grad();
            let shape = grad.shape_with_last(from);
            vec![Some(Self::empty(grad.session(), "pad_backward", shape, grad.dtype()))]
        })
    }
}

/// FlashAttention splits the keys where the queries alone do not fill the card (flash-attention's
/// num_splits_heuristic: two blocks a multiprocessor, the fewest splits within 85 % of the best).
fn flash_splits(hardware: &Hardware, e: Extents) -> u64 {
    let slots = hardware.multiprocessors * 2;
    let blocks = e.b * e.h * e.s.div_ceil(64);
    if blocks as f64 >= 0.8 * slots as f64 {
        return 1;
    }
    let block = if e.d <= 64 {
        256
    } else if e.d <= 128 {
        128
    } else {
        64
    };
    let key_blocks = e.s.div_ceil(block);
    let eligible =
        |splits: u64| splits == 1 || key_blocks.div_ceil(splits) != key_blocks.div_ceil(splits - 1);
    let efficiency = |splits: u64| {
        let waves = (blocks * splits) as f32 / slots as f32;
        waves / waves.ceil()
    };
    let most = key_blocks.min(slots).min(128);
    let candidates = || (1..=most).filter(|splits| eligible(*splits));
    let best = candidates().map(efficiency).fold(0.0_f32, f32::max);
    candidates().find(|splits| f64::from(efficiency(*splits)) >= 0.85 * f64::from(best)).unwrap_or(1)
}

/// The head size that FlashAttention accumulates in.
const fn flash_head(head: u64) -> u64 {
    if head <= 128 { up(head, 32) } else { up(head, 64) }
}

fn flash(query: &Tensor, key: &Tensor, value: &Tensor, dropout: f64) -> Tensor {
    let head = query.size(-1);
    if !head.is_multiple_of(8) {
        let size = up(head, 8);
        let query = query.pad_last(size);
        let key = key.pad_last(size);
        let value = value.pad_last(size);
        let out = flash(&query, &key, &value, dropout);
        return out.narrow(-1, 0, head);
    }
    let session = query.session();
    let e = Extents::of(query, key);
    let op = Op::new(session, &[query, key, value]);
    op.save(key);
    op.save(query);
    op.save(value);
    let (out, lse, seeds) = session.results_of("_scaled_dot_product_flash_attention", || {
        let out = query.empty_like("sdpa", query.dtype());
        let lse = Tensor::empty(session, "sdpa.logsumexp", [e.b, e.h, e.s], Dtype::Fp32);
        let splits = if dropout == 0.0 { flash_splits(&session.hardware, e) } else { 1 };
        let accumulators = (splits > 1).then(|| {
            let lse = session.scratch(splits * e.b * e.h * e.s * 4, "sdpa.split_logsumexp");
            let out = session.scratch(splits * e.b * e.h * e.s * flash_head(e.d) * 4, "sdpa.split_out");
            (lse, out)
        });
        let seeds = session.profile.flash_attention_seeds.then(|| {
            let state = || Tensor::empty(session, "sdpa.rng_state", [2], Dtype::Int64);
            let mut seed = state();
            let unused = Tensor::empty(session, "sdpa.rng_unused", [], Dtype::Int64);
            if dropout > 0.0 {
                seed = state();
            }
            (seed, unused)
        });
        if let Some((lse, out)) = accumulators {
            crate::release!(lse, out);
        }
        session.add_flops(e.flops());
        (out, lse, seeds)
    });
    op.save_result(&lse);
    op.save_result(&out);
    if let Some((seed, unused)) = &seeds {
        op.save_result(seed);
        op.save_result(unused);
    }
    let out = op.finish(out, move |call| {
        let session = call.grad().session();
        // The kernel takes the gradient and the result in (b, s, h, d) order; another layout is copied.
        let grad = call.grad().transpose(1, 2).contiguous();
        let out = call.saved(4).transpose(1, 2).contiguous();
        let (dq, dk, dv) = gradients_like_inputs(call, 0);
        let rows = e.b * e.h * up(e.s, 128);
        let delta = session.scratch(rows * 4, "sdpa_backward.delta");
        let dq_accumulator = session.scratch(rows * flash_head(e.d) * 4, "sdpa_backward.dq_accumulator");
        let expanded = expanded_gradients(call, e);
        session.add_flops(e.flops() / 2 * 5);
        crate::release!(expanded, dq_accumulator, delta, out, grad);
        vec![Some(dq), Some(dk), Some(dv)]
    });
    crate::release!(lse, seeds);
    out
}

/// Gradients laid out like query, key and value, which are saved from `first` on (key, query, value).
fn gradients_like_inputs(call: &Call<'_>, first: usize) -> (Tensor, Tensor, Tensor) {
    let like = |what, index: usize| {
        let input = call.saved(first + index);
        input.empty_like(what, input.dtype())
    };
    let dq = like("sdpa_backward.query", 1);
    let dk = like("sdpa_backward.key", 0);
    let dv = like("sdpa_backward.value", 2);
    (dq, dk, dv)
}

/// Buffers for the gradients of query, key and value, whether all are wanted or not.
fn input_gradients(call: &Call<'_>, e: Extents) -> (Tensor, Tensor, Tensor) {
    let session = call.grad().session();
    let dtype = call.grad().dtype();
    let dq = e.strided(session, "sdpa_backward.query", e.h, dtype);
    let dk = e.strided(session, "sdpa_backward.key", e.hk, dtype);
    let dv = e.strided(session, "sdpa_backward.value", e.hk, dtype);
    (dq, dk, dv)
}

/// Gradients of keys and values a query head, before they are summed to fewer key-value heads; the
/// second is let go first.
fn expanded_gradients(call: &Call<'_>, e: Extents) -> Option<(Tensor, Tensor)> {
    let session = call.grad().session();
    let dtype = call.grad().dtype();
    (e.hk < e.h).then(|| {
        let dk = e.strided(session, "sdpa_backward.expanded", e.h, dtype);
        let dv = e.strided(session, "sdpa_backward.expanded", e.h, dtype);
        (dv, dk)
    })
}

fn efficient(query: &Tensor, key: &Tensor, value: &Tensor, attention: Attention<'_>) -> Tensor {
    let session = query.session();
    let e = Extents::of(query, key);
    let bias = attention.mask.map(|mask| efficient_bias(mask, query.dtype()));
    let op = Op::new(session, &[query, key, value]);
    if let Some(bias) = &bias {
        op.save(bias);
    }
    op.save(key);
    op.save(query);
    op.save(value);
    let dropped = attention.dropout > 0.0;
    let (out, lse, seeds) = session.results_of("_scaled_dot_product_efficient_attention", || {
        let seeds = (!dropped && session.profile.efficient_attention_seeds).then(|| {
            let seed = Tensor::empty(session, "sdpa.rng_seed", [], Dtype::Int64);
            (seed, Tensor::empty(session, "sdpa.rng_offset", [], Dtype::Int64))
        });
        let out = e.strided(session, "sdpa", e.h, query.dtype());
        let lse = logsumexp(&op, [e.b, e.h, up(e.s, 32)]);
        if query.is_half() && e.d > 128 {
            drop(session.scratch(out.numel() * 4, "sdpa.accumulator"));
        }
        session.add_flops(e.flops());
        (out, lse, seeds)
    });
    op.save_result(&lse);
    op.save_result(&out);
    if let Some((seed, offset)) = &seeds {
        op.save_result(offset);
        op.save_result(seed);
    }
    let out = op.finish(out, move |call| {
        let grad = call.grad();
        let session = grad.session();
        let (dq, dk, dv) = input_gradients(call, e);
        let expanded = expanded_gradients(call, e);
        let rows = Dims::from([e.b, e.h, e.s]);
        let delta = if grad.is_half() {
            Tensor::empty(session, "sdpa_backward.delta", rows, Dtype::Fp32)
        } else {
            let product = e.strided(session, "sdpa_backward.product", e.h, Dtype::Fp32);
            let sum = Tensor::empty(session, "sdpa_backward.delta", [e.b, e.s, e.h], Dtype::Fp32);
            let delta = sum.transpose(1, 2).contiguous();
            crate::release!(sum, product);
            delta
        };
        let workspace = efficient_workspace(&session.hardware, e, grad.is_half(), dropped);
        let workspace = session.scratch(workspace, "sdpa_backward.workspace");
        session.add_flops(e.flops() / 2 * 5);
        crate::release!(delta, workspace, expanded);
        vec![Some(dq), Some(dk), Some(dv)]
    });
    crate::release!(lse, seeds, bias);
    out
}

/// What backward needs to know of the softmax; the kernels that leave it out make an empty tensor where no
/// gradient is wanted.
fn logsumexp(op: &Op, shape: [u64; 3]) -> Tensor {
    let shape = if op.is_recorded() { shape } else { [0; 3] };
    Tensor::empty(op.session(), "sdpa.logsumexp", shape, Dtype::Fp32)
}

/// The workspace of memory-efficient attention's backward, in bytes: gradients of the queries in fp32 by
/// blocks of I rows and J columns, and gradients of keys and values where they do not fit in registers.
/// Which kernel runs is the choice of PyTorch's table of kernels by type, head size and shared memory.
fn efficient_workspace(hardware: &Hardware, e: Extents, half: bool, dropout: bool) -> u64 {
    let large = hardware.large_shared_memory();
    let old = hardware.compute_capability.0 < 8;
    let narrow_kernel = matches!(hardware.compute_capability, (8, 6 | 9)) && e.d <= 96 && !dropout;
    let (rows, columns, in_registers) = match (half, e.d) {
        (true, ..=64) => (64, 64, true),
        (true, ..=128) if large => (128, 128, true),
        (true, ..=128) if old || narrow_kernel => (128, 64, true),
        (true, ..=128) => (64, 64, false),
        (true, _) => (128, 64, false),
        (false, 65..) if large => (128, 64, true),
        (false, _) => (64, 64, true),
    };
    let queries = e.s.div_ceil(rows) * e.d.div_ceil(columns) * (16 + rows * columns * 4);
    let keys_and_values =
        if in_registers { 0 } else { key_splits(e, columns) * 2 * columns * up(e.d, rows) * 4 };
    e.b * e.h * (queries + keys_and_values)
}

/// Into how many parts memory-efficient attention's backward splits the keys, where each part wants space of its own:
/// blocks of `columns` keys, but no more than about 200 parts in all.
fn key_splits(e: Extents, columns: u64) -> u64 {
    let heads = e.b * e.h;
    let blocks = if heads >= 256 && e.s <= 2 * columns { 1 } else { e.s.div_ceil(columns) };
    blocks.min(200 / heads).max(1)
}

/// A boolean mask as an additive bias in the dtype of the queries; rows that are no multiple of 8
/// elements are padded by a copy.
fn efficient_bias(mask: &Tensor, dtype: Dtype) -> Tensor {
    let bias = boolean_bias(mask, dtype);
    let length = bias.size(-1);
    if length.is_multiple_of(8) {
        return bias;
    }
    Tensor::empty(bias.session(), "sdpa.bias", bias.shape_with_last(up(length, 8)), dtype)
}

/// `where(mask, 0, -inf)`.
fn boolean_bias(mask: &Tensor, dtype: Dtype) -> Tensor {
    let zero = mask.scalar("sdpa.zero", dtype);
    let minus_infinity = mask.scalar("sdpa.minus_infinity", dtype);
    let bias = pointwise("sdpa.bias", &[mask], dtype);
    crate::release!(minus_infinity, zero);
    bias
}

fn cudnn(query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
    let session = query.session();
    let e = Extents::of(query, key);
    let bias = mask.map(|mask| boolean_bias(mask, query.dtype()));
    let op = Op::new(session, &[query, key, value]);
    if let Some(bias) = &bias {
        op.save(bias);
    }
    let first = usize::from(bias.is_some());
    op.save(key);
    op.save(query);
    op.save(value);
    let (out, lse, (seed, offset)) = session.results_of("_scaled_dot_product_cudnn_attention", || {
        let seed = Tensor::empty(session, "sdpa.rng_seed", [], Dtype::Int64);
        let offset = Tensor::empty(session, "sdpa.rng_offset", [], Dtype::Int64);
        let out = query.empty_like("sdpa", query.dtype());
        let lse = logsumexp(&op, [e.b, e.h, e.s]);
        session.add_flops(e.flops());
        (out, lse, (seed, offset))
    });
    op.save_result(&lse);
    op.save_result(&out);
    op.save_result(&offset);
    op.save_result(&seed);
    let out = op.finish(out, move |call| {
        let session = call.grad().session();
        let (dq, dk, dv) = gradients_like_inputs(call, first);
        drop(session.scratch(e.b * e.h * e.s * (e.d + 1) * 4, "sdpa_backward.cudnn_workspace"));
        session.add_flops(e.flops() / 2 * 5);
        vec![Some(dq), Some(dk), Some(dv)]
    });
    crate::release!(lse, seed, offset, bias);
    out
}

/// Keys or values repeated for each query head, as `repeat_interleave` copies them.
fn repeat_heads(tensor: &Tensor, heads: u64) -> Tensor {
    let [b, hk, s, d] = [tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)];
    if hk == heads {
        return tensor.clone();
    }
    let wide = tensor.unsqueeze(2).expand([b, hk, heads / hk, s, d]).copy_contiguous();
    wide.view([b, heads, s, d])
}

fn math(query: &Tensor, key: &Tensor, value: &Tensor, attention: Attention<'_>) -> Tensor {
    let session = query.session();
    let origin = query.dtype();
    let compute = if query.is_half() { Dtype::Fp32 } else { origin };
    // A given mask is made additive before anything else, in the dtype of the queries.
    let given = attention.mask.map(|mask| boolean_bias(mask, origin));
    let query = query.to(compute);
    let key = key.to(compute);
    let value = value.to(compute);
    let [heads, length] = [query.size(1), query.size(2)];
    let scaled = query.mul_scalar();
    let causal = (given.is_none() && length > 1).then(|| {
        let ones = Tensor::empty(session, "sdpa.ones", [length, length], Dtype::Bool);
        let causal = Tensor::empty(session, "sdpa.causal", [length, length], Dtype::Bool);
        drop(ones);
        boolean_bias(&causal, compute)
    });
    let keys = repeat_heads(&key, heads);
    let values = repeat_heads(&value, heads);
    let transposed = keys.transpose(2, 3).mul_scalar();
    let mut scores = scaled.matmul(&transposed);
    drop(transposed);
    // What a mode of Python intercepts is not done in place.
    scores = match causal.as_ref().or(given.as_ref()).filter(|_| session.is_intercepted()) {
        Some(bias) => scores.add(bias),
        None => scores.add_mask_in_place(),
    };
    let mut weights = scores.safe_softmax();
    drop(scores);
    weights = weights.dropout(attention.dropout);
    let unused = weights.to(origin);
    let out = weights.matmul(&values);
    let result = out.to(origin);
    crate::release!(out, weights, keys, values, scaled, causal, value, key, query, unused, given);
    result
}

impl Tensor {
    /// `self += mask` for a mask without a gradient: no memory.
    fn add_mask_in_place(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = self.view_as(self.shape(), self.strides(), self.offset());
        op.finish(out, |call| vec![Some(call.grad().clone())])
    }

    /// Softmax over the last dimension that gives zeros for rows that are masked whole.
    fn safe_softmax(&self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self]);
        let out = Self::empty(session, "softmax", self.shape(), self.dtype());
        let masked = Self::empty(session, "softmax.masked", self.shape(), Dtype::Bool);
        let rows = Self::empty(session, "softmax.masked_rows", self.shape_with_last(1), Dtype::Bool);
        let zero = self.scalar("softmax.zero", self.dtype());
        crate::release!(zero, rows, masked);
        op.save_result(&out);
        op.finish(out, |call| {
            let grad = call.grad();
            let gradient = Self::empty(grad.session(), "softmax_backward", grad.shape(), grad.dtype());
            drop(pointwise("softmax_backward.product", &[grad, call.saved(0)], grad.dtype()));
            vec![Some(gradient)]
        })
    }
}
