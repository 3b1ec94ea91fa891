//! What a ledger means, as data for a page: computed once, shown as it is.
//!
//! This is no document: everything in it follows from a ledger and, for the levers, from the ledgers
//! of other setups.

/// What a ledger means.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// The total that the page speaks of: the peak of the allocated bytes, or of the requested ones.
    pub peak: Option<PeakSummary>,
    /// What the card leaves to the allocator: all memory less the context.
    pub available_bytes: Option<u64>,
    /// `available_bytes` less the peak; negative where the peak alone is too much.
    pub left_bytes: Option<i64>,
    /// For a run that found no room: the requested peak it would have on a card without end.
    pub demand: Option<PeakSummary>,
    /// The phases, the micro-batches of a step and equal steps folded into one row.
    pub timeline: Vec<Span>,
    /// How many steps have no row in `timeline`.
    pub steps_left_out: u32,
    /// The peaks of the devices that are memory of the host, with their names.
    pub hosts: Vec<(String, PeakSummary)>,
    /// The measures at one instant, from the bytes asked for up to the whole card: when a request
    /// found no room, or else at the peak of the reserved bytes. Empty where those are not known.
    pub ladder: Vec<Rung>,
    /// What would be reserved at most if streams did not keep their blocks apart, where they do.
    pub one_stream_bytes: Option<u64>,
    /// Who is there at the peak, or when a request found no room, in the order a person thinks of
    /// them; they sum to the peak, or to what was allocated then.
    pub owners: Vec<Owner>,
    /// What other settings would save, the most first.
    pub levers: Vec<Lever>,
}

/// A peak in short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeakSummary {
    /// The name of its measure: `requested`.
    pub measure: String,
    /// The total.
    pub bytes: u64,
    /// The step, where known.
    pub step: Option<u32>,
    /// The micro-batch.
    pub micro_batch: Option<u32>,
    /// The phase, where known.
    pub phase: Option<String>,
}

/// One measure of the ladder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rung {
    /// Its name.
    pub measure: String,
    /// The total.
    pub bytes: u64,
    /// What it has more than the measure before.
    pub more_bytes: u64,
    /// What that is, and what was assumed of it.
    pub what: String,
}

/// One row of the timeline: a phase of the load, or of one or more equal steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first and the last step; 0 is the load.
    pub steps: (u32, u32),
    /// The first and the last micro-batch.
    pub micro_batches: Option<(u32, u32)>,
    /// The phase.
    pub phase: String,
    /// The largest total in any of them, in the measure of the page's peak.
    pub peak_bytes: Option<u64>,
    /// The largest reserved total in any of them.
    pub peak_reserved_bytes: Option<u64>,
    /// What the objects held at the end of the last one sum to: requested bytes, where the ledger
    /// knows them. The four amounts below sum to it.
    pub end_bytes: u64,
    /// Parameters, buffers and master weights.
    pub weights_bytes: u64,
    /// Gradients of parameters.
    pub gradient_bytes: u64,
    /// Optimizer state.
    pub optimizer_bytes: u64,
    /// Everything else.
    pub other_bytes: u64,
    /// Whether the peak of the run is in it.
    pub holds_peak: bool,
}

/// A group of objects at the peak.
#[derive(Clone, Debug, PartialEq)]
pub struct Owner {
    /// What a person calls them.
    pub name: String,
    /// Their bytes.
    pub bytes: u64,
    /// Their share of the peak, 0 to 1.
    pub share: f64,
    /// What the group is made of; empty where it is one thing. They sum to `bytes`.
    pub parts: Vec<Owner>,
}

/// A setting that would change the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lever {
    /// The flags to add or change: `--checkpoint full`.
    pub setting: String,
    /// The requested peak with it, on a card without end.
    pub peak_bytes: u64,
    /// The phase of that peak.
    pub phase: Option<String>,
    /// The requested peak of the run, on a card without end, less that peak.
    pub saving_bytes: i64,
    /// Whether it fits with it; asked only of a run that does not fit.
    pub fits: Option<bool>,
}
