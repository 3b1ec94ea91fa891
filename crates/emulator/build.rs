//! Writes one success stub for every symbol in `symbols/*.txt` that `src/` does not define for real.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=symbols");
    println!("cargo:rerun-if-changed=src");
    let mut wanted = BTreeSet::new();
    for text in files("symbols", "txt")? {
        wanted.extend(text.lines().map(|line| line.trim().to_owned()).filter(|n| !n.is_empty()));
    }
    for text in files("src", "rs")? {
        for name in defined(&text) {
            wanted.remove(name);
        }
    }
    let mut out = String::from("stubs! {\n");
    for name in wanted {
        out.push_str(&format!("    {name}\n"));
    }
    out.push_str("}\n");
    let dir = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("OUT_DIR is not set"))?;
    fs::write(Path::new(&dir).join("stubs.rs"), out)
}

/// The texts of the files in `folder` that end in `extension`.
fn files(folder: &str, extension: &str) -> io::Result<Vec<String>> {
    let mut texts = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == extension) {
            texts.push(fs::read_to_string(path)?);
        }
    }
    Ok(texts)
}

/// The names after the word `fn` in a source text.
fn defined(text: &str) -> impl Iterator<Item = &str> {
    text.split("fn ").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
        (end > 0).then(|| &rest[..end])
    })
}
