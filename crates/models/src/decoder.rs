//! The decoder with rotary positions that most families are: what a family and its config say of it, and its passes.

mod attention;
mod config;
mod experts;
mod feed_forward;
mod layer;

use std::rc::Rc;

use engine::{Problem, Session, Tensor, release};
use ledger::Dtype;

use crate::architecture::{Architecture, Extents, WORK_OF_DECODER_LAYER};
use crate::causal_lm::{Cache, Script, position_ids, shares_heads};
use crate::checkpoint::Checkpointing;
use crate::linear::Head;
use crate::lora::Lora;
use crate::mask::Masking;
use crate::network::{Built, Network, Pass};
use crate::nn::{Block, Builder, Embedding};
use crate::norm::RmsNorm;
use crate::parallel::Passage;
use crate::rotary::{Angles, RotaryEmbedding};
use crate::setup::Setup;

pub(crate) use config::{DecoderConfig, Defaults, HeadNorm, NormPlaces, Windowed};
pub(crate) use experts::{Experts, Router};
use experts::{RouterLogits, balance};
use layer::Layer;

impl Architecture for DecoderConfig {
    fn extents(&self) -> Extents {
        let joined = (self.heads + 2 * self.kv_heads) * self.head;
        let widest = self.vocab.max(2 * self.intermediate).max(joined);
        let largest = u128::from(self.hidden) * u128::from(widest);
        let experts = self.experts.as_ref();
        Extents {
            layers: self.layers,
            work: WORK_OF_DECODER_LAYER,
            widest: widest.max(experts.map_or(0, |experts| experts.widest(self.hidden))),
            largest_weight: largest.max(experts.map_or(0, |experts| experts.largest_weight(self.hidden))),
            head: Some([self.hidden, self.vocab]),
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
            tokens: seq,
            trains: true,
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

    fn assumptions(&self) -> Vec<String> {
        let sentence = "every expert gets tokens, as many as the next; memory depends on it only where a product is run for \
                        each, as for weights other than bf16";
        self.experts.iter().map(|_| sentence.to_owned()).collect()
    }

    fn adapter_problem(&self, lora: &Lora) -> Option<String> {
        let all = self.experts.is_some() && lora.adapts_all();
        all.then(|| {
            "adapters of experts are not planned; name the layers to adapt, as in q_proj,v_proj".into()
        })
    }

    fn runs_sdpa(&self) -> bool {
        self.runs_sdpa
    }

    fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built {
        let mut build = Builder::new(session, setup, dtype);
        let attention = setup.attention_setup(self.attention_dropout);
        let router_logits = RouterLogits::default();
        let (embed_tokens, layers, norm, rotary_emb) = build.module("model", |build| {
            let embed_tokens = if self.scaled_embedding {
                build.scaled_embedding("embed_tokens", self.vocab, self.hidden)
            } else {
                build.input_embedding("embed_tokens", self.vocab, self.hidden)
            };
            let layers = (0..self.layers)
                .map(|index| {
                    build.block(&format!("layers.{index}"), |build| {
                        Layer::build(self, index, build, attention, &router_logits)
                    })
                })
                .collect();
            let norm = build.rms_norm("norm", self.hidden, self.norm);
            (embed_tokens, layers, norm, self.rotary.build(build))
        });
        let (passage, rotary) = (build.passage(), build.passage());
        let lm_head =
            build.head(self.hidden, self.vocab, self.tied.then_some(&embed_tokens), self.logit_softcap);
        let network = Decoder {
            config: self.clone(),
            script: Script::new(setup, &build),
            checkpointing: Checkpointing::new(setup),
            eager: attention.eager,
            embed_tokens,
            layers,
            norm,
            rotary_emb,
            lm_head,
            router_logits,
            passage,
            rotary,
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
    layers: Vec<Block<Layer>>,
    norm: RmsNorm,
    rotary_emb: RotaryEmbedding,
    lm_head: Head,
    router_logits: RouterLogits,
    passage: Passage,
    rotary: Passage,
}

impl Decoder {
    /// The experts whose router is balanced by a part of the loss.
    fn balanced(&self) -> Option<&Experts> {
        self.config.experts.as_ref().filter(|experts| experts.balanced)
    }

    /// The model's forward: the last hidden state, and the cache where there is one.
    fn model(&self, input_ids: &Tensor) -> (Tensor, Option<Cache>) {
        let session = input_ids.session();
        session.scoped("model", || {
            self.passage.enter();
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
            self.rotary.enter();
            let angles = self.rotary_emb.angles(session, length, dtype);
            for segment in self.checkpointing.segments(self.layers.len()) {
                let windowed = |index: usize| config.windowed.at(index as u64);
                let mask = |index: usize| if windowed(index) { &sliding } else { &causal };
                let angles = |index: usize| &angles[if windowed(index) { angles.len() - 1 } else { 0 }];
                if !segment.recomputed {
                    for index in segment.layers {
                        let window = config.masks.window.filter(|_| windowed(index));
                        let cache = cache.as_ref().map(|cache| (cache, window));
                        hidden = session.scoped(&format!("layers.{index}"), || {
                            let (angles, mask) = (angles(index), mask(index).as_ref());
                            self.layers[index].run(
                                [&hidden, &angles.cos, &angles.sin],
                                |layer, [hidden, cos, sin]| {
                                    layer.forward(hidden, &Angles::of(cos, sin), mask, cache)
                                },
                            )
                        });
                    }
                    continue;
                }
                let call = |index| {
                    let kept =
                        Kept::new(mask(index), angles(index), &position_ids, config.position_ids_first);
                    (format!("layers.{index}"), self.layers[index].clone(), kept)
                };
                let calls: Vec<_> = segment.layers.map(call).collect();
                hidden = self.checkpointing.run(vec![hidden.clone()], move |args| {
                    let mut hidden = args[0].clone();
                    for (name, layer, kept) in &calls {
                        let mask = kept.mask.as_ref();
                        let session = Rc::clone(hidden.session());
                        hidden = session.scoped(name, || {
                            layer.run([&hidden, &kept.cos, &kept.sin], |layer, [hidden, cos, sin]| {
                                layer.forward(hidden, &Angles::of(cos, sin), mask, None)
                            })
                        });
                    }
                    hidden
                });
            }
            hidden = self.norm.forward(&hidden);
            hidden = self.passage.leave(hidden);
            if config.masks.by_type {
                release!(causal, sliding, embeddings, position_ids);
            } else {
                release!(position_ids, embeddings, causal, sliding);
            }
            for Angles { cos, sin } in angles {
                release!(sin, cos);
            }
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
}

impl Network for Decoder {
    fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        self.script.input(session, seq)
    }

    fn forward(&self, input_ids: &Tensor, pass: &mut Pass) {
        let collected = self.balanced().map(|_| Vec::new());
        self.router_logits.replace(collected);
        let balance = |loss: Tensor| {
            let (Some(experts), Some(logits)) = (self.balanced(), self.router_logits.take()) else {
                return (loss, None, Vec::new());
            };
            let router_loss = balance(loss.session(), &logits, experts);
            let part = router_loss.mul_scalar();
            let sum = loss.add_in_place(&part);
            release!(part);
            (sum, Some(router_loss), logits.into_iter().rev().collect())
        };
        self.script.forward(input_ids, pass, || self.model(input_ids), &self.lm_head, balance);
    }
}
