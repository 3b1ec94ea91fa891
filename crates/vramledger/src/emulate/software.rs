//! The Python and the PyTorch that a program would run on, and whether emulation can do with them.

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::fit::release;

/// The releases of torch that the emulator answers to.
const OLDEST: (u32, u32) = (2, 6);
const NEWEST: (u32, u32) = (2, 15);

const HINT_NO_GPU: &str = "it needs no GPU";

/// A program for the child's Python: it prints what [`Software::read`] reads.
pub const PROBE: &str = include_str!("probe.py");

/// What a program runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Software {
    /// The version of Python.
    pub python: String,
    /// `sys.platform`: `linux`.
    pub system: String,
    /// The architecture: `x86_64`.
    pub machine: String,
    /// The version of torch; none where there is no torch.
    pub torch: Option<String>,
    /// The version of CUDA that torch is built for; none for a build without CUDA.
    pub cuda: Option<String>,
}

impl Software {
    /// What [`PROBE`] printed, which is the last line of `output`; none where it is not that.
    pub fn read(output: &[u8]) -> Option<Self> {
        let line = output.trim_ascii_end().rsplit(|byte| *byte == b'\n').next()?;
        serde_json::from_slice(line).ok()
    }

    /// Refuses what emulation cannot run on. `python` is the command that starts it.
    ///
    /// # Errors
    /// What is missing, with what to install as a hint.
    pub fn check(&self, python: &str) -> Result<(), Error> {
        let refuse = |what: String, hint: String| Err(Error::CannotEmulate { what, hint });
        if !(self.system == "linux" && self.machine == "x86_64") {
            return Err(elsewhere(&format!("`{python}`"), &self.system, &self.machine));
        }
        let Some(torch) = &self.torch else {
            return refuse(
                format!("`{python}` (Python {}) has no torch", self.python),
                format!("install PyTorch's CUDA build with `{python} -m pip install torch`: {HINT_NO_GPU}"),
            );
        };
        if self.cuda.is_none() {
            return refuse(
                format!("torch {torch} of `{python}` is built without CUDA"),
                format!(
                    "install the CUDA build, the usual one on Linux, with `{python} -m pip install --force-reinstall torch`: {HINT_NO_GPU}"
                ),
            );
        }
        match release(torch) {
            Some(release) if (OLDEST..=NEWEST).contains(&release) => Ok(()),
            _ => refuse(
                format!("emulation knows torch 2.6 to 2.15, and `{python}` has torch {torch}"),
                format!("install one of them with `{python} -m pip install \"torch>=2.6,<2.16\"`"),
            ),
        }
    }
}

/// The refusal to emulate on `system` and `machine`, where `what` runs.
pub fn elsewhere(what: &str, system: &str, machine: &str) -> Error {
    Error::CannotEmulate {
        what: format!("emulation needs Linux on x86-64, and {what} runs on {system} {machine}"),
        hint: "run it on such a machine or in such a container; no GPU is needed".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn software(torch: Option<&str>, cuda: Option<&str>) -> Software {
        Software {
            python: "3.12.3".into(),
            system: "linux".into(),
            machine: "x86_64".into(),
            torch: torch.map(Into::into),
            cuda: cuda.map(Into::into),
        }
    }

    fn refusal(software: &Software) -> String {
        let error = software.check("python").unwrap_err();
        format!("{error}; {}", error.hint().unwrap())
    }

    #[test]
    fn the_known_releases_pass_and_no_others() {
        for torch in ["2.6.0+cu124", "2.11.0", "2.15.0+cu132", "2.15.0a0+git1234", "2.10.1"] {
            assert!(software(Some(torch), Some("13.2")).check("python").is_ok(), "{torch}");
        }
        for torch in ["2.5.1+cu121", "1.13.1", "2.16.0", "3.0.0", "unknown", "2"] {
            let refusal = refusal(&software(Some(torch), Some("13.2")));
            assert!(
                refusal.starts_with("emulation knows torch 2.6 to 2.15, and `python` has torch "),
                "{refusal}"
            );
        }
    }

    #[test]
    fn what_is_missing_is_said_with_what_to_install() {
        let refused = refusal(&software(None, None));
        assert!(refused.starts_with("`python` (Python 3.12.3) has no torch; install PyTorch's CUDA build"));
        let refused = refusal(&software(Some("2.15.0+cpu"), None));
        assert!(
            refused.starts_with("torch 2.15.0+cpu of `python` is built without CUDA; install the CUDA build")
        );
        let other = Software { system: "darwin".into(), machine: "arm64".into(), ..software(None, None) };
        assert!(
            refusal(&other)
                .starts_with("emulation needs Linux on x86-64, and `python` runs on darwin arm64; run it on")
        );
    }
}
