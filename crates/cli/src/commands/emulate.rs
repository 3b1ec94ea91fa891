//! `vramledger emulate`.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use report::PlanReport;
use vramledger::Error;
use vramledger::emulate::{EmulationQuestion, End as Recorded, PROBE, Rank, Software};
use vramledger::ledger::clip;

use crate::args::{Common, EmulateArgs};
use crate::child::{self, End};
use crate::exit::Exit;
use crate::progress::Follower;
use crate::stage::Stage;
use crate::{failure, output};

/// Answers `emulate`, on the device of the library `emulator` where that is no file.
pub fn run(args: &EmulateArgs, emulator: Option<&[u8]>, common: &Common) -> Result<Exit> {
    let question = question(args)?;
    let name = clip(&question.program.join(" "));
    let software = software(&args.program[0])?;
    let stage = Stage::new(emulator)?;
    let mut follower = Follower::new(stage.record().join("progress.jsonl"), common);
    let mut command = stage.command(&args.program, &question.environment());
    let timeout = args.timeout.map(Duration::from_secs);
    let end = child::run(&mut command, timeout, || follower.look());
    let place = follower.finish().map(|place| format!(" at {place}")).unwrap_or_default();
    let status = match end.with_context(|| format!("failed to start `{name}`"))? {
        End::Exited(status) => status,
        End::Interrupted => return Err(anyhow!("`{name}` was interrupted{place}")),
        End::TimedOut => {
            let seconds = args.timeout.unwrap_or_default();
            let what = format!("`{name}` was ended after {seconds} s{place}");
            return Err(Error::CannotEmulate { what, hint: "`--timeout` gives it more time".into() }.into());
        }
    };
    let left = |file: &str| read(&stage.record().join(file));
    let (recording, snapshot) = (left("run.json")?, left("snapshot.pickle")?);
    drop(stage);
    if let (Some(path), Some(snapshot)) = (&args.snapshot, &snapshot) {
        output::write_file(path, snapshot)?;
    }
    let Some((recording, snapshot)) = recording.zip(snapshot) else {
        if !status.success() {
            return Err(ended(&name, status));
        }
        let what = format!("`{name}` ended without using the GPU");
        let hint =
            "what PyTorch does on CUDA is recorded; Python's -E, -I and -S keep the recorder out".into();
        return Err(Error::CannotEmulate { what, hint }.into());
    };
    let mut emulation = vramledger::emulate::emulation(&question, software.as_ref(), &snapshot, &recording)?;
    if !status.success() && emulation.ledger.oom.is_none() {
        if emulation.end != Recorded::Stopped {
            let error = ended(&name, status);
            return Err(match emulation.error {
                Some(own) => anyhow!(own).context(error),
                None => error,
            });
        }
        emulation
            .ledger
            .warnings
            .push(format!("after its last step the program ended with {}", named(status)));
    }
    let mut common = common.clone();
    if let Some(path) = output::tape_path(&mut common) {
        output::write_file(&path, &emulation.tape_file()?)?;
        emulation.ledger.tape = Some(path.display().to_string());
    }
    let explanation = vramledger::explain(&emulation.ledger);
    let report = PlanReport { ledger: &emulation.ledger, explanation: &explanation };
    output::answer_with(&emulation.ledger, &report, &common)?;
    failure::warn(&emulation.ledger.warnings, &common);
    Ok(if emulation.ledger.fits == Some(false) { Exit::No } else { Exit::Yes })
}

fn question(args: &EmulateArgs) -> Result<EmulationQuestion> {
    let mut gpu = vramledger::find_gpu(&args.gpu)?.clone();
    gpu.capacity = args.capacity.unwrap_or(gpu.capacity);
    let rank = match args.gpus {
        Some(gpus) => Some(Rank::new(args.rank.unwrap_or(0), gpus, args.nodes.unwrap_or(1))?),
        None => None,
    };
    let question = EmulationQuestion {
        program: args.program.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        gpu,
        context: args.context.unwrap_or(vramledger::CONTEXT),
        alloc_conf: args.alloc_conf.clone(),
        steps: args.steps.0,
        rank,
    };
    question.check()?;
    Ok(question)
}

/// What `program` would run on, where it is a Python: of a launcher or a shell script it cannot be told.
fn software(program: &OsString) -> Result<Option<Software>> {
    let python =
        Path::new(program).file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"));
    if !python {
        return Ok(None);
    }
    let name = program.to_string_lossy();
    let asked = Command::new(program).arg("-c").arg(PROBE).stdin(Stdio::null()).output();
    let asked = asked.with_context(|| format!("failed to start `{name}`"))?;
    let software = Software::read(&asked.stdout).ok_or_else(|| {
        let own = String::from_utf8_lossy(&asked.stderr);
        let own = own.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it answers nothing");
        anyhow!(own.to_owned()).context(format!("`{name}` cannot tell what it is"))
    })?;
    software.check(&name)?;
    Ok(Some(software))
}

/// The bytes of a file that need not be there.
fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let file = path.file_name().unwrap_or(OsStr::new("")).display();
            Err(anyhow!(error).context(format!("failed to read `{file}` of the recording")))
        }
    }
}

/// A program that did not do well. What it said itself stands above this on standard error.
fn ended(name: &str, status: ExitStatus) -> anyhow::Error {
    anyhow!("`{name}` ended with {}", named(status))
}

/// `exit status 3`, or `signal 11 (SIGSEGV)`.
fn named(status: ExitStatus) -> String {
    status.to_string().replacen("status: ", "status ", 1).replacen("signal: ", "signal ", 1)
}
