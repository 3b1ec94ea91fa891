//! How the process ends.

use std::process::ExitCode;

/// What became of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Answered: yes, or the question is not one of yes and no.
    Yes,
    /// Answered: no (it does not fit, it does not agree).
    No,
    /// The question could not be answered.
    Unanswered,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Yes => Self::from(0),
            Exit::No => Self::from(1),
            Exit::Unanswered => Self::from(2),
        }
    }
}
