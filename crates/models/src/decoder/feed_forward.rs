//! The feed-forward part of a decoder layer.

use engine::{Tensor, release};

use super::DecoderConfig;
use crate::nn::{Activation, Builder, Linear};

/// Two projections up, one of them through the activation, and one down.
pub(super) struct FeedForward {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

impl FeedForward {
    pub(super) fn build(config: &DecoderConfig, build: &mut Builder) -> Self {
        let (hidden, intermediate, bias) = (config.hidden, config.intermediate, config.mlp_bias);
        build.module("mlp", |build| Self {
            gate_proj: build.linear("gate_proj", hidden, intermediate, bias),
            up_proj: build.linear("up_proj", hidden, intermediate, bias),
            down_proj: build.linear("down_proj", intermediate, hidden, bias),
            activation: config.activation,
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Tensor {
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
