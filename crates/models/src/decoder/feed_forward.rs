//! The feed-forward part of a decoder layer.

use engine::{Tensor, release};

use super::DecoderConfig;
use crate::linear::Linear;
use crate::nn::{Activation, Builder};
use crate::parallel::Passage;

/// Two projections up, one of them through the activation, and one down.
pub(super) struct FeedForward {
    up: Up,
    down_proj: Linear,
    activation: Activation,
    passage: Passage,
    act_fn: Passage,
}

/// The projections up.
enum Up {
    Separate { gate_proj: Linear, up_proj: Linear },
    Fused(Linear),
}

impl FeedForward {
    pub(super) fn build(config: &DecoderConfig, build: &mut Builder) -> Self {
        let (hidden, intermediate, bias) = (config.hidden, config.intermediate, config.mlp_bias);
        build.module("mlp", |build| Self {
            up: if config.fused {
                Up::Fused(build.linear("gate_up_proj", hidden, 2 * intermediate, bias))
            } else {
                Up::Separate {
                    gate_proj: build.linear("gate_proj", hidden, intermediate, bias),
                    up_proj: build.linear("up_proj", hidden, intermediate, bias),
                }
            },
            down_proj: build.linear("down_proj", intermediate, hidden, bias),
            activation: config.activation,
            passage: build.passage(),
            act_fn: build.passage(),
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Tensor {
        x.session().scoped("mlp", || self.passage.run(|| self.project(&self.passage.over(x))))
    }

    fn project(&self, x: &Tensor) -> Tensor {
        let activate = |gate: &Tensor| {
            x.session().scoped("act_fn", || self.act_fn.run(|| self.activation.forward(gate)))
        };
        match &self.up {
            Up::Separate { gate_proj, up_proj } => {
                let gate = gate_proj.forward(x);
                let active = activate(&gate);
                release!(gate);
                let up = up_proj.forward(x);
                let product = active.mul(&up);
                release!(active, up);
                self.down_proj.forward(&product)
            }
            Up::Fused(gate_up_proj) => {
                let both = gate_up_proj.forward(x);
                let parts = both.split(-1, both.size(-1) / 2);
                release!(both);
                let active = activate(&parts[0]);
                let product = parts[1].mul(&active);
                release!(active);
                let out = self.down_proj.forward(&product);
                release!(product, parts);
                out
            }
        }
    }
}
