//! The native module of the Python package: questions in, documents out. What users see is typed Python around it.

mod arrow;
mod ask;
mod document;
mod failure;
mod recorder;

use std::ffi::OsString;

use pyo3::prelude::*;

/// The emulated device's library, where it runs.
const EMULATOR: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/emulator.rs"));

/// Runs the command line with these words, the first of which is the program's name, and answers with its exit code.
#[pyfunction]
fn main(py: Python<'_>, words: Vec<OsString>) -> u8 {
    py.detach(|| vramledger_cli::main(words, EMULATOR))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<document::Document>()?;
    module.add_class::<recorder::Recorder>()?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(ask::plan, module)?)?;
    module.add_function(wrap_pyfunction!(ask::setting_keys, module)?)?;
    module.add_function(wrap_pyfunction!(ask::read, module)?)?;
    module.add_function(wrap_pyfunction!(ask::ledger, module)?)?;
    module.add_function(wrap_pyfunction!(ask::recorded, module)?)?;
    module.add_function(wrap_pyfunction!(ask::compare, module)?)?;
    module.add_function(wrap_pyfunction!(ask::reconcile, module)?)?;
    module.add_function(wrap_pyfunction!(ask::reconcile_evidence, module)?)?;
    module.add_function(wrap_pyfunction!(ask::read_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(ask::simulate, module)?)
}
