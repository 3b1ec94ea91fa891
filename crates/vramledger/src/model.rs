//! Which model a name on the command line means.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use models::{Model, PRESETS};

use crate::Error;

/// The largest config.json that is read. Real ones have some kilobytes.
const LARGEST_CONFIG: u64 = 64 << 20;

/// A model and the name it goes by.
#[derive(Clone, Debug)]
pub struct NamedModel {
    /// The preset's name, or the path.
    pub name: String,
    /// The model.
    pub model: Model,
}

/// The model that `name` means: a preset, `mlp:LAYERSxWIDTH`, `-` for a config.json on standard
/// input, a config.json, or a directory that holds one.
///
/// # Errors
/// No such model or file, a file that cannot be read, or one that is no config of a known model.
pub fn load_model(name: &str) -> Result<NamedModel, Error> {
    let named = |model: Result<Model, models::PlanError>| {
        let model = model.map_err(|problem| Error::Model { name: name.into(), problem })?;
        Ok(NamedModel { name: name.into(), model })
    };
    if let Some(preset) = PRESETS.iter().find(|preset| preset.name.eq_ignore_ascii_case(name)) {
        return named(Model::from_config(preset.config));
    }
    if let Some(mlp) = Model::from_mlp_name(name) {
        let model = mlp.map_err(|problem| Error::Setup { what: problem.0 })?;
        return Ok(NamedModel { name: name.into(), model });
    }
    if name == "-" {
        let text =
            read_text(io::stdin().lock()).map_err(|source| Error::Read { path: name.into(), source })?;
        return Ok(NamedModel { name: "stdin".into(), ..named(Model::from_config(&text))? });
    }
    let mut path = PathBuf::from(name);
    if path.is_dir() {
        path.push("config.json");
    }
    if !path.exists() {
        return Err(unknown(name, &path));
    }
    let text = File::open(&path).and_then(read_text);
    let text = text.map_err(|source| Error::Read { path: path.display().to_string(), source })?;
    named(Model::from_config(&text))
}

/// A name that has the form of a path is a missing file; any other is a missing preset.
fn unknown(name: &str, path: &Path) -> Error {
    let is_path = name.contains(['/', '\\']) || Path::new(name).extension().is_some_and(|e| e == "json");
    if is_path || path != Path::new(name) {
        Error::NoFile { path: path.display().to_string() }
    } else {
        Error::UnknownModel { name: name.into() }
    }
}

fn read_text(file: impl Read) -> io::Result<String> {
    let mut text = String::new();
    file.take(LARGEST_CONFIG + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LARGEST_CONFIG {
        return Err(io::Error::other("the file is larger than 64 MiB, which no config.json is"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_model_gets_the_names_most_like_it() {
        let error = load_model("llama3-8b").unwrap_err();
        assert_eq!(error.to_string(), "no model is called `llama3-8b`, and no file either");
        assert!(error.hint().unwrap().contains("`llama-3-8b`"), "{:?}", error.hint());
        let error = load_model("missing/config.json").unwrap_err();
        assert_eq!(error.to_string(), "there is no file `missing/config.json`");
    }
}
