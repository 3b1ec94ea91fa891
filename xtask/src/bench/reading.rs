//! How long `read` takes for large snapshots, beside what Python and PyTorch take for the same files, and for a large
//! trace.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::{Page, Usage, megabytes, usage};

/// A snapshot of so many entries, and the most wall time and resident memory that reading it may take.
struct Size {
    entries: usize,
    time: Duration,
    memory: u64,
}

const SIZES: [Size; 2] = [
    Size { entries: 1_000_000, time: Duration::from_millis(1500), memory: 400_000_000 },
    Size { entries: 5_000_000, time: Duration::from_secs(8), memory: 1_600_000_000 },
];

/// A profiler trace of so many megabytes, and the most that reading it may take.
const TRACE: (&str, Duration, u64) = ("290", Duration::from_secs(3), 450_000_000);

/// Python's own reading of the file, and nothing else.
const LOAD: &str = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))";
/// Where PyTorch keeps the script that tells of snapshots.
const FIND: &str =
    "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])";

impl Page {
    /// Snapshots that `gen-snapshot` makes, read by `binary` and, where it is there, by `python`.
    pub(super) fn reading(&mut self, binary: &Path, python: &str) -> Result<()> {
        let _ = write!(
            self.text,
            "\n## Reading snapshots\n\n\
             `vramledger read FILE --format json` on files of `cargo xtask gen-snapshot N`, beside Python's `pickle.load` of\n\
             the same file and `stats` of PyTorch's own `_memory_viz.py`, once each. The ratios are to ours.\n\n\
             | entries | file | reader | wall time | goal | processor time | ratio | peak resident memory | goal | ratio |\n\
             |---:|---:|---|---:|---:|---:|---:|---:|---:|---:|\n"
        );
        let folder = tempfile::tempdir().context("failed to make a folder for snapshots")?;
        for size in SIZES {
            let file = folder.path().join("snapshot.pickle");
            make(["gen-snapshot", &size.entries.to_string()], &file)?;
            self.sizes(binary, python, &size, &file)?;
        }
        self.trace(binary, &folder.path().join("trace.json"))
    }

    /// A trace that `gen-trace` makes in `file`, read by `binary`.
    fn trace(&mut self, binary: &Path, file: &Path) -> Result<()> {
        let (megabytes_made, time, memory) = TRACE;
        make(["gen-trace", megabytes_made], file)?;
        let mut command = Command::new(binary);
        command.arg("read").arg(file).args(["--format", "json", "--quiet"]);
        let found = usage(&mut command, "read", 0)?;
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        let _ = write!(
            self.text,
            "\n## Reading traces\n\n\
             `vramledger read FILE --format json` on the file of `cargo xtask gen-trace {megabytes_made}`, once.\n\n\
             | file | wall time | goal | processor time | peak resident memory | goal |\n|---:|---:|---:|---:|---:|---:|\n\
             | {} | {} | {} | {} | {} | {} |\n",
            megabytes(std::fs::metadata(file)?.len()),
            seconds(found.wall),
            seconds(time),
            seconds(found.processor),
            megabytes(found.memory),
            megabytes(memory)
        );
        self.hold(found.wall <= time, || format!("reading a trace took {}", seconds(found.wall)));
        self.hold(found.memory <= memory, || format!("reading a trace took {}", megabytes(found.memory)));
        Ok(())
    }

    fn sizes(&mut self, binary: &Path, python: &str, size: &Size, file: &Path) -> Result<()> {
        let bytes = std::fs::metadata(file)?.len();
        let mut command = Command::new(binary);
        command.arg("read").arg(file).args(["--format", "json", "--quiet"]);
        let ours = usage(&mut command, "read", 0)?;
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        let mut row = |reader: &str, found: &Usage, goals: [String; 2]| {
            let [time_goal, memory_goal] = goals;
            let _ = writeln!(
                self.text,
                "| {} | {} | {reader} | {} | {time_goal} | {} | {:.1} | {} | {memory_goal} | {:.1} |",
                size.entries,
                megabytes(bytes),
                seconds(found.wall),
                seconds(found.processor),
                found.processor.as_secs_f64() / ours.processor.as_secs_f64(),
                megabytes(found.memory),
                found.memory as f64 / ours.memory as f64,
            );
        };
        row("vramledger", &ours, [seconds(size.time), megabytes(size.memory)]);
        let mut load = Command::new(python);
        load.args(["-c", LOAD]).arg(file);
        if let Ok(found) = usage(&mut load, "pickle.load", 0) {
            row("pickle.load", &found, Default::default());
        }
        if let Some(script) = memory_viz(python) {
            let mut stats = Command::new(python);
            stats.arg(script).arg("stats").arg(file);
            if let Ok(found) = usage(&mut stats, "_memory_viz.py stats", 0) {
                row("_memory_viz stats", &found, Default::default());
            }
        }
        let missed = |amount: String| format!("reading {} entries took {amount}", size.entries);
        self.hold(ours.wall <= size.time, || missed(seconds(ours.wall)));
        self.hold(ours.memory <= size.memory, || missed(megabytes(ours.memory)));
        Ok(())
    }
}

/// Runs a command of this program that makes `file`, in a process of its own: what this one held would count as its
/// children's.
fn make(command: [&str; 2], file: &Path) -> Result<()> {
    let made = Command::new(std::env::current_exe()?).args(command).arg("-o").arg(file).status();
    ensure!(made.context("failed to start a generator")?.success(), "`{}` failed", command[0]);
    Ok(())
}

/// The path of PyTorch's script; none where `python` has no torch.
fn memory_viz(python: &str) -> Option<String> {
    let found = Command::new(python).args(["-c", FIND]).stderr(Stdio::null()).output().ok()?;
    let folder = String::from_utf8(found.stdout).ok()?;
    found.status.success().then(|| format!("{}/cuda/_memory_viz.py", folder.trim()))
}
