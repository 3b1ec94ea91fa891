//! How ranks divide the training of a model, and what each of them holds.

mod ddp;
mod fsdp2;
mod megatron;
mod zero;

use std::rc::Rc;

use engine::{Session, Tensor, copies};

use crate::contradiction::Contradiction;
use crate::network::Built;
use crate::setup::{Offload, Setup};
use crate::shards::{Sharding, State};

pub use ddp::Ddp;
pub use fsdp2::{Fsdp2, Reshard};
pub(crate) use fsdp2::{Job, Shard, Unit};
pub(crate) use megatron::Distributed;
pub use megatron::Megatron;
pub(crate) use zero::{Engine, Owner, Parts, Passage, run_gathered};
pub use zero::{Stage, Zero};

/// How the work of a step is divided between ranks, with the options of the framework that does it.
#[derive(Clone, Debug, PartialEq)]
pub enum Parallel {
    /// `DistributedDataParallel`: each rank holds all, and gradients are summed in buckets.
    Ddp(Ddp),
    /// `fully_shard` of FSDP2 on every block and the root, perhaps replicated (HSDP).
    Fsdp2(Fsdp2),
    /// DeepSpeed's ZeRO.
    Zero(Zero),
    /// Megatron's distributed optimizer.
    MegatronDo(Megatron),
}

impl Parallel {
    /// Its name on the command line.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ddp(_) => "ddp",
            Self::Fsdp2(options) => options.name(),
            Self::Zero(options) => options.name(),
            Self::MegatronDo(_) => "megatron-do",
        }
    }

    /// The dtype in which the model computes, where it is not that of the weights.
    pub(crate) const fn compute_dtype(&self) -> Option<ledger::Dtype> {
        match self {
            Self::Ddp(_) => None,
            Self::Fsdp2(options) => options.param_dtype,
            Self::Zero(_) => None,
            Self::MegatronDo(_) => None,
        }
    }

    /// The ranks that share each gradient by its rows, of `world`.
    pub(crate) fn shards(&self, world: u32) -> u32 {
        match self {
            Self::Ddp(_) | Self::Zero(_) | Self::MegatronDo(_) => 1,
            Self::Fsdp2(options) => options.shards(world),
        }
    }

    /// The ranks of `world` that each hold a part of `state`; 1 where each holds all of it.
    pub fn divided_among(&self, state: State, world: u32) -> u32 {
        let divided =
            Sharding::ALL.iter().any(|sharding| sharding.as_str() == self.name() && sharding.divides(state));
        match self {
            _ if !divided => 1,
            Self::Fsdp2(options) => options.shards(world),
            Self::Ddp(_) | Self::Zero(_) | Self::MegatronDo(_) => world,
        }
    }

    /// What the plan has to assume of it.
    pub(crate) fn assumptions(&self, setup: &Setup) -> Vec<String> {
        match self {
            Self::Ddp(options) => options.assumptions(setup),
            Self::Fsdp2(options) => options.assumptions(setup),
            Self::Zero(options) => options.assumptions(setup),
            Self::MegatronDo(options) => options.assumptions(setup),
        }
    }

    /// The settings that it cannot have, where there are any.
    fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        match self {
            Self::Ddp(options) => options.contradiction(setup),
            Self::Fsdp2(options) => options.contradiction(setup),
            Self::Zero(options) => options.contradiction(setup),
            Self::MegatronDo(options) => options.contradiction(setup),
        }
    }
}

/// What the training loop asks of the framework that divides the work.
pub(crate) trait Ranks {
    /// Before the forward pass of a micro-batch; `last`: of the last one before the update.
    fn begin(&self, _last: bool) {}

    /// Before the same, once the batch is there.
    fn before_forward(&self) {}

    /// After the backward pass of a micro-batch.
    fn after_backward(&self) {}
}

/// Whether the framework hands out copies of what the model gives.
pub(crate) fn copies_results(setup: &Setup) -> bool {
    matches!(&setup.parallel, Some(Parallel::Ddp(options)) if options.find_unused_parameters)
}

/// Copies of the `results` of a model, which die once these are there.
pub(crate) fn copied(results: Vec<Tensor>) -> Vec<Tensor> {
    let copies = copies(&results, "result");
    for result in results {
        drop(result);
    }
    copies
}

/// The framework around `model`, where it stands around the whole of it once it is made.
pub(crate) fn wrap(session: &Rc<Session>, setup: &Setup, model: &Built) -> Option<Rc<dyn Ranks>> {
    let Some(Parallel::Ddp(options)) = &setup.parallel else { return None };
    let ranks: Rc<dyn Ranks> = ddp::Reducer::new(session, options, model, setup.world_size);
    Some(ranks)
}

/// The training whose ranks share the parameters, and the unit of the root; none where each rank has all of them.
pub(crate) fn share(session: &Rc<Session>, setup: &Setup) -> Option<(Rc<Job>, Rc<Unit>)> {
    let Some(Parallel::Fsdp2(options)) = &setup.parallel else { return None };
    let rank = (setup.rank, setup.world_size);
    let job = Job::new(session, options, rank, setup.offloads(Offload::Parameters));
    let root = job.root();
    Some((job, root))
}

/// The forward pass of a module over `inputs`, whose parameters `unit` has where ranks share them.
pub(crate) fn run<const N: usize>(
    unit: Option<&Rc<Unit>>,
    inputs: [&Tensor; N],
    forward: impl FnOnce([&Tensor; N]) -> Tensor,
) -> Tensor {
    let Some(unit) = unit else { return forward(inputs) };
    let inputs = inputs.into_iter().cloned().collect();
    let mut results = unit.run(inputs, |inputs| vec![forward(std::array::from_fn(|index| &inputs[index]))]);
    results.swap_remove(0)
}

/// More ranks than any job has: some collectives make a tensor for each.
const MOST_RANKS: u32 = 1 << 20;

/// The first settings of ranks that rule each other out.
pub(crate) fn contradiction(setup: &Setup) -> Option<Contradiction> {
    let told = |settings: &[&'static str], sentence: String| {
        Some(Contradiction { settings: settings.to_vec(), sentence })
    };
    if setup.world_size > 0 && setup.rank >= setup.world_size {
        let (rank, world) = (setup.rank, setup.world_size);
        let sentence = format!("`--rank {rank}`: ranks count from 0, and `--world-size` is {world}");
        return told(&["rank", "world-size"], sentence);
    }
    if setup.parallel.is_some() && setup.world_size > MOST_RANKS {
        let sentence = format!("`--world-size {}`: at most {MOST_RANKS} ranks are planned", setup.world_size);
        return told(&["world-size"], sentence);
    }
    let Some(parallel) = &setup.parallel else {
        let sentence = "`--rank` is of ranks that divide the work: it needs `--parallel`".to_owned();
        return if setup.rank > 0 { told(&["rank"], sentence) } else { None };
    };
    parallel.contradiction(setup)
}
