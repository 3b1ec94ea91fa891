//! Errors of the library as exceptions of `vramledger.errors`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyType;
use vramledger::Error;

/// The exception that `error` is, with its hint.
pub fn raise(error: impl Into<anyhow::Error>) -> PyErr {
    let error = error.into();
    let known = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
    let class = known.map_or("SetupError", class_of);
    let hint = known.and_then(Error::hint);
    let sentence = error.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ");
    Python::attach(|py| exception(py, class, &sentence, hint).unwrap_or_else(|failed| failed))
}

/// An exception of the class `class` that says `sentence`.
pub fn plain(class: &str, sentence: &str) -> PyErr {
    Python::attach(|py| exception(py, class, sentence, None).unwrap_or_else(|failed| failed))
}

fn exception(py: Python<'_>, class: &str, sentence: &str, hint: Option<String>) -> PyResult<PyErr> {
    let class = py.import("vramledger.errors")?.getattr(class)?;
    let class = class.cast_into::<PyType>().map_err(|_| PyRuntimeError::new_err(sentence.to_owned()))?;
    Ok(PyErr::from_type(class, (sentence.to_owned(), hint)))
}

/// The class of an error: what the caller got wrong.
const fn class_of(error: &Error) -> &'static str {
    match error {
        Error::OutOfRange { .. }
        | Error::UnknownGpu { .. }
        | Error::UnknownModel { .. }
        | Error::Settings { .. }
        | Error::Setup { .. }
        | Error::Model { .. }
        | Error::Tape { .. } => "SetupError",
        Error::Compare(_) | Error::Reconcile(_) => "ComparisonError",
        Error::TapeFile(_) | Error::CannotEmulate { .. } => "Error",
        _ => "ReadError",
    }
}
