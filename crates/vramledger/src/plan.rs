//! A model, a setup and a card in; the ledger of the training step out.

use ledger::{Bytes, DeviceKind, Dtype, Tape};
use models::{Attention, Gpu, Loss, Optimizer, Parallel, Run, Setup};
use serde_json::{Map, Value, json};
use wire::{About, Batch, Flops, Ledger, Outside, Parameters, Traffic};

use crate::fit::{self, Fit};
use crate::vary::ONE_PROCESS;
use crate::{Error, NamedModel, rank};

/// What a CUDA context takes of a card, where nothing else is said.
pub const CONTEXT: Bytes = Bytes::mib(550);

/// What `plan` is asked.
#[derive(Clone, Debug)]
pub struct PlanQuestion<'a> {
    /// The model.
    pub model: &'a NamedModel,
    /// How it is trained. Without lengths a model of text takes up to 4096 tokens.
    pub setup: Setup,
    /// The card, with the capacity that counts.
    pub gpu: Gpu,
    /// What of the capacity the allocator never sees.
    pub context: Bytes,
    /// The allocator's settings, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub alloc_conf: String,
}

/// What `plan` answers.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The question, with what it left open filled in.
    pub question: PlanQuestion<'a>,
    /// The books.
    pub ledger: Ledger,
    /// The run they were made from.
    pub tape: Tape,
    /// What is known of the run besides; a tape file keeps it.
    pub about: About,
}

/// Runs the steps of the question on shapes and replays what they did to memory.
///
/// # Errors
/// A setup out of range, one that the model cannot run, or more than a tape holds.
pub fn plan(mut question: PlanQuestion<'_>) -> Result<Plan<'_>, Error> {
    let mut assumptions = Vec::new();
    if let Some(seq) = question.model.model.usual_seq().filter(|_| question.setup.seqs.is_empty()) {
        question.setup.seqs = vec![seq];
        assumptions.push(format!("no length was given: samples of {seq} tokens are taken"));
    }
    check(&question)?;
    let run = run(&question)?;
    let fit = fitted(&question, &run.tape)?;
    let ranks = question.setup.parallel.as_ref().map(|parallel| rank::ranks(&question.setup, parallel, &run));
    assumptions.extend(run.assumptions);
    let batch = batch(&question.setup)?;
    let longest = question.setup.seqs.iter().max();
    let tokens = longest.and_then(|tokens| tokens.checked_mul(batch.effective_batch?));
    let about = About {
        subject: subject(&question),
        parameters: Some(Parameters {
            total: run.parameters.total,
            trainable: run.parameters.trainable,
            bytes: run.parameters.bytes,
        }),
        flops: Some(Flops {
            forward: run.flops.forward,
            backward: run.flops.backward,
            recompute: run.flops.recompute,
            update: run.flops.update,
        }),
        batch: Some(batch),
        tokens,
        traffic: Some(Traffic { to_host_bytes: run.traffic.to_host, from_host_bytes: run.traffic.from_host }),
        ranks,
        outside: vec![outside(0, question.context)],
        assumptions,
        interpretation_limits: vec![ONE_PROCESS.into()],
        warnings: warnings(&question, fit.retries),
        ..About::new(ledger::Provenance::Estimated)
    };
    let mut ledger = Ledger::new(about.clone(), &fit.books);
    ledger.oom = fit.oom;
    ledger.fits = Some(fit.fits);
    ledger.headroom_bytes = fit.headroom.map(ledger::ByteDelta::get);
    Ok(Plan { ledger, tape: run.tape, about, question })
}

/// One run of `question`, with a tape that can be replayed.
pub(crate) fn run(question: &PlanQuestion<'_>) -> Result<Run, Error> {
    let name = &question.model.name;
    let train = question.model.model.train(&question.setup, &question.gpu);
    let mut run = train.map_err(|problem| Error::Model { name: name.clone(), problem })?;
    for device in run.tape.devices.iter_mut().filter(|device| device.kind == DeviceKind::Gpu) {
        device.capacity = Some(question.gpu.capacity);
        device.context = Some(question.context);
    }
    run.tape.validate().map_err(|problem| Error::Tape { name: name.clone(), problem })?;
    Ok(run)
}

/// The books of the tape of `question`, and what the allocator says to it.
pub(crate) fn fitted(question: &PlanQuestion<'_>, tape: &Tape) -> Result<Fit, Error> {
    let (settings, _) = fit::settings(&question.alloc_conf)?;
    Ok(fit::fit(tape, &settings, fit::tie_rule(question.setup.torch)))
}

/// Refuses what the model itself does not see: `models` bounds every extent before it is multiplied.
fn check(question: &PlanQuestion<'_>) -> Result<(), Error> {
    let setup = &question.setup;
    if question.model.model.max_seq().is_none() && !setup.seqs.is_empty() {
        return Err(Error::Setup { what: "an mlp has no sequence: leave out `--seq` and `--seqs`".into() });
    }
    if !(setup.momentum.is_finite() && setup.momentum >= 0.0) {
        return Err(Error::out_of_range("--momentum", "0 or more", setup.momentum));
    }
    if let Some(decay) = setup.weight_decay.filter(|decay| !(decay.is_finite() && *decay >= 0.0)) {
        return Err(Error::out_of_range("--weight-decay", "0 or more", decay));
    }
    if let Some(norm) = setup.clip_grad_norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
        return Err(Error::out_of_range("--clip-grad-norm", "more than 0", norm));
    }
    if let Some(lora) = &setup.lora {
        if !(1..=1 << 16).contains(&lora.rank) {
            return Err(Error::out_of_range("--lora-rank", "1 to 65536", lora.rank));
        }
        if !(0.0..1.0).contains(&lora.dropout) {
            return Err(Error::out_of_range("--lora-dropout", "0 or more and less than 1", lora.dropout));
        }
    }
    if question.context >= question.gpu.capacity {
        let range = format!("less than the capacity, {}", question.gpu.capacity);
        return Err(Error::out_of_range("--context", range, question.context));
    }
    Ok(())
}

/// The samples of one update, and how often forward and backward run for it.
fn batch(setup: &Setup) -> Result<Batch, Error> {
    let (accumulate, world_size) = (u64::from(setup.accumulate), u64::from(setup.world_size));
    let effective = setup.batch.checked_mul(accumulate).and_then(|samples| samples.checked_mul(world_size));
    let effective_batch = effective.ok_or_else(|| {
        let value = format!("{} x {accumulate} x {world_size}", setup.batch);
        Error::out_of_range("--batch x --accumulate x --world-size", "below 2^64", value)
    })?;
    Ok(Batch {
        micro_batch: Some(setup.batch),
        accumulate,
        world_size,
        effective_batch: Some(effective_batch),
        forward_backward_rounds: accumulate,
    })
}

/// The CUDA context on `device`.
pub(crate) fn outside(device: u16, context: Bytes) -> Outside {
    let sentence = "differs by card, driver and loaded kernels";
    Outside { device, name: "CUDA context".into(), bytes: context.get(), assumption: Some(sentence.into()) }
}

/// Settings that were given and do nothing.
fn warnings(question: &PlanQuestion<'_>, retries: u64) -> Vec<String> {
    let setup = &question.setup;
    let mut warnings = Vec::new();
    if let Ok((_, found)) = fit::settings(&question.alloc_conf) {
        warnings.extend(found.iter().map(ToString::to_string));
    }
    warnings.extend(fit::retried(retries));
    if setup.momentum > 0.0 && !matches!(setup.optimizer, Optimizer::Sgd | Optimizer::RmsProp) {
        warnings.push(format!("`--momentum` does nothing with {}", setup.optimizer.as_str()));
    }
    if setup.attention == Attention::Eager && setup.sdpa_kernel != models::SdpaKernel::Default {
        warnings.push("`--sdpa-kernel` does nothing with `--attention eager`".into());
    }
    if let Some(longest) = question.model.model.max_seq()
        && let Some(seq) = setup.seqs.iter().find(|seq| **seq > longest)
    {
        warnings.push(format!("{seq} tokens are more than the {longest} that the config allows"));
    }
    warnings
}

/// What the ledger is of: model, setup, software.
pub(crate) fn subject(question: &PlanQuestion<'_>) -> Map<String, Value> {
    let setup = &question.setup;
    let dtype = |dtype: Option<Dtype>| dtype.map(Dtype::as_str);
    let text = question.model.model.max_seq().is_some();
    let subject = json!({
        "model": {
            "name": question.model.name,
            "family": question.model.model.family(),
            "config": question.model.model.config().and_then(|text| serde_json::from_str::<Value>(text).ok()),
        },
        "setup": {
            "gpu": question.gpu.name,
            "capacity_bytes": question.gpu.capacity.get(),
            "context_bytes": question.context.get(),
            "batch": setup.batch,
            "seqs": setup.seqs,
            "dtype": dtype(setup.dtype),
            "autocast": dtype(setup.autocast),
            "attention": text.then_some(question.model.model.attention_of(setup.attention).as_str()),
            "sdpa_kernel": text.then_some(setup.sdpa_kernel.as_str()),
            "checkpoint": setup.checkpoint.to_string(),
            "checkpoint_reentrant": setup.checkpoint_reentrant,
            "optimizer": setup.optimizer.as_str(),
            "optimizer_impl": setup.optimizer_impl.map(models::OptimizerImpl::as_str),
            "momentum": setup.momentum,
            "nesterov": setup.nesterov,
            "weight_decay": setup.weight_decay,
            "amsgrad": setup.amsgrad,
            "capturable": setup.capturable,
            "optimizer_in_backward": setup.optimizer_in_backward,
            "fp32_state": setup.fp32_state,
            "master_weights": setup.master_weights,
            "accumulate": setup.accumulate,
            "world_size": setup.world_size,
            "rank": setup.rank,
            "parallel": setup.parallel.as_ref().map(parallel),
            "zero_grad": setup.zero_grad.as_str(),
            "clip_grad_norm": setup.clip_grad_norm,
            "offload": setup.offload.iter().map(|what| what.as_str()).collect::<Vec<_>>(),
            "keep_outputs": setup.keep_outputs,
            "loss": setup.loss.unwrap_or(if text { Loss::Default } else { Loss::MeanSquare }).to_string(),
            "freeze": setup.freeze,
            "quantize": setup.quantize.map(models::Quantize::as_str),
            "prepare_kbit": setup.prepare_kbit,
            "lora": setup.lora.as_ref().map(|lora| json!({
                "rank": lora.rank,
                "targets": lora.targets,
                "dropout": lora.dropout,
                "dtype": lora.dtype.as_str(),
            })),
            "steps": setup.steps,
            "alloc_conf": question.alloc_conf,
        },
        "software": { "torch": setup.torch.as_str() },
    });
    match subject {
        Value::Object(subject) => subject,
        _ => Map::new(),
    }
}

/// How ranks divide the work, with the options of the framework that does it.
fn parallel(parallel: &Parallel) -> Value {
    let dtype = |dtype: Option<Dtype>| dtype.map(Dtype::as_str);
    match parallel {
        Parallel::Ddp(options) => json!({
            "kind": parallel.name(),
            "gradient_as_bucket_view": options.gradient_as_bucket_view,
            "bucket_cap_mb": options.bucket_cap_mb,
            "init_sync": options.init_sync,
            "find_unused_parameters": options.find_unused_parameters,
            "lazy_bucket_allocation": options.lazy_bucket_allocation,
            "no_sync": options.no_sync,
        }),
        Parallel::Fsdp2(options) => json!({
            "kind": parallel.name(),
            "shard_size": options.shard_size,
            "reshard_after_forward": options.reshard_after_forward.to_string(),
            "root_reshard_after_forward": options.root_reshard_after_forward.unwrap_or(false),
            "mp_param_dtype": dtype(options.param_dtype),
            "mp_reduce_dtype": dtype(options.reduce_dtype),
            "no_sync": options.no_sync,
        }),
        Parallel::Zero(options) => json!({
            "kind": parallel.name(),
            "reduce_bucket_size": options.reduce_bucket_size,
            "allgather_bucket_size": options.allgather_bucket_size,
            "contiguous_gradients": options.contiguous_gradients,
            "overlap_comm": options.overlaps(),
            "round_robin_gradients": options.round_robin_gradients,
            "prefetch_bucket_size": options.prefetch_bucket_size,
            "param_persistence_threshold": options.param_persistence_threshold,
            "max_live_parameters": options.max_live_parameters,
            "max_reuse_distance": options.max_reuse_distance,
            "grad_accum_dtype": dtype(options.grad_accum_dtype),
        }),
        Parallel::MegatronDo(options) => json!({
            "kind": parallel.name(),
            "grad_reduce_in_fp32": options.grad_reduce_in_fp32,
            "overlap_grad_reduce": options.overlap_grad_reduce,
            "bucket_size": options.bucket_size,
        }),
    }
}

/// The file of a plan's tape, `.vlt`.
///
/// # Errors
/// A tape beyond the limits of the form.
pub fn tape_file(plan: &Plan<'_>) -> Result<Vec<u8>, Error> {
    Ok(wire::write_tape(&plan.about, &plan.tape)?)
}
