//! One rank of Megatron's distributed optimizer: the buffers, the parts that it steps, and its step.

use std::rc::Rc;

use engine::{Collective, Dims, Session, Tensor, release};
use ledger::{Category, Dtype};

use super::{Megatron, norm};
use crate::optim::{Form, Optimizer};
use crate::setup::{OptimizerImpl, Setup};
use crate::shards::FlatBuffer;

/// A part of a parameter that this rank steps.
struct Piece {
    /// What the optimizer steps: an fp32 copy of 16-bit elements, or the elements themselves.
    main: Tensor,
    /// Where the gradient of its first element lies in the buffer.
    start: u64,
}

/// The optimizer of one rank, with the buffers of weights and gradients.
pub(crate) struct Distributed {
    session: Rc<Session>,
    /// The weights live on under the names of the parameters.
    weights: Tensor,
    gradients: Tensor,
    /// Matrices, then vectors, which weights do not decay.
    groups: Vec<Vec<Piece>>,
    optimizers: Vec<Optimizer>,
    /// Single values on the device.
    values: Vec<Tensor>,
    /// fp16 gradients are scaled, checked and scaled back.
    scales: bool,
    fused: bool,
    clips: bool,
    /// Elements of each bucket.
    buckets: Vec<u64>,
}

impl Distributed {
    /// Wraps a model with these parameters that are trained.
    pub(crate) fn new(
        session: &Rc<Session>,
        options: &Megatron,
        setup: &Setup,
        parameters: &[Tensor],
    ) -> Option<Self> {
        let dtype = parameters.first()?.dtype();
        let (ranks, rank) = (u64::from(setup.world_size), u64::from(setup.rank));
        let sizes: Vec<u64> = parameters.iter().map(Tensor::numel).collect();
        let layout = FlatBuffer::new(&sizes, ranks, options.bucket_size(ranks));
        let buffer =
            |what, category, dtype| Tensor::of_category(session, what, category, [layout.len()], dtype);
        let weights = buffer("param_data", Category::Parameter, dtype);
        let gradients = buffer("grad_data", Category::Gradient, options.grad_dtype(dtype));
        for parameter in parameters.iter().rev() {
            parameter.move_into(&weights);
            let own = parameter.clone();
            // It is added to the buffer and let go.
            parameter.on_accumulated(Some(Rc::new(move || own.set_grad(None))));
        }
        // Beside adapters in fp32 it is told the dtype of the model.
        let told = setup.dtype.unwrap_or(dtype);
        let scales = told == Dtype::Fp16;
        let value = |what| Tensor::of_category(session, what, Category::Workspace, [1], Dtype::Fp32);
        let names: &[&'static str] = match told {
            Dtype::Fp16 => {
                &["loss_scale", "min_scale", "growth_factor", "backoff_factor", "found_inf", "overflow"]
            }
            Dtype::Bf16 => &["loss_scale"],
            _ => &["overflow", "loss_scale"],
        };
        let values: Vec<Tensor> = names.iter().map(|name| value(name)).collect();
        let mut pieces = layout.pieces(ranks, rank);
        // Stable: the order of the buffer within each group.
        pieces.sort_by_key(|(index, _)| parameters[*index].shape().len() == 1);
        let mut groups = vec![Vec::new(), Vec::new()];
        for (index, range) in pieces {
            let parameter = &parameters[index];
            let shape = Dims::new(&[range.end - range.start]);
            let main = if dtype == Dtype::Fp32 {
                parameter.window(range.start, shape)
            } else {
                let copy = parameter.beside("clone", Category::Temporary, shape, dtype);
                let main = parameter.companion("master", Category::MasterWeight, &shape, Dtype::Fp32);
                release!(copy);
                main
            };
            let start = layout.start_of(index) + range.start;
            groups[usize::from(parameter.shape().len() == 1)].push(Piece { main, start });
        }
        let fused = setup.optimizer_impl == Some(OptimizerImpl::Fused);
        // One kernel over everything, whose counters of steps are on the host.
        let form = Form::new(&Setup { fp32_state: fused, ..setup.clone() });
        let optimizer = |group: &Vec<Piece>| {
            Optimizer::new(form, &group.iter().map(|piece| piece.main.clone()).collect::<Vec<_>>())
        };
        let optimizers = groups.iter().map(optimizer).collect();
        let buckets = layout.buckets().iter().map(|bucket| bucket.end - bucket.start).collect();
        Some(Self {
            session: Rc::clone(session),
            weights,
            gradients,
            groups,
            optimizers,
            values,
            scales,
            fused,
            clips: setup.clip_grad_norm.is_some(),
            buckets,
        })
    }

    /// What backward begins from: of fp16 weights the loss times its scale.
    pub(crate) fn scaled(&self, loss: &Tensor) -> Tensor {
        if self.scales { self.values[0].mul(loss) } else { loss.clone() }
    }

    /// Gradients are reduced, and this rank steps its parts and gives them to all.
    pub(crate) fn step(&mut self) {
        let session = Rc::clone(&self.session);
        for elements in &self.buckets {
            session.collective(Collective::ReduceScatter, elements * self.gradients.dtype().size());
        }
        let grads: Vec<Tensor> = self.groups.iter().flatten().map(|piece| self.grad_of(piece)).collect();
        if self.scales {
            let value =
                |dtype| Tensor::of_category(&session, "inverse_scale", Category::Temporary, [1], dtype);
            let wide = value(Dtype::Fp64);
            let inverse = value(Dtype::Fp64);
            release!(wide);
            let narrow = value(Dtype::Fp32);
            release!(inverse, narrow);
            session.collective(Collective::AllReduce, Dtype::Fp32.size());
        }
        norm::norm(&session, &grads, self.fused);
        session.collective(Collective::AllReduce, Dtype::Fp32.size());
        if self.clips {
            norm::clip(&session, &grads, self.fused);
        }
        drop(grads);
        self.optimizers.iter_mut().for_each(Optimizer::step);
        for elements in &self.buckets {
            session.collective(Collective::AllGather, elements * self.weights.dtype().size());
        }
        self.optimizers.iter().for_each(Optimizer::zero_grad);
    }

    /// Gives a piece its gradient: in fp32, a view of the buffer where that is.
    fn grad_of(&self, Piece { main, start }: &Piece) -> Tensor {
        let grad = if self.gradients.dtype() == Dtype::Fp32 {
            self.gradients.window(*start, main.shape())
        } else {
            main.companion("grad", Category::Temporary, &main.shape(), Dtype::Fp32)
        };
        main.set_grad(Some(grad.clone()));
        grad
    }
}
