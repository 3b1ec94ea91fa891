//! What a reader could not tell, or found odd.

use std::fmt;

use ledger::Bytes;

/// What a file does not say, or says against itself. A reading with warnings is still a reading.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message says it")]
pub enum Warning {
    /// Nothing was recorded over time: only the end state is known.
    NoEvents,
    /// One entry is no recording.
    OneEvent,
    /// The recording began when there was memory in use already.
    BegunInTheMiddle { device: String, objects: u64, bytes: Bytes },
    /// The oldest entries are gone.
    Truncated { device: String, unmatched_frees: u64 },
    /// Actions that no known PyTorch records; the entries are kept and mean nothing here.
    UnknownActions { action: String, count: u64 },
    /// Allocations at an address that was still in use: a free was not recorded.
    UnrecordedFrees { device: String, count: u64 },
    /// Blocks in use at the end that were made while nothing was recorded.
    UnrecordedAllocations { device: String, count: u64, bytes: Bytes },
    /// Objects of the recording that are not among the blocks in use at the end.
    MissingAtEnd { device: String, count: u64, bytes: Bytes },
    /// The end state names no blocks for a device that has a recording.
    NoEndState { device: String },
    /// Segment entries and the segments at the end do not agree.
    SegmentsDisagree { device: String, count: u64 },
    /// Nothing has a stack: the recording was made without.
    NoStacks,
    /// Nothing has a time: PyTorch before 2.2 does not record it.
    NoTimes,
    /// More phases on more devices than a ledger may have rows.
    TooManyPhases { phases: u64, devices: u64 },
    /// There are bytes after the end of the data.
    TrailingBytes { count: u64 },
    /// A mark or label of a recording that finds nothing to stand on.
    UnplacedLabels { count: u64 },
    /// The text ends before its data does.
    CutOff,
    /// Events of a trace that cannot be read.
    DamagedEvents { count: u64 },
    /// The profiler counts steps from 0, which is the load here.
    StepsFromZero,
    /// A trace that begins when there was memory in use already.
    TraceBegunInTheMiddle { device: String, objects: u64, bytes: Bytes },
    /// Totals that are not the sum of what came before them.
    TotalsDisagree { device: String, count: u64, bytes: Bytes },
    /// Instants that do not say of which block they are.
    WithoutAddress { device: String, count: u64 },
    /// A column whose name does not tell which memory it counts.
    UnclearMeasure { column: String, figure: &'static str },
    /// A unit that some take for a decimal one.
    UnclearUnit { column: String, unit: &'static str },
    /// A column without a unit.
    NoUnit { column: String, unit: &'static str },
    /// A query of `nvidia-smi` without its heading.
    NoHeading,
    /// A log without steps.
    NoStepColumn,
    /// A log whose steps go back.
    StepsGoBack { count: u64 },
    /// Rows beyond the most that are read.
    RowsLeftOut { count: u64 },
    /// Lines of a log that are no rows of it.
    OddRows { count: u64 },
    /// The figures noted at a mark are not those of the entries up to it.
    MarkDisagrees { mark: u32, measure: &'static str, noted: Bytes, found: Bytes },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoEvents => f.write_str(
                "nothing was recorded over time, only the state at the end: call `torch.cuda.memory._record_memory_history()` before the run",
            ),
            Self::OneEvent => {
                f.write_str("the recording holds one entry: it was begun when everything was done")
            }
            Self::BegunInTheMiddle { device, objects, bytes } => write!(
                f,
                "{device}: the recording begins when {objects} objects of {bytes} are in use already; who made them, and when, is known only as far as the end state tells"
            ),
            Self::Truncated { device, unmatched_frees } => write!(
                f,
                "{device}: {unmatched_frees} objects are let go that the recording never saw made: it was begun in mid-run, or its oldest entries were dropped (`max_entries`)"
            ),
            Self::UnknownActions { action, count } => {
                write!(f, "{count} entries of the unknown action `{action}` are left out of the account")
            }
            Self::UnrecordedFrees { device, count } => write!(
                f,
                "{device}: {count} objects were let go without an entry; they are taken to end when their address is used again"
            ),
            Self::UnrecordedAllocations { device, count, bytes } => write!(
                f,
                "{device}: {count} blocks of {bytes} in use at the end were made without an entry"
            ),
            Self::MissingAtEnd { device, count, bytes } => write!(
                f,
                "{device}: {count} objects of {bytes} that were never let go are not in use at the end: the state is later than the recording"
            ),
            Self::NoEndState { device } => write!(
                f,
                "{device}: no segments are listed, so what was there before the recording is known only where it was let go"
            ),
            Self::SegmentsDisagree { device, count } => write!(
                f,
                "{device}: {count} segment entries do not agree with the segments at the end: reserved bytes may be off"
            ),
            Self::NoStacks => f.write_str("no entry has a stack: who made what cannot be told"),
            Self::NoTimes => f.write_str("no entry has a time"),
            Self::TooManyPhases { phases, devices } => write!(
                f,
                "{phases} phases on {devices} devices are more than a ledger holds: steps and phases are left out"
            ),
            Self::TrailingBytes { count } => write!(f, "{count} bytes after the end of the data are not read"),
            Self::UnplacedLabels { count } => {
                write!(f, "{count} labels name addresses where nothing is in use at their mark")
            }
            Self::CutOff => f.write_str("the file ends in the middle of its data: what comes after is not known"),
            Self::DamagedEvents { count } => {
                write!(f, "{count} events cannot be read and are left out of the account")
            }
            Self::StepsFromZero => {
                f.write_str("the profiler counts steps from 0: its `ProfilerStep#0` is step 1 here, and so on")
            }
            Self::TraceBegunInTheMiddle { device, objects, bytes } => write!(
                f,
                "{device}: {bytes} are in use already when the recording begins ({}); which operator made them is not known",
                if *objects == 1 { "one object".to_owned() } else { format!("{objects} objects, or more") }
            ),
            Self::TotalsDisagree { device, count, bytes } => write!(
                f,
                "{device}: {count} totals are not the sum of the blocks up to them, by {bytes} at most: not every allocation is in the trace"
            ),
            Self::WithoutAddress { device, count } => write!(
                f,
                "{device}: {count} instants do not tell their block: they may count too long, or not at all"
            ),
            Self::UnclearMeasure { column, figure } => write!(
                f,
                "`{}` does not say which memory it counts; it is taken for what is {}",
                ledger::clip(column),
                figure.replace('_', " ")
            ),
            Self::UnclearUnit { column, unit } => write!(
                f,
                "`{}` is in {unit}, taken for 2^10 and its powers, as PyTorch's tools write it; by powers of 1000 it would be less",
                ledger::clip(column)
            ),
            Self::NoUnit { column, unit } => write!(
                f,
                "`{}` has no unit; by its numbers it is taken for {unit}",
                ledger::clip(column)
            ),
            Self::NoHeading => f.write_str(
                "the table has no heading: which column is which is told by its words and by its numbers",
            ),
            Self::NoStepColumn => f.write_str("no column is a step: rows are counted from 0"),
            Self::StepsGoBack { count } => {
                write!(f, "the steps go back {count} times: the run was begun anew, or several runs are in one log")
            }
            Self::RowsLeftOut { count } => {
                write!(f, "the last {count} rows are more than are read and are left out")
            }
            Self::OddRows { count } => write!(f, "{count} lines are no rows of the log and are left out"),
            Self::MarkDisagrees { mark, measure, noted, found } => write!(
                f,
                "at mark {mark} the program noted {noted} {measure}, and the entries up to it make {found}"
            ),
        }
    }
}
