//! A question in, an answer out.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod emulate;
pub mod plan;
mod read;
mod vary;

use anyhow::{Context as _, Result, anyhow, bail};
use vramledger::ledger::Found;
use vramledger::{RankQuestion, SimulateQuestion, TradeoffQuestion};

use crate::args::{CheckpointPlanArgs, Cli, Command, Common, PlanSettings};
use crate::commands::plan::Refused;
use crate::exit::Exit;
use crate::input::NamedFile;
use crate::output::answer;
use crate::{failure, setup_file};

/// Answers the question of `cli`; `emulator` is the library of the emulated device, where it is no file.
#[cfg_attr(
    not(all(target_os = "linux", target_arch = "x86_64")),
    expect(unused_variables, reason = "`emulate` runs there alone")
)]
pub fn run(cli: Cli, emulator: Option<&'static [u8]>) -> Result<Exit> {
    let common = &cli.common;
    match cli.command {
        Command::Plan(args) => return plan::run(*args, common),
        Command::Read(args) => return read::run(&args, common),
        Command::Simulate(args) => {
            let usual = ["", "expandable_segments:True"].map(String::from);
            let question = SimulateQuestion {
                alloc_confs: if args.alloc_conf.is_empty() { &usual } else { &args.alloc_conf },
                gpu: args.gpu.as_deref().map(vramledger::find_gpu).transpose()?,
                capacity: args.capacity,
                context: args.context,
                torch: args.torch,
            };
            let (path, bytes) = args.tape.contents()?;
            let answered = vramledger::simulate(&args.tape.name, &path, &bytes, &question)?;
            answer(&answered, common)?;
            failure::warn(&answered.warnings, common);
        }
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        Command::Emulate(args) => return emulate::run(&args, emulator, common),
        #[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
        Command::Emulate(_) => {
            let (system, machine) = (std::env::consts::OS, std::env::consts::ARCH);
            return Err(vramledger::emulate::elsewhere("this program", system, machine).into());
        }
        Command::Compare(args) => {
            let (base, others) = (args.base.ledger()?, args.others.iter().map(NamedFile::ledger));
            let others = others.collect::<Result<Vec<_>>>()?;
            let named: Vec<_> = args.others.iter().map(|file| file.name.as_str()).zip(&others).collect();
            answer(&vramledger::compare((&args.base.name, &base), &named)?, common)?;
        }
        Command::Reconcile(args) => {
            let answered = match (&args.evidence, args.allocated, args.reserved, args.capacity) {
                (Some(evidence), ..) => {
                    let (predicted, found) = (args.predicted.contents()?, evidence.contents()?);
                    vramledger::reconcile_evidence((&predicted.0, &predicted.1), (&found.0, &found.1))?
                }
                (None, Some(allocated), Some(reserved), Some(capacity)) => {
                    let predicted = args.predicted.ledger()?;
                    let found = Found { allocated, reserved, capacity };
                    vramledger::reconcile(&args.predicted.name, &predicted, found, args.at.as_deref())?
                }
                _ => bail!("`reconcile` needs evidence, or `--allocated`, `--reserved` and `--capacity`"),
            };
            answer(&answered, common)?;
            return Ok(if answered.agrees() { Exit::Yes } else { Exit::No });
        }
        Command::Budget(args) => {
            let sizes =
                if args.params.is_empty() { &vramledger::DEFAULT_SIZES } else { args.params.as_slice() };
            let Some((parallel, world_size)) = args.parallel.zip(args.world_size) else {
                answer(&vramledger::budget(sizes, vramledger::find_gpu(&args.gpu)?, args.gpus)?, common)?;
                return Ok(Exit::Yes);
            };
            let model = args.model.as_deref().map(vramledger::load_model).transpose()?;
            let question = RankQuestion {
                parallel,
                world_size,
                rank: args.rank.unwrap_or(0),
                shard_size: args.shard_size,
                model: model.as_ref(),
                sizes,
            };
            answer(&vramledger::rank_budget(&question)?, common)?;
        }
        Command::CheckpointPlan(args) => checkpoint_plan(*args, common)?,
        Command::Tradeoff(args) => {
            let question = TradeoffQuestion {
                batch: args.batch,
                seq: args.seq,
                hidden: args.hidden,
                dtype: args.dtype,
                saved_fraction: args.saved_fraction,
                extra_forward: args.extra_forward,
            };
            answer(&vramledger::tradeoff(question)?, common)?;
        }
        Command::Models => answer(&vramledger::model_catalogue(), common)?,
        Command::Gpus => answer(&vramledger::gpu_catalogue(), common)?,
    }
    Ok(Exit::Yes)
}

/// Answers `checkpoint-plan`: in units of a layer, or of a model under a budget.
fn checkpoint_plan(args: CheckpointPlanArgs, common: &Common) -> Result<()> {
    let (Some(model), Some(budget)) = (&args.model, args.budget) else {
        let layers = args.layers.context("checkpoint-plan needs a model or --layers")?;
        if args.setup.is_some() || args.settings != PlanSettings::default() {
            bail!("`--layers` counts units of a layer: the settings of a run need a model");
        }
        return answer(&vramledger::checkpoint_plan(layers, args.segment)?, common);
    };
    let (settings, places) = match &args.setup {
        Some(path) => setup_file::read(path, &args.settings)?,
        None => (args.settings, Vec::new()),
    };
    let placed = |refused: Refused| setup_file::placed(refused.error, &refused.others, &places);
    if settings.checkpoint.is_some() {
        return Err(placed(anyhow!("`--checkpoint` is what checkpoint-plan searches").into()));
    }
    let model = vramledger::load_model(model)?;
    let question = plan::question(&model, &settings).map_err(placed)?;
    let answered = vramledger::checkpoint_budget(question, budget);
    answer(&answered.map_err(|error| placed(error.into()))?, common)
}
