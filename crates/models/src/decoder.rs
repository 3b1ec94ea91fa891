//! The decoder with rotary positions that most families are: what a family and its config say of it, and its passes.

mod attention;
mod config;
mod feed_forward;
mod layer;

use std::rc::Rc;

use engine::{Problem, Session, Tensor, checkpoint, release};
use ledger::Dtype;

use crate::architecture::{Architecture, Extents, WORK_OF_DECODER_LAYER};
use crate::causal_lm::{Cache, Script, position_ids, shares_heads};
use crate::checkpoint::Checkpointing;
use crate::mask::Masking;
use crate::network::{Built, Network, Pass};
use crate::nn::{Builder, Embedding, Linear, RmsNorm};
use crate::rotary::Angles;
use crate::setup::Setup;

pub(crate) use config::{DecoderConfig, Defaults, HeadNorm, Windowed};
use layer::Layer;

impl Architecture for DecoderConfig {
    fn extents(&self) -> Extents {
        Extents {
            layers: self.layers,
            work: WORK_OF_DECODER_LAYER,
            widest: self.vocab.max(self.intermediate).max(self.heads * self.head),
            heads: self.heads,
            positions: Some(self.max_positions),
            learnt_positions: false,
        }
    }

    fn attention(&self, dtype: Dtype, seq: u64) -> Vec<Problem> {
        let problem = |mask: bool| Problem {
            dtype,
            head: self.head,
            grouped: self.kv_heads < self.heads && shares_heads(mask, self.head),
            mask,
            dropout: self.attention_dropout > 0.0,
        };
        let (windowed, full) = self.windowed.among(self.layers);
        let masked = windowed && self.masks.window.is_some_and(|window| seq >= window);
        let mut problems = Vec::new();
        if full || !masked {
            problems.push(problem(false));
        }
        if masked {
            problems.push(problem(true));
        }
        problems
    }

    fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built {
        let mut build = Builder::new(session, setup, dtype);
        let attention = setup.attention_setup(self.attention_dropout);
        let (embed_tokens, layers, norm) = build.module("model", |build| {
            let embed_tokens = build.input_embedding("embed_tokens", self.vocab, self.hidden);
            let layers = (0..self.layers)
                .map(|index| {
                    build.module(&format!("layers.{index}"), |build| {
                        Rc::new(Layer::build(self, build, attention))
                    })
                })
                .collect();
            let norm = build.rms_norm("norm", self.hidden);
            self.rotary.build(build);
            (embed_tokens, layers, norm)
        });
        let lm_head = build.head(self.hidden, self.vocab, self.tied.then_some(&embed_tokens));
        let network = Decoder {
            config: self.clone(),
            script: Script::new(setup),
            checkpointing: Checkpointing::new(setup),
            eager: attention.eager,
            embed_tokens,
            layers,
            norm,
            lm_head,
        };
        build.finish(network)
    }
}

struct Decoder {
    config: DecoderConfig,
    script: Script,
    checkpointing: Checkpointing,
    eager: bool,
    embed_tokens: Embedding,
    layers: Vec<Rc<Layer>>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Decoder {
    /// The model's forward: the last hidden state, and the cache where there is one.
    fn model(&self, input_ids: &Tensor) -> (Tensor, Option<Cache>) {
        let session = input_ids.session();
        session.scoped("model", || {
            let [batch, length] = [input_ids.size(0), input_ids.size(1)];
            let embeddings = self.embed_tokens.forward(input_ids);
            let config = &self.config;
            let cache = (config.use_cache && !self.checkpointing.is_on()).then(Cache::default);
            let position_ids = position_ids(session, length);
            let dtype = embeddings.dtype();
            let cached = cache.is_some();
            let masking = Masking { session, batch, length, dtype, eager: self.eager, cached };
            let causal = config.masks.causal.then(|| masking.causal()).flatten();
            let sliding = config.masks.window.and_then(|window| masking.sliding(window));
            let mut hidden = embeddings.clone();
            let angles = config.rotary.angles(session, length, dtype);
            for segment in self.checkpointing.segments(self.layers.len()) {
                let windowed = |index: usize| config.windowed.at(index as u64);
                let mask = |index: usize| if windowed(index) { &sliding } else { &causal };
                if !segment.recomputed {
                    for index in segment.layers {
                        let window = config.masks.window.filter(|_| windowed(index));
                        let cache = cache.as_ref().map(|cache| (cache, window));
                        hidden = session.scoped(&format!("layers.{index}"), || {
                            self.layers[index].forward(&hidden, &angles, mask(index).as_ref(), cache)
                        });
                    }
                    continue;
                }
                let call = |index| {
                    let kept = Kept::new(mask(index), &angles, &position_ids, config.position_ids_first);
                    (format!("layers.{index}"), Rc::clone(&self.layers[index]), kept)
                };
                let calls: Vec<_> = segment.layers.map(call).collect();
                hidden = checkpoint(self.checkpointing.how(), vec![hidden.clone()], move |args| {
                    let mut hidden = args[0].clone();
                    for (name, layer, kept) in &calls {
                        let (angles, mask) = (kept.angles(), kept.mask.as_ref());
                        let session = Rc::clone(hidden.session());
                        hidden = session.scoped(name, || layer.forward(&hidden, &angles, mask, None));
                    }
                    hidden
                });
            }
            hidden = self.norm.forward(&hidden);
            if config.masks.by_type {
                release!(causal, sliding, embeddings, position_ids);
            } else {
                release!(position_ids, embeddings, causal, sliding);
            }
            let Angles { cos, sin } = angles;
            release!(sin, cos);
            (hidden, cache)
        })
    }
}

/// Keyword arguments of a checkpointed layer, in the order in which they die.
struct Kept {
    mask: Option<Tensor>,
    _position_ids_first: Option<Tensor>,
    sin: Tensor,
    cos: Tensor,
    _position_ids_last: Option<Tensor>,
}

impl Kept {
    fn new(mask: &Option<Tensor>, angles: &Angles, position_ids: &Tensor, position_ids_first: bool) -> Self {
        let Angles { cos, sin } = angles.clone();
        Self {
            mask: mask.clone(),
            _position_ids_first: position_ids_first.then(|| position_ids.clone()),
            sin,
            cos,
            _position_ids_last: (!position_ids_first).then(|| position_ids.clone()),
        }
    }

    fn angles(&self) -> Angles {
        Angles { cos: self.cos.clone(), sin: self.sin.clone() }
    }
}

impl Network for Decoder {
    fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        self.script.input(session, seq)
    }

    fn forward(&self, input_ids: &Tensor, pass: &mut Pass) {
        self.script.forward(input_ids, pass, &self.lm_head, || self.model(input_ids));
    }
}
