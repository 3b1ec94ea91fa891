//! Files that a command reads: `FILE`, `NAME=FILE`, or `-` for standard input.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use vramledger::wire::Ledger;

/// The largest file that is read.
const LARGEST: u64 = 1 << 31;

/// A file and what to call it.
#[derive(Clone, Debug)]
pub struct NamedFile {
    /// The name before `=`, or the stem of the file.
    pub name: String,
    path: PathBuf,
}

impl FromStr for NamedFile {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text.split_once('=') {
            Some((name, path)) => Self { name: name.into(), path: path.into() },
            None if text == "-" => Self { name: "stdin".into(), path: text.into() },
            None => {
                let stem = Path::new(text).file_stem().unwrap_or_default();
                Self { name: stem.to_string_lossy().into_owned(), path: text.into() }
            }
        })
    }
}

impl NamedFile {
    /// The ledger in the file, whichever form holds it.
    pub fn ledger(&self) -> Result<Ledger> {
        let (path, bytes) = self.contents()?;
        Ok(vramledger::read_ledger(&path, &bytes)?)
    }

    /// The path of the file, and what is in it.
    pub fn contents(&self) -> Result<(String, Vec<u8>)> {
        let path = self.path.display().to_string();
        let bytes = self.read().with_context(|| format!("failed to read `{path}`"))?;
        Ok((path, bytes))
    }

    /// How many bytes the file has; none where it is no file of a known size.
    pub fn size(&self) -> Option<u64> {
        self.path.metadata().ok().filter(std::fs::Metadata::is_file).map(|known| known.len())
    }

    /// The path of the file, and the file, to be read as it comes.
    pub fn open(&self) -> Result<(String, Box<dyn Read>)> {
        let path = self.path.display().to_string();
        if self.path == Path::new("-") {
            return Ok((path, Box::new(io::stdin().lock())));
        }
        let file = File::open(&self.path).with_context(|| format!("failed to read `{path}`"))?;
        Ok((path, Box::new(file)))
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if self.path == Path::new("-") {
            io::stdin().lock().take(LARGEST + 1).read_to_end(&mut bytes)?;
        } else {
            File::open(&self.path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
        }
        if bytes.len() as u64 > LARGEST {
            bail!("it is larger than 2 GiB");
        }
        Ok(bytes)
    }
}
