//! Llama, as `LlamaForCausalLM` of transformers runs it.

use std::rc::Rc;

use engine::{Session, Tensor, checkpoint, release};
use ledger::Dtype;

use crate::causal_lm::{AttentionSetup, Cache, Script, causal_mask, position_ids, rotary_embedding};
use crate::network::{Built, Network, Pass};
use crate::nn::{Activation, Builder, Embedding, Linear, RmsNorm, rotate};
use crate::setup::{Checkpoint, Setup};

/// The extents of a Llama.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LlamaConfig {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) intermediate: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) kv_heads: u64,
    pub(crate) head: u64,
    pub(crate) max_positions: u64,
    pub(crate) attention_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) attention_dropout: f64,
    pub(crate) tied: bool,
    pub(crate) use_cache: bool,
    pub(crate) activation: Activation,
}

struct LlamaMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

impl LlamaMlp {
    fn forward(&self, x: &Tensor) -> Tensor {
        x.session().scoped("mlp", || {
            let gate = self.gate_proj.forward(x);
            let active = x.session().scoped("act_fn", || self.activation.forward(&gate));
            release!(gate);
            let up = self.up_proj.forward(x);
            let product = active.mul(&up);
            release!(active, up);
            self.down_proj.forward(&product)
        })
    }
}

/// `repeat_kv`: key-value heads repeated for each query head.
fn repeat_kv(x: &Tensor, groups: u64) -> Tensor {
    if groups == 1 {
        return x.clone();
    }
    let [b, heads, s, d] = [x.size(0), x.size(1), x.size(2), x.size(3)];
    let wide = x.unsqueeze(2).expand([b, heads, groups, s, d]);
    wide.reshape([b, heads * groups, s, d])
}

struct LlamaAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    head: u64,
    groups: u64,
    attention: AttentionSetup,
}

impl LlamaAttention {
    /// The attention output, and the weights that eager attention returns beside it.
    fn forward(
        &self,
        hidden: &Tensor,
        (cos, sin): &(Tensor, Tensor),
        mask: Option<&Tensor>,
        cache: Option<&Cache>,
    ) -> (Tensor, Option<Tensor>) {
        let session = hidden.session();
        session.scoped("self_attn", || {
            let [b, s] = [hidden.size(0), hidden.size(1)];
            let heads = |x: Tensor| {
                let count = x.size(-1) / self.head;
                x.view([b, s, count, self.head]).transpose(1, 2)
            };
            let mut query = heads(self.q_proj.forward(hidden));
            let mut key = heads(self.k_proj.forward(hidden));
            let mut value = heads(self.v_proj.forward(hidden));
            let rotated = session.scoped("rotary", || {
                let cos = cos.unsqueeze(1);
                let sin = sin.unsqueeze(1);
                (rotate(&query, &cos, &sin), rotate(&key, &cos, &sin))
            });
            (query, key) = rotated;
            if let Some(cache) = cache {
                let (keys, values) = cache.update(&key, &value);
                key = keys;
                value = values;
            }
            let (mut out, weights) = if self.attention.eager {
                let (out, weights) = self.eager(&query, &key, &value, mask);
                (out, Some(weights))
            } else {
                (self.attention.sdpa(&query, &key, &value), None)
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

struct LlamaDecoderLayer {
    self_attn: LlamaAttention,
    mlp: LlamaMlp,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl LlamaDecoderLayer {
    fn forward(
        &self,
        hidden: &Tensor,
        positions: &(Tensor, Tensor),
        mask: Option<&Tensor>,
        cache: Option<&Cache>,
    ) -> Tensor {
        let mut residual = hidden.clone();
        let mut hidden = self.input_layernorm.forward(hidden);
        let (attended, weights) = self.self_attn.forward(&hidden, positions, mask, cache);
        hidden = attended;
        hidden = residual.add(&hidden);
        residual = hidden.clone();
        hidden = self.post_attention_layernorm.forward(&hidden);
        hidden = self.mlp.forward(&hidden);
        hidden = residual.add(&hidden);
        release!(residual, weights);
        hidden
    }
}

struct Llama {
    config: LlamaConfig,
    script: Script,
    checkpoint: bool,
    eager: bool,
    embed_tokens: Embedding,
    layers: Vec<Rc<LlamaDecoderLayer>>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl LlamaConfig {
    pub(crate) fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built {
        let mut build = Builder::new(session, dtype);
        let attention = setup.attention_setup(self.attention_dropout);
        let (embed_tokens, layers, norm) = build.module("model", |build| {
            let embed_tokens = build.embedding("embed_tokens", self.vocab, self.hidden);
            let layers = (0..self.layers)
                .map(|layer| {
                    build.module(&format!("layers.{layer}"), |build| Rc::new(self.layer(build, attention)))
                })
                .collect();
            let norm = build.rms_norm("norm", self.hidden);
            build.module("rotary_emb", |build| {
                build.buffer("inv_freq", self.head / 2, Dtype::Fp32);
                build.buffer("original_inv_freq", self.head / 2, Dtype::Fp32);
            });
            (embed_tokens, layers, norm)
        });
        let lm_head = if self.tied {
            Linear::tied("lm_head", &embed_tokens)
        } else {
            build.linear("lm_head", self.hidden, self.vocab, false)
        };
        let (parameters, buffers) = build.finish();
        let checkpoint = setup.checkpoint == Checkpoint::Full;
        let network = Llama {
            config: self.clone(),
            script: Script::new(setup),
            checkpoint,
            eager: attention.eager,
            embed_tokens,
            layers,
            norm,
            lm_head,
        };
        Built { network: Box::new(network), parameters, buffers }
    }

    fn layer(&self, build: &mut Builder, attention: AttentionSetup) -> LlamaDecoderLayer {
        let (hidden, head) = (self.hidden, self.head);
        let bias = self.attention_bias;
        let self_attn = build.module("self_attn", |build| LlamaAttention {
            q_proj: build.linear("q_proj", hidden, self.heads * head, bias),
            k_proj: build.linear("k_proj", hidden, self.kv_heads * head, bias),
            v_proj: build.linear("v_proj", hidden, self.kv_heads * head, bias),
            o_proj: build.linear("o_proj", self.heads * head, hidden, bias),
            head,
            groups: self.heads / self.kv_heads,
            attention,
        });
        let mlp = build.module("mlp", |build| LlamaMlp {
            gate_proj: build.linear("gate_proj", hidden, self.intermediate, self.mlp_bias),
            up_proj: build.linear("up_proj", hidden, self.intermediate, self.mlp_bias),
            down_proj: build.linear("down_proj", self.intermediate, hidden, self.mlp_bias),
            activation: self.activation,
        });
        LlamaDecoderLayer {
            self_attn,
            mlp,
            input_layernorm: build.rms_norm("input_layernorm", hidden),
            post_attention_layernorm: build.rms_norm("post_attention_layernorm", hidden),
        }
    }
}

impl Llama {
    /// `LlamaModel.forward`: the last hidden state, and the cache where there is one.
    fn model(&self, input_ids: &Tensor) -> (Tensor, Option<Cache>) {
        let session = input_ids.session();
        session.scoped("model", || {
            let [batch, length] = [input_ids.size(0), input_ids.size(1)];
            let embeddings = self.embed_tokens.forward(input_ids);
            let cache = (self.config.use_cache && !self.checkpoint).then(Cache::default);
            let position_ids = position_ids(session, length);
            let dtype = embeddings.dtype();
            let mask = causal_mask(session, batch, length, dtype, self.eager, cache.is_some());
            let mut hidden = embeddings.clone();
            let positions = rotary_embedding(session, length, self.config.head, dtype);
            for (index, layer) in self.layers.iter().enumerate() {
                hidden = session.scoped(&format!("layers.{index}"), || {
                    if !self.checkpoint {
                        return layer.forward(&hidden, &positions, mask.as_ref(), cache.as_ref());
                    }
                    let layer = Rc::clone(layer);
                    // The closure keeps the keyword arguments; they die mask first, sines before cosines.
                    let (mask, (cos, sin)) = (mask.clone(), positions.clone());
                    let position_ids = position_ids.clone();
                    let kept = Kept { mask, sin, cos, position_ids };
                    checkpoint(vec![hidden.clone()], move |args| {
                        let positions = (kept.cos.clone(), kept.sin.clone());
                        let _ = &kept.position_ids;
                        layer.forward(&args[0], &positions, kept.mask.as_ref(), None)
                    })
                });
            }
            hidden = self.norm.forward(&hidden);
            release!(position_ids, embeddings, mask);
            let (cos, sin) = positions;
            release!(sin, cos);
            (hidden, cache)
        })
    }
}

/// Keyword arguments of a checkpointed layer, in the order in which they die.
struct Kept {
    mask: Option<Tensor>,
    sin: Tensor,
    cos: Tensor,
    position_ids: Tensor,
}

impl Network for Llama {
    fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        self.script.input(session, seq)
    }

    fn forward(&self, input_ids: &Tensor, pass: &mut Pass) {
        self.script.forward(input_ids, pass, &self.lm_head, || self.model(input_ids));
    }
}
