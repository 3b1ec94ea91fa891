//! `cargo xtask python`: the Python package, built as users build it and tested in their places.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::environment::{NEWEST, OLDEST};
use crate::test::{finish, root, tell};

/// The tests that measure PyTorch, which hold with every release.
const MEASURE: [&str; 6] = ["demonstrations", "verify", "capture", "framework", "tracking", "watch"];

/// Builds the wheel, installs it in an environment that has nothing else, and runs the tests with the newest and with
/// the oldest PyTorch.
///
/// # Errors
/// A step that cannot be started or that fails.
pub fn run() -> Result<()> {
    let python = NEWEST.python()?;
    let wheels = root().join("target/wheels");
    let build = ["-m", "maturin", "build", "--release", "--out"].map(OsStr::new);
    step(Command::new(&python).args(build).arg(&wheels), "maturin build")?;
    let wheel = newest_wheel(&wheels)?;
    clean(&wheel)?;
    let install = |python: &Path| {
        let words = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"];
        step(Command::new(python).args(words).arg(&wheel), "pip install vramledger")
    };
    install(&python)?;
    step(Command::new(&python).args(["-m", "mypy"]), "mypy --strict")?;
    step(Command::new(&python).args(["-m", "pytest"]), "pytest")?;
    let oldest = OLDEST.python()?;
    install(&oldest)?;
    let tests = MEASURE.map(|name| format!("crates/python/tests/test_{name}.py"));
    step(Command::new(&oldest).args(["-m", "pytest"]).args(tests), "pytest, with the oldest PyTorch")
}

/// An environment with the wheel and nothing else: it imports, and its command answers.
fn clean(wheel: &Path) -> Result<()> {
    let folder = root().join("target/venv-clean");
    step(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder), "python3 -m venv")?;
    let python = folder.join("bin/python");
    let install = ["-m", "pip", "install", "--quiet", "--no-index"];
    step(Command::new(&python).args(install).arg(wheel), "pip install in a clean environment")?;
    step(Command::new(&python).args(["-c", "import vramledger"]), "import vramledger without PyTorch")?;
    step(Command::new(folder.join("bin/vramledger")).args(["plan", "mlp:2x8"]), "vramledger plan mlp:2x8")
}

fn newest_wheel(folder: &Path) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).context("failed to list target/wheels")?;
    let wheels = entries.filter_map(Result::ok).map(|entry| entry.path());
    let made = |path: &PathBuf| path.metadata().and_then(|known| known.modified()).ok();
    wheels
        .filter(|path| path.extension().is_some_and(|end| end == "whl"))
        .max_by_key(made)
        .context("there is no wheel in target/wheels")
}

fn step(command: &mut Command, line: &str) -> Result<()> {
    tell(line);
    finish(command.current_dir(root()), line)
}
