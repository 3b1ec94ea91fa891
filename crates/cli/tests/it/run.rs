//! Runs the binary in a folder of its own.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A folder and the files in it.
pub struct Folder(TempDir);

impl Folder {
    /// An empty one.
    pub fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    /// With a file of these contents.
    pub fn with(self, name: &str, contents: impl AsRef<[u8]>) -> Self {
        std::fs::write(self.0.path().join(name), contents).unwrap();
        self
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The names of the files in it.
    pub fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Runs `vramledger` with the words of `line` here; nothing is on standard input.
    pub fn run(&self, line: &str) -> Answer {
        self.run_with(line, b"")
    }

    /// As [`Folder::run`], with `input` on standard input.
    pub fn run_with(&self, line: &str, input: &[u8]) -> Answer {
        let mut command = self.command(line);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that refuses its arguments does not read.
        let _ = child.stdin.take().unwrap().write_all(input);
        let output = child.wait_with_output().unwrap();
        Answer {
            exit: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The command, not yet started.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramledger"));
        command
            .args(line.split_whitespace())
            .current_dir(self.path())
            .env("NO_COLOR", "1")
            .env("COLUMNS", "100");
        command
    }
}

/// What a run left.
pub struct Answer {
    pub exit: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// Exit code and both streams, for a snapshot.
    pub fn all(&self) -> String {
        let mut text = format!("exit {}\n", self.exit.unwrap());
        for (name, stream) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !stream.is_empty() {
                write!(text, "--- {name}\n{stream}").unwrap();
            }
        }
        text
    }

    /// The JSON on standard output of a question that was answered.
    pub fn json(&self) -> Value {
        assert_ne!(self.exit, Some(2), "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The one sentence of a question that could not be answered.
    pub fn sentence(&self) -> &str {
        assert_eq!((self.exit, self.stdout.as_str()), (Some(2), ""), "{}", self.stderr);
        let sentence = self.stderr.lines().next().unwrap();
        sentence.strip_prefix("error: ").unwrap()
    }
}

/// Runs `vramledger` in an empty folder.
pub fn run(line: &str) -> Answer {
    Folder::new().run(line)
}
