//! `vramledger plan`.

use std::fmt;

use anyhow::{Error, Result, anyhow, bail};
use report::PlanReport;
use vramledger::models::{Contradiction, Lora, Setup};
use vramledger::{Grows, NamedModel, PlanQuestion};

use crate::args::{Common, Format, PlanArgs, PlanSettings};
use crate::exit::Exit;
use crate::{failure, output, setup_file};

/// Answers `plan`.
pub fn run(args: PlanArgs, common: &Common) -> Result<Exit> {
    let (settings, places) = match &args.setup {
        Some(path) => setup_file::read(path, &args.settings)?,
        None => (args.settings, Vec::new()),
    };
    let placed = |refused: Refused| setup_file::placed(refused.error, &refused.others, &places);
    let model = vramledger::load_model(&args.model)?;
    if !args.vary.is_empty() {
        return super::vary::run(&model, &settings, &args.vary, common);
    }
    let question = question(&model, &settings).map_err(placed)?;
    if let Some(grows) = args.largest {
        return largest(&question, grows, common);
    }
    let mut plan = vramledger::plan(question).map_err(|error| placed(error.into()))?;
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

/// Answers `plan --largest`.
fn largest(question: &PlanQuestion<'_>, grows: Grows, common: &Common) -> Result<Exit> {
    if output::tape_path(&mut common.clone()).is_some() {
        bail!(
            "`-o FILE.vlt` keeps the tape of one plan, and `--largest` runs several: leave one of them out"
        );
    }
    let found = vramledger::largest(question, grows)?;
    output::answer(&found, common)?;
    Ok(if found.value.is_some() { Exit::Yes } else { Exit::No })
}

/// Why settings are no question, and which of them the sentence does not name.
pub struct Refused {
    /// The sentence.
    pub error: Error,
    /// Settings that it does not name.
    pub others: Vec<&'static str>,
}

impl<E: Into<Error>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self { error: error.into(), others: Vec::new() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// The question that `settings` ask of `model`.
pub fn question<'a>(model: &'a NamedModel, settings: &PlanSettings) -> Result<PlanQuestion<'a>, Refused> {
    let setup = setup(settings)?;
    if let Some(Contradiction { sentence, settings }) = model.model.contradiction(&setup) {
        return Err(Refused { error: anyhow!(sentence), others: settings });
    }
    let card = settings.gpu.as_deref().unwrap_or(vramledger::models::GPUS[0].name);
    let mut gpu = vramledger::find_gpu(card)?.clone();
    gpu.capacity = settings.capacity.unwrap_or(gpu.capacity);
    Ok(PlanQuestion {
        model,
        setup,
        gpu,
        context: settings.context.unwrap_or(vramledger::CONTEXT),
        alloc_conf: settings.alloc_conf.clone().unwrap_or_default(),
    })
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
        fp32_state: settings.fp32_state,
        master_weights: settings.master_weights,
        accumulate: settings.accumulate.unwrap_or(usual.accumulate),
        world_size: settings.ranks.world_size.unwrap_or(usual.world_size),
        rank: settings.ranks.rank.unwrap_or(usual.rank),
        parallel: settings.ranks.parallel()?,
        zero_grad: settings.zero_grad.unwrap_or(usual.zero_grad),
        clip_grad_norm: settings.clip_grad_norm.or(usual.clip_grad_norm),
        offload: settings.offload.clone(),
        keep_outputs: settings.keep_outputs,
        loss: settings.loss.or(usual.loss),
        steps: settings.steps.unwrap_or(usual.steps),
        freeze: settings.freeze.clone(),
        quantize: settings.quantize,
        prepare_kbit: settings.prepare_kbit,
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
    let usual = Lora::of_rank(rank);
    Ok(Some(Lora {
        targets: settings.lora_targets.clone(),
        dropout: settings.lora_dropout.unwrap_or(usual.dropout),
        dtype: settings.lora_dtype.unwrap_or(usual.dtype),
        ..usual
    }))
}
