//! The project's own commands, a file each: `cargo xtask NAME`.

mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Formatting, lints and every test: what must hold before a change is done
    Test,
}

#[allow(clippy::print_stderr, reason = "a command of developers tells why it failed")]
fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Test => test::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
