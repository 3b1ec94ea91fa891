//! Rotary position embedding, as transformers computes and applies it.

use std::rc::Rc;

use engine::{Session, Tensor, cat, release};
use ledger::Dtype;

use crate::nn::Builder;

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rotary {
    /// The part of a head that turns, an even number.
    pub(crate) size: u64,
}

/// Cosines and sines (1, s, d).
#[derive(Clone)]
pub(crate) struct Angles {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Rotary {
    /// The buffers of the module.
    pub(crate) fn build(&self, build: &mut Builder) {
        build.module("rotary_emb", |build| {
            build.buffer("inv_freq", self.size / 2, Dtype::Fp32);
            build.buffer("original_inv_freq", self.size / 2, Dtype::Fp32);
        });
    }

    /// Cosines and sines in `dtype`, computed in fp32.
    pub(crate) fn angles(&self, session: &Rc<Session>, length: u64, dtype: Dtype) -> Angles {
        session.scoped("rotary_emb", || {
            let fp32 = |what, size| Tensor::empty(session, what, [1, length, size], Dtype::Fp32);
            let positions = fp32("positions", 1);
            let frequencies = fp32("freqs", self.size / 2);
            release!(positions);
            let embedding = fp32("emb", self.size);
            let of_embedding = |what, scaled| {
                let plain = fp32(what, self.size);
                let result = fp32(scaled, self.size);
                release!(plain);
                result
            };
            let cos = of_embedding("cos", "cos_scaled");
            let sin = of_embedding("sin", "sin_scaled");
            let angles = Angles { cos: cos.to(dtype), sin: sin.to(dtype) };
            release!(frequencies, embedding, cos, sin);
            angles
        })
    }
}

impl Angles {
    /// `apply_rotary_pos_emb`: queries and keys (b, heads, s, d), turned.
    pub(crate) fn apply(&self, query: &Tensor, key: &Tensor) -> (Tensor, Tensor) {
        query.session().scoped("rotary", || {
            let cos = self.cos.unsqueeze(1);
            let sin = self.sin.unsqueeze(1);
            (rotate(query, &cos, &sin), rotate(key, &cos, &sin))
        })
    }
}

/// `rotate_half`: the halves of the last dimension exchanged, the second negated.
fn rotate_half(x: &Tensor) -> Tensor {
    let half = x.size(-1) / 2;
    let x1 = x.narrow(-1, 0, half);
    let x2 = x.narrow(-1, half, half);
    let negative = x2.neg();
    let out = cat(&[&negative, &x1], -1);
    release!(negative, x1, x2);
    out
}

/// Rotary position embedding of one (b, heads, s, d) tensor.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let direct = x.mul(cos);
    let rotated = rotate_half(x);
    let crossed = rotated.mul(sin);
    release!(rotated);
    let out = direct.add(&crossed);
    release!(direct, crossed);
    out
}
