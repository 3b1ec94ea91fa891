//! `vramledger read`.

use anyhow::Result;
use report::{PlanReport, ReadReport, SeriesReport};
use vramledger::{Answer, Read, ReadQuestion};

use crate::args::{Common, Format, ReadArgs};
use crate::exit::Exit;
use crate::{failure, output};

/// Answers `read`.
pub fn run(args: &ReadArgs, common: &Common) -> Result<Exit> {
    let (path, source) = args.file.open()?;
    let question = ReadQuestion {
        by: args.by,
        depth: args.depth,
        at: args.at,
        device: args.device,
        step: args.step,
        what_if: args.what_if.clone(),
    };
    match vramledger::read(&path, source, &question)? {
        Answer::Ledger(read) => ledger(*read, args, common),
        Answer::Series(series) => {
            output::answer_with(&series, &SeriesReport { name: &args.file.name, series: &series }, common)?;
            if !is_page(common) {
                failure::warn(&series.warnings, common);
            }
            Ok(Exit::Yes)
        }
    }
}

/// Whether the answer is a page, which tells what its file does not as a part of the answer.
fn is_page(common: &Common) -> bool {
    matches!(common.format, Format::Text | Format::Markdown)
}

/// Answers with a ledger.
fn ledger(mut read: Read, args: &ReadArgs, common: &Common) -> Result<Exit> {
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
    if !(ledger.reading.is_some() && is_page(&common)) {
        failure::warn(&ledger.warnings, &common);
    }
    Ok(Exit::Yes)
}
