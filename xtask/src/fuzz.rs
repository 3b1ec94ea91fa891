//! `cargo xtask fuzz`: everything that reads a file, fed with what nobody would write.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::test::{finish, root, tell};

/// What libFuzzer needs to see: which branches a run takes and what it compares.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";

/// No input may take more memory, in MiB, or seconds: a finding.
const MEMORY: u32 = 1024;
const SECONDS_AN_INPUT: u32 = 10;
/// The largest input, in bytes.
const LENGTH: u32 = 1 << 16;

#[derive(Args)]
pub struct Fuzz {
    /// The targets to run: names of fuzz/src/bin; all of them if none is given
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// Runs each target from the seeds in fuzz/seeds, what it finds kept in fuzz/target.
pub fn run(args: &Fuzz) -> Result<()> {
    let known = targets()?;
    for target in &args.targets {
        ensure!(known.contains(target), "there is no target `{target}`; there are {}", known.join(", "));
    }
    let folder = root().join("fuzz");
    tell("cargo build --release, in fuzz");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // For a target that is named, build scripts and macros are spared the flags.
    let host = host()?;
    cargo
        .args(["build", "--release", "--target", &host])
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_TARGET_DIR");
    finish(cargo.current_dir(&folder), "cargo build of fuzz")?;
    let wanted = if args.targets.is_empty() { &known } else { &args.targets };
    for target in wanted {
        let corpus = folder.join("target/corpus").join(target);
        std::fs::create_dir_all(&corpus).with_context(|| format!("failed to make `{}`", corpus.display()))?;
        let mut fuzzer = Command::new(folder.join("target").join(&host).join("release").join(target));
        fuzzer
            .arg(&corpus)
            .arg(folder.join("seeds").join(target))
            .args([
                format!("-max_total_time={}", args.seconds),
                format!("-max_len={LENGTH}"),
                format!("-rss_limit_mb={MEMORY}"),
                format!("-timeout={SECONDS_AN_INPUT}"),
                format!("-artifact_prefix={}/{target}-", folder.join("target").display()),
                "-print_final_stats=1".into(),
                "-verbosity=0".into(),
            ])
            .current_dir(&folder);
        let told = fuzzer.output().with_context(|| format!("failed to start the target `{target}`"))?;
        let text = String::from_utf8_lossy(&told.stderr);
        if !told.status.success() {
            tell(&text);
            bail!("{target} has a finding; the input that did it is kept in fuzz/target");
        }
        let inputs = text.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
        let inputs = inputs.map_or("no", str::trim);
        tell(&format!("fuzz {target}: {inputs} inputs in {} seconds, no finding", args.seconds));
    }
    Ok(())
}

/// The triple of this machine.
fn host() -> Result<String> {
    let told = Command::new("rustc").arg("-vV").output().context("failed to start `rustc -vV`")?;
    let text = String::from_utf8(told.stdout).context("`rustc -vV` prints no text")?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(ToOwned::to_owned).context("`rustc -vV` names no host")
}

/// The names of the targets, in order.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("fuzz/src/bin");
    let entries =
        std::fs::read_dir(&folder).with_context(|| format!("failed to list `{}`", folder.display()))?;
    let files: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let mut names: Vec<String> =
        files.iter().filter_map(|file| Some(file.file_stem()?.to_str()?.to_owned())).collect();
    names.sort_unstable();
    Ok(names)
}
