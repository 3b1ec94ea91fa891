//! Out-of-memory messages, in whatever text they stand: a message alone, a log, the logs of several ranks in one.
//!
//! Lines lose the prefixes that launchers and loggers put before them and are told apart by the rank
//! or process they are from (`lanes`); what is left is joined without its white space, so that it does not matter
//! where a terminal broke it, and the forms of the allocators are found in it (`forms`).

mod fields;
mod forms;
mod lanes;
mod size;
mod stack;

use std::fmt;

use ledger::Bytes;

use crate::Instant;
use forms::Form;
use lanes::{Lane, windows};

pub use size::Printed;
pub use stack::Frame;

/// The most messages that are taken from one file.
const MOST_MESSAGES: usize = 10_000;

/// One out-of-memory message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// What it says of the device; its tensor is not undone.
    pub instant: Instant,
    /// Its form.
    pub family: Family,
    /// The line of the file in which it begins, from 1.
    pub line: u64,
    /// The rank of the job that says it, as the log's prefix has it.
    pub rank: Option<u32>,
    /// The process that says it, as the log's prefix has it: `Runner pid=4321`.
    pub speaker: Option<String>,
    /// All sizes that "Tried to allocate" may stand for: it is printed with two decimals.
    pub requested: Option<Printed>,
    /// The process that is probably the one that speaks, where the message does not say which.
    pub own_process_guess: Option<u64>,
    /// The processes of this job that the log names in its prefixes.
    pub job_processes: Vec<u64>,
    /// What the process holds beside the allocator, where the message says it (MPS).
    pub other: Option<Bytes>,
    /// What XLA's program needs in all.
    pub needs: Option<Needs>,
    /// The stack of the program that the log shows for it, outermost first.
    pub stack: Vec<Frame>,
    /// What is odd about it.
    pub warnings: Vec<OomWarning>,
}

/// The form of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Family {
    /// No figures, or nothing but what was asked for.
    #[default]
    Bare,
    /// Figures in parentheses.
    Paren,
    /// Figures in sentences.
    Sentence,
    /// The labelled lines of `cudaMallocAsync`.
    MallocAsync,
    /// The warning before the exception.
    WarningLine,
    /// Apple's Metal through PyTorch.
    Mps,
    /// Apple's Metal through MLX.
    Mlx,
    /// JAX and XLA.
    Xla,
    /// The best-fit allocator of XLA and TensorFlow.
    Bfc,
    /// TensorFlow's own sentences.
    TensorFlow,
    /// NCCL.
    Nccl,
    /// Host memory.
    Cpu,
    /// An error of a library that stands for missing memory.
    Masked,
}

/// What a program of XLA needs, by what it is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// What it is given.
    pub parameters: Option<Bytes>,
    /// Its constants.
    pub constants: Option<Bytes>,
    /// What may be alive when it ends.
    pub outputs: Option<Bytes>,
    /// What it uses meanwhile.
    pub temporaries: Option<Bytes>,
    /// All of it.
    pub total: Option<Bytes>,
    /// What of it is lost between the parts.
    pub fragmentation: Option<Bytes>,
}

/// What is odd about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomWarning {
    /// There was more free than was asked for.
    FreeAboveRequest,
    /// There is more reserved than the device has.
    ReservedAboveDevice,
    /// The free bytes went below zero.
    FreeUnderflowed,
}

impl Family {
    /// Its name in documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Paren => "paren",
            Self::Sentence => "sentence",
            Self::MallocAsync => "cudaMallocAsync",
            Self::WarningLine => "warning_line",
            Self::Mps => "mps",
            Self::Mlx => "mlx",
            Self::Xla => "xla",
            Self::Bfc => "bfc",
            Self::TensorFlow => "tensorflow",
            Self::Nccl => "nccl",
            Self::Cpu => "cpu",
            Self::Masked => "masked",
        }
    }
}

impl fmt::Display for OomWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FreeAboveRequest => {
                "free > requested: limit/fraction, other allocator, or fragmentation of the address space"
            }
            Self::ReservedAboveDevice => "reserved > device: some pool memory is virtual/unmapped",
            Self::FreeUnderflowed => "free underflowed",
        })
    }
}

/// Whether `text` has an out-of-memory message.
pub fn looks_like_oom(text: &str) -> bool {
    !read_oom(text.as_bytes()).is_empty()
}

/// The out-of-memory messages in `bytes`, in their order.
pub fn read_oom(bytes: &[u8]) -> Vec<Message> {
    let narrow = forms::is_wide(bytes).then(|| forms::narrowed(bytes));
    let mut messages = Vec::new();
    for (first_line, window) in windows(narrow.as_deref().unwrap_or(bytes)) {
        let text = String::from_utf8_lossy(window);
        let lanes = lanes::lanes(&text, first_line);
        let pids: Vec<u64> = lanes.iter().filter_map(|lane| lane.pid).collect();
        for lane in &lanes {
            messages.extend(of_lane(lane, &pids));
        }
        if messages.len() >= MOST_MESSAGES {
            break;
        }
    }
    messages.sort_by_key(|message| message.line);
    messages.truncate(MOST_MESSAGES);
    messages
}

/// The messages of one process.
fn of_lane(lane: &Lane<'_>, pids: &[u64]) -> Vec<Message> {
    let (text, heads) = (lane.joined.as_str(), forms::heads(&lane.joined));
    let mut messages = Vec::new();
    for (index, head) in heads.iter().enumerate() {
        let next = heads.get(index + 1).map_or(text.len(), |next| next.start);
        let mut message = fields::read(head, &text[head.start..forms::end(text, head, next)]);
        message.line = lane.line_at(head.start);
        message.rank = lane.rank;
        message.speaker.clone_from(&lane.speaker);
        message.job_processes = pids.to_vec();
        let lines = lane.lines_between(
            index.checked_sub(1).map_or(0, |before| lane.row_at(heads[before].start) + 1),
            heads.get(index + 1).map(|next| lane.row_at(next.start)),
        );
        message.stack = stack::of(lines, lane.row_at(head.start));
        messages.push(message);
    }
    messages
}

impl Form {
    /// The family of a message that has this form and no figures of its own.
    const fn family(self) -> Family {
        match self {
            Self::Caching | Self::Bare => Family::Bare,
            Self::MallocAsync => Family::MallocAsync,
            Self::WarningLine => Family::WarningLine,
            Self::Mps | Self::MpsBuffer => Family::Mps,
            Self::Mlx => Family::Mlx,
            Self::Xla | Self::XlaUsed => Family::Xla,
            Self::Bfc => Family::Bfc,
            Self::TensorFlow | Self::TensorFlowDriver => Family::TensorFlow,
            Self::Nccl | Self::NcclFailure => Family::Nccl,
            Self::Cpu => Family::Cpu,
            Self::Masked => Family::Masked,
        }
    }
}
