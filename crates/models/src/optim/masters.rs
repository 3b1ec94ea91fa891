//! fp32 copies of 16-bit parameters: the optimizer steps them, and the parameters are written from them.

use engine::Tensor;
use ledger::{Category, Dtype};

/// Parameters with their copies.
pub(crate) struct Masters(Vec<(Tensor, Tensor)>);

impl Masters {
    /// Makes a copy of each of `parameters`.
    pub(crate) fn new(parameters: &[Tensor]) -> Self {
        let pair = |parameter: &Tensor| {
            let shape = parameter.shape();
            let copy = parameter.companion("master", Category::MasterWeight, &shape, Dtype::Fp32);
            (parameter.clone(), copy)
        };
        Self(parameters.iter().map(pair).collect())
    }

    /// The copies.
    pub(crate) fn copies(&self) -> Vec<Tensor> {
        self.0.iter().map(|(_, copy)| copy.clone()).collect()
    }

    /// The copies of those parameters that are among `some`.
    pub(crate) fn copies_of(&self, some: &[Tensor]) -> Vec<Tensor> {
        let among = |parameter: &Tensor| some.iter().any(|other| other.same(parameter));
        self.0.iter().filter(|(parameter, _)| among(parameter)).map(|(_, copy)| copy.clone()).collect()
    }

    /// Gives each copy the gradient of its parameter, in fp32.
    pub(crate) fn take_gradients(&self) {
        for (parameter, copy) in &self.0 {
            if let Some(grad) = parameter.grad() {
                let shape = grad.shape();
                let cast = copy.companion("grad", Category::Temporary, &shape, Dtype::Fp32);
                copy.set_grad(Some(cast));
            }
        }
    }

    /// `model.zero_grad()`, after the optimizer has let go of the gradients of the copies.
    pub(crate) fn zero_grad(&self) {
        for (parameter, _) in &self.0 {
            parameter.set_grad(None);
        }
    }
}
