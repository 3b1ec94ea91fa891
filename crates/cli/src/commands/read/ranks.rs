//! `vramledger read` of several files: the ranks of a job.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vramledger::{By, DEPTH, RankReader};

use crate::args::{Common, ReadArgs};
use crate::exit::Exit;
use crate::{failure, output};

/// Answers `read` of several files.
pub fn run(args: &ReadArgs, common: &Common) -> Result<Exit> {
    one_file_alone(args)?;
    let mut names = BTreeSet::new();
    for file in &args.files {
        if file.name.is_empty() {
            bail!("a file has an empty name; name it as `NAME=FILE`");
        }
        if !names.insert(&file.name) {
            bail!("two files are called `{}`; name one of them as `NAME=FILE`", file.name);
        }
    }
    let bar = bar(args.files.len(), common);
    let mut reader = RankReader::new(args.device);
    for file in &args.files {
        bar.set_message(file.name.clone());
        match file.open() {
            Ok((path, source)) => reader.read(&file.name, &path, source),
            Err(error) => reader.unread(&file.name, format!("{error:#}")),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    let answer = reader.answer()?;
    output::answer(&answer, common)?;
    let unread: Vec<String> = answer.unread.into_iter().map(|unread| unread.reason).collect();
    failure::warn(&unread, common);
    if !super::is_page(common) {
        failure::warn(&answer.warnings, common);
    }
    Ok(Exit::Yes)
}

/// Refuses what looks into one file.
fn one_file_alone(args: &ReadArgs) -> Result<()> {
    let asked = [
        ("--at", args.at.is_some()),
        ("--step", args.step.is_some()),
        ("--by", args.by != By::default()),
        ("--depth", args.depth != DEPTH),
        ("--what-if", !args.what_if.is_empty()),
        ("--capacity", args.capacity.is_some()),
        ("--model", args.model.is_some()),
        ("--ledger", args.ledger.is_some()),
        ("--params", args.params.is_some()),
    ];
    match asked.iter().find(|(_, asked)| *asked) {
        Some((flag, _)) => bail!("`{flag}` looks into one file, and these are {}", args.files.len()),
        None => Ok(()),
    }
}

/// How far the reading is: on a terminal, and gone when it is done.
fn bar(files: usize, common: &Common) -> ProgressBar {
    let target = if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(files as u64), target);
    if let Ok(style) = ProgressStyle::with_template("{pos} of {len}: {msg}") {
        bar.set_style(style);
    }
    bar
}
