//! How far an emulated program is: one line on a terminal, gone when the program is.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use vramledger::emulate::Progress;

use crate::args::Common;

/// Follows the file that the recorder writes a line to for every phase.
pub struct Follower {
    path: PathBuf,
    file: Option<BufReader<File>>,
    /// The beginning of a line that is not whole yet.
    begun: String,
    last: Option<Progress>,
    bar: ProgressBar,
}

impl Follower {
    /// Follows the file at `path`, which need not be there yet.
    pub fn new(path: PathBuf, common: &Common) -> Self {
        // Where standard error is no terminal it draws nothing either.
        let target = if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        Self { path, file: None, begun: String::new(), last: None, bar }
    }

    /// Takes in what is new and shows it.
    pub fn look(&mut self) {
        if !self.read() {
            return;
        }
        if let Some(progress) = &self.last {
            let held = report::size(progress.allocated_bytes);
            self.bar.set_message(format!("{}: {held} allocated", progress.place()));
            self.bar.tick();
        }
    }

    /// Takes the line away. Where the program was last: `step 2, backward`.
    pub fn finish(mut self) -> Option<String> {
        self.read();
        self.bar.finish_and_clear();
        self.last.map(|progress| progress.place())
    }

    /// Whether there was something new.
    fn read(&mut self) -> bool {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok().map(BufReader::new);
        }
        let Some(file) = &mut self.file else { return false };
        let mut news = false;
        while file.read_line(&mut self.begun).is_ok_and(|bytes| bytes > 0) && self.begun.ends_with('\n') {
            news |= true;
            self.last = Progress::read(&self.begun).or(self.last.take());
            self.begun.clear();
        }
        news
    }
}
