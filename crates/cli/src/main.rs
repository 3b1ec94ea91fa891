//! The `vramledger` binary: arguments, files, exit codes. What it knows is in `vramledger`, how it is
//! shown in `report`.

mod args;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod child;
mod commands;
mod exit;
mod failure;
mod input;
mod output;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod progress;
mod setup_file;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod stage;
mod value;

use std::process::ExitCode;

use clap::Parser;

use crate::args::Cli;
use crate::exit::Exit;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Help and version are answers; everything else clap refuses is a question that cannot be answered.
        Err(refused) => {
            let exit = if refused.use_stderr() { Exit::Unanswered } else { Exit::Yes };
            // Nothing is left to tell where neither stream takes text.
            let _ = refused.print();
            return exit.into();
        }
    };
    let common = cli.common.clone();
    match commands::run(cli) {
        Ok(exit) => exit.into(),
        Err(error) if output::is_broken_pipe(&error) => Exit::Yes.into(),
        Err(error) => {
            failure::show(&error, &common);
            Exit::Unanswered.into()
        }
    }
}
