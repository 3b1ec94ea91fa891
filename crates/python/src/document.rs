//! The one native object: an answer with its forms.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule};
use report::{InstantsReport, Page, PlanReport, ReadReport, Report, SeriesReport, Sheet};
use vramledger::ledger::Tape;
use vramledger::wire::{self, About, to_json};

use crate::arrow;
use crate::ask::Asked;
use crate::failure::{plain, raise};

/// What was answered.
pub enum Body {
    /// A ledger.
    Ledger(Box<wire::Ledger>),
    /// A comparison.
    Comparison(wire::Comparison),
    /// A reconciliation.
    Reconciliation(Box<wire::Reconciliation>),
    /// A simulation.
    Simulation(wire::Simulation),
    /// Moments.
    Instants(wire::Instants),
    /// Totals over time.
    Series(wire::Series),
    /// The ranks of a job.
    Ranks(Box<wire::RankReadings>),
}

/// A document: its JSON, its page for people and its rows for programs.
#[pyclass(frozen, module = "vramledger._native")]
pub struct Document {
    /// What to call it.
    #[pyo3(get)]
    pub name: String,
    /// What was answered.
    pub body: Body,
    /// The tape of a ledger, where it is at hand.
    pub tape: Option<(About, Tape)>,
    /// What a plan was asked, from which its page makes proposals.
    pub asked: Option<Asked>,
}

impl Document {
    /// A document without a tape.
    pub const fn new(name: String, body: Body) -> Self {
        Self { name, body, tape: None, asked: None }
    }

    /// The ledger that it is.
    pub fn ledger(&self) -> PyResult<&wire::Ledger> {
        match &self.body {
            Body::Ledger(ledger) => Ok(ledger),
            _ => {
                Err(plain("ComparisonError", &format!("`{}` is a {}, not a ledger", self.name, self.kind())))
            }
        }
    }

    /// The tape that it was made from.
    pub fn tape(&self) -> PyResult<&(About, Tape)> {
        let none = || {
            plain(
                "ReadError",
                &format!(
                    "the tape of `{}` is not at hand: plan, capture and read of a recording or a .vlt keep one",
                    self.name
                ),
            )
        };
        self.tape.as_ref().ok_or_else(none)
    }

    fn page(&self) -> PyResult<Page> {
        Ok(match &self.body {
            Body::Ledger(ledger) => match (&self.asked, &ledger.reading) {
                (Some(asked), _) => return asked.page().map_err(raise),
                (None, Some(reading)) => ReadReport { name: &self.name, ledger, reading }.page(),
                (None, None) => PlanReport { ledger, explanation: &vramledger::explain(ledger) }.page(),
            },
            Body::Comparison(it) => it.page(),
            Body::Reconciliation(it) => it.page(),
            Body::Simulation(it) => it.page(),
            Body::Ranks(it) => it.page(),
            Body::Instants(instants) => InstantsReport { name: &self.name, instants }.page(),
            Body::Series(series) => SeriesReport { name: &self.name, series }.page(),
        })
    }

    fn sheet(&self) -> Sheet {
        match &self.body {
            Body::Ledger(ledger) => match &ledger.reading {
                Some(reading) => ReadReport { name: &self.name, ledger, reading }.sheet(),
                None => PlanReport { ledger, explanation: &vramledger::explain(ledger) }.sheet(),
            },
            Body::Comparison(it) => it.sheet(),
            Body::Reconciliation(it) => it.sheet(),
            Body::Simulation(it) => it.sheet(),
            Body::Ranks(it) => it.sheet(),
            Body::Instants(instants) => InstantsReport { name: &self.name, instants }.sheet(),
            Body::Series(series) => SeriesReport { name: &self.name, series }.sheet(),
        }
    }
}

/// An object of a tape: its name, owner, category, whether autograd keeps it, dtype, shape, bytes and device.
type Row = (String, Option<String>, String, bool, Option<String>, Option<Vec<u64>>, u64, String);

#[pymethods]
impl Document {
    #[getter]
    fn kind(&self) -> &'static str {
        match self.body {
            Body::Ledger(_) => "ledger",
            Body::Comparison(_) => "comparison",
            Body::Reconciliation(_) => "reconciliation",
            Body::Simulation(_) => "simulation",
            Body::Instants(_) => "instants",
            Body::Series(_) => "series",
            Body::Ranks(_) => "ranks",
        }
    }

    fn json(&self, py: Python<'_>) -> String {
        py.detach(|| match &self.body {
            Body::Ledger(it) => to_json(it),
            Body::Comparison(it) => to_json(it),
            Body::Reconciliation(it) => to_json(it),
            Body::Simulation(it) => to_json(it),
            Body::Instants(it) => to_json(it),
            Body::Series(it) => to_json(it),
            Body::Ranks(it) => to_json(it),
        })
    }

    /// The page of the terminal, without its styles.
    fn text(&self, py: Python<'_>) -> PyResult<String> {
        Ok(anstream::adapter::strip_str(&py.detach(|| self.page())?.text()).to_string())
    }

    fn markdown(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| self.page())?.markdown())
    }

    fn html(&self, py: Python<'_>) -> PyResult<String> {
        Ok(py.detach(|| self.page())?.html())
    }

    fn csv(&self, py: Python<'_>) -> String {
        py.detach(|| self.sheet().csv())
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // The schema is a wish, and there is one form.
        let _ = requested_schema;
        let stream =
            py.detach(|| arrow::stream(&self.sheet())).map_err(|e| plain("Error", &e.to_string()))?;
        PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
    }

    /// The .vlt file of the tape.
    fn tape_file<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let (about, tape) = self.tape()?;
        let bytes =
            py.detach(|| wire::write_tape(about, tape).map_err(vramledger::Error::from).map_err(raise))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The objects alive at the end of a phase.
    fn objects(
        &self,
        py: Python<'_>,
        step: u32,
        micro_batch: Option<u32>,
        phase: &str,
    ) -> PyResult<Vec<Row>> {
        let (_, tape) = self.tape()?;
        let alive = py.detach(|| vramledger::objects(tape, step, micro_batch, phase).map_err(raise))?;
        let text = |name| tape.name(name).to_owned();
        let row = |it: vramledger::Alive| {
            let layout = it.layout.map(|layout| tape.layout(layout));
            (
                text(it.label.name),
                it.label.owner.map(text),
                it.label.category.to_string(),
                it.label.saved,
                layout.map(|layout| layout.dtype.as_str().into()),
                layout.map(|layout| layout.shape.to_vec()),
                it.bytes.get(),
                tape.devices[usize::from(it.device.0)].name.clone(),
            )
        };
        Ok(alive.into_iter().map(row).collect())
    }
}
