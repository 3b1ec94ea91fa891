//! The root-mean-square norms of transformers: one computation, three places of the weight.

use engine::{Tensor, release};
use ledger::Dtype;

use crate::parallel::{Owner, run_gathered};

/// Where a family applies the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norm {
    /// After the cast back to the dtype of the input, as Llama does.
    Cast,
    /// In fp32, before that cast.
    Fp32,
    /// In fp32 and added to one, as Gemma does.
    OneMore,
}

/// A root-mean-square norm over the last dimension, computed in fp32.
pub(crate) struct RmsNorm {
    pub(crate) name: &'static str,
    pub(crate) weight: Tensor,
    pub(crate) norm: Norm,
    pub(crate) owner: Option<Owner>,
}

impl RmsNorm {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            run_gathered(self.owner.as_ref(), input, |input| match self.norm {
                Norm::Cast | Norm::Fp32 => self.with_variance(input),
                Norm::OneMore => self.one_more(input),
            })
        })
    }

    /// The variance is a name of its own, alive until the result is there.
    fn with_variance(&self, input: &Tensor) -> Tensor {
        let mut hidden = input.to(Dtype::Fp32);
        let squares = hidden.pow_scalar();
        let variance = squares.mean_last();
        release!(squares);
        let shifted = variance.add_scalar();
        let scale = shifted.rsqrt();
        release!(shifted);
        let product = hidden.mul(&scale);
        release!(scale);
        hidden = product;
        let out = if self.norm == Norm::Cast {
            let weight = self.weight.on_device();
            let cast = hidden.to(input.dtype());
            let out = weight.mul(&cast);
            release!(weight, cast);
            out
        } else {
            let product = self.weight.on_device().mul(&hidden);
            product.to(input.dtype())
        };
        release!(hidden, variance);
        out
    }

    fn one_more(&self, input: &Tensor) -> Tensor {
        let hidden = input.to(Dtype::Fp32);
        let squares = hidden.pow_scalar();
        let variance = squares.mean_last();
        release!(squares);
        let shifted = variance.add_scalar();
        release!(variance);
        let scale = shifted.rsqrt();
        release!(shifted);
        let out = hidden.mul(&scale);
        release!(scale, hidden);
        let weight = self.weight.on_device().to(Dtype::Fp32);
        let factor = weight.add_scalar();
        release!(weight);
        let product = out.mul(&factor);
        release!(factor, out);
        product.to(input.dtype())
    }
}
