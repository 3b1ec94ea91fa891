//! Virtual environments of Python under target, which stay while what they are to have stays the same.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::test::{finish, root, tell};

/// An environment and what it has.
pub struct Environment {
    folder: &'static str,
    requirements: &'static [&'static str],
}

/// The newest PyTorch that is supported, what users' scripts need, and the tools of the package's tests.
pub const NEWEST: Environment = Environment {
    folder: "target/venv",
    requirements: &["tests/emulate/requirements.txt", "crates/python/tests/requirements.txt"],
};

/// The oldest PyTorch that is supported.
pub const OLDEST: Environment =
    Environment { folder: "target/venv-oldest", requirements: &["crates/python/tests/oldest.txt"] };

impl Environment {
    /// Its Python, installed if need be; what is there already stays.
    ///
    /// # Errors
    /// A step that cannot be started or that fails.
    pub fn python(&self) -> Result<PathBuf> {
        let folder = root().join(self.folder);
        let (python, installed) = (folder.join("bin/python"), folder.join("requirements.txt"));
        let wanted: Vec<String> =
            self.requirements.iter().map(|file| read(&root().join(file))).collect::<Result<_>>()?;
        let wanted = wanted.concat();
        if python.exists() && read(&installed).is_ok_and(|there| there == wanted) {
            return Ok(python);
        }
        tell(&format!(
            "installing PyTorch and its CUDA libraries into {}: about 6 GB, which takes minutes",
            self.folder
        ));
        let make = ["-m", "venv", "--clear"].map(OsStr::new);
        finish(
            Command::new("python3").args(make).arg(&folder),
            "python3 -m venv (Python 3.10 or later, with venv)",
        )?;
        let install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let files = self.requirements.iter().flat_map(|file| ["--requirement", file]);
        finish(
            Command::new(&python).args(install).args(files).current_dir(root()),
            &format!("pip install --requirement {}", self.requirements.join(" --requirement ")),
        )?;
        // Written last: an installation that broke off is made again.
        std::fs::write(&installed, wanted)
            .with_context(|| format!("failed to write `{}`", installed.display()))?;
        Ok(python)
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("failed to read `{}`", path.display()))
}
