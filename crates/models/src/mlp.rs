//! The plain MLP: L layers of Linear without bias and ReLU, all of one width.

use std::rc::Rc;

use engine::{Problem, Session, Tensor};
use ledger::{Category, Dtype};

use crate::architecture::{Architecture, Extents};
use crate::checkpoint::Checkpointing;
use crate::linear::Linear;
use crate::loss::Loss;
use crate::network::{Built, Network, Pass};
use crate::nn::{Activation, Builder};
use crate::setup::Setup;

/// An MLP: `layers` of `width`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MlpConfig {
    pub(crate) layers: u64,
    pub(crate) width: u64,
}

struct Mlp {
    config: MlpConfig,
    batch: u64,
    dtype: Dtype,
    loss: Option<Loss>,
    checkpointing: Checkpointing,
    keep_outputs: bool,
    autocast: Option<Dtype>,
    layers: Vec<Rc<Linear>>,
}

impl Architecture for MlpConfig {
    fn extents(&self) -> Extents {
        Extents {
            layers: self.layers,
            work: 1,
            widest: self.width,
            largest_weight: u128::from(self.width).pow(2),
            head: None,
            heads: 0,
            positions: None,
            learnt_positions: false,
        }
    }

    fn attention(&self, _dtype: Dtype, _seq: u64) -> Vec<Problem> {
        Vec::new()
    }

    fn build(&self, session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Built {
        let mut build = Builder::new(session, setup, dtype);
        let layers = (0..self.layers)
            .map(|layer| {
                build.module(&format!("layers.{layer}"), |build| {
                    Rc::new(build.linear("linear", self.width, self.width, false))
                })
            })
            .collect();
        let network = Mlp {
            config: *self,
            batch: setup.batch,
            dtype,
            loss: setup.loss,
            checkpointing: Checkpointing::new(setup),
            keep_outputs: setup.keep_outputs,
            autocast: setup.autocast,
            layers,
        };
        build.finish(network)
    }
}

impl Network for Mlp {
    fn input(&self, session: &Rc<Session>, _seq: u64) -> Tensor {
        Tensor::of_category(session, "x", Category::Input, [self.batch, self.config.width], self.dtype)
    }

    fn forward(&self, x: &Tensor, pass: &mut Pass) {
        x.session().autocast(self.autocast, || self.run(x, pass));
    }
}

impl Mlp {
    fn run(&self, x: &Tensor, pass: &mut Pass) {
        let session = Rc::clone(x.session());
        let mut hidden = x.clone();
        for segment in self.checkpointing.segments(self.layers.len()) {
            let call = |index| (format!("layers.{index}"), Rc::clone(&self.layers[index]));
            let calls: Vec<_> = segment.layers.map(call).collect();
            let block = move |args: &[Tensor]| {
                let mut hidden = args[0].clone();
                for (name, layer) in &calls {
                    let session = Rc::clone(hidden.session());
                    hidden = session.scoped(name, || Activation::Relu.forward(&layer.forward(&hidden)));
                }
                hidden
            };
            hidden = if segment.recomputed {
                self.checkpointing.run(vec![hidden.clone()], block)
            } else {
                block(std::slice::from_ref(&hidden))
            };
        }
        pass.rebind_output((None, hidden.clone(), None, Vec::new()));
        let out = hidden;
        let loss = session.scoped("loss", || match self.loss {
            Some(Loss::Sum) => out.sum_all(),
            _ => {
                let squares = out.pow_scalar();
                squares.mean_all()
            }
        });
        pass.rebind_loss(loss);
        drop(out);
        if !self.keep_outputs {
            pass.drop_output();
        }
    }
}
