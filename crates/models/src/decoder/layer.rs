//! A decoder layer: attention and a feed-forward part, each normed and added to what came in.

use engine::{Tensor, release};

use super::attention::SelfAttention;
use super::experts::{Mixture, RouterLogits};
use super::feed_forward::FeedForward;
use super::{DecoderConfig, NormPlaces};
use crate::causal_lm::{AttentionSetup, Cache};
use crate::nn::Builder;
use crate::norm::RmsNorm;
use crate::parallel::Passage;
use crate::rotary::Angles;

/// A decoder layer.
pub(super) struct Layer {
    self_attn: SelfAttention,
    mlp: Mlp,
    before_attention: Option<RmsNorm>,
    after_attention: Option<RmsNorm>,
    before_mlp: Option<RmsNorm>,
    after_mlp: Option<RmsNorm>,
    residual_dropout: f64,
    /// The modules that drop of what attention and the feed-forward part give, where there are such.
    dropouts: [Passage; 2],
}

enum Mlp {
    Dense(Box<FeedForward>),
    Sparse(Mixture),
}

impl Layer {
    pub(super) fn build(
        config: &DecoderConfig,
        index: u64,
        build: &mut Builder,
        attention: AttentionSetup,
        router_logits: &RouterLogits,
    ) -> Self {
        let self_attn = SelfAttention::build(config, build, attention);
        let mlp = match &config.experts {
            Some(experts) if experts.at(index) => {
                Mlp::Sparse(Mixture::build(config, experts, build, router_logits))
            }
            _ => Mlp::Dense(Box::new(FeedForward::build(config, build))),
        };
        let mut norm = |name| Some(build.rms_norm(name, config.hidden, config.norm));
        let [before_attention, after_attention, before_mlp, after_mlp] = match config.norm_places {
            NormPlaces::Before => [norm("input_layernorm"), None, norm("post_attention_layernorm"), None],
            NormPlaces::After => {
                [None, norm("post_attention_layernorm"), None, norm("post_feedforward_layernorm")]
            }
            NormPlaces::Around => [
                norm("input_layernorm"),
                norm("post_attention_layernorm"),
                norm("pre_feedforward_layernorm"),
                norm("post_feedforward_layernorm"),
            ],
        };
        let residual_dropout = config.residual_dropout;
        let dropouts = [0, 1].map(|_| if config.fused { build.passage() } else { Passage::default() });
        Self {
            self_attn,
            mlp,
            before_attention,
            after_attention,
            before_mlp,
            after_mlp,
            residual_dropout,
            dropouts,
        }
    }

    pub(super) fn forward(
        &self,
        hidden: &Tensor,
        angles: &Angles,
        mask: Option<&Tensor>,
        cache: Option<(&Cache, Option<u64>)>,
    ) -> Tensor {
        let mut residual = hidden.clone();
        let mut hidden = normed(self.before_attention.as_ref(), hidden);
        let (attended, weights) = self.self_attn.forward(&hidden, angles, mask, cache);
        hidden = attended;
        hidden = normed(self.after_attention.as_ref(), &hidden);
        hidden = self.add(&residual, &hidden, &self.dropouts[0]);
        residual = hidden.clone();
        hidden = normed(self.before_mlp.as_ref(), &hidden);
        hidden = match &self.mlp {
            Mlp::Dense(mlp) => mlp.forward(&hidden),
            Mlp::Sparse(mlp) => mlp.forward(&hidden),
        };
        hidden = normed(self.after_mlp.as_ref(), &hidden);
        hidden = self.add(&residual, &hidden, &self.dropouts[1]);
        release!(residual, weights);
        hidden
    }

    fn add(&self, residual: &Tensor, hidden: &Tensor, dropout: &Passage) -> Tensor {
        residual.add(&dropout.run(|| hidden.dropout(self.residual_dropout)))
    }
}

fn normed(norm: Option<&RmsNorm>, hidden: &Tensor) -> Tensor {
    norm.map_or_else(|| hidden.clone(), |norm| norm.forward(hidden))
}
