//! The training loop: load, then steps of forward, backward and update.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use engine::{Collective, Hardware, Messages, Profile, Session, Tensor, Traffic, backward};
use ledger::{Device, DeviceKind, Phase};

use crate::gpus::Gpu;
use crate::network::{Built, Pass};
use crate::optim::{Form, Masters, Offloaded, Optimizer, clip_grad_norm};
use crate::parallel::{self, Distributed, Engine, Parallel};
use crate::run::{Flops, PlanError, Run};
use crate::setup::{Offload, Optimizer as OptimizerKind, Setup, Torch, ZeroGrad};

/// A session on `gpu` under the release of torch that `setup` names.
pub(crate) fn session(gpu: &Gpu, setup: &Setup) -> Rc<Session> {
    let device = Device {
        name: gpu.name.to_owned(),
        kind: DeviceKind::Gpu,
        capacity: Some(gpu.capacity),
        context: None,
    };
    let session = Session::new(device, hardware(gpu), profile(setup.torch));
    if !setup.offload.is_empty() {
        let kind = DeviceKind::Cpu;
        session.add_host(Device { name: "host".into(), kind, capacity: None, context: None });
    }
    session
}

/// What a release of torch decides.
pub(crate) const fn profile(torch: Torch) -> Profile {
    match torch {
        Torch::V2_6 => Profile::TORCH_2_6,
        Torch::V2_11 => Profile::TORCH_2_11,
        Torch::V2_15 => Profile::TORCH_2_15,
    }
}

/// What operators ask of `gpu`. Resident threads of a multiprocessor go by compute capability (CUDA C++
/// programming guide, technical specifications).
pub(crate) fn hardware(gpu: &Gpu) -> Hardware {
    let threads = match gpu.compute_capability {
        (7, 5) => 1024,
        (8, 6 | 7 | 9) | (12, _) => 1536,
        _ => 2048,
    };
    Hardware {
        compute_capability: gpu.compute_capability,
        multiprocessors: u64::from(gpu.multiprocessors),
        threads_per_multiprocessor: threads,
    }
}

/// Runs the steps of `setup` on the model that `build` puts on the device.
pub(crate) fn train(
    session: &Rc<Session>,
    setup: &Setup,
    build: impl FnOnce() -> Built,
    assumptions: Vec<String>,
) -> Result<Run, PlanError> {
    session.mark(0, None, Phase::LOAD);
    let mut model = session.with_grad(false, build);
    if let Some((setting, name)) = model.unmet.first() {
        let what = if *setting == "freeze" { "parameter" } else { "linear layer" };
        return Err(PlanError(format!("`--{setting}` names `{name}`, which is no {what} of the model")));
    }
    if model.trainable.is_empty() {
        return Err(PlanError("`--freeze` leaves nothing to train".into()));
    }
    let wrapped = parallel::wrap(session, setup, &model);
    model.ranks = wrapped.or(model.ranks.take());
    if model.parts.as_ref().is_some_and(|parts| parts.unowned()) {
        return Err(PlanError("`--parallel zero3`: mixtures of experts are not planned with it".into()));
    }
    let deepspeed = Engine::new(session, setup, &model.trainable, model.parts.clone());
    let mut update = match deepspeed {
        Some(engine) => Update::OfEngine(engine),
        None => Update::new(session, setup, &model.trainable, &model.vocabulary),
    };
    let mut pass = Pass::default();
    let mut input = None;
    let mut before = BTreeMap::new();
    for step in 1..=setup.steps {
        before = session.collectives();
        let seq = setup.seq_of_step(step);
        for micro_batch in 1..=setup.accumulate {
            session.mark(step, Some(micro_batch), Phase::FORWARD);
            if let Some(ranks) = &model.ranks {
                ranks.begin(micro_batch == setup.accumulate);
            }
            let batch = model.network.input(session, seq);
            input = Some(batch.clone());
            if let Some(ranks) = &model.ranks {
                ranks.before_forward();
            }
            if let Update::OfEngine(engine) = &update {
                engine.begin_forward();
            }
            match setup.saved_on_host() {
                None => model.network.forward(&batch, &mut pass),
                Some(pinning) => {
                    session.saved_on_host(pinning, || model.network.forward(&batch, &mut pass));
                }
            }
            drop(batch);
            session.mark(step, Some(micro_batch), Phase::BACKWARD);
            if let Some(loss) = pass.loss() {
                if let Update::OfEngine(engine) = &update {
                    engine.backward(loss, micro_batch == setup.accumulate);
                } else {
                    let mut scaled = if setup.accumulate > 1 { loss.div_scalar() } else { loss.clone() };
                    if let Update::OfShards(optimizer) = &update {
                        scaled = optimizer.scaled(&scaled);
                    }
                    backward(&scaled);
                }
            }
            if let Some(ranks) = &model.ranks {
                ranks.after_backward();
            }
        }
        session.mark(step, None, Phase::UPDATE);
        session.with_grad(false, || {
            match &mut update {
                Update::OfEngine(engine) => return engine.step(),
                Update::OfShards(optimizer) => return optimizer.step(),
                _ => {}
            }
            let stepped = update.stepped(&model.trainable);
            if setup.clip_grad_norm.is_some() {
                let shared =
                    setup.parallel.as_ref().is_some_and(|parallel| parallel.shards(setup.world_size) > 1);
                clip_grad_norm(&stepped, shared);
            }
            update.run(setup.zero_grad);
        });
    }
    let (counted, copied) = (session.flops(), session.traffic());
    let steps = u64::from(setup.steps.max(1));
    let tape = session.take_tape();
    for parameter in &model.trainable {
        parameter.on_accumulated(None);
    }
    drop((input, model.buffers));
    session.release();
    let flops = Flops {
        forward: counted.forward / steps,
        backward: counted.backward / steps,
        recompute: counted.recompute / steps,
        update: counted.update / steps,
    };
    let traffic = Traffic { to_host: copied.to_host / steps, from_host: copied.from_host / steps };
    let collectives = since(&before, session.collectives());
    Ok(Run { tape, parameters: model.parameters, flops, traffic, collectives, assumptions })
}

/// What ranks did together since they had done `before`.
fn since(
    before: &BTreeMap<Collective, Messages>,
    mut now: BTreeMap<Collective, Messages>,
) -> BTreeMap<Collective, Messages> {
    for (kind, messages) in before {
        let now = now.entry(*kind).or_default();
        now.count -= messages.count;
        now.bytes -= messages.bytes;
    }
    now.retain(|_, messages| messages.count > 0);
    now
}

/// When the optimizers step.
enum Update {
    /// After backward, each over its parameters.
    Phase(Vec<Optimizer>),
    /// After backward, each over copies of its parameters.
    OfMasters(Masters, Vec<Optimizer>),
    /// After backward, on the host.
    OnHost(Offloaded),
    /// In backward, an optimizer a parameter.
    InBackward,
    /// That of DeepSpeed's engine.
    OfEngine(Engine),
    /// After backward, each rank over its part.
    OfShards(Distributed),
}

impl Update {
    fn new(session: &Rc<Session>, setup: &Setup, parameters: &[Tensor], vocabulary: &[Tensor]) -> Self {
        if let Some(Parallel::MegatronDo(options)) = &setup.parallel
            && let Some(optimizer) = Distributed::new(session, options, setup, parameters)
        {
            return Self::OfShards(optimizer);
        }
        if setup.offloads(Offload::Optimizer) {
            return Self::OnHost(Offloaded::new(Form::new(setup), parameters));
        }
        let optimizers = |groups: &[(Form, Vec<Tensor>)]| {
            groups.iter().map(|(form, group)| Optimizer::new(*form, group)).collect()
        };
        if setup.master_weights {
            let masters = Masters::new(parameters);
            let groups = groups(setup, &masters.copies(), &masters.copies_of(vocabulary));
            return Self::OfMasters(masters, optimizers(&groups));
        }
        let groups = groups(setup, parameters, vocabulary);
        if !setup.optimizer_in_backward {
            return Self::Phase(optimizers(&groups));
        }
        let form_of = |parameter: &Tensor| {
            let of_it = |(_, group): &&(Form, Vec<Tensor>)| group.iter().any(|other| other.same(parameter));
            groups.iter().find(of_it).map(|(form, _)| *form)
        };
        for (parameter, form) in parameters.iter().filter_map(|one| Some((one, form_of(one)?))) {
            let own = RefCell::new(Optimizer::new(form, std::slice::from_ref(parameter)));
            parameter.on_accumulated(Some(Rc::new(move || {
                own.borrow_mut().step();
                own.borrow().zero_grad();
            })));
        }
        Self::InBackward
    }

    /// The parameters, or their copies, whose gradients the step takes.
    fn stepped(&self, parameters: &[Tensor]) -> Vec<Tensor> {
        let Self::OfMasters(masters, _) = self else { return parameters.to_vec() };
        masters.take_gradients();
        masters.copies()
    }

    fn run(&mut self, zero_grad: ZeroGrad) {
        match self {
            Self::OfMasters(masters, optimizers) => {
                optimizers.iter_mut().for_each(Optimizer::step);
                if zero_grad == ZeroGrad::SetToNone {
                    optimizers.iter().for_each(Optimizer::zero_grad);
                    masters.zero_grad();
                }
            }
            Self::Phase(optimizers) => {
                optimizers.iter_mut().for_each(Optimizer::step);
                if zero_grad == ZeroGrad::SetToNone {
                    optimizers.iter().for_each(Optimizer::zero_grad);
                }
            }
            Self::OnHost(optimizer) => {
                optimizer.step();
                optimizer.zero_grad();
            }
            Self::InBackward | Self::OfEngine(_) | Self::OfShards(_) => {}
        }
    }
}

/// The parameters of each optimizer: Muon has the matrices of hidden layers, AdamW what it leaves.
fn groups(setup: &Setup, parameters: &[Tensor], vocabulary: &[Tensor]) -> Vec<(Form, Vec<Tensor>)> {
    let form = Form::new(setup);
    if setup.optimizer != OptimizerKind::Muon {
        return vec![(form, parameters.to_vec())];
    }
    let hidden = |parameter: &&Tensor| {
        parameter.shape().len() == 2 && !vocabulary.iter().any(|weight| weight.same(parameter))
    };
    let (matrices, others): (Vec<&Tensor>, Vec<&Tensor>) = parameters.iter().partition(hidden);
    let adamw = Form::new(&Setup { optimizer: OptimizerKind::AdamW, optimizer_impl: None, ..setup.clone() });
    let groups =
        [(form, matrices), (adamw, others)].map(|(form, group)| (form, group.into_iter().cloned().collect()));
    groups.into_iter().filter(|(_, group): &(Form, Vec<Tensor>)| !group.is_empty()).collect()
}
