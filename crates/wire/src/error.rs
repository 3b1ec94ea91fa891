//! Why a document cannot be read.

use thiserror::Error;

/// Why bytes are not a document of ours.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum ReadError {
    #[error("{place}: {what}")]
    Contradiction { place: String, what: String },
}
