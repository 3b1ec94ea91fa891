//! The tape: an ordered record of what happens to memory.
//!
//! Columns, not structs of pointers: an event is a kind and a handful of integers; names, owners
//! and layouts are interned once in tables beside the columns.

use std::borrow::Borrow;
use std::hash::Hash;
use std::num::NonZeroU32;

use rustc_hash::FxHashMap;
use thiserror::Error;

use crate::{Bytes, Category, Phase};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident($int:ty)),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $int);
    )+};
}

handles! {
    /// One storage of a tape.
    ObjectId(u32),
    /// One device segment of a tape.
    SegmentId(u32),
    /// An index into [`Tape::devices`].
    DeviceId(u16),
    /// A stream of a device; 0 is the default stream.
    Stream(u16),
    /// An allocator pool; 0 is the default, others are private pools (CUDA graphs).
    Pool(u16),
    /// A label of a tape: name, owner, category, saved.
    LabelId(u32),
    /// A mark of a tape.
    MarkId(u32),
}

/// An interned text of a tape. `Option<Name>` costs no more than `Name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(NonZeroU32);

/// An interned dtype and shape of a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayoutId(NonZeroU32);

impl Name {
    /// The place of the text in [`Tape::names`].
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

impl LayoutId {
    /// The place of the layout in [`Tape::layouts`].
    pub const fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// What the bytes of a tape count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Bytes asked for.
    Requested,
    /// Bytes of allocator blocks: what `memory_allocated` counts.
    Block,
}

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// An accelerator.
    Gpu,
    /// Host memory.
    Cpu,
}

/// One device of a tape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name, as in the catalogue: `H100-80GB`.
    pub name: String,
    /// GPU or host.
    pub kind: DeviceKind,
    /// All memory of the device, where known.
    pub capacity: Option<Bytes>,
    /// What of it the allocator never sees (CUDA context), where known.
    pub context: Option<Bytes>,
}

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "each name is its own description")]
pub enum Dtype {
    Fp64,
    Fp32,
    Fp16,
    Bf16,
    Int64,
    Int32,
    Uint8,
    Bool,
}

impl Dtype {
    /// All of them, in the order in which a tape file numbers them.
    pub const ALL: [Self; 8] =
        [Self::Fp64, Self::Fp32, Self::Fp16, Self::Bf16, Self::Int64, Self::Int32, Self::Uint8, Self::Bool];

    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            Self::Fp64 | Self::Int64 => 8,
            Self::Fp32 | Self::Int32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
            Self::Uint8 | Self::Bool => 1,
        }
    }

    /// The name used in documents and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fp64 => "fp64",
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Uint8 => "uint8",
            Self::Bool => "bool",
        }
    }
}

/// The dtype and shape of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// The element type.
    pub dtype: Dtype,
    /// The extent of each dimension.
    pub shape: Box<[u64]>,
}

/// What is known of an object besides its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label {
    /// The kind of object, the same for every layer: `model.layers.*.mlp.down_proj.weight`.
    pub name: Name,
    /// The one that owns it: `model.layers.7.mlp.down_proj`.
    pub owner: Option<Name>,
    /// What it is for.
    pub category: Category,
    /// Whether autograd keeps it for the backward pass.
    pub saved: bool,
}

/// One storage: its label when it was made, and its dtype and shape where known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The label it was born with; a [`Event::Relabel`] may change it later.
    pub label: LabelId,
    /// Its dtype and shape, where known.
    pub layout: Option<LayoutId>,
}

/// A point on the timeline: what follows belongs to this step, micro-batch and phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1; none in load and update.
    pub micro_batch: Option<u32>,
    /// The phase that begins.
    pub phase: Phase,
    /// Free text.
    pub text: Option<Name>,
}

/// One event of a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An object comes to be.
    Alloc {
        /// The new object.
        object: ObjectId,
        /// Its size in the tape's unit.
        bytes: Bytes,
        /// Where it lives.
        device: DeviceId,
        /// The stream it was made on.
        stream: Stream,
        /// The allocator pool it was made in.
        pool: Pool,
    },
    /// The program let go of an object whose block still waits for other streams.
    FreeRequested(ObjectId),
    /// An object is gone. Without a `FreeRequested` before it, it was let go at this event too.
    Free(ObjectId),
    /// A category, owner or saved flag learnt later.
    Relabel(ObjectId, LabelId),
    /// The allocator took a segment from the device.
    SegmentAlloc(Segment),
    /// The allocator gave a segment back.
    SegmentFree(Segment),
    /// The allocator mapped pages into an expandable segment.
    SegmentMap(Segment),
    /// The allocator unmapped pages of an expandable segment.
    SegmentUnmap(Segment),
    /// The device had no room for a request of `bytes`.
    Oom {
        /// The bytes asked for.
        bytes: Bytes,
        /// The device that had no room.
        device: DeviceId,
        /// The stream of the request.
        stream: Stream,
    },
    /// Step, micro-batch, phase or text.
    Mark(MarkId),
}

/// The segment of a segment event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which segment.
    pub segment: SegmentId,
    /// The bytes taken, given back, mapped or unmapped.
    pub bytes: Bytes,
    /// Where.
    pub device: DeviceId,
    /// The stream the segment serves.
    pub stream: Stream,
    /// The pool the segment serves.
    pub pool: Pool,
}

/// The code of an event kind: the first column of a tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Alloc,
    FreeRequested,
    Free,
    Relabel,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Oom,
    Mark,
}

/// Why a tape cannot hold what it was given.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message says it")]
pub enum TapeError {
    #[error("a tape holds at most 2^32 objects")]
    TooManyObjects,
    #[error("a tape holds at most 2^63 bytes, and event {event} goes beyond")]
    TooManyBytes { event: usize },
    #[error("event {event} frees object {object}, which is not alive")]
    NotAlive { event: usize, object: u32 },
    #[error("event {event} names {what} {index}, of which the tape has {count}")]
    Dangling { event: usize, what: &'static str, index: u64, count: usize },
    #[error("event {event} makes object {object}, which was made before")]
    MadeTwice { event: usize, object: u32 },
    #[error("event {event} gives back more segment bytes than device {device} holds")]
    NotReserved { event: usize, device: u16 },
    #[error("{what} {index} names {of} {handle}, of which the tape has {count}")]
    DanglingTable { what: &'static str, index: usize, of: &'static str, handle: u64, count: usize },
}

/// An ordered record of allocations, frees and marks.
#[derive(Clone, Debug)]
pub struct Tape {
    /// What the bytes of this tape count.
    pub unit: Unit,
    /// The devices, GPU and host.
    pub devices: Vec<Device>,
    /// The names of the phases, in the order of the timeline.
    pub phases: Vec<String>,
    /// How many of the first events tell what was there before the tape begins: one instant, that
    /// after the last of them.
    pub before: usize,
    names: Interner<String>,
    layouts: Interner<Layout>,
    labels: Vec<Label>,
    label_ids: FxHashMap<Label, LabelId>,
    objects: Vec<Object>,
    marks: Vec<Mark>,
    kinds: Vec<Kind>,
    subjects: Vec<u32>,
    bytes: Vec<u64>,
    device: Vec<DeviceId>,
    stream: Vec<Stream>,
    pool: Vec<Pool>,
    times: Vec<u64>,
}

impl Tape {
    /// An empty tape with the six phases of a training step.
    pub fn new(unit: Unit, devices: Vec<Device>) -> Self {
        Self {
            unit,
            devices,
            phases: Phase::NAMES.iter().map(ToString::to_string).collect(),
            before: 0,
            names: Interner::default(),
            layouts: Interner::default(),
            labels: Vec::new(),
            label_ids: FxHashMap::default(),
            objects: Vec::new(),
            marks: Vec::new(),
            kinds: Vec::new(),
            subjects: Vec::new(),
            bytes: Vec::new(),
            device: Vec::new(),
            stream: Vec::new(),
            pool: Vec::new(),
            times: Vec::new(),
        }
    }

    /// Whether anything was made on another stream than the default one.
    pub fn has_streams(&self) -> bool {
        self.stream.iter().any(|stream| *stream != Stream(0))
    }

    /// The same, as if all of it had been made on the default stream.
    #[must_use]
    pub fn on_one_stream(&self) -> Self {
        Self { stream: vec![Stream(0); self.stream.len()], ..self.clone() }
    }

    /// The number of events.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The handle of `text`, interned.
    pub fn intern(&mut self, text: &str) -> Name {
        Name(self.names.intern_ref(text))
    }

    /// The text of `name`.
    pub fn name(&self, name: Name) -> &str {
        self.names.get(name.0)
    }

    /// Every interned text, by [`Name::index`].
    pub fn names(&self) -> &[String] {
        &self.names.values
    }

    /// The handle of every interned text, in the order of [`Tape::names`].
    pub fn name_ids(&self) -> impl Iterator<Item = Name> + use<> {
        self.names.handles().map(Name)
    }

    /// The handle of a dtype and shape, interned.
    pub fn intern_layout(&mut self, layout: &Layout) -> LayoutId {
        LayoutId(self.layouts.intern_ref(layout))
    }

    /// The dtype and shape of `layout`.
    pub fn layout(&self, layout: LayoutId) -> &Layout {
        self.layouts.get(layout.0)
    }

    /// Every interned dtype and shape, by [`LayoutId::index`].
    pub fn layouts(&self) -> &[Layout] {
        &self.layouts.values
    }

    /// The handle of every interned dtype and shape, in the order of [`Tape::layouts`].
    pub fn layout_ids(&self) -> impl Iterator<Item = LayoutId> + use<> {
        self.layouts.handles().map(LayoutId)
    }

    /// The handle of `label`, interned.
    pub fn intern_label(&mut self, label: Label) -> LabelId {
        let labels = &mut self.labels;
        *self.label_ids.entry(label).or_insert_with(|| {
            labels.push(label);
            LabelId(labels.len() as u32 - 1)
        })
    }

    /// The label behind `label`.
    pub fn label(&self, label: LabelId) -> Label {
        self.labels[label.0 as usize]
    }

    /// Every label, by its handle.
    pub fn labels(&self) -> &[Label] {
        &self.labels
    }

    /// Every object, by its handle.
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// What is known of `object`.
    pub fn object(&self, object: ObjectId) -> Object {
        self.objects[object.0 as usize]
    }

    /// A new object that no event speaks of yet.
    pub fn new_object(&mut self, object: Object) -> Result<ObjectId, TapeError> {
        let id = u32::try_from(self.objects.len()).map_err(|_| TapeError::TooManyObjects)?;
        self.objects.push(object);
        Ok(ObjectId(id))
    }

    /// The label that `object` is born with, changed before anybody has seen it.
    pub fn set_label(&mut self, object: ObjectId, label: LabelId) {
        self.objects[object.0 as usize].label = label;
    }

    /// Records a mark.
    pub fn mark(&mut self, mark: Mark) {
        let id = self.new_mark(mark);
        self.push(Event::Mark(id));
    }

    /// A new mark that no event speaks of yet: for an [`Event::Mark`] with a time.
    pub fn new_mark(&mut self, mark: Mark) -> MarkId {
        self.marks.push(mark);
        MarkId(self.marks.len() as u32 - 1)
    }

    /// The mark behind `mark`.
    pub fn mark_of(&self, mark: MarkId) -> Mark {
        self.marks[mark.0 as usize]
    }

    /// Every mark, by its handle.
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// The name of `phase` on this tape.
    pub fn phase_name(&self, phase: Phase) -> &str {
        &self.phases[usize::from(phase.0)]
    }

    /// Records an event. Time stamps, where a tape has them, come with [`Tape::push_at`].
    pub fn push(&mut self, event: Event) {
        let none = (Bytes::ZERO, DeviceId(0), Stream(0), Pool(0));
        let (kind, subject, (bytes, device, stream, pool)) = match event {
            Event::Alloc { object, bytes, device, stream, pool } => {
                (Kind::Alloc, object.0, (bytes, device, stream, pool))
            }
            Event::FreeRequested(object) => (Kind::FreeRequested, object.0, none),
            Event::Free(object) => (Kind::Free, object.0, none),
            Event::Relabel(object, label) => {
                let label = Bytes::new(u64::from(label.0));
                (Kind::Relabel, object.0, (label, DeviceId(0), Stream(0), Pool(0)))
            }
            Event::SegmentAlloc(s) => (Kind::SegmentAlloc, s.segment.0, s.columns()),
            Event::SegmentFree(s) => (Kind::SegmentFree, s.segment.0, s.columns()),
            Event::SegmentMap(s) => (Kind::SegmentMap, s.segment.0, s.columns()),
            Event::SegmentUnmap(s) => (Kind::SegmentUnmap, s.segment.0, s.columns()),
            Event::Oom { bytes, device, stream } => (Kind::Oom, 0, (bytes, device, stream, Pool(0))),
            Event::Mark(mark) => (Kind::Mark, mark.0, none),
        };
        self.kinds.push(kind);
        self.subjects.push(subject);
        self.bytes.push(bytes.get());
        self.device.push(device);
        self.stream.push(stream);
        self.pool.push(pool);
    }

    /// Records an event that happened at `time_us` microseconds.
    pub fn push_at(&mut self, event: Event, time_us: u64) {
        self.times.resize(self.kinds.len(), 0);
        self.push(event);
        self.times.push(time_us);
    }

    /// Puts events between those that are there: each with the index of the one it goes before, in
    /// order. They happen when the event before them does.
    ///
    /// # Panics
    /// Where the indices are not in order or beyond the end of the tape.
    pub fn insert(&mut self, events: &[(usize, Event)]) {
        let mut whole = Self::new(self.unit, Vec::new());
        let mut next = 0;
        let copy = |whole: &mut Self, range: std::ops::Range<usize>| {
            for index in range {
                match self.times.get(index) {
                    Some(time) => whole.push_at(self.event(index), *time),
                    None => whole.push(self.event(index)),
                }
            }
        };
        for (index, event) in events {
            copy(&mut whole, next..*index);
            next = *index;
            match whole.times.last().copied().filter(|_| whole.times.len() == whole.len()) {
                Some(time) => whole.push_at(*event, time),
                None => whole.push(*event),
            }
        }
        copy(&mut whole, next..self.len());
        self.before += events.iter().filter(|(index, _)| *index < self.before).count();
        (self.kinds, self.subjects, self.bytes) = (whole.kinds, whole.subjects, whole.bytes);
        (self.device, self.stream, self.pool) = (whole.device, whole.stream, whole.pool);
        self.times = whole.times;
    }

    /// When event `index` happened, in microseconds, where the tape knows.
    pub fn time_us(&self, index: usize) -> Option<u64> {
        self.times.get(index).copied()
    }

    /// The event at `index`.
    pub fn event(&self, index: usize) -> Event {
        let subject = self.subjects[index];
        let object = ObjectId(subject);
        let bytes = Bytes::new(self.bytes[index]);
        let (device, stream, pool) = (self.device[index], self.stream[index], self.pool[index]);
        let segment = Segment { segment: SegmentId(subject), bytes, device, stream, pool };
        match self.kinds[index] {
            Kind::Alloc => Event::Alloc { object, bytes, device, stream, pool },
            Kind::FreeRequested => Event::FreeRequested(object),
            Kind::Free => Event::Free(object),
            Kind::Relabel => Event::Relabel(object, LabelId(bytes.get() as u32)),
            Kind::SegmentAlloc => Event::SegmentAlloc(segment),
            Kind::SegmentFree => Event::SegmentFree(segment),
            Kind::SegmentMap => Event::SegmentMap(segment),
            Kind::SegmentUnmap => Event::SegmentUnmap(segment),
            Kind::Oom => Event::Oom { bytes, device, stream },
            Kind::Mark => Event::Mark(MarkId(subject)),
        }
    }

    /// Whether the tape can be replayed: every handle names something, an object is made once and
    /// let go once, and no total reaches 2^63. For tapes from outside.
    ///
    /// # Errors
    /// The first place that is not so.
    pub fn validate(&self) -> Result<(), TapeError> {
        self.validate_tables()?;
        let mut lives = vec![Life::Unborn; self.objects.len()];
        let mut sizes = vec![0_u64; self.objects.len()];
        let mut alive = Bytes::ZERO;
        let mut reserved = vec![Bytes::ZERO; self.devices.len()];
        for (event, it) in self.events().enumerate() {
            let known = |what, index: u64, count: usize| {
                let error = TapeError::Dangling { event, what, index, count };
                usize::try_from(index).ok().filter(|index| *index < count).ok_or(error)
            };
            let object = |ObjectId(object)| known("object", u64::from(object), self.objects.len());
            let device = |DeviceId(device)| known("device", u64::from(device), self.devices.len());
            let more = |total: Bytes, bytes: Bytes| {
                total.checked_add(bytes).ok_or(TapeError::TooManyBytes { event })
            };
            match it {
                Event::Alloc { object: id, bytes, device: at, .. } => {
                    let object = object(id)?;
                    device(at)?;
                    if lives[object] != Life::Unborn {
                        return Err(TapeError::MadeTwice { event, object: id.0 });
                    }
                    alive = more(alive, bytes)?;
                    (lives[object], sizes[object]) = (Life::Held, bytes.get());
                }
                Event::FreeRequested(id) => {
                    let life = &mut lives[object(id)?];
                    if *life != Life::Held {
                        return Err(TapeError::NotAlive { event, object: id.0 });
                    }
                    *life = Life::Awaiting;
                }
                Event::Free(id) => {
                    let object = object(id)?;
                    if !matches!(lives[object], Life::Held | Life::Awaiting) {
                        return Err(TapeError::NotAlive { event, object: id.0 });
                    }
                    lives[object] = Life::Gone;
                    alive -= Bytes::new(sizes[object]);
                }
                Event::Relabel(id, label) => {
                    object(id)?;
                    known("label", u64::from(label.0), self.labels.len())?;
                }
                Event::SegmentAlloc(segment) | Event::SegmentMap(segment) => {
                    let device = device(segment.device)?;
                    reserved[device] = more(reserved[device], segment.bytes)?;
                }
                Event::SegmentFree(segment) | Event::SegmentUnmap(segment) => {
                    let device = device(segment.device)?;
                    let error = TapeError::NotReserved { event, device: segment.device.0 };
                    reserved[device] = reserved[device].checked_sub(segment.bytes).ok_or(error)?;
                }
                Event::Oom { bytes, device: at, .. } => {
                    device(at)?;
                    more(Bytes::ZERO, bytes)?;
                }
                Event::Mark(mark) => {
                    known("mark", u64::from(mark.0), self.marks.len())?;
                }
            }
        }
        Ok(())
    }

    /// Whether every handle in the tables names something.
    fn validate_tables(&self) -> Result<(), TapeError> {
        let known = |what, index, of, handle: u64, count: usize| {
            let error = TapeError::DanglingTable { what, index, of, handle, count };
            if handle < count as u64 { Ok(()) } else { Err(error) }
        };
        let names = self.names.values.len();
        let layouts = self.layouts.values.len();
        for (index, label) in self.labels.iter().enumerate() {
            for name in [Some(label.name), label.owner].into_iter().flatten() {
                known("label", index, "name", name.index() as u64, names)?;
            }
        }
        for (index, object) in self.objects.iter().enumerate() {
            known("object", index, "label", u64::from(object.label.0), self.labels.len())?;
            if let Some(layout) = object.layout {
                known("object", index, "layout", layout.index() as u64, layouts)?;
            }
        }
        for (index, mark) in self.marks.iter().enumerate() {
            known("mark", index, "phase", u64::from(mark.phase.0), self.phases.len())?;
            if let Some(text) = mark.text {
                known("mark", index, "name", text.index() as u64, names)?;
            }
        }
        Ok(())
    }

    /// The events in order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = Event> + '_ {
        (0..self.len()).map(|index| self.event(index))
    }
}

/// Where an object is in its life.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// Not made yet.
    Unborn,
    /// Made, and the program holds it.
    Held,
    /// Let go; its block waits for other streams.
    Awaiting,
    /// Gone.
    Gone,
}

impl Segment {
    const fn columns(self) -> (Bytes, DeviceId, Stream, Pool) {
        (self.bytes, self.device, self.stream, self.pool)
    }
}

/// Values stored once, named by a small handle.
#[derive(Clone, Debug)]
struct Interner<T> {
    values: Vec<T>,
    handles: FxHashMap<T, NonZeroU32>,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { values: Vec::new(), handles: FxHashMap::default() }
    }
}

impl<T: Clone + Eq + Hash> Interner<T> {
    fn intern_ref<Q>(&mut self, value: &Q) -> NonZeroU32
    where
        T: Borrow<Q>,
        Q: Eq + Hash + ToOwned<Owned = T> + ?Sized,
    {
        if let Some(handle) = self.handles.get(value) {
            return *handle;
        }
        let value = value.to_owned();
        self.values.push(value.clone());
        let handle = NonZeroU32::new(self.values.len() as u32).expect("a length after a push");
        self.handles.insert(value, handle);
        handle
    }

    fn handles(&self) -> impl Iterator<Item = NonZeroU32> + use<T> {
        (1..=self.values.len() as u32).filter_map(NonZeroU32::new)
    }

    fn get(&self, handle: NonZeroU32) -> &T {
        &self.values[handle.get() as usize - 1]
    }
}
