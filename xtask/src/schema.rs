//! `cargo xtask schema`: docs/schema, the JSON schema of each document.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Writes a file for each document.
pub fn run() -> Result<()> {
    for (path, text) in files() {
        let written = std::fs::create_dir_all(folder()).and_then(|()| std::fs::write(&path, text));
        written.with_context(|| format!("failed to write `{}`", path.display()))?;
    }
    Ok(())
}

/// Each file and what is to be in it: `vramledger-compare/1` is in `vramledger-compare-1.json`.
fn files() -> Vec<(PathBuf, String)> {
    let file = |(format, schema): (&str, _)| {
        (folder().join(format!("{}.json", format.replace('/', "-"))), wire::to_json(&schema))
    };
    wire::schemas().into_iter().map(file).collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schema")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_files_are_those_of_the_code() {
        let files = files();
        for (path, text) in &files {
            let written = std::fs::read_to_string(path).unwrap_or_default();
            assert!(written == *text, "{} is old: run `cargo xtask schema`", path.display());
        }
        let there = std::fs::read_dir(folder()).unwrap().count();
        assert_eq!(there, files.len(), "docs/schema has a file of no document");
    }
}
