//! Why a question cannot be answered, and what can be done about it.

use thiserror::Error;

/// Why a question cannot be answered.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum Error {
    #[error("`{what}` must be {range}, not {value}")]
    OutOfRange { what: &'static str, range: String, value: String },
    #[error("no GPU of the catalogue is called `{name}`")]
    UnknownGpu { name: String },
    #[error("no model is called `{name}`, and no file either")]
    UnknownModel { name: String },
    #[error("there is no file `{path}`")]
    NoFile { path: String },
    #[error("failed to read `{path}`")]
    Read { path: String, source: std::io::Error },
    #[error("the allocator settings `{}`: {problem}", ledger::clip(.settings))]
    Settings { settings: String, problem: allocator::SettingsError },
    #[error("{what}")]
    Setup { what: String },
    #[error("{what}")]
    CannotEmulate { what: String, hint: String },
    #[error("`{name}`: {problem}")]
    Model { name: String, problem: models::PlanError },
    #[error("`{name}` with this setup is more than a ledger holds: {problem}")]
    Tape { name: String, problem: ledger::TapeError },
    #[error(transparent)]
    TapeFile(#[from] wire::WriteError),
    #[error(transparent)]
    Recording(#[from] evidence::RecordingError),
    #[error("`{name}`: {problem}")]
    Document { name: String, problem: wire::ReadError },
    #[error("`{name}` {what}: a tape is needed")]
    NoTape { name: String, what: &'static str, tape: Option<String> },
    #[error("`{name}`: {problem}")]
    Snapshot { name: String, problem: evidence::SnapshotError },
    #[error("`{name}`: {problem}")]
    Trace { name: String, problem: evidence::TraceError },
    #[error("`{name}`: {problem}")]
    Timeline { name: String, problem: evidence::TimelineError },
    #[error("`{name}`: {problem}")]
    Log { name: String, problem: evidence::LogError },
    #[error("`{name}` is {what}, and no evidence of a run's memory")]
    NotEvidence { name: String, what: &'static str },
    #[error("`{name}` is larger than {mib} MiB, unpacked, the most that is read of a file of its form")]
    TooLarge { name: String, mib: u64 },
    #[error("`{name}` tells of no objects: {what} has totals alone")]
    NoLedger { name: String, what: &'static str },
    #[error("not one of the files can be read; the first: {first}")]
    NoRanks { first: String },
    #[error("`{name}` has {what}")]
    NoSuch { name: String, what: String },
    #[error("`{name}`: {problem}")]
    States { name: String, problem: ledger::StateError },
    #[error(transparent)]
    Compare(#[from] ledger::CompareError),
    #[error(transparent)]
    Reconcile(#[from] ledger::ReconcileError),
}

impl Error {
    /// What the reader can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::UnknownGpu { name } => {
                Some(suggest(name, models::GPUS.iter().map(|gpu| gpu.name), "`vramledger gpus` lists them"))
            }
            Self::UnknownModel { name } => {
                let names = models::PRESETS.iter().map(|preset| preset.name);
                let otherwise = "a model is a name that `vramledger models` lists, a config.json, a directory that holds one, or mlp:LAYERSxWIDTH";
                Some(suggest(name, names, otherwise))
            }
            Self::NoTape { tape: Some(tape), .. } => {
                Some(format!("it was made from the tape `{}`", ledger::clip(tape)))
            }
            Self::NoTape { tape: None, .. } => Some("`vramledger plan MODEL -o run.vlt` keeps one".into()),
            Self::NotEvidence { .. } | Self::Log { .. } => Some(
                "memory snapshots, out-of-memory messages, profiler traces, memory timelines, summaries, nvidia-smi's tables and step logs are read".into(),
            ),
            Self::CannotEmulate { hint, .. } => Some(hint.clone()),
            _ => None,
        }
    }

    pub(crate) fn out_of_range(what: &'static str, range: impl Into<String>, value: impl ToString) -> Self {
        Self::OutOfRange { what, range: range.into(), value: value.to_string() }
    }
}

/// The names most like `wanted`, and otherwise where the names are listed.
fn suggest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>, otherwise: &str) -> String {
    let wanted = wanted.to_ascii_lowercase();
    let mut scored: Vec<(f64, &str)> =
        names.map(|name| (strsim::jaro_winkler(&wanted, &name.to_ascii_lowercase()), name)).collect();
    scored.retain(|(score, _)| *score > 0.8);
    scored.sort_by(|(a, x), (b, y)| b.total_cmp(a).then(x.cmp(y)));
    let best: Vec<String> = scored.iter().take(3).map(|(_, name)| format!("`{name}`")).collect();
    if best.is_empty() {
        otherwise.into()
    } else {
        format!("did you mean {}? {otherwise}", best.join(" or "))
    }
}
