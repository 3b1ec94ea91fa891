//! A setup file: the flags of `plan` as keys of a TOML file.
//!
//! Its keys become flags and are read as such, so that a value means the same in both places and
//! there is one list of settings. What the command line says itself is left out of the file.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use clap::{Arg, Args as _, Command, FromArgMatches as _};
use toml::Spanned;
use vramledger::{NamedModel, PlanQuestion};

use crate::args::PlanSettings;
use crate::commands::plan;

/// Where a setting comes from.
pub struct Place {
    key: String,
    line: usize,
    file: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` in line {} of `{}`", self.key, self.line, self.file)
    }
}

/// The settings of `given`, and from the file at `path` those that it does not give, with their places.
pub fn read(path: &Path, given: &PlanSettings) -> Result<(PlanSettings, Vec<Place>)> {
    let name = path.display().to_string();
    let text = fs::read_to_string(path).with_context(|| format!("failed to read `{name}`"))?;
    of_text(&name, &text, given)
}

/// The same of a file called `name` with `text` in it.
fn of_text(name: &str, text: &str, given: &PlanSettings) -> Result<(PlanSettings, Vec<Place>)> {
    let table: BTreeMap<Spanned<String>, toml::Value> =
        toml::from_str(text).with_context(|| format!("`{name}` is not TOML"))?;
    let (mut words, mut places) = (Vec::new(), Vec::new());
    for (key, value) in &table {
        let line = text[..key.span().start].matches('\n').count() + 1;
        let place = Place { key: key.get_ref().clone(), line, file: name.to_owned() };
        let command = command();
        if !command.get_arguments().any(|known| known.get_long() == Some(&place.key)) {
            bail!("{place} is an unknown key; the keys are {}", keys(&command));
        }
        let flag = flag(&place.key, value).with_context(|| place.to_string())?;
        let alone = parse(flag.clone()).with_context(|| place.to_string())?;
        if given.over(alone) != *given {
            places.push(place);
        }
        words.extend(flag);
    }
    let file = parse(words).with_context(|| format!("`{name}` is no setup"))?;
    Ok((given.over(file), places))
}

/// `error` with the places of the settings that it names, in its sentence or in `others`.
pub fn placed(error: anyhow::Error, others: &[&str], places: &[Place]) -> anyhow::Error {
    let sentence = error.to_string();
    let named = |key: &str| others.contains(&key) || sentence.contains(&format!("`--{key}`"));
    let of_it = places.iter().filter(|place| named(&place.key));
    let of_it: Vec<String> = of_it.map(ToString::to_string).collect();
    if of_it.is_empty() { error } else { anyhow::anyhow!("{sentence} ({})", of_it.join(", ")) }
}

/// The settings that `values` are, by their keys as in a setup file. An error calls a key one of `place`.
pub fn values<'a>(place: &str, values: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<PlanSettings> {
    let mut words = Vec::new();
    for (key, value) in values {
        let command = command();
        let known = command.get_arguments().find(|known| known.get_long() == Some(key));
        let Some(known) = known else {
            bail!("`{key}` of `{place}` is an unknown key; the keys are {}", keys(&command));
        };
        let value = match value {
            "true" | "false" if !known.get_action().takes_values() => toml::Value::Boolean(value == "true"),
            text => toml::Value::String(text.into()),
        };
        words.extend(flag(key, &value)?);
    }
    parse(words)
}

/// The settings of a plan, for programs that have no command line.
#[derive(Clone)]
pub struct Settings(PlanSettings);

impl Settings {
    /// The settings that `values` are, by their keys as in a setup file. An error calls a key one of `place`.
    ///
    /// # Errors
    /// An unknown key, or a value that its key cannot have.
    pub fn new<'a>(place: &str, pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        Ok(Self(values(place, pairs)?))
    }

    /// The settings of a setup file called `name` with `text` in it.
    ///
    /// # Errors
    /// What is not TOML, an unknown key, or a value that its key cannot have.
    pub fn of_file(name: &str, text: &str) -> Result<Self> {
        Ok(Self(of_text(name, text, &PlanSettings::default())?.0))
    }

    /// The question that they ask of `model`.
    ///
    /// # Errors
    /// Settings that contradict each other or the model.
    pub fn question<'a>(&self, model: &'a NamedModel) -> Result<PlanQuestion<'a>> {
        plan::question(model, &self.0).map_err(|refused| refused.error)
    }

    /// Every key, in the order of the help.
    pub fn keys() -> Vec<String> {
        command().get_arguments().filter_map(Arg::get_long).map(Into::into).collect()
    }
}

fn command() -> Command {
    PlanSettings::augment_args(Command::new("setup").no_binary_name(true).disable_help_flag(true))
}

fn parse(words: Vec<OsString>) -> Result<PlanSettings> {
    let found = command().try_get_matches_from(words);
    found.and_then(|found| PlanSettings::from_arg_matches(&found)).map_err(|refused| {
        let text = refused.to_string();
        let sentence = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        anyhow::anyhow!(sentence)
    })
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
