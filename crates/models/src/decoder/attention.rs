//! Self-attention of a decoder layer.

use engine::{Tensor, release};
use ledger::Dtype;

use super::{DecoderConfig, HeadNorm};
use crate::causal_lm::{AttentionSetup, Cache, repeat_kv};
use crate::nn::{Builder, Linear, RmsNorm};
use crate::rotary::Angles;

/// Self-attention with rotary positions.
pub(super) struct SelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    head: u64,
    groups: u64,
    attention: AttentionSetup,
}

impl SelfAttention {
    pub(super) fn build(config: &DecoderConfig, build: &mut Builder, attention: AttentionSetup) -> Self {
        let (hidden, head, bias) = (config.hidden, config.head, config.qkv_bias);
        let norm = |build: &mut Builder, name| match config.head_norm {
            HeadNorm::None => None,
            HeadNorm::EachHead => Some(build.rms_norm(name, head)),
        };
        build.module("self_attn", |build| Self {
            q_proj: build.linear("q_proj", hidden, config.heads * head, bias),
            k_proj: build.linear("k_proj", hidden, config.kv_heads * head, bias),
            v_proj: build.linear("v_proj", hidden, config.kv_heads * head, bias),
            o_proj: build.linear("o_proj", config.heads * head, hidden, config.o_bias),
            q_norm: norm(build, "q_norm"),
            k_norm: norm(build, "k_norm"),
            head,
            groups: config.heads / config.kv_heads,
            attention,
        })
    }

    /// The attention output, and the weights that eager attention returns beside it.
    pub(super) fn forward(
        &self,
        hidden: &Tensor,
        angles: &Angles,
        mask: Option<&Tensor>,
        cache: Option<(&Cache, Option<u64>)>,
    ) -> (Tensor, Option<Tensor>) {
        hidden.session().scoped("self_attn", || {
            let [b, s] = [hidden.size(0), hidden.size(1)];
            let heads = |x: Tensor, norm: Option<&RmsNorm>| {
                let count = x.size(-1) / self.head;
                let heads = x.view([b, s, count, self.head]);
                drop(x);
                norm.map_or_else(|| heads.clone(), |norm| norm.forward(&heads)).transpose(1, 2)
            };
            let mut query = heads(self.q_proj.forward(hidden), self.q_norm.as_ref());
            let mut key = heads(self.k_proj.forward(hidden), self.k_norm.as_ref());
            let mut value = heads(self.v_proj.forward(hidden), None);
            (query, key) = angles.apply(&query, &key);
            if let Some((cache, window)) = cache {
                (key, value) = cache.update(&key, &value, window);
            }
            let (mut out, weights) = if self.attention.eager {
                let (out, weights) = self.eager(&query, &key, &value, mask);
                (out, Some(weights))
            } else {
                (self.attention.sdpa(&query, &key, &value, mask), None)
            };
            out = out.reshape([b, s, out.size(2) * out.size(3)]).contiguous();
            out = self.o_proj.forward(&out);
            release!(query, key, value);
            (out, weights)
        })
    }

    fn eager(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> (Tensor, Tensor) {
        let keys = repeat_kv(key, self.groups);
        let values = repeat_kv(value, self.groups);
        let scores = query.matmul(&keys.transpose(2, 3));
        let mut weights = scores.mul_scalar();
        release!(scores);
        if let Some(mask) = mask {
            weights = weights.add(mask);
        }
        let probabilities = weights.softmax(Some(Dtype::Fp32));
        let cast = probabilities.to(query.dtype());
        release!(probabilities);
        weights = cast;
        weights = weights.dropout(self.attention.dropout);
        let mut out = weights.matmul(&values);
        out = out.transpose(1, 2).contiguous();
        release!(keys, values);
        (out, weights)
    }
}
