//! `vramledger plan MODEL --vary KEY=VALUE,…`.

use anyhow::{Context as _, Result, bail};
use vramledger::NamedModel;
use vramledger::wire::SettingValue;
use vramledger::{Combination, vary};

use super::plan::question;
use crate::args::{Common, PlanSettings};
use crate::exit::Exit;
use crate::{output, setup_file};

/// The most combinations that are run for one answer.
const MOST: usize = 256;

/// Answers `plan` with the values that `asked` has for some of its settings.
pub fn run(model: &NamedModel, settings: &PlanSettings, asked: &[String], common: &Common) -> Result<Exit> {
    if output::tape_path(&mut common.clone()).is_some() {
        bail!(
            "`-o FILE.vlt` keeps the tape of one plan, and `--vary` asks for several: leave one of them out"
        );
    }
    let varied: Vec<(&str, Vec<&str>)> = asked.iter().map(|asked| read(asked)).collect::<Result<_>>()?;
    for (index, (key, _)) in varied.iter().enumerate() {
        if varied[..index].iter().any(|(other, _)| other == key) {
            bail!("`--vary` has `{key}` twice: give all its values at once");
        }
    }
    let count = varied.iter().try_fold(1_usize, |count, (_, values)| count.checked_mul(values.len()));
    if count.is_none_or(|count| count > MOST) {
        bail!("`--vary` asks for more than the {MOST} combinations that are run for one answer");
    }
    let mut combinations = vec![Vec::new()];
    for (key, values) in &varied {
        let with = |known: &Vec<SettingValue>, value: &&str| {
            let more = SettingValue { key: (*key).to_owned(), value: (*value).to_owned() };
            known.iter().cloned().chain([more]).collect::<Vec<_>>()
        };
        combinations = combinations
            .iter()
            .flat_map(|known| values.iter().map(move |value| with(known, value)))
            .collect();
    }
    let combinations = combinations.into_iter().map(|values| {
        let words = values.iter().map(|setting| (setting.key.as_str(), setting.value.as_str()));
        let settings = setup_file::values("--vary", words)?.over(settings.clone());
        let question = question(model, &settings).map_err(|refused| refused.to_string());
        Ok(Combination { settings: values, question })
    });
    let table = vary(&model.name, combinations.collect::<Result<_>>()?)?;
    output::answer(&table, common)?;
    let fits = table.rows.iter().any(|row| row.outcome.as_ref().is_some_and(|outcome| outcome.fits));
    Ok(if fits { Exit::Yes } else { Exit::No })
}

/// `checkpoint=none,full`: a key and its values.
fn read(asked: &str) -> Result<(&str, Vec<&str>)> {
    let told = || format!("`--vary {asked}` must be KEY=VALUE,… as in `--vary checkpoint=none,full`");
    let (key, values) = asked.split_once('=').with_context(told)?;
    let between = if values.contains(';') { ';' } else { ',' };
    let values: Vec<&str> = values.split(between).map(str::trim).collect();
    if key.is_empty() || values.iter().any(|value| value.is_empty()) {
        bail!(told());
    }
    Ok((key, values))
}
