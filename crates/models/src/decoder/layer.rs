//! A decoder layer: attention and a feed-forward part, each normed and added to what came in.

use engine::{Tensor, release};

use super::DecoderConfig;
use super::attention::SelfAttention;
use super::feed_forward::FeedForward;
use crate::causal_lm::{AttentionSetup, Cache};
use crate::nn::{Builder, RmsNorm};
use crate::rotary::Angles;

/// A decoder layer.
pub(super) struct Layer {
    self_attn: SelfAttention,
    mlp: FeedForward,
    input_layernorm: RmsNorm,
    post_attention_layernorm: RmsNorm,
}

impl Layer {
    pub(super) fn build(config: &DecoderConfig, build: &mut Builder, attention: AttentionSetup) -> Self {
        Self {
            self_attn: SelfAttention::build(config, build, attention),
            mlp: FeedForward::build(config, build),
            input_layernorm: build.rms_norm("input_layernorm", config.hidden),
            post_attention_layernorm: build.rms_norm("post_attention_layernorm", config.hidden),
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
        let mut hidden = self.input_layernorm.forward(hidden);
        let (attended, weights) = self.self_attn.forward(&hidden, angles, mask, cache);
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
