//! `cargo xtask emulation`: users' scripts and the recorded cases on the emulated GPU.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::environment::NEWEST;
use crate::test::{cargo, finish, root, tell};

/// Installs PyTorch if need be, builds the binary and the library, and runs tests/emulate/run.py.
///
/// # Errors
/// A step that cannot be started or that fails.
pub fn run() -> Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        tell("the emulated GPU needs Linux on x86-64: its scripts are not run");
        return Ok(());
    }
    let python = NEWEST.python()?;
    cargo(&["build", "--release", "--package", "vramledger-cli", "--package", "emulator"])?;
    // Beside this very program, whichever target folder is in use.
    let binary = std::env::current_exe().context("failed to tell where this program lies")?;
    let binary = binary.with_file_name("vramledger");
    let results = root().join("target/emulated.jsonl");
    let driver: [&OsStr; 5] = [
        "tests/emulate/run.py".as_ref(),
        "--vramledger".as_ref(),
        binary.as_ref(),
        "--results".as_ref(),
        results.as_ref(),
    ];
    tell("python tests/emulate/run.py");
    finish(Command::new(python).args(driver).current_dir(root()), "tests/emulate/run.py")
}
