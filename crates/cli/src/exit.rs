//! How the process ends.

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

impl Exit {
    /// The code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Yes => 0,
            Self::No => 1,
            Self::Unanswered => 2,
        }
    }
}
