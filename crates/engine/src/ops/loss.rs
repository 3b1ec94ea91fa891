//! The cross-entropy loss.

use crate::graph::Op;
use crate::tensor::Tensor;

impl Tensor {
    /// `cross_entropy` of (N, V) logits and N targets, mean over N: log-softmax, then the negative
    /// log-likelihood; both in fp32 under autocast. Keeps the log-softmax, the targets and the total weight.
    pub fn cross_entropy(&self, target: &Self) -> Self {
        let input = self.session().autocast_fp32(self);
        let log_softmax = input.log_softmax();
        crate::release!(input);
        let loss = log_softmax.nll_loss(target);
        crate::release!(log_softmax);
        loss
    }

    fn log_softmax(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = Self::empty(self.session(), "log_softmax", self.shape(), self.dtype());
        op.save_result(&out);
        op.finish(out, |call| {
            let grad = call.grad();
            vec![Some(Self::empty(grad.session(), "log_softmax_backward", grad.shape(), grad.dtype()))]
        })
    }

    fn nll_loss(&self, target: &Self) -> Self {
        let op = Op::new(self.session(), &[self]);
        op.save(self);
        op.save(target);
        let loss = self.scalar("loss", self.dtype());
        let total_weight = self.scalar("nll_loss.total_weight", self.dtype());
        op.save_result(&total_weight);
        let loss = op.finish(loss, |call| {
            let input = call.saved(0);
            vec![Some(Self::empty(input.session(), "nll_loss_backward", input.shape(), input.dtype()))]
        });
        crate::release!(total_weight);
        loss
    }
}
