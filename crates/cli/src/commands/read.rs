//! `vramledger read`.

use anyhow::Result;
use report::{PlanReport, ReadReport};
use vramledger::ReadQuestion;

use crate::args::{Common, ReadArgs};
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
    let ledger = vramledger::read(&path, bytes, &question)?;
    match &ledger.reading {
        Some(reading) => {
            let report = ReadReport { name: &args.file.name, ledger: &ledger, reading };
            output::answer_with(&ledger, &report, common)?;
        }
        None => {
            let explanation = vramledger::explain(&ledger);
            let report = PlanReport { ledger: &ledger, explanation: &explanation };
            output::answer_with(&ledger, &report, common)?;
        }
    }
    failure::warn(&ledger.warnings, common);
    Ok(Exit::Yes)
}
