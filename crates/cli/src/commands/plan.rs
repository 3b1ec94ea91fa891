//! `vramledger plan`.

use anyhow::{Error, Result, anyhow, bail};
use report::PlanReport;
use vramledger::PlanQuestion;
use vramledger::ledger::Dtype;
use vramledger::models::{Lora, Setup};

use crate::args::{Common, Format, PlanArgs, PlanSettings};
use crate::exit::Exit;
use crate::{failure, output, setup_file};

/// Answers `plan`.
pub fn run(args: PlanArgs, common: &Common) -> Result<Exit> {
    let (settings, places) = match &args.setup {
        Some(path) => setup_file::read(path, &args.settings)?,
        None => (args.settings, Vec::new()),
    };
    let placed = |error: Error, others: &[&str]| setup_file::placed(error, others, &places);
    let model = vramledger::load_model(&args.model)?;
    let setup = setup(&settings).map_err(|error| placed(error, &[]))?;
    if let Some(contradiction) = model.model.contradiction(&setup) {
        return Err(placed(anyhow!(contradiction.sentence), &contradiction.settings));
    }
    let mut gpu =
        vramledger::find_gpu(settings.gpu.as_deref().unwrap_or(vramledger::models::GPUS[0].name))?.clone();
    gpu.capacity = settings.capacity.unwrap_or(gpu.capacity);
    let question = PlanQuestion {
        model: &model,
        setup,
        gpu,
        context: settings.context.unwrap_or(vramledger::CONTEXT),
        alloc_conf: settings.alloc_conf.clone().unwrap_or_default(),
    };
    let mut plan = vramledger::plan(question).map_err(|error| placed(error.into(), &[]))?;
    let mut common = common.clone();
    if let Some(path) = output::tape_path(&mut common) {
        output::write_file(&path, &vramledger::tape_file(&plan)?)?;
        plan.ledger.tape = Some(path.display().to_string());
    }
    let explanation = match common.format {
        Format::Text | Format::Markdown => vramledger::explain_plan(&plan),
        Format::Json | Format::Csv => vramledger::explain(&plan.ledger),
    };
    let report = PlanReport { ledger: &plan.ledger, explanation: &explanation };
    output::answer_with(&plan.ledger, &report, &common)?;
    failure::warn(&plan.ledger.warnings, &common);
    Ok(if plan.ledger.fits == Some(false) { Exit::No } else { Exit::Yes })
}

/// The setup that `settings` ask for.
fn setup(settings: &PlanSettings) -> Result<Setup> {
    let usual = Setup::default();
    Ok(Setup {
        batch: settings.batch.unwrap_or(usual.batch),
        seqs: settings.seq.map_or_else(|| settings.seqs.clone(), |seq| vec![seq]),
        dtype: settings.dtype.or(usual.dtype),
        autocast: settings.autocast.map_or(usual.autocast, |autocast| autocast.0),
        attention: settings.attention.unwrap_or(usual.attention),
        sdpa_kernel: settings.sdpa_kernel.unwrap_or(usual.sdpa_kernel),
        checkpoint: settings.checkpoint.clone().unwrap_or(usual.checkpoint),
        checkpoint_reentrant: settings.checkpoint_reentrant,
        optimizer: settings.optimizer.unwrap_or(usual.optimizer),
        optimizer_impl: settings.optimizer_impl.or(usual.optimizer_impl),
        momentum: settings.momentum.unwrap_or(usual.momentum),
        nesterov: settings.nesterov,
        weight_decay: settings.weight_decay.or(usual.weight_decay),
        amsgrad: settings.amsgrad,
        capturable: settings.capturable,
        optimizer_in_backward: settings.optimizer_in_backward,
        accumulate: settings.accumulate.unwrap_or(usual.accumulate),
        world_size: settings.world_size.unwrap_or(usual.world_size),
        zero_grad: settings.zero_grad.unwrap_or(usual.zero_grad),
        clip_grad_norm: settings.clip_grad_norm.or(usual.clip_grad_norm),
        offload: settings.offload.clone(),
        keep_outputs: settings.keep_outputs,
        mlp_loss: settings.loss.unwrap_or(usual.mlp_loss),
        steps: settings.steps.unwrap_or(usual.steps),
        lora: lora(settings)?,
        torch: settings.torch.unwrap_or(usual.torch),
    })
}

/// The adapters that `settings` ask for.
fn lora(settings: &PlanSettings) -> Result<Option<Lora>> {
    let Some(rank) = settings.lora_rank else {
        let given = [
            ("lora-alpha", settings.lora_alpha.is_some()),
            ("lora-targets", !settings.lora_targets.is_empty()),
            ("lora-dropout", settings.lora_dropout.is_some()),
            ("lora-dtype", settings.lora_dtype.is_some()),
        ];
        return match given.iter().find(|(_, given)| *given) {
            Some((key, _)) => bail!("`--{key}` is of adapters: it needs `--lora-rank`"),
            None => Ok(None),
        };
    };
    Ok(Some(Lora {
        rank,
        targets: settings.lora_targets.clone(),
        dropout: settings.lora_dropout.unwrap_or(0.0),
        dtype: settings.lora_dtype.unwrap_or(Dtype::Fp32),
    }))
}
