//! `vramledger read`.

mod ranks;

use anyhow::{Result, bail};
use report::{InstantsReport, PlanReport, ReadReport, SeriesReport};
use vramledger::{Answer, Known, Read, ReadQuestion};

use super::plan::{self, Refused};
use crate::args::{Common, Format, PlanSettings, ReadArgs};
use crate::exit::Exit;
use crate::{failure, output, setup_file};

/// Answers `read`.
pub fn run(args: &ReadArgs, common: &Common) -> Result<Exit> {
    let [file] = args.files.as_slice() else { return ranks::run(args, common) };
    let (path, source) = file.open()?;
    let question = ReadQuestion {
        by: args.by,
        depth: args.depth,
        at: args.at,
        device: args.device,
        step: args.step,
        what_if: args.what_if.clone(),
        capacity: args.capacity,
        known: known(args)?,
        size: file.size(),
    };
    let answer = vramledger::read(&path, source, &question)?;
    if question.known.is_some() && !matches!(answer, Answer::Instants(_)) {
        bail!(
            "`--model`, `--ledger` and `--params` name what an out-of-memory message asked for, and `{path}` is none"
        );
    }
    match answer {
        Answer::Instants(instants) => {
            let report = InstantsReport { name: &file.name, instants: &instants };
            output::answer_with(&instants, &report, common)?;
            Ok(Exit::Yes)
        }
        Answer::Ledger(read) => ledger(*read, &file.name, common),
        Answer::Series(series) => {
            output::answer_with(&series, &SeriesReport { name: &file.name, series: &series }, common)?;
            if !is_page(common) {
                failure::warn(&series.warnings, common);
            }
            Ok(Exit::Yes)
        }
    }
}

/// What is known of the run besides its evidence.
fn known(args: &ReadArgs) -> Result<Option<Known>> {
    if let Some(model) = &args.model {
        let (settings, places) = match &args.setup {
            Some(path) => setup_file::read(path, &PlanSettings::default())?,
            None => Default::default(),
        };
        let model = vramledger::load_model(model)?;
        let placed = |refused: Refused| setup_file::placed(refused.error, &refused.others, &places);
        let question = plan::question(&model, &settings).map_err(placed)?;
        return Ok(Some(Known::of_plan(question).map_err(|error| placed(error.into()))?));
    }
    if let Some(file) = &args.ledger {
        let (path, bytes) = file.contents()?;
        return Ok(Some(Known::of_file(&path, &bytes)?));
    }
    Ok(args.params.map(|parameters| Known::of_parameters(parameters, args.world_size.unwrap_or(1))))
}

/// Whether the answer is a page, which tells what its file does not as a part of the answer.
fn is_page(common: &Common) -> bool {
    matches!(common.format, Format::Text | Format::Markdown)
}

/// Answers with a ledger.
fn ledger(mut read: Read, name: &str, common: &Common) -> Result<Exit> {
    let mut common = common.clone();
    if let Some(path) = output::tape_path(&mut common) {
        output::write_file(&path, &read.tape_file()?)?;
        read.ledger.tape = Some(path.display().to_string());
    }
    let ledger = read.ledger;
    match &ledger.reading {
        Some(reading) => {
            let report = ReadReport { name, ledger: &ledger, reading };
            output::answer_with(&ledger, &report, &common)?;
        }
        None => {
            let explanation = vramledger::explain(&ledger);
            let report = PlanReport { ledger: &ledger, explanation: &explanation };
            output::answer_with(&ledger, &report, &common)?;
        }
    }
    if !(ledger.reading.is_some() && is_page(&common)) {
        failure::warn(&ledger.warnings, &common);
    }
    Ok(Exit::Yes)
}
