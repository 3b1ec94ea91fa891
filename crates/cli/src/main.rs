//! The `vramledger` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    vramledger_cli::main(std::env::args_os(), None).into()
}
