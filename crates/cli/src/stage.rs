//! The folder that an emulated program runs from: the libraries it finds in place of CUDA's, the
//! files that let the recorder in, and what the recorder leaves. It goes when it is dropped.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use anyhow::{Context as _, Result};
use tempfile::TempDir;
use vramledger::Error;
use vramledger::emulate::BOOTSTRAP;

/// The emulated device's library.
const LIBRARY: &str = "libvramledger_emulator.so";
/// Names another library, for tests and for those who build their own.
const OTHER_LIBRARY: &str = "VRAMLEDGER_EMULATOR_LIBRARY";
/// The names under which PyTorch and its libraries look for the driver.
const DRIVERS: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// A folder for one run.
pub struct Stage(TempDir);

impl Stage {
    /// A folder with everything that a program needs to find; `carried` is the library where it is no file.
    ///
    /// # Errors
    /// No emulator library, or no folder for temporary files that the loader can be told of.
    pub fn new(carried: Option<&[u8]>) -> Result<Self> {
        let library = library(carried)?;
        let folder = tempfile::Builder::new().prefix("vramledger-").tempdir();
        let stage = Self(folder.context("failed to make a folder for temporary files")?);
        if stage.0.path().as_os_str().as_bytes().iter().any(|byte| b" \t\n:;".contains(byte)) {
            let what = format!(
                "the folder for temporary files, `{}`, has a space, a colon or a semicolon in its name",
                env::temp_dir().display()
            );
            let hint = "set TMPDIR to another: the lists of folders in the environment have no other way to end a name".into();
            return Err(Error::CannotEmulate { what, hint }.into());
        }
        stage.furnish(&library).context("failed to prepare the folder for temporary files")?;
        Ok(stage)
    }

    fn furnish(&self, library: &Library<'_>) -> io::Result<()> {
        for folder in [self.libraries(), self.bootstrap(), self.record()] {
            fs::create_dir(folder)?;
        }
        let file = match library {
            Library::File(path) => path.clone(),
            Library::Carried(bytes) => {
                let path = self.libraries().join(LIBRARY);
                fs::write(&path, bytes)?;
                path
            }
        };
        for name in DRIVERS {
            std::os::unix::fs::symlink(&file, self.libraries().join(name))?;
        }
        for (name, text) in BOOTSTRAP {
            fs::write(self.bootstrap().join(name), text)?;
        }
        Ok(())
    }

    fn libraries(&self) -> PathBuf {
        self.0.path().join("lib")
    }

    fn bootstrap(&self) -> PathBuf {
        self.0.path().join("python")
    }

    /// What the recorder leaves.
    pub fn record(&self) -> PathBuf {
        self.0.path().join("record")
    }

    /// `program` with the environment in which it meets the emulated device and the recorder.
    pub fn command(&self, program: &[OsString], environment: &[(&str, String)]) -> Command {
        let (first, arguments) = program
            .split_first()
            .map_or((OsStr::new(""), &[][..]), |(first, rest)| (first.as_os_str(), rest));
        let mut command = Command::new(first);
        command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value)));
        command.env("VRAMLEDGER_RECORD", self.record());
        for (name, place) in [
            ("LD_PRELOAD", self.libraries().join(DRIVERS[0])),
            ("LD_LIBRARY_PATH", self.libraries()),
            ("PYTHONPATH", self.bootstrap()),
        ] {
            command.env(name, in_front(place, env::var_os(name)));
        }
        command
    }
}

/// `place` in front of the user's own places.
fn in_front(place: PathBuf, others: Option<OsString>) -> OsString {
    let mut list = place.into_os_string();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// Where the emulated device's library is.
enum Library<'a> {
    /// In this file.
    File(PathBuf),
    /// In the program itself.
    Carried(&'a [u8]),
}

/// The emulator library: carried, beside the binary, or where an installation puts libraries.
fn library(carried: Option<&[u8]>) -> Result<Library<'_>> {
    if let Some(path) = env::var_os(OTHER_LIBRARY) {
        let path = PathBuf::from(path);
        let found = fs::canonicalize(&path);
        return found.map(Library::File).with_context(|| format!("there is no library `{}`", path.display()));
    }
    if let Some(bytes) = carried {
        return Ok(Library::Carried(bytes));
    }
    let binary =
        env::current_exe().and_then(fs::canonicalize).context("failed to find this program's own file")?;
    let folder = binary.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    let found = places.iter().find_map(|place| fs::canonicalize(place).ok());
    Ok(found.map(Library::File).ok_or_else(|| Error::CannotEmulate {
        what: format!("the emulated device, `{LIBRARY}`, is not in `{}`", folder.display()),
        hint: "it comes with `vramledger`; from the sources `cargo build --release -p emulator` makes it"
            .into(),
    })?)
}
