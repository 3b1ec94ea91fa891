//! The plain MLP: L layers of Linear without bias and ReLU, all of one width.

use std::rc::Rc;

use engine::{Problem, Session, Tensor};
use ledger::{Category, Dtype};

use crate::architecture::{Architecture, Extents};
use crate::checkpoint::Checkpointing;
use crate::linear::Linear;
use crate::loss::Loss;
use crate::network::{Built, Network, Pass};
use crate::nn::{Activation, Block, Builder};
use crate::parallel::{self, Passage, Unit};
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
    layers: Vec<Block<Linear>>,
    root: Option<Rc<Unit>>,
    copies_results: bool,
    passage: Passage,
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
                build.block(&format!("layers.{layer}"), |build| {
                    build.linear("linear", self.width, self.width, false)
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
            root: build.root(),
            copies_results: parallel::copies_results(setup),
            passage: build.passage(),
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
        let mut out = self.passage.run(|| parallel::run(self.root.as_ref(), [x], |[x]| self.layers(x)));
        if self.copies_results {
            out = parallel::copied(vec![out]).swap_remove(0);
        }
        pass.rebind_output((None, out.clone(), None, Vec::new()));
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

    fn layers(&self, x: &Tensor) -> Tensor {
        let mut hidden = x.clone();
        for segment in self.checkpointing.segments(self.layers.len()) {
            let call = |index: usize| (format!("layers.{index}"), self.layers[index].clone());
            let calls: Vec<_> = segment.layers.map(call).collect();
            let block = move |args: &[Tensor]| {
                let mut hidden = args[0].clone();
                for (name, layer) in &calls {
                    let session = Rc::clone(hidden.session());
                    hidden = session.scoped(name, || {
                        layer.run([&hidden], |layer, [hidden]| {
                            Activation::Relu.forward(&layer.forward(hidden))
                        })
                    });
                }
                hidden
            };
            hidden = if segment.recomputed {
                self.checkpointing.run(vec![hidden.clone()], block)
            } else {
                block(std::slice::from_ref(&hidden))
            };
        }
        hidden
    }
}
