//! The project's own commands, a file each: `cargo xtask NAME`.

mod bench;
mod case;
mod emulation;
mod emulator_symbols;
mod environment;
mod events;
mod fuzz;
mod gen_snapshot;
mod gen_trace;
mod python;
mod schema;
mod tape_diff;
mod test;
mod truth;

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
    /// Formatting, lints, every test, and what `emulation` and `python` run: what must hold before a change is done
    Test,
    /// Users' scripts and the recorded cases on the emulated GPU, in a virtual environment with PyTorch
    Emulation,
    /// The wheel of the Python package, in a clean environment and through its tests, with two releases of PyTorch
    Python,
    /// Planned ledgers against recorded training steps; writes docs/accuracy.md
    Truth(truth::Truth),
    /// Time and memory, held against their goals; writes docs/benchmarks.md
    Bench(bench::Bench),
    /// The JSON schema of each document; writes docs/schema
    Schema,
    /// A planned tape against a recorded event list, event by event
    TapeDiff(tape_diff::TapeDiff),
    /// The names the emulator must export for a build of PyTorch, from its libraries
    EmulatorSymbols(emulator_symbols::EmulatorSymbols),
    /// Everything that reads a file, fed with what nobody would write
    Fuzz(fuzz::Fuzz),
    /// A memory snapshot with N trace entries and a leak of known size, to measure readers with
    GenSnapshot(gen_snapshot::GenSnapshot),
    /// A profiler trace of at least so many megabytes with a leak of known size, to measure readers with
    GenTrace(gen_trace::GenTrace),
}

#[allow(clippy::print_stderr, reason = "a command of developers tells why it failed")]
fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Test => test::run(),
        Command::Emulation => emulation::run(),
        Command::Python => python::run(),
        Command::Truth(args) => truth::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Schema => schema::run(),
        Command::TapeDiff(args) => tape_diff::run(&args),
        Command::EmulatorSymbols(args) => emulator_symbols::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::GenSnapshot(args) => gen_snapshot::run(&args),
        Command::GenTrace(args) => gen_trace::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
