//! The command line: arguments, files, exit codes. What it knows is in `vramledger`, how it is shown in `report`.
//!
//! The binary is [`main`] alone; the Python package has the same command, and its `plan` takes the same [`Settings`].

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

use std::ffi::OsString;

use clap::Parser;

use crate::args::Cli;
use crate::exit::Exit;

pub use crate::setup_file::Settings;

/// Answers the question of `words`, the first of which is the name of the program, and says with which code to end.
///
/// `emulator` is the emulated device's library, where it is not a file beside the program.
pub fn main(words: impl IntoIterator<Item = OsString>, emulator: Option<&'static [u8]>) -> u8 {
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        // Help and version are answers; everything else clap refuses is a question that cannot be answered.
        Err(refused) => {
            let exit = if refused.use_stderr() { Exit::Unanswered } else { Exit::Yes };
            // Nothing is left to tell where neither stream takes text.
            let _ = refused.print();
            return exit.code();
        }
    };
    let common = cli.common.clone();
    match commands::run(cli, emulator) {
        Ok(exit) => exit.code(),
        Err(error) if output::is_broken_pipe(&error) => Exit::Yes.code(),
        Err(error) => {
            failure::show(&error, &common);
            Exit::Unanswered.code()
        }
    }
}
