//! DeepSpeed's ZeRO: its options, and the engine around a model.

mod bf16;
mod checks;
mod flat;
mod gathered;
mod layout;

use std::rc::Rc;

use engine::{Session, Tensor, backward};
use ledger::Dtype;

use crate::contradiction::Contradiction;
use crate::optim::Form;
use crate::setup::{Offload, Optimizer, Setup, Torch};

pub(crate) use gathered::{Owner, Parts, Passage, run_gathered};

/// The options of `zero_optimization` and what else of a DeepSpeed configuration decides memory, under its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zero {
    /// What is divided between the ranks.
    pub stage: Stage,
    /// Elements of gradients that are reduced at a time.
    pub reduce_bucket_size: u64,
    /// Elements gathered at a time where torch cannot gather in place. No release that is planned needs it.
    pub allgather_bucket_size: u64,
    /// Gradients are copied into a buffer as they come.
    pub contiguous_gradients: bool,
    /// Gradients are reduced on a stream of their own. None: in stage 3 alone.
    pub overlap_comm: Option<bool>,
    /// Parameters are dealt out to the partitions in turn.
    pub round_robin_gradients: bool,
    /// Elements of parameters that are gathered ahead of use (`stage3_prefetch_bucket_size`).
    pub prefetch_bucket_size: u64,
    /// Parameters of at most so many elements stay whole (`stage3_param_persistence_threshold`).
    pub param_persistence_threshold: u64,
    /// Elements of parameters that may be whole before no more are gathered ahead (`stage3_max_live_parameters`).
    pub max_live_parameters: u64,
    /// A parameter stays whole that is used again within so many elements (`stage3_max_reuse_distance`).
    pub max_reuse_distance: u64,
    /// The dtype in which micro-batches are added up (`data_types.grad_accum_dtype`); none: that of the weights.
    pub grad_accum_dtype: Option<Dtype>,
}

/// Ranks of stage 3: each makes a buffer for every part of a parameter that has no elements.
const MOST_RANKS: u32 = 16_384;

/// What is divided between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The state of the optimizer.
    One,
    /// And the gradients.
    Two,
    /// And the parameters.
    Three,
}

impl Zero {
    /// A stage with DeepSpeed's own values for everything else.
    pub const fn new(stage: Stage) -> Self {
        Self {
            stage,
            reduce_bucket_size: 500_000_000,
            allgather_bucket_size: 500_000_000,
            contiguous_gradients: true,
            overlap_comm: None,
            round_robin_gradients: false,
            prefetch_bucket_size: 50_000_000,
            param_persistence_threshold: 100_000,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 1_000_000_000,
            grad_accum_dtype: None,
        }
    }

    /// Its name on the command line.
    pub(super) const fn name(&self) -> &'static str {
        match self.stage {
            Stage::One => "zero1",
            Stage::Two => "zero2",
            Stage::Three => "zero3",
        }
    }

    /// Whether gradients are reduced beside the backward pass.
    pub fn overlaps(&self) -> bool {
        self.overlap_comm.unwrap_or(self.stage == Stage::Three)
    }

    pub(super) fn assumptions(&self, setup: &Setup) -> Vec<String> {
        let mut sentences = vec![
            "ZeRO as DeepSpeed 0.19 runs it; the buffers that NCCL itself takes are no part of it".to_owned(),
        ];
        if setup.clip_grad_norm.is_none() {
            sentences.push("gradients are clipped at 1.0, which is DeepSpeed's own value".into());
        }
        if self.stage == Stage::Three {
            sentences.push("parameters are made and divided one after the other, as under zero.Init".into());
            sentences.push(
                "what DeepSpeed gives back to the device while it wraps the model stays reserved until it is asked for"
                    .into(),
            );
        }
        let on_device = !setup.offloads(Offload::Optimizer)
            && matches!(setup.optimizer, Optimizer::Adam | Optimizer::AdamW);
        if self.stage == Stage::Two && on_device {
            sentences.push(
                "DeepSpeed's own estimate of states is 2 bytes a parameter and 18 a parameter of the partition; where documentation has 4 and 16, the code has gone on"
                    .into(),
            );
        }
        if self.stage == Stage::Three && on_device {
            sentences.push(
                "DeepSpeed's own estimate of states is 18 bytes a parameter of the partition; with its 16-bit gradients, which stay, they are 20"
                    .into(),
            );
        }
        if setup.torch != Torch::V2_15 {
            sentences.push(format!("ZeRO is that of torch 2.15, not of {}", setup.torch.as_str()));
        }
        sentences
    }

    pub(super) fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        use Optimizer::{Adam, AdamW, Lion, RmsProp, Sgd};
        let told = |settings: &[&'static str], sentence: String| {
            Some(Contradiction { settings: settings.to_vec(), sentence })
        };
        let name = self.name();
        if self.stage == Stage::Three && setup.world_size > MOST_RANKS {
            let sentence = format!("`--parallel zero3`: at most {MOST_RANKS} ranks are planned with it");
            return told(&["world-size", "parallel"], sentence);
        }
        if self.reduce_bucket_size == 0 {
            return told(&["reduce-bucket-size"], "`--reduce-bucket-size` is at least one element".into());
        }
        let planned = matches!(setup.optimizer, Sgd | Adam | AdamW | RmsProp | Lion);
        let bars: [(&'static str, bool, &str); 9] = [
            ("optimizer", !planned, "the optimizer of a flat partition is sgd, adam, adamw, rmsprop or lion"),
            ("lora-rank", setup.lora.is_some(), "adapters are not planned with it"),
            ("quantize", setup.quantize.is_some(), "weights of 4 bits are not planned with it"),
            ("autocast", setup.autocast.is_some(), "it computes in the dtype of the weights"),
            ("optimizer-in-backward", setup.optimizer_in_backward, "it steps after backward"),
            ("master-weights", setup.master_weights, "its partition of the weights in fp32 is the master"),
            ("fp32-state", setup.fp32_state, "its state is that of the partition in fp32"),
            ("capturable", setup.capturable, "a captured step of a partition is not planned"),
            (
                "offload",
                setup.offloads(Offload::Parameters) && self.stage != Stage::Three,
                "`--offload parameters` is of zero3; `--offload optimizer` is of every stage",
            ),
        ];
        let (setting, _, because) = bars.into_iter().find(|(_, barred, _)| *barred)?;
        told(&[setting, "parallel"], format!("`--parallel {name}`: {because}"))
    }
}

/// What of a setup every stage obeys.
#[derive(Clone)]
pub(crate) struct Job {
    session: Rc<Session>,
    options: Zero,
    rank: u64,
    world: u64,
    accumulate: u32,
    dtype: Dtype,
    form: Form,
    /// The largest norm of the gradients, where they are clipped.
    clips: bool,
    offloads_optimizer: bool,
    offloads_parameters: bool,
}

impl Job {
    fn new(session: &Rc<Session>, options: &Zero, setup: &Setup, dtype: Dtype) -> Self {
        Self {
            session: Rc::clone(session),
            options: options.clone(),
            rank: u64::from(setup.rank),
            world: u64::from(setup.world_size.max(1)),
            accumulate: setup.accumulate,
            dtype,
            form: Form::new(setup),
            clips: setup.clip_grad_norm.is_none_or(|norm| norm > 0.0),
            offloads_optimizer: setup.offloads(Offload::Optimizer),
            offloads_parameters: setup.offloads(Offload::Parameters),
        }
    }

    /// The dtype in which micro-batches are added up.
    fn accumulated(&self) -> Dtype {
        self.options.grad_accum_dtype.unwrap_or(self.dtype)
    }
}

/// How a stage takes part in a step.
pub(crate) trait Strategy {
    /// Before the forward pass of a micro-batch.
    fn begin_forward(&self) {}

    /// Before the backward pass of a micro-batch; `last`: of the last one before the update.
    fn begin_backward(&self, last: bool);

    /// After it, the loss and its gradient still alive.
    fn end_backward(&self);

    /// `optimizer.step()` and `zero_grad()`.
    fn step(&self);

    /// Whether the loss is multiplied by a scale, if only of 1.
    fn scales_loss(&self) -> bool {
        true
    }
}

/// DeepSpeed's engine around a model.
pub(crate) struct Engine(Rc<dyn Strategy>);

impl Engine {
    /// `deepspeed.initialize` on a model of `parameters`, which are trained; none where ranks divide the work
    /// otherwise. `parts`: the parameters that ranks share.
    pub(crate) fn new(
        session: &Rc<Session>,
        setup: &Setup,
        parameters: &[Tensor],
        parts: Option<Rc<Parts>>,
    ) -> Option<Self> {
        if let Some(parts) = parts {
            return Some(Self(gathered::Gathered::wrap(parts, parameters)));
        }
        let Some(super::Parallel::Zero(options)) = &setup.parallel else { return None };
        let dtype = parameters.first()?.dtype();
        let job = Job::new(session, options, setup, dtype);
        // Which of its optimizers DeepSpeed takes.
        let bf16 = options.stage == Stage::One && dtype == Dtype::Bf16 && job.accumulated() == Dtype::Fp32;
        Some(Self(if bf16 && !job.offloads_optimizer {
            bf16::Bf16::wrap(job, parameters)
        } else {
            flat::Flat::wrap(job, parameters)
        }))
    }

    /// Before the forward pass of a micro-batch.
    pub(crate) fn begin_forward(&self) {
        self.0.begin_forward();
    }

    /// `engine.backward(loss)`.
    pub(crate) fn backward(&self, loss: &Tensor, last: bool) {
        self.0.begin_backward(last);
        let averaged = loss.div_scalar();
        let scaled = self.0.scales_loss().then(|| averaged.mul_scalar());
        backward(scaled.as_ref().unwrap_or(&averaged));
        self.0.end_backward();
        engine::release!(scaled, averaged);
    }

    /// `engine.step()` after the last micro-batch.
    pub(crate) fn step(&self) {
        self.0.step();
    }
}
