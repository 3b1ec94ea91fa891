//! The log of unknown calls: which stubs and names a program used that nobody wrote for real.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Mutex, OnceLock};

/// Adds a line to the file named by `VRAMLEDGER_EMULATOR_LOG`; does nothing without it.
pub fn line(kind: &str, name: &str) {
    static FILE: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        let path = std::env::var_os("VRAMLEDGER_EMULATOR_LOG")?;
        // A log that cannot be opened must not stop the program that is being watched.
        OpenOptions::new().create(true).append(true).open(path).ok().map(Mutex::new)
    });
    if let Some(Ok(mut file)) = file.as_ref().map(Mutex::lock) {
        let _ = file.write_all(format!("{kind} {name}\n").as_bytes());
    }
}
