//! Where an answer goes: standard output, or a file that is there whole or not at all.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anstream::AutoStream;
use anyhow::{Context as _, Result};
use report::Report;
use serde::Serialize;

use crate::args::{Common, Format};

/// Standard error, with styles where they are wanted.
pub fn stderr(common: &Common) -> AutoStream<io::Stderr> {
    AutoStream::new(io::stderr(), common.color.into())
}

/// Writes `document` in the form and to the place that were asked for.
pub fn answer<D: Report + Serialize>(document: &D, common: &Common) -> Result<()> {
    answer_with(document, document, common)
}

/// As [`answer`], with a `report` that shows more than the document holds.
pub fn answer_with<D: Serialize>(document: &D, report: &impl Report, common: &Common) -> Result<()> {
    let text = match common.format {
        Format::Text => report.page().text(),
        Format::Json => vramledger::wire::to_json(document),
        Format::Markdown => report.page().markdown(),
        Format::Csv => report.sheet().csv(),
    };
    match common.output.as_deref().filter(|path| *path != Path::new("-")) {
        None => {
            let mut stream = AutoStream::new(io::stdout(), common.color.into());
            stream.write_all(text.as_bytes())?;
            stream.flush()?;
            Ok(())
        }
        Some(path) => {
            let mut plain = Vec::new();
            let choice = match common.color {
                crate::args::Color::Always => anstream::ColorChoice::Always,
                _ => anstream::ColorChoice::Never,
            };
            AutoStream::new(&mut plain, choice).write_all(text.as_bytes())?;
            write_file(path, &plain)
        }
    }
}

/// Takes `-o run.vlt` out of `common`: such a file keeps the tape, and the answer goes to standard output.
pub fn tape_path(common: &mut Common) -> Option<PathBuf> {
    common.output.take_if(|path| path.extension().is_some_and(|end| end == "vlt"))
}

/// Puts `bytes` in the file at `path`: under another name first, so that no reader sees half of it
/// and a failure leaves the old file.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, bytes).with_context(|| format!("failed to write `{}`", path.display()))
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link stays a link; a device or a pipe cannot be replaced and is written to.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if fs::metadata(&target).is_ok_and(|known| !known.is_file()) {
        return fs::OpenOptions::new().write(true).open(&target)?.write_all(bytes);
    }
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(&target)?;
    Ok(())
}

/// Whether the reader of standard output has gone, which is no failure of ours.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
