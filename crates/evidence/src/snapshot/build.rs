//! The typed tables that a snapshot's dicts become while the pickle is read.

use std::ops::Range;

use indexmap::IndexSet;
use ledger::Bytes;

use super::{
    ACTIONS, Annotation, Block, BlockState, Entries, Frame, NO_POOL, Segment, Setting, Snapshot,
    SnapshotError, Stack, Trace,
};
use crate::Warning;
use crate::pickle::{Builder, Built, Contents, Heap, Node, Text, Value};

/// Texts that mean something in a snapshot, as constants and as the builder's vocabulary.
macro_rules! vocabulary {
    ($($name:ident = $text:literal),+ $(,)?) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "only numbers the constants")]
        enum Place { $($name),+ }
        $(
            #[allow(dead_code, reason = "actions are known by their place")]
            const $name: Text = Text(Place::$name as u32);
        )+
        const VOCABULARY: &[&str] = &[$($text),+];
    };
}

vocabulary! {
    // The actions first: their place is their code.
    ALLOC = "alloc",
    FREE_REQUESTED = "free_requested",
    FREE_COMPLETED = "free_completed",
    SEGMENT_ALLOC = "segment_alloc",
    SEGMENT_FREE = "segment_free",
    SEGMENT_MAP = "segment_map",
    SEGMENT_UNMAP = "segment_unmap",
    SNAPSHOT = "snapshot",
    OOM = "oom",
    ANNOTATE = "annotate",
    EMPTY = "",
    // Keys of entries.
    ACTION = "action",
    ADDR = "addr",
    DEVICE_FREE = "device_free",
    SIZE = "size",
    STREAM = "stream",
    TIME_US = "time_us",
    COMPILE_CONTEXT = "compile_context",
    NO_CONTEXT = "N/A",
    USER_METADATA = "user_metadata",
    POOL_ID = "pool_id",
    FRAMES = "frames",
    // Keys of frames.
    FILENAME = "filename",
    LINE = "line",
    NAME = "name",
    FX_NODE_OP = "fx_node_op",
    FX_NODE_NAME = "fx_node_name",
    FX_NODE_TARGET = "fx_node_target",
    FX_ORIGINAL_TRACE = "fx_original_trace",
    // Keys of segments and blocks.
    DEVICE = "device",
    ADDRESS = "address",
    TOTAL_SIZE = "total_size",
    SEGMENT_TYPE = "segment_type",
    LARGE = "large",
    SMALL = "small",
    SEGMENT_POOL_ID = "segment_pool_id",
    IS_EXPANDABLE = "is_expandable",
    BLOCKS = "blocks",
    REQUESTED_SIZE = "requested_size",
    STATE = "state",
    ACTIVE_ALLOCATED = "active_allocated",
    ACTIVE_PENDING_FREE = "active_pending_free",
    ACTIVE_AWAITING_FREE = "active_awaiting_free",
    INACTIVE = "inactive",
    HISTORY = "history",
    REAL_SIZE = "real_size",
    // Annotations.
    STAGE = "stage",
    START = "START",
    // The top.
    SEGMENTS = "segments",
    DEVICE_TRACES = "device_traces",
    HOST_SEGMENTS = "host_segments",
    HOST_TRACES = "host_traces",
    ALLOCATOR_SETTINGS = "allocator_settings",
    EXTERNAL_ANNOTATIONS = "external_annotations",
}

/// More GPUs than any machine has.
const DEVICES: u16 = 1024;

/// The tables that dicts and lists go to.
mod table {
    pub(super) const FRAME: u8 = 1;
    pub(super) const ENTRY: u8 = 2;
    pub(super) const BLOCK: u8 = 3;
    pub(super) const SEGMENT: u8 = 4;
    pub(super) const ANNOTATION: u8 = 5;
    pub(super) const HISTORY: u8 = 6;
    pub(super) const STACK: u8 = 7;
    pub(super) const TRACE: u8 = 8;
    /// Lists whose items a dict has taken as its own.
    pub(super) const TAKEN: u8 = 9;
}

/// What a block of 2.0 says of who is in it.
#[derive(Clone, Copy)]
struct History {
    address: Option<u64>,
    requested: Option<u64>,
    stack: Stack,
}

/// Builds the tables of a snapshot.
pub(super) struct SnapshotBuilder {
    frames: IndexSet<Frame>,
    stacks: IndexSet<Box<[u32]>>,
    stack_bytes: usize,
    entries: Entries,
    /// The rows of each trace, runs of which follow each other in the file.
    traces: Vec<Vec<Range<u32>>>,
    blocks: Vec<Block>,
    histories: Vec<History>,
    segments: Vec<Option<Segment>>,
    annotations: Vec<Annotation>,
    streams: IndexSet<i64>,
    pools: IndexSet<(i64, i64)>,
    /// The frames of the stack that is being looked up.
    scratch: Vec<u32>,
    has_times: bool,
}

impl SnapshotBuilder {
    /// A builder for a file of `length` bytes.
    pub(super) fn new(length: usize) -> Self {
        let none: Box<[u32]> = Box::default();
        Self {
            frames: IndexSet::new(),
            stacks: IndexSet::from([none]),
            stack_bytes: 0,
            entries: Entries::with_room_for(length / 128),
            traces: Vec::new(),
            blocks: Vec::new(),
            histories: Vec::new(),
            segments: Vec::new(),
            annotations: Vec::new(),
            streams: IndexSet::from([0]),
            pools: IndexSet::from([(0, 0)]),
            scratch: Vec::new(),
            has_times: false,
        }
    }

    /// The interned stack of a list of frames.
    fn stack(&mut self, heap: &mut Heap, value: Value) -> Stack {
        let Value::List(node) = value else { return Stack(0) };
        match heap.contents(node) {
            Contents::Built(Built { table: table::STACK, row }) => Stack(row),
            Contents::Items(items) if !items.is_empty() => {
                self.scratch.clear();
                for item in items {
                    if let Some(frame) = row(heap, *item, table::FRAME) {
                        self.scratch.push(frame);
                    }
                }
                let index = self.stacks.get_index_of(self.scratch.as_slice()).unwrap_or_else(|| {
                    self.stack_bytes += size_of_val(self.scratch.as_slice()) + 64;
                    self.stacks.insert_full(self.scratch.as_slice().into()).0
                });
                heap.finish(node, Built { table: table::STACK, row: index as u32 });
                Stack(index as u32)
            }
            _ => Stack(0),
        }
    }

    fn stream(&mut self, value: Value) -> Result<u16, String> {
        let stream = match value {
            Value::Int(stream) => stream,
            Value::Unsigned(stream) => stream.cast_signed(),
            _ => return Err("a stream is no number".into()),
        };
        u16::try_from(self.streams.insert_full(stream).0).map_err(|_| "it has more than 65536 streams".into())
    }

    fn pool(&mut self, heap: &Heap, value: Value) -> Result<u16, String> {
        let parts = match value {
            Value::Tuple(tuple) => heap.tuple(tuple),
            Value::List(node) => items(heap, node),
            _ => &[],
        };
        let [Value::Int(first), Value::Int(second)] = parts else {
            return Err("the name of a pool is no pair of numbers".into());
        };
        let index = self.pools.insert_full((*first, *second)).0;
        u16::try_from(index)
            .ok()
            .filter(|pool| *pool != NO_POOL)
            .ok_or_else(|| "it has more than 65535 pools".into())
    }

    fn frame(&mut self, items: &[Value]) -> u32 {
        let mut frame = Frame { file: EMPTY, line: 0, name: EMPTY, node: [None; 4] };
        for (key, value) in pairs(items) {
            match (key, value) {
                (FILENAME, Value::Text(text)) => frame.file = text,
                (LINE, Value::Int(line)) => frame.line = line,
                (LINE, Value::Unsigned(line)) => frame.line = line.cast_signed(),
                (NAME, Value::Text(text)) => frame.name = text,
                (FX_NODE_OP, Value::Text(text)) => frame.node[0] = Some(text),
                (FX_NODE_NAME, Value::Text(text)) => frame.node[1] = Some(text),
                (FX_NODE_TARGET, Value::Text(text)) => frame.node[2] = Some(text),
                (FX_ORIGINAL_TRACE, Value::Text(text)) => frame.node[3] = Some(text),
                _ => {}
            }
        }
        self.frames.insert_full(frame).0 as u32
    }

    fn entry(&mut self, heap: &mut Heap, items: &[Value]) -> Result<u32, String> {
        let number = self.entries.len();
        let at = |what: String| format!("trace entry {number} of the file: {what}");
        let (mut action, mut address, mut size) = (None, None, None);
        let (mut stream, mut pool, mut time_us) = (0, NO_POOL, 0);
        let (mut stack, mut user_metadata, mut compile_context) = (Stack(0), EMPTY, EMPTY);
        for (key, value) in pairs(items) {
            match key {
                ACTION => action = text(value),
                ADDR | DEVICE_FREE => address = Some(unsigned(value).ok_or_else(|| at(not_a("address")))?),
                SIZE => size = Some(bytes(value).map_err(at)?),
                STREAM => stream = self.stream(value).map_err(at)?,
                TIME_US => time_us = unsigned(value).ok_or_else(|| at(not_a("time")))?,
                POOL_ID => pool = self.pool(heap, value).map_err(at)?,
                FRAMES => stack = self.stack(heap, value),
                USER_METADATA => user_metadata = text(value).unwrap_or(EMPTY),
                COMPILE_CONTEXT => {
                    compile_context = text(value).filter(|text| *text != NO_CONTEXT).unwrap_or(EMPTY);
                }
                _ => {}
            }
        }
        let action = action.ok_or_else(|| at("its action is no text".into()))?;
        let code = self.action(action);
        // Only what moves memory must say where and how much.
        if action.0 <= SEGMENT_UNMAP.0 && (address.is_none() || size.is_none()) {
            return Err(at(format!("`{}` without an address or a size", heap.text(action))));
        }
        self.has_times |= time_us != 0;
        let row = u32::try_from(number).map_err(|_| at("there are more than 2^32".into()))?;
        let entries = &mut self.entries;
        entries.action.push(code);
        entries.address.push(address.unwrap_or(0));
        entries.size.push(size.unwrap_or(0));
        entries.stream.push(stream);
        entries.pool.push(pool);
        entries.time_us.push(time_us);
        entries.stack.push(stack);
        entries.user_metadata.push(user_metadata);
        entries.compile_context.push(compile_context);
        Ok(row)
    }

    /// The code of an action. What does not fit beside the known ones shares the last code.
    fn action(&mut self, action: Text) -> u8 {
        if (action.0 as usize) < ACTIONS.len() {
            return action.0 as u8;
        }
        let others = &mut self.entries.others;
        let index = others.iter().position(|other| *other == action).unwrap_or_else(|| {
            if others.len() < usize::from(u8::MAX) - ACTIONS.len() {
                others.push(action);
            }
            others.len() - 1
        });
        (ACTIONS.len() + index) as u8
    }

    fn history(&mut self, heap: &mut Heap, items: &[Value]) -> Result<u32, String> {
        let mut history = History { address: None, requested: None, stack: Stack(0) };
        for (key, value) in pairs(items) {
            match key {
                ADDR => history.address = unsigned(value),
                REAL_SIZE => history.requested = Some(bytes(value)?),
                FRAMES => history.stack = self.stack(heap, value),
                _ => {}
            }
        }
        self.histories.push(history);
        Ok(self.histories.len() as u32 - 1)
    }

    fn block(&mut self, heap: &mut Heap, items: &[Value]) -> Result<u32, String> {
        let (mut size, mut requested, mut state) = (None, None, None);
        let (mut address, mut stack, mut history) = (None, Stack(0), None);
        for (key, value) in pairs(items) {
            match key {
                SIZE => size = Some(bytes(value)?),
                REQUESTED_SIZE => requested = Some(bytes(value)?),
                ADDRESS => address = unsigned(value),
                FRAMES => stack = self.stack(heap, value),
                STATE => state = text(value),
                HISTORY => {
                    // The newest allocation is the first; those after it are gone.
                    if let Value::List(node) = value
                        && let Some(first) = self::items(heap, node).first()
                    {
                        history = row(heap, *first, table::HISTORY).map(|row| self.histories[row as usize]);
                    }
                }
                _ => {}
            }
        }
        let size = size.ok_or("a block has no size")?;
        let state = match state {
            Some(ACTIVE_ALLOCATED) => BlockState::Allocated,
            Some(ACTIVE_PENDING_FREE | ACTIVE_AWAITING_FREE) => BlockState::PendingFree,
            Some(INACTIVE) => BlockState::Inactive,
            _ => return Err("a block is neither active nor inactive".into()),
        };
        if let Some(history) = history.filter(|_| state != BlockState::Inactive) {
            address = address.or(history.address);
            requested = requested.or(history.requested);
            if stack == Stack(0) {
                stack = history.stack;
            }
        }
        let requested = Bytes::new(requested.unwrap_or(size));
        self.blocks.push(Block { address, size: Bytes::new(size), requested, state, stack });
        Ok(self.blocks.len() as u32 - 1)
    }

    fn segment(&mut self, heap: &mut Heap, items: &[Value]) -> Result<u32, String> {
        let mut segment = Segment {
            device: Some(0),
            address: None,
            size: Bytes::ZERO,
            stream: 0,
            pool: 0,
            large: None,
            expandable: false,
            stack: Stack(0),
            blocks: Vec::new(),
        };
        for (key, value) in pairs(items) {
            match key {
                DEVICE => segment.device = device(value)?,
                ADDRESS => segment.address = unsigned(value),
                TOTAL_SIZE => segment.size = Bytes::new(bytes(value)?),
                STREAM => segment.stream = self.stream(value)?,
                SEGMENT_POOL_ID => segment.pool = self.pool(heap, value)?,
                SEGMENT_TYPE => {
                    segment.large =
                        text(value).filter(|text| matches!(*text, LARGE | SMALL)).map(|text| text == LARGE);
                }
                IS_EXPANDABLE => segment.expandable = value == Value::Bool(true),
                FRAMES => segment.stack = self.stack(heap, value),
                BLOCKS => {
                    let Value::List(node) = value else {
                        return Err("the blocks of a segment are no list".into());
                    };
                    if let Contents::Built(_) = heap.contents(node) {
                        return Err("two segments have the same blocks".into());
                    }
                    let rows = self::items(heap, node).iter().map(|item| row(heap, *item, table::BLOCK));
                    let blocks = rows.map(|row| row.map(|row| self.blocks[row as usize]));
                    segment.blocks = blocks
                        .collect::<Option<_>>()
                        .ok_or("among the blocks of a segment is something else")?;
                    if !segment.blocks.is_empty() {
                        heap.finish(node, Built { table: table::TAKEN, row: 0 });
                    }
                }
                _ => {}
            }
        }
        let mut next = segment.address;
        for block in &mut segment.blocks {
            block.address = block.address.or(next);
            next = block.address.and_then(|address| address.checked_add(block.size.get()));
        }
        self.segments.push(Some(segment));
        Ok(self.segments.len() as u32 - 1)
    }

    fn annotation(&mut self, items: &[Value]) -> Result<u32, String> {
        let mut annotation = Annotation { name: EMPTY, starts: false, device: None, time_us: 0 };
        for (key, value) in pairs(items) {
            match key {
                NAME => annotation.name = text(value).unwrap_or(EMPTY),
                STAGE => annotation.starts = text(value) == Some(START),
                DEVICE => annotation.device = device(value)?,
                TIME_US => annotation.time_us = unsigned(value).unwrap_or(0),
                _ => {}
            }
        }
        self.annotations.push(annotation);
        Ok(self.annotations.len() as u32 - 1)
    }

    /// The snapshot of which `root` is the top.
    pub(super) fn finish(mut self, root: Value, heap: Heap) -> Result<Snapshot, SnapshotError> {
        let damaged = |what: &str| SnapshotError::Damaged { what: what.into() };
        let mut top = Top::default();
        match root {
            // The old form: nothing but segments.
            Value::List(node) => {
                let segments = self.segments_of(&heap, Value::List(node));
                top.segments = segments.filter(|found| !found.is_empty()).ok_or(SnapshotError::NoSnapshot)?;
            }
            Value::Dict(node) => self.top(&heap, items(&heap, node), &mut top)?,
            _ => return Err(SnapshotError::NoSnapshot),
        }
        let mut traces: Vec<Vec<Range<u32>>> = Vec::new();
        for device in top.traces {
            traces.push(
                self.trace_of(&heap, device).ok_or_else(|| damaged("a trace holds more than entries"))?,
            );
        }
        let host = top.host_trace.map_or(Some(Vec::new()), |list| self.trace_of(&heap, list));
        traces.push(host.ok_or_else(|| damaged("the host's trace holds more than entries"))?);
        let mut traces =
            in_order(&mut self.entries, traces).ok_or_else(|| damaged("an entry is in two traces"))?;
        let host_trace = traces.pop().unwrap_or_default();
        if traces.len() > usize::from(DEVICES) {
            return Err(damaged("it has traces of more than 1024 devices"));
        }
        let entries = traces.iter().map(Trace::len).sum::<usize>() + host_trace.len();
        // What a release has added shows, and that it is missing does.
        let written_by = match (self.histories.is_empty(), self.has_times) {
            _ if top.host => Some("PyTorch 2.15 or later"),
            (false, _) => Some("PyTorch 2.0"),
            (true, true) => Some("PyTorch 2.2 to 2.14"),
            (true, false) => (entries > 0).then_some("PyTorch 2.0 or 2.1"),
        };
        let mut snapshot = Snapshot {
            texts: heap.into_texts(),
            frames: self.frames.into_iter().collect(),
            stacks: self.stacks,
            segments: top.segments,
            host_segments: top.host_segments,
            entries: self.entries,
            traces,
            host_trace,
            settings: top.settings,
            annotations: top.annotations,
            streams: self.streams.into_iter().collect(),
            pools: self.pools.into_iter().collect(),
            warnings: Vec::new(),
            written_by,
        };
        snapshot.warnings = oddities(&snapshot, self.has_times);
        Ok(snapshot)
    }

    fn top(&mut self, heap: &Heap, items: &[Value], top: &mut Top) -> Result<(), SnapshotError> {
        let damaged = |what: &str| SnapshotError::Damaged { what: what.into() };
        let mut found = false;
        for (key, value) in pairs(items) {
            match key {
                SEGMENTS | HOST_SEGMENTS => {
                    let segments = self.segments_of(heap, value);
                    let segments = segments.ok_or_else(|| damaged("among the segments is something else"))?;
                    found |= key == SEGMENTS;
                    *(if key == SEGMENTS { &mut top.segments } else { &mut top.host_segments }) = segments;
                }
                DEVICE_TRACES => {
                    let Value::List(node) = value else { return Err(damaged("`device_traces` is no list")) };
                    top.traces = self::items(heap, node).to_vec();
                    found = true;
                }
                HOST_TRACES => (top.host_trace, top.host) = (Some(value), true),
                EXTERNAL_ANNOTATIONS => {
                    if let Value::List(node) = value {
                        let rows = self::items(heap, node).iter();
                        let rows = rows.filter_map(|item| row(heap, *item, table::ANNOTATION));
                        top.annotations = rows.map(|row| self.annotations[row as usize]).collect();
                    }
                }
                ALLOCATOR_SETTINGS => {
                    if let Value::Dict(node) = value {
                        top.settings = settings(heap, self::items(heap, node));
                    }
                }
                _ => {}
            }
        }
        if found { Ok(()) } else { Err(SnapshotError::NoSnapshot) }
    }

    /// The segments of a list, each taken once; none where something else is among them.
    fn segments_of(&mut self, heap: &Heap, list: Value) -> Option<Vec<Segment>> {
        let Value::List(node) = list else { return None };
        let rows = items(heap, node).iter().map(|item| row(heap, *item, table::SEGMENT));
        rows.map(|row| self.segments[row? as usize].take()).collect()
    }

    fn trace_of(&mut self, heap: &Heap, list: Value) -> Option<Vec<Range<u32>>> {
        let Value::List(node) = list else { return None };
        match heap.contents(node) {
            Contents::Items([]) => Some(Vec::new()),
            Contents::Built(Built { table: table::TRACE, row }) => {
                Some(std::mem::take(&mut self.traces[row as usize]))
            }
            _ => None,
        }
    }
}

/// The parts of the top dict.
#[derive(Default)]
struct Top {
    segments: Vec<Segment>,
    host_segments: Vec<Segment>,
    traces: Vec<Value>,
    host_trace: Option<Value>,
    /// Whether the host's memory has a place in the file, empty or not.
    host: bool,
    annotations: Vec<Annotation>,
    settings: Vec<(String, Setting)>,
}

impl Builder for SnapshotBuilder {
    const VOCABULARY: &'static [&'static str] = VOCABULARY;

    fn dict(&mut self, heap: &mut Heap, items: &[Value]) -> Result<Option<Built>, String> {
        let built = |table, row| Ok(Some(Built { table, row }));
        for (key, _) in pairs(items) {
            return match key {
                ACTION => built(table::ENTRY, self.entry(heap, items)?),
                FILENAME => built(table::FRAME, self.frame(items)),
                STATE => built(table::BLOCK, self.block(heap, items)?),
                TOTAL_SIZE => built(table::SEGMENT, self.segment(heap, items)?),
                STAGE => built(table::ANNOTATION, self.annotation(items)?),
                REAL_SIZE => built(table::HISTORY, self.history(heap, items)?),
                _ => continue,
            };
        }
        Ok(None)
    }

    fn list(
        &mut self,
        heap: &mut Heap,
        before: Option<Built>,
        items: &[Value],
    ) -> Result<Option<Built>, String> {
        let entry = |item: &Value| row(heap, *item, table::ENTRY);
        if before.is_none() && items.first().and_then(entry).is_none() {
            return Ok(None);
        }
        let row = match before {
            None => {
                self.traces.push(Vec::new());
                self.traces.len() as u32 - 1
            }
            Some(Built { table: table::TRACE, row }) => row,
            Some(_) => return Ok(None),
        };
        let trace = &mut self.traces[row as usize];
        for item in items {
            let row = entry(item).ok_or("a trace holds more than entries")?;
            match trace.last_mut() {
                Some(run) if run.end == row => run.end += 1,
                _ => trace.push(row..row + 1),
            }
        }
        Ok(Some(Built { table: table::TRACE, row }))
    }

    fn memory(&self) -> usize {
        let entry = 4 * size_of::<u64>() + 4 * size_of::<u32>();
        self.entries.len() * entry
            + self.stack_bytes
            + self.frames.capacity() * (size_of::<Frame>() + 16)
            + self.blocks.capacity() * 2 * size_of::<Block>()
            + self.histories.capacity() * size_of::<History>()
            + self.segments.capacity() * size_of::<Segment>()
            + self.annotations.capacity() * size_of::<Annotation>()
            + self.traces.capacity() * 2 * size_of::<Vec<Range<u32>>>()
            + (self.streams.capacity() + self.pools.capacity()) * 48
    }
}

/// Makes each trace one range of rows; none where an entry is in two places.
fn in_order(entries: &mut Entries, traces: Vec<Vec<Range<u32>>>) -> Option<Vec<Trace>> {
    let rows: usize = traces.iter().flatten().map(|run| run.len()).sum();
    if rows > entries.len() {
        return None;
    }
    if traces.iter().all(|runs| runs.len() <= 1) {
        let range =
            |runs: &Vec<Range<u32>>| runs.first().map_or(0..0, |run| run.start as usize..run.end as usize);
        return Some(traces.iter().map(|runs| Trace { rows: range(runs) }).collect());
    }
    let order: Vec<u32> = traces.iter().flatten().flat_map(Clone::clone).collect();
    fn gather<T: Copy>(column: &mut Vec<T>, order: &[u32]) {
        *column = order.iter().map(|row| column[*row as usize]).collect();
    }
    gather(&mut entries.action, &order);
    gather(&mut entries.address, &order);
    gather(&mut entries.size, &order);
    gather(&mut entries.stream, &order);
    gather(&mut entries.pool, &order);
    gather(&mut entries.time_us, &order);
    gather(&mut entries.stack, &order);
    gather(&mut entries.user_metadata, &order);
    gather(&mut entries.compile_context, &order);
    let mut end = 0;
    let mut range = |runs: &Vec<Range<u32>>| {
        let start = end;
        end += runs.iter().map(|run| run.len()).sum::<usize>();
        Trace { rows: start..end }
    };
    Some(traces.iter().map(&mut range).collect())
}

/// What the file does not say.
fn oddities(snapshot: &Snapshot, has_times: bool) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let count: usize = snapshot.traces.iter().map(Trace::len).sum::<usize>() + snapshot.host_trace.len();
    match count {
        0 => warnings.push(Warning::NoEvents),
        1 => warnings.push(Warning::OneEvent),
        _ => {}
    }
    if count > 0 && !has_times {
        warnings.push(Warning::NoTimes);
    }
    if snapshot.stacks.len() == 1 && (count > 0 || !snapshot.segments.is_empty()) {
        warnings.push(Warning::NoStacks);
    }
    for (index, action) in snapshot.entries.others.iter().enumerate() {
        let code = (ACTIONS.len() + index) as u8;
        let count = snapshot.entries.action.iter().filter(|other| **other == code).count() as u64;
        warnings.push(Warning::UnknownActions { action: snapshot.text(*action).to_owned(), count });
    }
    warnings
}

fn settings(heap: &Heap, items: &[Value]) -> Vec<(String, Setting)> {
    let mut settings = Vec::new();
    let plain = |value| {
        Some(match value {
            Value::Bool(value) => Setting::Bool(value),
            Value::Int(value) => Setting::Integer(value),
            Value::Real(value) => Setting::Real(value.get()),
            Value::Text(text) => Setting::Text(heap.text(text).to_owned()),
            _ => return None,
        })
    };
    for (key, value) in pairs(items) {
        let name = heap.text(key);
        if let Some(setting) = plain(value) {
            settings.push((name.to_owned(), setting));
        } else if let Value::Dict(node) = value {
            for (key, value) in pairs(self::items(heap, node)) {
                settings.extend(plain(value).map(|value| (format!("{name}.{}", heap.text(key)), value)));
            }
        }
    }
    settings
}

/// The items of a list or dict that nobody took over.
fn items(heap: &Heap, node: Node) -> &[Value] {
    match heap.contents(node) {
        Contents::Items(items) => items,
        Contents::Built(_) => &[],
    }
}

/// The keys that are texts, with their values.
fn pairs(items: &[Value]) -> impl Iterator<Item = (Text, Value)> + '_ {
    let (pairs, _) = items.as_chunks::<2>();
    pairs.iter().filter_map(|[key, value]| match key {
        Value::Text(key) => Some((*key, *value)),
        _ => None,
    })
}

/// The row of `value` in `table`.
fn row(heap: &Heap, value: Value, table: u8) -> Option<u32> {
    let Value::Dict(node) = value else { return None };
    match heap.contents(node) {
        Contents::Built(built) if built.table == table => Some(built.row),
        _ => None,
    }
}

fn text(value: Value) -> Option<Text> {
    match value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

fn unsigned(value: Value) -> Option<u64> {
    match value {
        Value::Int(value) => u64::try_from(value).ok(),
        Value::Unsigned(value) => Some(value),
        _ => None,
    }
}

/// An amount of memory: an integer from 0 and below 2^63.
fn bytes(value: Value) -> Result<u64, String> {
    match value {
        Value::Int(bytes) if bytes >= 0 => Ok(bytes.cast_unsigned()),
        Value::Int(bytes) => Err(format!("the size {bytes} is negative")),
        Value::Unsigned(_) | Value::Huge => Err("a size is above 2^63 bytes".into()),
        _ => Err(not_a("size")),
    }
}

fn device(value: Value) -> Result<Option<u16>, String> {
    match value {
        Value::Int(-1) | Value::None => Ok(None),
        Value::Int(number) => {
            let device = u16::try_from(number).ok().filter(|device| *device < DEVICES);
            device.map(Some).ok_or_else(|| format!("there is no device {number}"))
        }
        _ => Err(not_a("device")),
    }
}

fn not_a(what: &str) -> String {
    format!("its {what} is no number")
}
