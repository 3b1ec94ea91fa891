//! The one place that tells why a question could not be answered.

use std::io::Write as _;

use anstyle::{AnsiColor, Style};

use crate::args::Common;
use crate::output;

/// Writes `error:`, `caused by:` and `hint:` to standard error.
pub fn show(error: &anyhow::Error, common: &Common) {
    let mut text = line(AnsiColor::Red.on_default().bold(), "error", &error.to_string());
    for cause in error.chain().skip(1) {
        text.push_str(&line(AnsiColor::Red.on_default(), "caused by", &cause.to_string()));
    }
    let hint = error.chain().find_map(|cause| cause.downcast_ref::<vramledger::Error>()?.hint());
    if let Some(hint) = hint.filter(|_| !common.quiet) {
        text.push_str(&line(AnsiColor::Cyan.on_default().bold(), "hint", &hint));
    }
    // A closed standard error leaves the exit code, which says enough.
    let _ = output::stderr(common).write_all(text.as_bytes());
}

/// Writes what is worth knowing besides the answer to standard error.
pub fn warn(warnings: &[String], common: &Common) {
    if common.quiet {
        return;
    }
    let style = AnsiColor::Yellow.on_default().bold();
    let text: String = warnings.iter().map(|warning| line(style, "warning", warning)).collect();
    // As above.
    let _ = output::stderr(common).write_all(text.as_bytes());
}

fn line(style: Style, label: &str, text: &str) -> String {
    format!("{style}{label}:{style:#} {text}\n")
}
