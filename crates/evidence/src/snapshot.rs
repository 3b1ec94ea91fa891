//! The CUDA memory snapshot of PyTorch, from version 2.0 on.
//!
//! `torch.cuda.memory._dump_snapshot` writes a pickle: the segments and their blocks at the end,
//! the recorded entries of each device, the allocator's settings, and annotations. Versions differ
//! in what they leave out; [`Snapshot::read`] takes all of them, and a bare list of segments too.
//!
//! Sizes of trace entries are the bytes asked for, sizes of blocks the allocator's, sizes of
//! segments what it holds of the device: three units, never to be added.

mod anchor;
mod build;
mod ranges;
mod tape;

use std::ops::Range;

use indexmap::IndexSet;
use ledger::Bytes;
use thiserror::Error;

use crate::Warning;
use crate::pickle::{self, Limits, PickleError, Text};

pub(crate) use tape::is_native;
pub use tape::{Alive, Narrator, Origin, Plain, Taped};

/// A snapshot as its file tells it.
#[derive(Debug)]
pub struct Snapshot {
    texts: IndexSet<Box<str>>,
    frames: Vec<Frame>,
    stacks: IndexSet<Box<[u32]>>,
    /// The segments of all devices at the end, with their blocks. For expandable segments one is a
    /// contiguous mapped range.
    pub segments: Vec<Segment>,
    /// The segments of pinned host memory at the end (from 2.15, where asked for).
    pub host_segments: Vec<Segment>,
    /// All entries of all traces, in columns.
    entries: Entries,
    /// The entries of each device; the place in the list is the number of the device.
    pub traces: Vec<Trace>,
    /// The entries of pinned host memory.
    pub host_trace: Trace,
    /// The allocator's settings by name, those that are lists or tables by their parts.
    pub settings: Vec<(String, Setting)>,
    /// Profiler steps, optimizer steps, collectives: present where a profiler or `record_function` ran.
    pub annotations: Vec<Annotation>,
    /// Streams by number: what the file calls them. The first is the default stream, 0.
    pub streams: Vec<i64>,
    /// Pools by number: what the file calls them. The first is the common pool, (0, 0).
    pub pools: Vec<(i64, i64)>,
    /// What the file does not say, or says against itself.
    pub warnings: Vec<Warning>,
    written_by: Option<&'static str>,
}

/// A stack of a snapshot; 0 is the empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stack(pub u32);

/// The entries of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    rows: Range<usize>,
}

impl Trace {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// One segment at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The device; none for pinned host memory.
    pub device: Option<u16>,
    /// Where it begins; none in files before 2.0.
    pub address: Option<u64>,
    /// Its segment bytes.
    pub size: Bytes,
    /// Its stream, an index into [`Snapshot::streams`].
    pub stream: u16,
    /// Its pool, an index into [`Snapshot::pools`].
    pub pool: u16,
    /// Whether it is of the pool for large blocks, where known.
    pub large: Option<bool>,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// Who had it allocated.
    pub stack: Stack,
    /// Its blocks in the order of addresses.
    pub blocks: Vec<Block>,
}

/// One block at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it begins, where the file or its place in the segment tells.
    pub address: Option<u64>,
    /// Its block bytes.
    pub size: Bytes,
    /// The bytes asked for; those of the block where the file does not tell.
    pub requested: Bytes,
    /// Whether it is in use.
    pub state: BlockState,
    /// Who made what is in it.
    pub stack: Stack,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// In use.
    Allocated,
    /// Let go, but waiting for other streams.
    PendingFree,
    /// Free for reuse.
    Inactive,
}

/// One frame of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The file, or the library for a frame of C++.
    pub file: Text,
    /// The line, or the offset in a library.
    pub line: i64,
    /// The function.
    pub name: Text,
    /// The operation, name, target and origin of a compiled graph's node, where recorded.
    pub node: [Option<Text>; 4],
}

/// What an entry records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// An object comes to be.
    Alloc,
    /// The program lets go of an object.
    FreeRequested,
    /// The block of an object is free.
    FreeCompleted,
    /// A segment is taken from the device.
    SegmentAlloc,
    /// A segment is given back.
    SegmentFree,
    /// Pages are mapped into an expandable segment.
    SegmentMap,
    /// Pages are unmapped.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// The device had no room.
    Oom,
    /// A live allocation got a note.
    Annotate,
    /// An action that this reader does not know.
    Other(Text),
}

/// One entry of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What is recorded.
    pub action: Action,
    /// The address it is about; for [`Action::Oom`] the bytes that the device still had.
    pub address: u64,
    /// Bytes: asked for, or of the segment.
    pub size: Bytes,
    /// The stream, an index into [`Snapshot::streams`].
    pub stream: u16,
    /// The pool, an index into [`Snapshot::pools`]; none in files that do not tell.
    pub pool: Option<u16>,
    /// When, in microseconds; 0 where unknown.
    pub time_us: u64,
    /// Where in the program; empty for what autograd's own threads did.
    pub stack: Stack,
    /// What the program had noted with `_set_memory_metadata`, empty for nothing.
    pub user_metadata: Text,
    /// Which compiled region, empty for none.
    pub compile_context: Text,
}

/// A named point of a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Its name: `ProfilerStep#3`, `Optimizer.step#AdamW.step`.
    pub name: Text,
    /// Whether it starts here, or ends.
    pub starts: bool,
    /// The device, where there is one.
    pub device: Option<u16>,
    /// When, in microseconds.
    pub time_us: u64,
}

/// The value of a setting.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the type is all there is to say")]
pub enum Setting {
    Bool(bool),
    Integer(i64),
    Real(f64),
    Text(String),
}

/// Why a file is no snapshot that can be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum SnapshotError {
    #[error("the file is empty")]
    Empty,
    #[error("it is a git-lfs pointer, not the file itself: fetch it with `git lfs pull`")]
    LfsPointer,
    #[error("it is {form}, not a memory snapshot")]
    OtherForm { form: &'static str },
    #[error(transparent)]
    Pickle(#[from] PickleError),
    #[error(
        "it is a pickle, but no memory snapshot: it is no dict with `segments` and `device_traces`, and no list of segments"
    )]
    NoSnapshot,
    #[error("the snapshot is damaged: {what}")]
    Damaged { what: String },
}

impl Snapshot {
    /// Reads the snapshot in `bytes`.
    ///
    /// # Errors
    /// One sentence: what the bytes are instead, or where they are damaged.
    pub fn read(bytes: &[u8]) -> Result<Self, SnapshotError> {
        if let Some(error) = mislabelled(bytes) {
            return Err(error);
        }
        let mut builder = build::SnapshotBuilder::new(bytes.len());
        let (root, heap, read) = pickle::read(bytes, Limits::for_length(bytes.len()), &mut builder)?;
        let mut snapshot = builder.finish(root, heap)?;
        if read < bytes.len() {
            snapshot.warnings.push(Warning::TrailingBytes { count: (bytes.len() - read) as u64 });
        }
        Ok(snapshot)
    }

    /// The text behind `text`.
    pub fn text(&self, text: Text) -> &str {
        self.texts.get_index(text.0 as usize).map_or("", |text| text)
    }

    /// The frames of `stack`, innermost first.
    pub fn stack(&self, stack: Stack) -> impl DoubleEndedIterator<Item = &Frame> + ExactSizeIterator {
        let frames: &[u32] = self.stacks.get_index(stack.0 as usize).map_or(&[], |frames| frames);
        frames.iter().map(|frame| &self.frames[*frame as usize])
    }

    /// The number of different stacks, the empty one included.
    pub fn stacks(&self) -> usize {
        self.stacks.len()
    }

    /// The number of different frames.
    pub fn frames(&self) -> usize {
        self.frames.len()
    }

    /// The entries of `trace` in order.
    pub fn entries(&self, trace: &Trace) -> impl DoubleEndedIterator<Item = Entry> + ExactSizeIterator {
        trace.rows.clone().map(|row| self.entries.get(row))
    }

    /// The entry at `index` of `trace`.
    ///
    /// # Panics
    /// Where the trace has no such entry.
    pub fn entry(&self, trace: &Trace, index: usize) -> Entry {
        self.entries.get(trace.rows.start + index)
    }

    /// Leaves everything out that is not of the GPU of number `device`; whether there is anything of it.
    pub fn keep_device(&mut self, device: u16) -> bool {
        self.segments.retain(|segment| segment.device == Some(device));
        self.host_segments.clear();
        self.host_trace = Trace::default();
        for (number, trace) in self.traces.iter_mut().enumerate() {
            if number != usize::from(device) {
                *trace = Trace::default();
            }
        }
        !self.segments.is_empty() || self.traces.iter().any(|trace| !trace.is_empty())
    }

    /// The releases of PyTorch that write what is in this file, as far as it shows.
    pub fn written_by(&self) -> Option<&'static str> {
        self.written_by
    }

    /// The setting `name`, where the file has it.
    pub fn setting(&self, name: &str) -> Option<&Setting> {
        self.settings.iter().find(|(known, _)| known == name).map(|(_, setting)| setting)
    }
}

/// What a file is that is named like a snapshot and is none.
fn mislabelled(bytes: &[u8]) -> Option<SnapshotError> {
    let form = match bytes {
        [] => return Some(SnapshotError::Empty),
        _ if bytes.starts_with(b"version https://git-lfs") => return Some(SnapshotError::LfsPointer),
        [b'P', b'K', 3, 4, ..] => "a zip archive, as `torch.save` writes",
        [0x1f, 0x8b, ..] => "compressed with gzip",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "compressed with zstd",
        _ => match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
            None => "white space",
            Some(b'{' | b'[') => "JSON",
            Some(b'<') => "HTML or XML",
            _ => return None,
        },
    };
    Some(SnapshotError::OtherForm { form })
}

/// The entries of all traces, a column for each field.
#[derive(Debug)]
struct Entries {
    /// The code of the action: a known one, or beyond those one of `others`.
    action: Vec<u8>,
    address: Vec<u64>,
    size: Vec<u64>,
    stream: Vec<u16>,
    /// The pool, or [`NO_POOL`].
    pool: Vec<u16>,
    time_us: Vec<u64>,
    stack: Vec<Stack>,
    user_metadata: Vec<Text>,
    compile_context: Vec<Text>,
    /// The names of unknown actions.
    others: Vec<Text>,
}

const NO_POOL: u16 = u16::MAX;

/// The known actions by their code.
const ACTIONS: [Action; 10] = [
    Action::Alloc,
    Action::FreeRequested,
    Action::FreeCompleted,
    Action::SegmentAlloc,
    Action::SegmentFree,
    Action::SegmentMap,
    Action::SegmentUnmap,
    Action::Snapshot,
    Action::Oom,
    Action::Annotate,
];

impl Entries {
    /// No entries; `count` of them take no more than what they touch.
    fn with_room_for(count: usize) -> Self {
        Self {
            action: Vec::with_capacity(count),
            address: Vec::with_capacity(count),
            size: Vec::with_capacity(count),
            stream: Vec::with_capacity(count),
            pool: Vec::with_capacity(count),
            time_us: Vec::with_capacity(count),
            stack: Vec::with_capacity(count),
            user_metadata: Vec::with_capacity(count),
            compile_context: Vec::with_capacity(count),
            others: Vec::new(),
        }
    }

    fn len(&self) -> usize {
        self.action.len()
    }

    fn get(&self, row: usize) -> Entry {
        let code = usize::from(self.action[row]);
        let action = ACTIONS.get(code).copied();
        Entry {
            action: action.unwrap_or_else(|| Action::Other(self.others[code - ACTIONS.len()])),
            address: self.address[row],
            size: Bytes::new(self.size[row]),
            stream: self.stream[row],
            pool: Some(self.pool[row]).filter(|pool| *pool != NO_POOL),
            time_us: self.time_us[row],
            stack: self.stack[row],
            user_metadata: self.user_metadata[row],
            compile_context: self.compile_context[row],
        }
    }
}
