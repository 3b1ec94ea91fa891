//! Self-attention of a decoder layer.

use engine::{Tensor, release};
use ledger::Dtype;

use super::{DecoderConfig, HeadNorm};
use crate::causal_lm::{AttentionSetup, Cache, repeat_kv};
use crate::linear::Linear;
use crate::nn::Builder;
use crate::norm::RmsNorm;
use crate::parallel::Passage;
use crate::rotary::{Angles, Rotary};

/// Self-attention with rotary positions.
pub(super) struct SelfAttention {
    projections: Projections,
    o_proj: Linear,
    norms: Option<(RmsNorm, RmsNorm)>,
    head_norm: HeadNorm,
    rotary: Rotary,
    head: u64,
    groups: u64,
    attention: AttentionSetup,
    softcap: bool,
    passage: Passage,
}

/// The projections to queries, keys and values.
enum Projections {
    Separate([Linear; 3]),
    Fused { qkv_proj: Linear, sizes: [u64; 3] },
}

impl SelfAttention {
    pub(super) fn build(config: &DecoderConfig, build: &mut Builder, attention: AttentionSetup) -> Self {
        let (hidden, head, bias) = (config.hidden, config.head, config.qkv_bias);
        let (query, key) = (config.heads * head, config.kv_heads * head);
        build.module("self_attn", |build| {
            let (projections, o_proj) = if config.fused {
                let o_proj = build.linear("o_proj", query, hidden, config.o_bias);
                let qkv_proj = build.linear("qkv_proj", hidden, query + 2 * key, bias);
                (Projections::Fused { qkv_proj, sizes: [query, key, key] }, o_proj)
            } else {
                let q_proj = build.linear("q_proj", hidden, query, bias);
                let k_proj = build.linear("k_proj", hidden, key, bias);
                let v_proj = build.linear("v_proj", hidden, key, bias);
                let o_proj = build.linear("o_proj", query, hidden, config.o_bias);
                (Projections::Separate([q_proj, k_proj, v_proj]), o_proj)
            };
            let widths = match config.head_norm {
                HeadNorm::None => None,
                HeadNorm::AllHeads => Some((query, key)),
                HeadNorm::EachHead | HeadNorm::EachHeadTransposed => Some((head, head)),
            };
            let norms = widths.map(|(query, key)| {
                (build.rms_norm("q_norm", query, config.norm), build.rms_norm("k_norm", key, config.norm))
            });
            Self {
                projections,
                o_proj,
                norms,
                head_norm: config.head_norm,
                rotary: config.rotary,
                head,
                groups: config.heads / config.kv_heads,
                attention,
                softcap: config.attention_softcap,
                passage: build.passage(),
            }
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
            self.passage.enter();
            let [b, s] = [hidden.size(0), hidden.size(1)];
            let (joined, [mut query, mut key, mut value]) = self.project(hidden);
            (query, key) = self.rotary.apply(&query, &key, angles);
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
            release!(joined, query, key, value);
            (self.passage.leave(out), weights)
        })
    }

    /// Queries, keys and values (b, heads, s, d), normed, and what they are parts of.
    fn project(&self, hidden: &Tensor) -> (Option<Tensor>, [Tensor; 3]) {
        let transposed = |x: &Tensor| self.by_head(x).transpose(1, 2);
        match &self.projections {
            Projections::Fused { qkv_proj, sizes } => {
                let joined = qkv_proj.forward(hidden);
                let mut start = 0;
                let parts = sizes.map(|size| {
                    start += size;
                    joined.narrow(-1, start - size, size)
                });
                (Some(joined), parts.map(|part| transposed(&part)))
            }
            Projections::Separate(projections) => (None, self.project_each(projections, hidden)),
        }
    }

    fn project_each(&self, [q_proj, k_proj, v_proj]: &[Linear; 3], hidden: &Tensor) -> [Tensor; 3] {
        let (query_norm, key_norm) = (self.norms.as_ref().map(|n| &n.0), self.norms.as_ref().map(|n| &n.1));
        let transposed = |x: &Tensor| self.by_head(x).transpose(1, 2);
        match self.head_norm {
            HeadNorm::EachHead => {
                let one = |projection: &Linear, norm| {
                    let heads = self.by_head(&projection.forward(hidden));
                    normed(norm, heads).transpose(1, 2)
                };
                [one(q_proj, query_norm), one(k_proj, key_norm), transposed(&v_proj.forward(hidden))]
            }
            HeadNorm::AllHeads => {
                let query = normed(query_norm, q_proj.forward(hidden));
                let key = normed(key_norm, k_proj.forward(hidden));
                let value = v_proj.forward(hidden);
                [query, key, value].map(|x| transposed(&x))
            }
            HeadNorm::None | HeadNorm::EachHeadTransposed => {
                let parts = [q_proj, k_proj, v_proj];
                let [query, key, value] = parts.map(|projection| transposed(&projection.forward(hidden)));
                [normed(query_norm, query), normed(key_norm, key), value]
            }
        }
    }

    /// The last dimension as heads.
    fn by_head(&self, x: &Tensor) -> Tensor {
        x.view([x.size(0), x.size(1), x.size(2) / self.head, self.head])
    }

    fn eager(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> (Tensor, Tensor) {
        let keys = repeat_kv(key, self.groups);
        let values = repeat_kv(value, self.groups);
        let scores = query.matmul(&keys.transpose(2, 3));
        let mut weights = scores.mul_scalar();
        release!(scores);
        if self.softcap {
            weights = weights.div_scalar();
            weights = weights.tanh();
            weights = weights.mul_scalar();
        }
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

fn normed(norm: Option<&RmsNorm>, x: Tensor) -> Tensor {
    norm.map_or_else(|| x.clone(), |norm| norm.forward(&x))
}
