//! The questions, as the command line answers them.

use std::fs::{self, File};
use std::io::Read as _;

use pyo3::prelude::*;
use report::{Page, PlanReport, Report as _};
use vramledger::ledger::{Bytes, Found};
use vramledger::models::Torch;
use vramledger::wire::Document as Known;
use vramledger::{Answer, By, Error, RankReader, ReadQuestion, RecordedDevice, SimulateQuestion, wire};
use vramledger_cli::Settings;

use crate::document::{Body, Document};
use crate::failure::{plain, raise};

/// What a plan is asked: a model and settings by their keys.
pub struct Asked {
    model: String,
    settings: Vec<(String, String)>,
}

impl Asked {
    fn plan<T>(&self, with: impl FnOnce(vramledger::Plan<'_>) -> T) -> anyhow::Result<T> {
        let model = vramledger::load_model(&self.model)?;
        let pairs = self.settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let settings = Settings::new("plan", pairs)?;
        Ok(with(vramledger::plan(settings.question(&model)?)?))
    }

    /// The page of the plan, with the settings that would help.
    pub fn page(&self) -> anyhow::Result<Page> {
        self.plan(|plan| {
            let explanation = vramledger::explain_plan(&plan);
            PlanReport { ledger: &plan.ledger, explanation: &explanation }.page()
        })
    }
}

/// The plan of a model.
#[pyfunction]
pub fn plan(py: Python<'_>, model: String, settings: Vec<(String, String)>) -> PyResult<Document> {
    py.detach(|| {
        let asked = Asked { model, settings };
        let (ledger, tape) = asked.plan(|plan| (plan.ledger, (plan.about, plan.tape))).map_err(raise)?;
        let body = Body::Ledger(Box::new(ledger));
        Ok(Document { name: asked.model.clone(), body, tape: Some(tape), asked: Some(asked) })
    })
}

/// The keys of the settings of a plan.
#[pyfunction]
pub fn setting_keys() -> Vec<String> {
    Settings::keys()
}

/// What a file says.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn read(
    py: Python<'_>,
    name: String,
    path: String,
    by: &str,
    depth: usize,
    at: Option<u64>,
    step: Option<u32>,
    device: Option<u16>,
    what_if: Vec<String>,
    capacity: Option<u64>,
    known: Option<(String, Vec<(String, String)>)>,
    parameters: Option<(u64, u64)>,
) -> PyResult<Document> {
    let unknown =
        || plain("SetupError", &format!("`by` is one of {}, not `{by}`", words(By::ALL, By::as_str)));
    let by = By::ALL.iter().copied().find(|known| known.as_str() == by).ok_or_else(unknown)?;
    py.detach(|| {
        let known = match (known, parameters) {
            (Some((model, settings)), _) => {
                let model = vramledger::load_model(&model).map_err(raise)?;
                let pairs = settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
                let settings = Settings::new("read", pairs).map_err(raise)?;
                let question = settings.question(&model).map_err(raise)?;
                Some(vramledger::Known::of_plan(question).map_err(raise)?)
            }
            (None, Some((parameters, ranks))) => Some(vramledger::Known::of_parameters(parameters, ranks)),
            (None, None) => None,
        };
        let failed = |source| raise(Error::Read { path: path.clone(), source });
        let file = File::open(&path).map_err(failed)?;
        let size = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|known| known.len());
        let capacity = capacity.map(Bytes::new);
        let question = ReadQuestion { by, depth, at, device, step, what_if, capacity, known, size };
        Ok(match vramledger::read(&path, file, &question).map_err(raise)? {
            Answer::Ledger(read) => {
                let (ledger, tape) = read.into_parts();
                let tape = tape.or_else(|| kept(&path));
                Document { tape, ..Document::new(name, Body::Ledger(Box::new(ledger))) }
            }
            Answer::Series(series) => Document::new(name, Body::Series(series)),
            Answer::Instants(instants) => Document::new(name, Body::Instants(instants)),
        })
    })
}

/// The tape in a file of one.
fn kept(path: &str) -> Option<(wire::About, vramledger::ledger::Tape)> {
    let mut head = [0; 16];
    File::open(path).ok()?.read_exact(&mut head).ok()?;
    if !head.starts_with(b"vramledger-tape/") {
        return None;
    }
    match Known::read(&fs::read(path).ok()?) {
        Ok(Known::Tape(tape)) => Some(*tape),
        _ => None,
    }
}

/// The ledger in a text: a document or hand-written states.
#[pyfunction]
pub fn ledger(py: Python<'_>, name: String, text: &str) -> PyResult<Document> {
    let ledger = py.detach(|| vramledger::read_ledger(&name, text.as_bytes()).map_err(raise))?;
    Ok(Document::new(name, Body::Ledger(Box::new(ledger))))
}

/// The ledger of a recorded run: PyTorch's snapshot, and what the run noted.
#[pyfunction]
pub fn recorded(
    py: Python<'_>,
    name: String,
    device: String,
    capacity: u64,
    snapshot: &[u8],
    notes: &str,
) -> PyResult<Document> {
    let device = RecordedDevice { name: device, capacity: Bytes::new(capacity) };
    let answer =
        py.detach(|| vramledger::recorded(&name, &device, snapshot, notes.as_bytes()).map_err(raise));
    let (ledger, about, tape) = answer?;
    Ok(Document { tape: Some((about, tape)), ..Document::new(name, Body::Ledger(Box::new(ledger))) })
}

/// Ledgers side by side, each with what to call it.
#[pyfunction]
pub fn compare(
    py: Python<'_>,
    base: (String, Py<Document>),
    others: Vec<(String, Py<Document>)>,
) -> PyResult<Document> {
    let baseline = (base.0.as_str(), base.1.get().ledger()?);
    let named: Vec<(&str, &wire::Ledger)> = others
        .iter()
        .map(|(name, other)| Ok((name.as_str(), other.get().ledger()?)))
        .collect::<PyResult<_>>()?;
    let comparison = py.detach(|| vramledger::compare(baseline, &named).map_err(raise))?;
    Ok(Document::new(base.0.clone(), Body::Comparison(comparison)))
}

/// A prediction beside allocated, reserved and capacity bytes of one instant, in a phase.
#[pyfunction]
pub fn reconcile(
    py: Python<'_>,
    name: String,
    predicted: Py<Document>,
    found: (u64, u64, u64),
    at: Option<&str>,
) -> PyResult<Document> {
    let ledger = predicted.get().ledger()?;
    let (allocated, reserved, capacity) = (Bytes::new(found.0), Bytes::new(found.1), Bytes::new(found.2));
    let found = Found { allocated, reserved, capacity };
    let answer = py.detach(|| vramledger::reconcile(&name, ledger, found, at).map_err(raise))?;
    Ok(Document::new(name, Body::Reconciliation(Box::new(answer))))
}

/// A prediction beside evidence, each a name and the bytes of a file.
#[pyfunction]
pub fn reconcile_evidence(
    py: Python<'_>,
    predicted: (String, Vec<u8>),
    found: (String, Vec<u8>),
) -> PyResult<Document> {
    let answer = py.detach(|| {
        let sides = ((&*predicted.0, &*predicted.1), (&*found.0, &*found.1));
        vramledger::reconcile_evidence(sides.0, sides.1).map_err(raise)
    })?;
    Ok(Document::new(predicted.0, Body::Reconciliation(Box::new(answer))))
}

/// What the files of the ranks of a job say, each a name and a path.
#[pyfunction]
pub fn read_ranks(
    py: Python<'_>,
    name: String,
    files: Vec<(String, String)>,
    device: Option<u16>,
) -> PyResult<Document> {
    py.detach(|| {
        let mut reader = RankReader::new(device);
        for (name, path) in &files {
            match File::open(path) {
                Ok(file) => reader.read(name, path, file),
                Err(error) => reader.unread(name, format!("failed to read `{path}`: {error}")),
            }
        }
        Ok(Document::new(name, Body::Ranks(Box::new(reader.answer().map_err(raise)?))))
    })
}

/// The tape of a ledger under settings of the allocator.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub fn simulate(
    py: Python<'_>,
    name: String,
    document: Py<Document>,
    alloc_confs: Vec<String>,
    gpu: Option<&str>,
    capacity: Option<u64>,
    context: Option<u64>,
    torch: Option<&str>,
) -> PyResult<Document> {
    let (about, tape) = document.get().tape()?;
    let unknown = |text: &str| {
        plain("SetupError", &format!("`torch` is one of {}, not `{text}`", words(Torch::ALL, Torch::as_str)))
    };
    let torch = match torch {
        Some(text) => {
            let found = Torch::ALL.iter().copied().find(|known| known.as_str() == text);
            Some(found.ok_or_else(|| unknown(text))?)
        }
        None => None,
    };
    py.detach(|| {
        let bytes = wire::write_tape(about, tape).map_err(Error::from).map_err(raise)?;
        let question = SimulateQuestion {
            alloc_confs: &alloc_confs,
            gpu: gpu.map(vramledger::find_gpu).transpose().map_err(raise)?,
            capacity: capacity.map(Bytes::new),
            context: context.map(Bytes::new),
            torch,
        };
        let answer = vramledger::simulate(&name, &name, &bytes, &question).map_err(raise)?;
        Ok(Document::new(name, Body::Simulation(answer)))
    })
}

fn words<T: Copy>(all: &[T], word: impl Fn(T) -> &'static str) -> String {
    all.iter().map(|one| word(*one)).collect::<Vec<_>>().join(", ")
}
