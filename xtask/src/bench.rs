//! `cargo xtask bench`: time and memory, held against their goals; writes docs/benchmarks.md.

mod reading;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use cargo_metadata::MetadataCommand;
use clap::Args;
use serde::Deserialize;
use wait4::Wait4 as _;

/// Arguments of `bench`.
#[derive(Args)]
pub struct Bench {
    /// Runs of each whole process
    #[arg(long, default_value_t = 41, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// A Python, with PyTorch or without, that reads the same snapshots
    #[arg(long, default_value = "python3")]
    python: String,
    /// Where the figures go; `-` for nowhere.
    #[arg(long, default_value = "docs/benchmarks.md")]
    output: String,
}

/// A plan as a whole process.
struct Plan {
    model: &'static str,
    format: &'static str,
    /// The most wall time and resident memory it may take, in bytes.
    goals: Option<(Duration, u64)>,
}

/// For text, what other settings would save is tried too: no goal holds for that.
const PLANS: &[Plan] = &[
    Plan { model: "llama-3-8b", format: "json", goals: Some((Duration::from_millis(50), 60_000_000)) },
    Plan { model: "llama-3-8b", format: "text", goals: None },
    Plan { model: "llama-3.1-405b", format: "json", goals: Some((Duration::from_millis(250), 250_000_000)) },
    Plan { model: "llama-3.1-405b", format: "text", goals: None },
];

/// What each plan is asked.
const SETUP: &str = "--gpu H100-80GB --batch 1 --seq 4096 --dtype bf16 --optimizer adamw --quiet";

const BUILD: &str = "cargo build --release -p vramledger-cli";

/// A benchmark of a crate, measured by criterion.
struct Suite {
    title: &'static str,
    /// What is measured and on what.
    about: &'static str,
    command: &'static str,
    /// Where criterion keeps the figures of each row, and what the row is of.
    rows: &'static [(&'static str, &'static str)],
    /// The least events per second.
    goal: Option<f64>,
}

const SUITES: &[Suite] = &[
    Suite {
        title: "Engine",
        about: "Three training steps run on shapes (batch 1, 4096 tokens, bf16, AdamW): from the model's config to a tape.",
        command: "cargo bench -p models --bench step -- engine",
        rows: &[("engine/llama-3-8b", "llama-3-8b"), ("engine/llama-3.1-405b", "llama-3.1-405b")],
        goal: None,
    },
    Suite {
        title: "Replay",
        about: "The tapes of the engine above, replayed without an allocator: from a tape to a ledger.",
        command: "cargo bench -p models --bench step -- replay",
        rows: &[("replay/llama-3-8b", "llama-3-8b"), ("replay/llama-3.1-405b", "llama-3.1-405b")],
        goal: None,
    },
    Suite {
        title: "Caching allocator",
        about: "A tape of a million events through the caching allocator: the recorded steps of a small Llama again and\n\
                again, and ten thousand objects of all sizes that die in no order.",
        command: "cargo bench -p allocator --bench replay",
        rows: &[
            ("allocator/training_default", "training, default settings"),
            ("allocator/training_expandable", "training, expandable_segments:True"),
            ("allocator/fragmented_default", "fragmented, default settings"),
            ("allocator/fragmented_expandable", "fragmented, expandable_segments:True"),
        ],
        goal: Some(5e6),
    },
];

/// Measures everything, writes the page, and fails where a goal is missed.
#[allow(clippy::print_stdout, reason = "a command of developers prints what falls short")]
pub fn run(args: &Bench) -> Result<()> {
    let target = MetadataCommand::new().no_deps().exec()?.target_directory.into_std_path_buf();
    let mut page = Page { text: heading()?, missed: Vec::new() };
    // Processes first: what a process held before it became another counts as the other's peak, and
    // this one is small as long as it has read nothing.
    cargo(BUILD)?;
    page.processes(&target.join("release/vramledger"), args.runs)?;
    page.reading(&target.join("release/vramledger"), &args.python)?;
    for suite in SUITES {
        cargo(suite.command)?;
        page.suite(suite, &target.join("criterion"))?;
    }
    if args.output != "-" {
        std::fs::write(&args.output, &page.text)
            .with_context(|| format!("failed to write `{}`", args.output))?;
    }
    println!("{}", page.text);
    ensure!(page.missed.is_empty(), "goals are missed: {}", page.missed.join("; "));
    Ok(())
}

/// docs/benchmarks.md as far as it is written, and the goals that were missed.
struct Page {
    text: String,
    missed: Vec<String>,
}

impl Page {
    /// The whole process of each plan.
    fn processes(&mut self, binary: &Path, runs: u32) -> Result<()> {
        let _ = write!(
            self.text,
            "\n## Whole process\n\n\
             `{BUILD}`, then\n`target/release/vramledger plan MODEL {SETUP} --format FORMAT`,\n\
             {runs} runs each: from the start of the process to its end. The goals are for json; for text, other\n\
             settings are tried too.\n\n\
             | model | format | wall time, median | least | goal | processor time, median | peak resident memory | goal |\n\
             |---|---|---:|---:|---:|---:|---:|---:|\n"
        );
        for Plan { model, format, goals } in PLANS {
            let usages = (0..runs).map(|_| plan(binary, model, format)).collect::<Result<Vec<_>>>()?;
            let sorted = |of: fn(&Usage) -> Duration| {
                let mut times: Vec<Duration> = usages.iter().map(of).collect();
                times.sort_unstable();
                times
            };
            let (times, processor) = (sorted(|usage| usage.wall), sorted(|usage| usage.processor));
            let median = times[times.len() / 2];
            let memory = usages.iter().map(|usage| usage.memory).max().unwrap_or_default();
            let (time_goal, memory_goal) =
                goals.map_or_else(Default::default, |(time, bytes)| (millis(time), megabytes(bytes)));
            let _ = writeln!(
                self.text,
                "| {model} | {format} | {} | {} | {time_goal} | {} | {} | {memory_goal} |",
                millis(median),
                millis(times[0]),
                millis(processor[processor.len() / 2]),
                megabytes(memory)
            );
            let missed = |amount| format!("the plan of {model} took {amount}");
            self.hold(goals.is_none_or(|(time, _)| median <= time), || missed(millis(median)));
            self.hold(goals.is_none_or(|(_, bytes)| memory <= bytes), || missed(megabytes(memory)));
        }
        Ok(())
    }

    /// The figures that criterion kept of `suite` in `home`.
    fn suite(&mut self, suite: &Suite, home: &Path) -> Result<()> {
        let Suite { title, about, command, rows, goal } = suite;
        let _ = write!(self.text, "\n## {title}\n\n{about} `{command}`.");
        if let Some(goal) = goal {
            let _ = write!(self.text, " The goal is {} events a second.", millions(*goal));
        }
        self.text.push_str("\n\n| of | events | median time | events a second |\n|---|---:|---:|---:|\n");
        for (place, name) in *rows {
            let (events, time) = criterion(&home.join(place))?;
            let rate = events as f64 / time.as_secs_f64();
            let _ = writeln!(self.text, "| {name} | {events} | {} | {} |", millis(time), millions(rate));
            self.hold(goal.is_none_or(|goal| rate >= goal), || {
                format!("{title}, {name}: {} events a second", millions(rate))
            });
        }
        Ok(())
    }

    fn hold(&mut self, goal: bool, missed: impl FnOnce() -> String) {
        if !goal {
            self.missed.push(missed());
        }
    }
}

/// What the page is, and the machine its figures are of.
fn heading() -> Result<String> {
    let compiler = Command::new("rustc").arg("--version").output().context("failed to run `rustc`")?;
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |line: &str| Some(line.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned());
    let processor = cpuinfo.lines().find_map(named).unwrap_or_else(|| std::env::consts::ARCH.into());
    Ok(format!(
        "# Benchmarks\n\n\
         Written by `cargo xtask bench`, on a machine that does nothing else; it fails where a goal is missed. MB is 10^6\n\
         bytes. The machine: {processor}, {} cores, {}; {}.\n",
        std::thread::available_parallelism()?,
        std::env::consts::OS,
        String::from_utf8_lossy(&compiler.stdout).trim()
    ))
}

/// What a process took.
struct Usage {
    wall: Duration,
    /// Of all its threads together: what a busy machine disturbs least.
    processor: Duration,
    /// The most resident memory, in bytes.
    memory: u64,
}

/// Runs the plan of `model` once.
fn plan(binary: &Path, model: &str, format: &str) -> Result<Usage> {
    let mut command = Command::new(binary);
    command.args(["plan", model]).args(SETUP.split(' ')).args(["--format", format]);
    usage(&mut command, "plan", 1)
}

/// What `command` takes, which is called `name` and answers with an exit code up to `most`.
fn usage(command: &mut Command, name: &str, most: i32) -> Result<Usage> {
    let start = Instant::now();
    let process = command.stdout(Stdio::null()).spawn();
    let mut process = process.with_context(|| format!("failed to start `{name}`"))?;
    let usage = process.wait4().with_context(|| format!("failed to wait for `{name}`"))?;
    let wall = start.elapsed();
    ensure!(usage.status.code().is_some_and(|code| code <= most), "`{name}` gave no answer");
    let processor = usage.rusage.utime + usage.rusage.stime;
    Ok(Usage { wall, processor, memory: usage.rusage.maxrss })
}

/// Runs a command line of cargo in the root of the workspace.
fn cargo(line: &str) -> Result<()> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let arguments = line.split(' ').skip(1);
    // Standard output is for the page alone.
    let status = command.args(arguments).current_dir(root).stdout(std::io::stderr()).status();
    ensure!(status.with_context(|| format!("failed to start `{line}`"))?.success(), "`{line}` failed");
    Ok(())
}

#[derive(Deserialize)]
struct Benchmark {
    throughput: Throughput,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Throughput {
    elements: u64,
}

#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    /// Nanoseconds.
    point_estimate: f64,
}

/// The events of the benchmark that criterion keeps in `folder`, and the median of its last run.
fn criterion(folder: &Path) -> Result<(u64, Duration)> {
    fn read<T: for<'de> Deserialize<'de>>(path: PathBuf) -> Result<T> {
        let text = std::fs::read(&path);
        let parsed = text.map_err(anyhow::Error::from).and_then(|text| Ok(serde_json::from_slice(&text)?));
        parsed.with_context(|| format!("criterion left no figure in `{}`", path.display()))
    }
    let benchmark: Benchmark = read(folder.join("new/benchmark.json"))?;
    let estimates: Estimates = read(folder.join("new/estimates.json"))?;
    Ok((benchmark.throughput.elements, Duration::from_nanos(estimates.median.point_estimate as u64)))
}

fn millis(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

fn millions(events: f64) -> String {
    format!("{:.1} million", events / 1e6)
}
