//! `vramledger read`.

use anyhow::Result;
use report::{PlanReport, ReadReport};
use vramledger::ReadQuestion;

use crate::args::{Common, Format, ReadArgs};
use crate::exit::Exit;
use crate::{failure, output};

/// Answers `read`.
pub fn run(args: &ReadArgs, common: &Common) -> Result<Exit> {
    let (path, bytes) = args.file.contents()?;
    let question = ReadQuestion {
        by: args.by,
        depth: args.depth,
        at: args.at,
        device: args.device,
        step: args.step,
        what_if: args.what_if.clone(),
    };
    let mut read = vramledger::read(&path, bytes, &question)?;
    let mut common = common.clone();
    if let Some(path) = output::tape_path(&mut common) {
        output::write_file(&path, &read.tape_file()?)?;
        read.ledger.tape = Some(path.display().to_string());
    }
    let ledger = read.ledger;
    match &ledger.reading {
        Some(reading) => {
            let report = ReadReport { name: &args.file.name, ledger: &ledger, reading };
            output::answer_with(&ledger, &report, &common)?;
        }
        None => {
            let explanation = vramledger::explain(&ledger);
            let report = PlanReport { ledger: &ledger, explanation: &explanation };
            output::answer_with(&ledger, &report, &common)?;
        }
    }
    // A page tells what its file does not, as a part of the answer.
    let told = ledger.reading.is_some() && matches!(common.format, Format::Text | Format::Markdown);
    if !told {
        failure::warn(&ledger.warnings, &common);
    }
    Ok(Exit::Yes)
}
