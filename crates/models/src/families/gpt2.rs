//! GPT-2, as `GPT2LMHeadModel` of transformers runs it.

use std::rc::Rc;

use engine::{Problem, Session, Tensor, release};
use ledger::Dtype;

use crate::architecture::{Architecture, Extents, WORK_OF_DECODER_LAYER};
use crate::causal_lm::{AttentionSetup, Cache, Script, position_ids};
use crate::config::{Fields, divides};
use crate::checkpoint::Checkpointing;
use crate::mask::Masking;
use crate::network::{Built, Network, Pass};
use crate::linear::{Head, Linear};
use crate::parallel::Passage;
use crate::nn::{Activation, Builder, Embedding, LayerNorm};
use crate::run::PlanError;
use crate::setup::Setup;

/// The extents of a GPT-2.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gpt2Config {
    pub(crate) vocab: u64,
    pub(crate) hidden: u64,
    pub(crate) inner: u64,
    pub(crate) layers: u64,
    pub(crate) heads: u64,
    pub(crate) positions: u64,
    pub(crate) resid_dropout: f64,
    pub(crate) embd_dropout: f64,
    pub(crate) attn_dropout: f64,
    pub(crate) tied: bool,
    pub(crate) use_cache: bool,
    pub(crate) activation: Activation,
}

pub(super) fn read(fields: &Fields<'_>) -> Result<Gpt2Config, PlanError> {
    let hidden = fields.size(&["n_embd", "hidden_size"], 768)?;
    let heads = fields.size(&["n_head", "num_attention_heads"], 12)?;
    divides("n_head", heads, "n_embd", hidden)?;
    for unsupported in ["add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"] {
        if unsupported != "scale_attn_by_inverse_layer_idx" && fields.flag(unsupported, false)? {
            return Err(PlanError(format!("a gpt2 config with `{unsupported}` is not supported")));
        }
    }
    Ok(Gpt2Config {
        vocab: fields.size(&["vocab_size"], 50257)?,
        hidden,
        inner: fields.size(&["n_inner"], 4 * hidden)?,
        layers: fields.size(&["n_layer", "num_hidden_layers"], 12)?,
        heads,
        positions: fields.size(&["n_positions", "max_position_embeddings"], 1024)?,
        resid_dropout: fields.probability("resid_pdrop", 0.1)?,
        embd_dropout: fields.probability("embd_pdrop", 0.1)?,
        attn_dropout: fields.probability("attn_pdrop", 0.1)?,
        tied: fields.flag("tie_word_embeddings", true)?,
        use_cache: fields.flag("use_cache", true)?,
        activation: fields.activation("activation_function", "gelu_new")?,
    })
}

struct Attention {
    c_attn: Linear,
    c_proj: Linear,
    hidden: u64,
    heads: u64,
    attention: AttentionSetup,
    resid_dropout: f64,
    passage: Passage,
    dropout: Passage,
}

impl Attention {
    fn forward(
        &self,
        hidden: &Tensor,
        mask: Option<&Tensor>,
        cache: Option<&Cache>,
    ) -> (Tensor, Option<Tensor>) {
        hidden.session().scoped("attn", || {
            self.passage.enter();
            let [b, s] = [hidden.size(0), hidden.size(1)];
            let parts = self.c_attn.forward(hidden).split(2, self.hidden);
            let heads = |x: &Tensor| x.view([b, s, self.heads, self.hidden / self.heads]).transpose(1, 2);
            let mut key = heads(&parts[1]);
            let mut value = heads(&parts[2]);
            let query = heads(&parts[0]);
            release!(parts);
            if let Some(cache) = cache {
                let (keys, values) = cache.update(&key, &value, None);
                key = keys;
                value = values;
            }
            let (mut out, weights) = if self.attention.eager {
                let (out, weights) = self.eager(&query, &key, &value, mask);
                (out, Some(weights))
            } else {
                (self.attention.sdpa(&query, &key, &value, mask), None)
            };
            out = out.reshape([b, s, self.hidden]).contiguous();
            out = self.c_proj.forward(&out);
            out = self.dropout.run(|| out.dropout(self.resid_dropout));
            release!(query, key, value);
            (self.passage.leave(out), weights)
        })
    }

    fn eager(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> (Tensor, Tensor) {
        let scores = query.matmul(&key.transpose(-1, -2));
        let mut weights = scores.mul_scalar();
        release!(scores);
        if let Some(mask) = mask {
            weights = weights.add(mask);
        }
        weights = weights.softmax(None);
        weights = weights.to(value.dtype());
        weights = weights.dropout(self.attention.dropout);
        let out = weights.matmul(value);
        (out.transpose(1, 2), weights)
    }
}

struct Mlp {
    c_fc: Linear,
    c_proj: Linear,
    activation: Activation,
    dropout: f64,
    passage: Passage,
    act: Passage,
    drop: Passage,
}

impl Mlp {
    fn forward(&self, hidden: &Tensor) -> Tensor {
        let session = hidden.session();
        session.scoped("mlp", || {
            self.passage.enter();
            let mut hidden = self.c_fc.forward(hidden);
            hidden = session.scoped("act", || self.act.run(|| self.activation.forward(&hidden)));
            hidden = self.c_proj.forward(&hidden);
            hidden = self.drop.run(|| hidden.dropout(self.dropout));
            self.passage.leave(hidden)
        })
    }
}

struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
}

impl Block {
    fn forward(&self, hidden: &Tensor, mask: Option<&Tensor>, cache: Option<&Cache>) -> Tensor {
        let mut residual = hidden.clone();
        let mut hidden = self.ln_1.forward(hidden);
        let (attended, weights) = self.attn.forward(&hidden, mask, cache);
        hidden = attended.add(&residual);
        residual = hidden.clone();
        hidden = self.ln_2.forward(&hidden);
        let forwarded = self.mlp.forward(&hidden);
        hidden = residual.add(&forwarded);
        release!(residual, attended, weights, forwarded);
        hidden
    }
}

struct Gpt2 {
    config: Gpt2Config,
    script: Script,
    checkpointing: Checkpointing,
    eager: bool,
    wte: Embedding,
    wpe: Embedding,
    blocks: Vec<crate::nn::Block<Block>>,
    ln_f: LayerNorm,
    lm_head: Head,
    passage: Passage,
    drop: Passage,
}

impl Architecture for Gpt2Config {
    fn extents(&self) -> Extents {
        Extents {
            layers: self.layers,
            work: WORK_OF_DECODER_LAYER,
            widest: self.vocab.max(self.inner).max(3 * self.hidden),
            largest_weight: u128::from(self.hidden)
                * u128::from(self.vocab.max(self.positions).max(self.inner).max(3 * self.hidden)),
            head: Some([self.hidden, self.vocab]),
            heads: self.heads,
            positions: Some(self.positions),
            learnt_positions: true,
        }
    }

    fn attention(&self, dtype: Dtype, seq: u64) -> Vec<Problem> {
        let (head, dropout) = (self.hidden / self.heads, self.attn_dropout > 0.0);
        vec![Problem { dtype, head, grouped: false, mask: false, dropout, tokens: seq, trains: true }]
    }

    fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built {
        let mut build = Builder::new(session, setup, dtype);
        let attention = setup.attention_setup(self.attn_dropout);
        let (wte, wpe, blocks, ln_f) = build.module("transformer", |build| {
            let wte = build.input_embedding("wte", self.vocab, self.hidden);
            let wpe = build.embedding("wpe", self.positions, self.hidden);
            let blocks = (0..self.layers)
                .map(|layer| {
                    build.block(&format!("h.{layer}"), |build| self.block(build, attention))
                })
                .collect();
            (wte, wpe, blocks, build.layer_norm("ln_f", self.hidden))
        });
        let lm_head = build.head(self.hidden, self.vocab, self.tied.then_some(&wte), false);
        let network = Gpt2 {
            config: self.clone(),
            script: Script::new(setup, &build),
            checkpointing: Checkpointing::new(setup),
            eager: attention.eager,
            wte,
            wpe,
            blocks,
            ln_f,
            lm_head,
            passage: build.passage(),
            drop: build.passage(),
        };
        build.finish(network)
    }
}

impl Gpt2Config {
    fn block(&self, build: &mut Builder, attention: AttentionSetup) -> Block {
        let hidden = self.hidden;
        Block {
            ln_1: build.layer_norm("ln_1", hidden),
            attn: build.module("attn", |build| Attention {
                c_attn: build.conv1d("c_attn", hidden, 3 * hidden),
                c_proj: build.conv1d("c_proj", hidden, hidden),
                hidden,
                heads: self.heads,
                attention,
                resid_dropout: self.resid_dropout,
                passage: build.passage(),
                dropout: build.passage(),
            }),
            ln_2: build.layer_norm("ln_2", hidden),
            mlp: build.module("mlp", |build| Mlp {
                c_fc: build.conv1d("c_fc", hidden, self.inner),
                c_proj: build.conv1d("c_proj", self.inner, hidden),
                activation: self.activation,
                dropout: self.resid_dropout,
                passage: build.passage(),
                act: build.passage(),
                drop: build.passage(),
            }),
        }
    }
}

impl Gpt2 {
    /// `GPT2Model.forward`: the last hidden state, and the cache where there is one.
    fn model(&self, input_ids: &Tensor) -> (Tensor, Option<Cache>) {
        let session = input_ids.session();
        session.scoped("transformer", || {
            self.passage.enter();
            let [batch, length] = [input_ids.size(0), input_ids.size(1)];
            let input_ids = input_ids.view([batch, length]);
            let cache = (self.config.use_cache && !self.checkpointing.is_on()).then(Cache::default);
            let embeddings = self.wte.forward(&input_ids);
            let position_ids = position_ids(session, length);
            let positions = self.wpe.forward(&position_ids);
            let mut hidden = embeddings.add(&positions);
            let dtype = embeddings.dtype();
            let cached = cache.is_some();
            let mask = Masking { session, batch, length, dtype, eager: self.eager, cached }.causal();
            hidden = session.scoped("drop", || {
                self.drop.run(|| hidden.dropout(self.config.embd_dropout))
            });
            for segment in self.checkpointing.segments(self.blocks.len()) {
                if !segment.recomputed {
                    for index in segment.layers {
                        hidden = session.scoped(&format!("h.{index}"), || {
                            let (mask, cache) = (mask.as_ref(), cache.as_ref());
                            self.blocks[index].run([&hidden], |block, [hidden]| block.forward(hidden, mask, cache))
                        });
                    }
                    continue;
                }
                let call = |index: usize| (format!("h.{index}"), self.blocks[index].clone());
                let calls: Vec<_> = segment.layers.map(call).collect();
                let mut args = vec![hidden.clone()];
                args.extend(mask.clone());
                let position_ids = position_ids.clone();
                hidden = self.checkpointing.run(args, move |args| {
                    let _ = &position_ids;
                    let mut hidden = args[0].clone();
                    for (name, block) in &calls {
                        let session = Rc::clone(hidden.session());
                        hidden = session.scoped(name, || {
                            block.run([&hidden], |block, [hidden]| block.forward(hidden, args.get(1), None))
                        });
                    }
                    hidden
                });
            }
            hidden = self.ln_f.forward(&hidden);
            hidden = hidden.view(hidden.shape());
            hidden = self.passage.leave(hidden);
            release!(position_ids, embeddings, positions, mask);
            (hidden, cache)
        })
    }
}

impl Network for Gpt2 {
    fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        self.script.input(session, seq)
    }

    fn forward(&self, input_ids: &Tensor, pass: &mut Pass) {
        self.script.forward(input_ids, pass, || self.model(input_ids), &self.lm_head, |loss| (loss, None, Vec::new()));
    }
}
