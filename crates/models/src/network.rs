//! What the training loop asks of an architecture.

use std::rc::Rc;

use engine::{Session, Tensor};
use ledger::Dtype;

use crate::causal_lm::Cache;
use crate::parallel::{Parts, Ranks};
use crate::run::Parameters;

/// What a forward pass gives besides the loss, in the order in which it dies: the router's loss, the logits, the
/// cache, the logits of the router.
pub(crate) type Output = (Option<Tensor>, Tensor, Option<Cache>, Vec<Tensor>);

/// The names that a plain training script keeps bound from one micro-batch to the next.
#[derive(Default)]
pub(crate) struct Pass {
    output: Option<Output>,
    loss: Option<Tensor>,
}

impl Pass {
    /// `out = …`: the previous output dies once the new one is there.
    pub(crate) fn rebind_output(&mut self, output: Output) {
        self.output = Some(output);
    }

    /// `del out`.
    pub(crate) fn drop_output(&mut self) {
        self.output = None;
    }

    /// `loss = …`: the previous loss and its graph die once the new one is there.
    pub(crate) fn rebind_loss(&mut self, loss: Tensor) {
        self.loss = Some(loss);
    }

    /// The loss of the last forward pass.
    pub(crate) fn loss(&self) -> Option<&Tensor> {
        self.loss.as_ref()
    }
}

/// A model on the device.
pub(crate) trait Network {
    /// The batch of one micro-batch, brought to the device.
    fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor;

    /// The forward pass and the loss, bound to the names of the script.
    fn forward(&self, input: &Tensor, pass: &mut Pass);
}

/// A model built on the device.
pub(crate) struct Built {
    pub(crate) network: Box<dyn Network>,
    /// The parameters that are trained, in the order of `model.parameters()`.
    pub(crate) trainable: Vec<Tensor>,
    pub(crate) parameters: Parameters,
    /// The dtype and bytes of each parameter, in the same order.
    pub(crate) states: Vec<(Dtype, u64)>,
    pub(crate) buffers: Vec<Tensor>,
    /// The parameters with a row for each token or position: embeddings and the head.
    pub(crate) vocabulary: Vec<Tensor>,
    /// Names of the setup that name nothing of it, after their setting.
    pub(crate) unmet: Vec<(&'static str, String)>,
    /// The framework that divides the work between ranks.
    pub(crate) ranks: Option<Rc<dyn Ranks>>,
    /// The parameters of which each rank holds a part, under ZeRO's stage 3.
    pub(crate) parts: Option<Rc<Parts>>,
}
