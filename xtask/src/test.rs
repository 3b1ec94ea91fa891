//! `cargo xtask test`: what must hold before a change is done.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::{emulation, python};

/// The checks of the Rust code, in the order of their cost.
const CHECKS: &[&[&str]] = &[
    &["fmt", "--all", "--check"],
    &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
    &["test", "--workspace"],
];

/// Runs every check from the root of the workspace, what needs Python last; the first that fails ends it.
pub fn run() -> Result<()> {
    for arguments in CHECKS {
        cargo(arguments)?;
    }
    emulation::run()?;
    python::run()
}

/// Runs cargo in the root of the workspace.
pub fn cargo(arguments: &[&str]) -> Result<()> {
    let line = format!("cargo {}", arguments.join(" "));
    tell(&line);
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    finish(cargo.args(arguments).current_dir(root()), &line)
}

/// Runs a command to its end, which must be a good one.
pub fn finish(command: &mut Command, line: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("failed to start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed");
    Ok(())
}

/// The root of the workspace.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

#[allow(clippy::print_stderr, reason = "a developer sees which check runs")]
pub fn tell(line: &str) {
    eprintln!("$ {line}");
}
