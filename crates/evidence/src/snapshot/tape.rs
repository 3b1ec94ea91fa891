//! A snapshot as a tape: what was there before is told by the end, the rest by the entries.
//!
//! A recording seldom begins with an empty device. What was in use at its first entry follows from
//! its end alone: [`anchor`] walks the entries backward from the blocks and segments that are there
//! at the end, taking back each; what is left was there before. Then the entries are taken over in
//! order, of several devices in the order of time.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, LabelId, Object, ObjectId, Pool, SegmentId,
    Stream, Tape, TapeError, Unit,
};

use super::anchor::{Anchor, Held, anchor};
use super::ranges::{Mapped, Ranges};
use super::{Action, BlockState, Entry, Frame, Segment, Snapshot, Stack, Trace};
use crate::Warning;

/// A snapshot's tape, in requested bytes.
#[derive(Debug)]
pub struct Taped {
    /// The tape. Every object is unattributed and named after the place in the program that made it,
    /// where that is known.
    pub tape: Tape,
    /// Where each object comes from, by its handle.
    pub origins: Vec<Origin>,
    /// Where each segment event's range begins, in the order of the tape.
    pub segments: Vec<u64>,
    /// For each device of the tape the trace it was made of: an index into [`Snapshot::traces`];
    /// none for pinned host memory.
    pub devices: Vec<Option<usize>>,
    /// What could not be told.
    pub warnings: Vec<Warning>,
}

/// Where an object comes from, and where it went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The device of the tape.
    pub device: DeviceId,
    /// The entry of that device's trace that made it; none for what was there before, or came
    /// without an entry.
    pub entry: Option<u32>,
    /// The entry with which the program let go of it; none where there is none.
    pub end: Option<u32>,
    /// Where it lived.
    pub address: u64,
    /// Who made it, as far as recorded.
    pub stack: Stack,
}

/// The objects in use at one moment of a tape in the making, by device and address.
#[derive(Debug, Default)]
pub struct Alive {
    devices: Vec<HashMap<u64, Living>>,
}

#[derive(Clone, Copy, Debug)]
struct Living {
    object: ObjectId,
    /// Whether the program has let go of it.
    pending: bool,
}

impl Alive {
    /// The object at `address`. Devices of one process share their addresses; the first that has
    /// one there is taken.
    pub fn at(&self, address: u64) -> Option<ObjectId> {
        self.devices.iter().find_map(|device| device.get(&address)).map(|living| living.object)
    }
}

/// Tells what a tape has besides what the allocator recorded.
pub trait Narrator {
    /// `entry`, the one at `index` of the trace of `device`, is about to be taken over; a break ends the
    /// tape there.
    fn before(
        &mut self,
        tape: &mut Tape,
        alive: &Alive,
        device: DeviceId,
        index: usize,
        entry: &Entry,
    ) -> ControlFlow<()>;

    /// Every entry was taken over.
    fn end(&mut self, _tape: &mut Tape, _alive: &Alive) {}
}

/// Tells nothing.
#[derive(Debug)]
pub struct Plain;

impl Narrator for Plain {
    fn before(&mut self, _: &mut Tape, _: &Alive, _: DeviceId, _: usize, _: &Entry) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

impl Snapshot {
    /// The tape of this snapshot, with what `narrator` has to tell.
    ///
    /// Addresses become objects, streams and pools their numbers. Objects and segments that were
    /// there before the recording come first. The capacity of the devices is not known.
    ///
    /// # Errors
    /// More than a tape holds.
    pub fn tape(&self, narrator: &mut dyn Narrator) -> Result<Taped, TapeError> {
        let mut writer = Writer::new(self);
        writer.begin()?;
        writer.tape.before = writer.tape.len();
        let end = writer.follow(narrator)?;
        if end.is_continue() {
            narrator.end(&mut writer.tape, &writer.alive);
            writer.compare_with_end();
        }
        let Writer { tape, origins, segments, sources, warnings, .. } = writer;
        tape.validate()?;
        let devices = sources.iter().map(|source| source.index).collect();
        Ok(Taped { tape, origins, segments, devices, warnings })
    }

    /// What a tape calls the device of the trace at `index`.
    pub(crate) fn device_name(index: usize) -> String {
        format!("GPU {index}")
    }

    /// The frames of `stack` that say something, innermost first: neither machine code nor what only
    /// stands between two others.
    pub fn telling_frames(&self, stack: Stack) -> impl Iterator<Item = &Frame> {
        self.stack(stack).filter(|frame| {
            let file = self.text(frame.file);
            let wraps = WRAPPERS.iter().any(|wrapper| file.ends_with(wrapper));
            let name = self.text(frame.name);
            !wraps && !is_native(file, name) && !WRAPPING.contains(&name)
        })
    }

    /// The place in the program that `stack` tells of: the `depth` innermost frames that say something,
    /// `modeling_llama.py:164 forward < modeling_llama.py:313 forward`; none where none does.
    pub fn site(&self, stack: Stack, depth: usize) -> Option<String> {
        let frames = self.telling_frames(stack).take(depth).map(|frame| {
            let file = self.text(frame.file);
            let file = file.rsplit(['/', '\\']).next().unwrap_or(file);
            format!("{file}:{} {}", frame.line, self.text(frame.name))
        });
        let frames: Vec<String> = frames.collect();
        (!frames.is_empty()).then(|| frames.join(" < "))
    }
}

/// Files whose frames stand between any two others and say nothing.
const WRAPPERS: [&str; 9] = [
    // Ours, around what runs on the host under emulation.
    "vramledger_host.py",
    "torch/nn/modules/module.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_prims_common/wrappers.py",
    "torch/utils/_contextlib.py",
    "torch/_ops.py",
    "torch/cuda/memory.py",
    "contextlib.py",
];

/// Functions that call what they wrap and do nothing else.
const WRAPPING: [&str; 5] =
    ["wrapper", "wrapped_func", "wrapped", "decorate_context", "forward_with_checkpointing"];

/// Whether a frame is of machine code and not of a Python program's text: that is in a file of Python,
/// in one that is none (`<string>`), or is a script as a whole.
pub(crate) fn is_native(file: &str, name: &str) -> bool {
    let text = file.ends_with(".py") || file.starts_with('<') || name == "<module>";
    !text || name.contains("::")
}

/// One device on the way to the tape.
struct Source<'a> {
    /// None for pinned host memory.
    index: Option<usize>,
    trace: &'a Trace,
    segments: Vec<&'a Segment>,
    anchor: Anchor,
    /// The entry to take over next, and the object without an entry to come next.
    next: usize,
    next_late: usize,
    ranges: Ranges,
    reused: u64,
}

struct Writer<'a> {
    snapshot: &'a Snapshot,
    tape: Tape,
    sources: Vec<Source<'a>>,
    alive: Alive,
    origins: Vec<Origin>,
    segments: Vec<u64>,
    /// The label of each stack that was met.
    labels: Vec<Option<LabelId>>,
    warnings: Vec<Warning>,
    has_times: bool,
    next_segment: u32,
}

impl<'a> Writer<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        let listed = snapshot.segments.iter().filter_map(|segment| segment.device);
        let listed = listed.map(|device| usize::from(device) + 1).max().unwrap_or(0);
        let mut segments: Vec<Vec<&Segment>> = vec![Vec::new(); listed.max(snapshot.traces.len()).max(1)];
        for segment in &snapshot.segments {
            if let Some(device) = segment.device {
                segments[usize::from(device)].push(segment);
            }
        }
        let (mut sources, mut devices) = (Vec::new(), Vec::new());
        let mut add = |index: Option<usize>, trace: &'a Trace, segments: Vec<&'a Segment>| {
            let (name, kind) = match index {
                Some(index) => (Snapshot::device_name(index), DeviceKind::Gpu),
                None => ("pinned host memory".to_owned(), DeviceKind::Cpu),
            };
            devices.push(Device { name, kind, capacity: None, context: None });
            let anchor = anchor(snapshot, trace, &segments);
            let ranges = Ranges::default();
            sources.push(Source { index, trace, segments, anchor, next: 0, next_late: 0, ranges, reused: 0 });
        };
        // That a snapshot was taken is noted on every device.
        let tells = |entry: Entry| entry.action != Action::Snapshot;
        let used = |index: usize, segments: &[&Segment]| {
            let trace = snapshot.traces.get(index);
            !segments.is_empty() || trace.is_some_and(|trace| snapshot.entries(trace).any(tells))
        };
        // A process on one of eight GPUs lists eight traces; one that used none has the first.
        let none_used = !segments.iter().enumerate().any(|(index, segments)| used(index, segments));
        for (index, segments) in segments.into_iter().enumerate() {
            if used(index, &segments) || (none_used && index == 0) {
                add(Some(index), snapshot.traces.get(index).unwrap_or(&NO_TRACE), segments);
            }
        }
        if !snapshot.host_trace.is_empty() || !snapshot.host_segments.is_empty() {
            add(None, &snapshot.host_trace, snapshot.host_segments.iter().collect());
        }
        Self {
            snapshot,
            alive: Alive { devices: vec![HashMap::new(); sources.len()] },
            tape: Tape::new(Unit::Requested, devices),
            sources,
            origins: Vec::new(),
            segments: Vec::new(),
            labels: vec![None; snapshot.stacks()],
            warnings: Vec::new(),
            has_times: !snapshot.warnings.contains(&Warning::NoTimes),
            next_segment: 0,
        }
    }

    /// Writes what was there before the recording.
    fn begin(&mut self) -> Result<(), TapeError> {
        for index in 0..self.sources.len() {
            let device = DeviceId(index as u16);
            let snapshot = self.snapshot;
            let source = &mut self.sources[index];
            let first = (!source.trace.is_empty()).then(|| snapshot.entry(source.trace, 0).time_us);
            let time = first.unwrap_or(0);
            let segments = std::mem::take(&mut source.anchor.segments);
            let objects = std::mem::take(&mut source.anchor.objects);
            for (start, end, what) in segments.iter() {
                self.take_segment(index, start, end, what, time);
            }
            for (address, held) in &objects {
                let object = self.make(device, *address, *held, None, time)?;
                if held.pending {
                    self.push(Event::FreeRequested(object), time);
                    self.alive.devices[index].insert(*address, Living { object, pending: true });
                }
            }
            self.warn_of_beginning(index, &objects);
        }
        Ok(())
    }

    fn warn_of_beginning(&mut self, index: usize, objects: &[(u64, Held)]) {
        let Source { trace, anchor, segments, .. } = &self.sources[index];
        let (name, recorded) = (|| self.tape.devices[index].name.clone(), !trace.is_empty());
        let late = anchor.late.iter().map(|(_, _, held)| held);
        let before = objects.iter().map(|(_, held)| held);
        let warnings = [
            (recorded && !objects.is_empty()).then(|| Warning::BegunInTheMiddle {
                device: name(),
                objects: objects.len() as u64,
                bytes: total(before),
            }),
            (anchor.unmatched_frees > 0)
                .then(|| Warning::Truncated { device: name(), unmatched_frees: anchor.unmatched_frees }),
            (!anchor.late.is_empty()).then(|| Warning::UnrecordedAllocations {
                device: name(),
                count: anchor.late.len() as u64,
                bytes: total(late),
            }),
            (anchor.disagreements > 0)
                .then(|| Warning::SegmentsDisagree { device: name(), count: anchor.disagreements }),
            (recorded && segments.is_empty()).then(|| Warning::NoEndState { device: name() }),
        ];
        self.warnings.extend(warnings.into_iter().flatten());
    }

    /// Writes the entries, those of several devices in the order of time.
    fn follow(&mut self, narrator: &mut dyn Narrator) -> Result<ControlFlow<()>, TapeError> {
        let snapshot = self.snapshot;
        let time = |source: &Source<'_>| snapshot.entry(source.trace, source.next).time_us;
        loop {
            let mut ready =
                self.sources.iter().enumerate().filter(|(_, source)| source.next < source.trace.len());
            let next = match self.sources.len() {
                1 => ready.next(),
                _ => ready.min_by_key(|(_, source)| time(source)),
            };
            let Some((index, source)) = next else { return Ok(ControlFlow::Continue(())) };
            let entry = snapshot.entry(source.trace, source.next);
            let (device, at) = (DeviceId(index as u16), source.next);
            if narrator.before(&mut self.tape, &self.alive, device, at, &entry).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            self.entry(index, &entry)?;
            self.come_late(index, entry.time_us)?;
            self.sources[index].next += 1;
        }
    }

    /// Writes what came to be after the entry just taken over without one of its own.
    fn come_late(&mut self, index: usize, time: u64) -> Result<(), TapeError> {
        loop {
            let source = &mut self.sources[index];
            let Some((after, address, held)) = source.anchor.late.get(source.next_late).copied() else {
                return Ok(());
            };
            if after > source.next {
                return Ok(());
            }
            source.next_late += 1;
            if !self.alive.devices[index].contains_key(&address) {
                self.make(DeviceId(index as u16), address, held, None, time)?;
            }
        }
    }

    fn entry(&mut self, index: usize, entry: &Entry) -> Result<(), TapeError> {
        let device = DeviceId(index as u16);
        let (address, time) = (entry.address, entry.time_us);
        let source = &mut self.sources[index];
        let alive = &mut self.alive.devices[index];
        let end = address.saturating_add(entry.size.get());
        match entry.action {
            Action::Alloc => {
                if let Some(old) = alive.remove(&address) {
                    source.reused += 1;
                    self.push(Event::Free(old.object), time);
                }
                let source = &self.sources[index];
                let around = || source.ranges.around(address).map_or(0, |what| what.pool);
                let held = Held {
                    bytes: entry.size,
                    pending: false,
                    stack: entry.stack,
                    stream: entry.stream,
                    pool: entry.pool.unwrap_or_else(around),
                };
                self.make(device, address, held, Some(source.next as u32), time)?;
            }
            Action::FreeRequested => {
                let Some(living) = alive.get_mut(&address).filter(|living| !living.pending) else {
                    return Ok(());
                };
                let object = living.object;
                self.origins[object.0 as usize].end = Some(source.next as u32);
                if !source.anchor.completes {
                    alive.remove(&address);
                    self.push(Event::Free(object), time);
                } else if !completes_at_once(self.snapshot, source, address) {
                    living.pending = true;
                    self.push(Event::FreeRequested(object), time);
                }
            }
            Action::FreeCompleted => {
                if let Some(living) = alive.remove(&address) {
                    self.origins[living.object.0 as usize].end.get_or_insert(source.next as u32);
                    self.push(Event::Free(living.object), time);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                let (stream, expandable) = (entry.stream, entry.action == Action::SegmentMap);
                let what = Mapped { segment: 0, stream, pool: entry.pool.unwrap_or(0), expandable };
                self.take_segment(index, address, end, what, time);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                if let (bytes, Some(what)) = source.ranges.remove(address, end) {
                    let segment = segment(device, bytes, what);
                    let unmap = entry.action == Action::SegmentUnmap;
                    self.segments.push(address);
                    self.push(
                        if unmap { Event::SegmentUnmap(segment) } else { Event::SegmentFree(segment) },
                        time,
                    );
                }
            }
            Action::Oom => {
                let stream = Stream(entry.stream);
                self.push(Event::Oom { bytes: entry.size, device, stream }, time);
            }
            Action::Snapshot | Action::Annotate | Action::Other(_) => {}
        }
        Ok(())
    }

    /// Writes that a range of addresses is taken from the device. A range that goes on where an
    /// expandable segment ends is of that segment.
    fn take_segment(&mut self, index: usize, start: u64, end: u64, what: Mapped, time: u64) {
        let ranges = &mut self.sources[index].ranges;
        let before = ranges.ending_at(start).filter(|before| {
            before.expandable && what.expandable && (before.stream, before.pool) == (what.stream, what.pool)
        });
        let what = Mapped { segment: before.map_or(self.next_segment, |before| before.segment), ..what };
        self.next_segment += u32::from(before.is_none());
        let bytes = ranges.insert(start, end, what);
        let segment = segment(DeviceId(index as u16), bytes, what);
        self.segments.push(start);
        self.push(
            if what.expandable { Event::SegmentMap(segment) } else { Event::SegmentAlloc(segment) },
            time,
        );
    }

    fn make(
        &mut self,
        device: DeviceId,
        address: u64,
        held: Held,
        entry: Option<u32>,
        time: u64,
    ) -> Result<ObjectId, TapeError> {
        let label = self.label(held.stack);
        let object = self.tape.new_object(Object { label, layout: None })?;
        self.origins.push(Origin { device, entry, end: None, address, stack: held.stack });
        self.alive.devices[usize::from(device.0)].insert(address, Living { object, pending: false });
        let (stream, pool) = (Stream(held.stream), Pool(held.pool));
        self.push(Event::Alloc { object, bytes: held.bytes, device, stream, pool }, time);
        Ok(object)
    }

    fn label(&mut self, stack: Stack) -> LabelId {
        if let Some(label) = self.labels[stack.0 as usize] {
            return label;
        }
        let site = self.snapshot.site(stack, 2);
        let name = self.tape.intern(site.as_deref().unwrap_or("unattributed"));
        let label = Label { name, owner: None, category: Category::Unattributed, saved: false };
        let label = self.tape.intern_label(label);
        self.labels[stack.0 as usize] = Some(label);
        label
    }

    fn push(&mut self, event: Event, time_us: u64) {
        if self.has_times {
            self.tape.push_at(event, time_us);
        } else {
            self.tape.push(event);
        }
    }

    /// Warns of what is in use on the tape and not at the end.
    fn compare_with_end(&mut self) {
        for (index, source) in self.sources.iter().enumerate() {
            let device = || self.tape.devices[index].name.clone();
            if source.reused > 0 {
                self.warnings.push(Warning::UnrecordedFrees { device: device(), count: source.reused });
            }
            if source.segments.is_empty() {
                continue;
            }
            let blocks = source.segments.iter().flat_map(|segment| &segment.blocks);
            let active = blocks.filter(|block| block.state != BlockState::Inactive);
            let active: HashSet<u64> = active.filter_map(|block| block.address).collect();
            let (mut count, mut bytes) = (0, 0_u64);
            for (address, living) in &self.alive.devices[index] {
                if !active.contains(address) {
                    let origin = self.origins[living.object.0 as usize];
                    let size =
                        origin.entry.map(|entry| self.snapshot.entry(source.trace, entry as usize).size);
                    count += 1;
                    bytes = bytes.saturating_add(size.unwrap_or_default().get());
                }
            }
            if count > 0 {
                let bytes = Bytes::new(bytes);
                self.warnings.push(Warning::MissingAtEnd { device: device(), count, bytes });
            }
        }
    }
}

const NO_TRACE: Trace = Trace { rows: 0..0 };

/// Whether the free that `source` requests now is completed by its next entry, before the program
/// noted anything else.
fn completes_at_once(snapshot: &Snapshot, source: &Source<'_>, address: u64) -> bool {
    let next = source.next + 1;
    next < source.trace.len() && {
        let entry = snapshot.entry(source.trace, next);
        let note = snapshot.entry(source.trace, source.next).user_metadata;
        (entry.action, entry.address, entry.user_metadata) == (Action::FreeCompleted, address, note)
    }
}

fn segment(device: DeviceId, bytes: u64, what: Mapped) -> ledger::Segment {
    ledger::Segment {
        segment: SegmentId(what.segment),
        bytes: Bytes::new(bytes),
        device,
        stream: Stream(what.stream),
        pool: Pool(what.pool),
    }
}

fn total<'a>(objects: impl Iterator<Item = &'a Held>) -> Bytes {
    Bytes::new(objects.fold(0, |total: u64, held| total.saturating_add(held.bytes.get())))
}
