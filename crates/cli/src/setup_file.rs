//! A setup file: the flags of `plan` as keys of a TOML file.
//!
//! Its keys become flags and are read as such, so that a value means the same in both places and
//! there is one list of settings. What the command line says itself is left out of the file.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use clap::{Arg, Args as _, Command, FromArgMatches as _};

use crate::args::PlanSettings;

/// The settings of `given`, and from the file at `path` those that it does not give.
pub fn read(path: &Path, given: &PlanSettings) -> Result<PlanSettings> {
    let name = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("failed to read `{name}`"))?;
    let table: toml::Table = text.parse().with_context(|| format!("`{name}` is not TOML"))?;
    let command =
        PlanSettings::augment_args(Command::new("setup").no_binary_name(true).disable_help_flag(true));
    let mut words: Vec<OsString> = Vec::new();
    for (key, value) in &table {
        if !command.get_arguments().any(|known| known.get_long() == Some(key)) {
            bail!("`{name}` has an unknown key `{key}`; the keys are {}", keys(&command));
        }
        words.extend(flag(key, value).with_context(|| format!("`{key}` in `{name}`"))?);
    }
    let parsed = command.try_get_matches_from(words).and_then(|found| PlanSettings::from_arg_matches(&found));
    let file = parsed.map_err(|refused| {
        let text = refused.to_string();
        let sentence = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        anyhow::anyhow!(sentence).context(format!("`{name}` is no setup"))
    })?;
    Ok(given.over(file))
}

/// A key and its value as words of a command line.
fn flag(key: &str, value: &toml::Value) -> Result<Vec<OsString>> {
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Ok(text.clone()),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) => Ok(number.to_string()),
        other => bail!("a value is a text or a number, not a {}", other.type_str()),
    };
    let text = match value {
        toml::Value::Boolean(true) => return Ok(vec![format!("--{key}").into()]),
        toml::Value::Boolean(false) => return Ok(Vec::new()),
        toml::Value::Array(list) => list.iter().map(scalar).collect::<Result<Vec<_>>>()?.join(","),
        other => scalar(other)?,
    };
    Ok(vec![format!("--{key}={text}").into()])
}

fn keys(command: &Command) -> String {
    let mut keys: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
    keys.sort_unstable();
    keys.join(", ")
}
