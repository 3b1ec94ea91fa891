//! Why a document cannot be read or written.

use thiserror::Error;

/// Why bytes are not a document of ours. The message is the whole of it: no error has a source.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum ReadError {
    #[error("there is nothing in it")]
    Empty,
    #[error("neither JSON nor a tape: a ledger, a tape or states are needed")]
    Unrecognised,
    #[error("the {document} cannot be read: {reason}")]
    Json { document: &'static str, reason: String },
    #[error("the JSON has neither a `format` nor `states`: a ledger, a tape or states are needed")]
    NoFormat,
    #[error("unknown format `{format}`: a ledger (`vramledger/1`), a tape or states are needed")]
    UnknownFormat { format: String },
    #[error("`{format}` is {what}, where a ledger, a tape or states are needed")]
    OtherDocument { format: String, what: &'static str },
    #[error("`{format}` is a version this vramledger does not know; it reads `{known}`")]
    UnknownVersion { format: String, known: &'static str },
    #[error("{place}: {what}")]
    Contradiction { place: String, what: String },
    #[error("state {index}{}: {problem}", named(.name))]
    State { index: usize, name: Option<String>, problem: String },
    #[error(transparent)]
    Lifecycle(#[from] ledger::StateError),
    #[error("the tape ends early or is damaged: {0}")]
    Damaged(std::io::Error),
    #[error("the tape is not consistent: {0}")]
    Inconsistent(ledger::TapeError),
    #[error("the tape has {what}")]
    BadTape { what: String },
}

/// Why a tape cannot be written. The message is the whole of it.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum WriteError {
    #[error("a tape file holds at most {limit} {what}, and this tape has {count}")]
    TooMany { what: &'static str, limit: usize, count: usize },
    #[error("the tape is not consistent: {0}")]
    Inconsistent(ledger::TapeError),
    #[error("the tape cannot be compressed: {0}")]
    Compression(std::io::Error),
}

impl ReadError {
    /// JSON that is broken or of other types than `document` has. What it quotes may be of any length.
    pub(crate) fn json(document: &'static str, error: &serde_json::Error) -> Self {
        let reason = error.to_string();
        let place = format!(" at line {} column {}", error.line(), error.column());
        let reason = match reason.strip_suffix(&place) {
            Some(reason) => ledger::clip(reason) + &place,
            None => ledger::clip(&reason),
        };
        Self::Json { document, reason }
    }
}

fn named(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!(" (`{name}`)")).unwrap_or_default()
}
