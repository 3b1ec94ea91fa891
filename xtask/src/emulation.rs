//! `cargo xtask emulation`: users' scripts and the recorded cases on the emulated GPU.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::test::{cargo, finish, root, tell};

/// What the scripts need.
const REQUIREMENTS: &str = "tests/emulate/requirements.txt";

/// Installs PyTorch if need be, builds the binary and the library, and runs tests/emulate/run.py.
///
/// # Errors
/// A step that cannot be started or that fails.
pub fn run() -> Result<()> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        tell("the emulated GPU needs Linux on x86-64: its scripts are not run");
        return Ok(());
    }
    let python = environment()?;
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

/// The Python of target/venv, with everything of `REQUIREMENTS`; what is there already stays.
fn environment() -> Result<PathBuf> {
    let folder = root().join("target/venv");
    let (python, installed) = (folder.join("bin/python"), folder.join("requirements.txt"));
    let wanted = read(&root().join(REQUIREMENTS))?;
    if python.exists() && read(&installed).is_ok_and(|there| there == wanted) {
        return Ok(python);
    }
    tell("installing PyTorch and its CUDA libraries into target/venv: about 6 GB, which takes minutes");
    let make = ["-m", "venv", "--clear"].map(OsStr::new);
    finish(
        Command::new("python3").args(make).arg(&folder),
        "python3 -m venv target/venv (Python 3.10 or later, with venv)",
    )?;
    let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
    finish(
        Command::new(&python).args(install).arg(REQUIREMENTS).current_dir(root()),
        "pip install --requirement tests/emulate/requirements.txt",
    )?;
    // Written last: an installation that broke off is made again.
    std::fs::write(&installed, wanted)
        .with_context(|| format!("failed to write `{}`", installed.display()))?;
    Ok(python)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("failed to read `{}`", path.display()))
}
