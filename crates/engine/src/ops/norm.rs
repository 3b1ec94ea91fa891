//! Layer normalization.

use ledger::Dtype;

use crate::dims::Dims;
use crate::graph::{Call, Op};
use crate::tensor::Tensor;

impl Tensor {
    /// `layer_norm` over the last dimension, in fp32 under autocast; keeps its input and the fp32 mean
    /// and reciprocal deviation of each row.
    pub fn layer_norm(&self, weight: &Self, bias: &Self) -> Self {
        let session = self.session();
        let bias = session.autocast_fp32(bias);
        let weight = session.autocast_fp32(weight);
        let input = session.autocast_fp32(self);
        let op = Op::new(session, &[&input, &weight, &bias]);
        op.save(&bias);
        op.save(&input);
        op.save(&weight);
        let (out, mean, deviation) = session.results_of("native_layer_norm", || {
            let rows = Dims::from([input.rows()[0]]);
            let out = Self::empty(session, "layer_norm", input.shape(), input.dtype());
            let mean = Self::empty(session, "layer_norm.mean", rows, Dtype::Fp32);
            (out, mean, Self::empty(session, "layer_norm.rstd", rows, Dtype::Fp32))
        });
        op.save_result(&mean);
        op.save_result(&deviation);
        let out = op.finish(out, layer_norm_backward);
        crate::release!(mean, deviation, input, weight, bias);
        out
    }
}

fn layer_norm_backward(call: &Call<'_>) -> Vec<Option<Tensor>> {
    let (grad, input, weight) = (call.grad(), call.saved(1), call.saved(2));
    let session = grad.session();
    let vector = || Tensor::empty(session, "layer_norm_backward.weight", weight.shape(), weight.dtype());
    let dx = call.when(0, || Tensor::empty(session, "layer_norm_backward", input.shape(), input.dtype()));
    let mut gamma = call.when(1, vector);
    let mut beta = call.when(2, vector);
    let [rows, width] = [input.rows()[0], input.rows()[1]];
    // Tall and narrow inputs are summed in two passes: blocks of rows first, then the blocks.
    if session.profile.two_pass_layer_norm
        && rows > 65_536
        && width / 32 < session.hardware.multiprocessors / 2
    {
        let blocks = rows.div_ceil(32).min((1 << 20) / width.max(1));
        let partial =
            || Tensor::empty(session, "layer_norm_backward.partials", [blocks, width], weight.dtype());
        let partial_gamma = gamma.is_some().then(partial);
        let partial_beta = beta.is_some().then(partial);
        for (partial, total) in [(&partial_gamma, &mut gamma), (&partial_beta, &mut beta)] {
            if let Some(partial) = partial {
                let sum = partial.reduce("layer_norm_backward.weight", &[true, false], weight.shape());
                *total = Some(sum);
            }
        }
        crate::release!(partial_beta, partial_gamma);
    }
    vec![dx, gamma, beta]
}
