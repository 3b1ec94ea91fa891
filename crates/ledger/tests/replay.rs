//! What the replay says, event by event, on tapes small enough to do by hand.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Ledger, Mark, Meter, Object, ObjectId, Oom,
    Peak, Phase, PhaseRow, Pool, Reading, Segment, SegmentId, Stream, Tape, TapeError, Totals, Unit, replay,
};

const GPU: DeviceId = DeviceId(0);

/// A tape under construction.
struct Draft(Tape);

impl Draft {
    fn new(unit: Unit, kinds: &[DeviceKind]) -> Self {
        let device =
            |kind: &DeviceKind| Device { name: "d".into(), kind: *kind, capacity: None, context: None };
        Self(Tape::new(unit, kinds.iter().map(device).collect()))
    }

    fn label(&mut self, name: &str, category: Category, saved: bool) -> ledger::LabelId {
        let name = self.0.intern(name);
        self.0.intern_label(Label { name, owner: None, category, saved })
    }

    fn alloc_on(&mut self, device: DeviceId, name: &str, category: Category, bytes: u64) -> ObjectId {
        let label = self.label(name, category, category == Category::Activation);
        let object = self.0.new_object(Object { label, layout: None }).unwrap();
        let bytes = Bytes::new(bytes);
        self.0.push(Event::Alloc { object, bytes, device, stream: Stream(0), pool: Pool(0) });
        object
    }

    fn alloc(&mut self, name: &str, category: Category, bytes: u64) -> ObjectId {
        self.alloc_on(GPU, name, category, bytes)
    }

    fn free(&mut self, object: ObjectId) {
        self.0.push(Event::Free(object));
    }

    fn mark(&mut self, step: u32, micro_batch: Option<u32>, phase: Phase) {
        self.0.mark(Mark { step, micro_batch, phase, text: None });
    }

    fn segment(&mut self, device: DeviceId, bytes: u64) -> Segment {
        let bytes = Bytes::new(bytes);
        Segment { segment: SegmentId(0), bytes, device, stream: Stream(0), pool: Pool(0) }
    }
}

fn gpu(unit: Unit) -> Draft {
    Draft::new(unit, &[DeviceKind::Gpu])
}

fn books(draft: &Draft) -> Ledger {
    draft.0.validate().unwrap();
    replay(&draft.0, None)
}

fn rows(peak: &Peak) -> Vec<(&str, Category, u64, u64)> {
    peak.contributors
        .iter()
        .map(|row| (row.name.as_str(), row.category, row.bytes.get(), row.count))
        .collect()
}

fn requested(row: &PhaseRow) -> (u64, u64) {
    (row.peak.requested.unwrap().get(), row.end.requested.unwrap().get())
}

#[test]
fn a_phase_peak_includes_what_is_alive_at_its_start() {
    let mut draft = gpu(Unit::Requested);
    draft.mark(0, None, Phase::LOAD);
    let weight = draft.alloc("w", Category::Parameter, 100);
    draft.mark(1, Some(1), Phase::FORWARD);
    draft.free(weight);
    draft.alloc("a", Category::Activation, 30);
    let books = books(&draft);
    assert_eq!(books.phases.iter().map(requested).collect::<Vec<_>>(), [(100, 100), (100, 30)]);
    assert_eq!(
        books.phases[1].end_by_category,
        BTreeMap::from([(Category::Parameter, Bytes::ZERO), (Category::Activation, Bytes::new(30))])
    );
    assert_eq!(books.peaks.requested.as_ref().unwrap().at.as_ref().unwrap().phase, "load");
}

#[test]
fn a_mark_of_the_same_phase_begins_no_row() {
    let mut draft = gpu(Unit::Requested);
    draft.mark(1, Some(1), Phase::FORWARD);
    draft.alloc("a", Category::Activation, 1);
    draft.mark(1, Some(1), Phase::FORWARD);
    draft.alloc("a", Category::Activation, 2);
    draft.mark(1, Some(2), Phase::FORWARD);
    let books = books(&draft);
    assert_eq!(books.phases.len(), 2);
    assert_eq!(books.phases[0].end.requested, Some(Bytes::new(3)));
}

#[test]
fn contributors_are_one_row_for_each_name_and_category() {
    let mut draft = gpu(Unit::Requested);
    for (name, category, bytes) in [
        ("b", Category::Activation, 10),
        ("a", Category::Activation, 5),
        ("a", Category::Activation, 5),
        ("a", Category::Temporary, 7),
        ("a", Category::Workspace, 10),
    ] {
        draft.alloc(name, category, bytes);
    }
    let books = books(&draft);
    let peak = books.peaks.requested.as_ref().unwrap();
    assert_eq!(
        rows(peak),
        [
            ("a", Category::Activation, 10, 2),
            ("a", Category::Workspace, 10, 1),
            ("b", Category::Activation, 10, 1),
            ("a", Category::Temporary, 7, 1),
        ]
    );
    assert_eq!(peak.contributors[0].saved, Bytes::new(10));
    assert_eq!(peak.contributors[1].saved, Bytes::ZERO);
    assert_eq!(peak.by_category[&Category::Activation], Bytes::new(20));
    // Without marks the peak has no place on the timeline, but its event.
    assert_eq!((peak.at.clone(), peak.event), (None, 4));
}

#[test]
fn what_is_let_go_counts_no_more_but_its_block_is_active() {
    let mut draft = gpu(Unit::Block);
    draft.mark(1, Some(1), Phase::FORWARD);
    let first = draft.alloc("a", Category::Activation, 100);
    draft.0.push(Event::FreeRequested(first));
    draft.alloc("b", Category::Activation, 150);
    draft.free(first);
    let books = books(&draft);
    let peak = books.peaks.allocated.unwrap();
    assert_eq!(peak.bytes, Bytes::new(150));
    assert_eq!(peak.at_peak.active, Some(Bytes::new(250)));
    assert_eq!(rows(&peak), [("b", Category::Activation, 150, 1)]);
    assert_eq!(books.phases[0].end.allocated, Some(Bytes::new(150)));
    assert_eq!(books.peaks.requested, None);
}

#[test]
fn a_relabel_moves_bytes_between_categories() {
    let mut draft = gpu(Unit::Requested);
    draft.mark(1, Some(1), Phase::BACKWARD);
    let object = draft.alloc("grad", Category::Temporary, 40);
    draft.mark(1, None, Phase::UPDATE);
    let label = draft.label("weight.grad", Category::Gradient, false);
    draft.0.push(Event::Relabel(object, label));
    let books = books(&draft);
    assert_eq!(books.phases[0].end_by_category[&Category::Temporary], Bytes::new(40));
    assert_eq!(books.phases[1].end_by_category[&Category::Temporary], Bytes::ZERO);
    assert_eq!(books.phases[1].end_by_category[&Category::Gradient], Bytes::new(40));
    // At the peak, the first event, it was a temporary still.
    assert_eq!(rows(books.peaks.requested.as_ref().unwrap()), [("grad", Category::Temporary, 40, 1)]);
}

#[test]
fn the_peak_is_of_one_gpu_and_never_of_the_host() {
    let mut draft = Draft::new(Unit::Requested, &[DeviceKind::Cpu, DeviceKind::Gpu, DeviceKind::Gpu]);
    draft.mark(0, None, Phase::LOAD);
    draft.alloc_on(DeviceId(0), "pinned", Category::Buffer, 1000);
    draft.alloc_on(DeviceId(1), "a", Category::Parameter, 60);
    draft.alloc_on(DeviceId(2), "b", Category::Parameter, 60);
    draft.alloc_on(DeviceId(2), "c", Category::Parameter, 1);
    let books = books(&draft);
    let peak = books.peaks.requested.unwrap();
    assert_eq!((peak.device, peak.bytes), (DeviceId(2), Bytes::new(61)));
    let peaks: Vec<_> =
        books.phases.iter().map(|row| (row.device.0, row.peak.requested.unwrap().get())).collect();
    assert_eq!(peaks, [(0, 1000), (1, 60), (2, 61)]);
}

#[test]
fn a_tape_with_segments_knows_what_is_reserved() {
    let mut draft = gpu(Unit::Block);
    draft.mark(1, Some(1), Phase::FORWARD);
    let segment = draft.segment(GPU, 1000);
    draft.0.push(Event::SegmentAlloc(segment));
    let first = draft.alloc("a", Category::Activation, 300);
    draft.alloc("b", Category::Activation, 200);
    draft.0.push(Event::FreeRequested(first));
    draft.0.push(Event::SegmentMap(segment));
    draft.0.push(Event::SegmentUnmap(segment));
    let books = books(&draft);
    assert_eq!(books.phases[0].peak.reserved, Some(Bytes::new(2000)));
    assert_eq!(books.phases[0].end.reserved, Some(Bytes::new(1000)));
    let peak = books.peaks.reserved.unwrap();
    assert_eq!(
        rows(&peak),
        [
            ("cached", Category::Unattributed, 1500, 0),
            ("awaiting free", Category::Unattributed, 300, 1),
            ("b", Category::Activation, 200, 1),
        ]
    );
}

#[test]
fn without_blocks_what_segments_hold_beyond_requests_is_unattributed() {
    let mut draft = gpu(Unit::Requested);
    let segment = draft.segment(GPU, 1000);
    draft.0.push(Event::SegmentAlloc(segment));
    draft.alloc("a", Category::Activation, 300);
    let books = books(&draft);
    assert_eq!(
        rows(&books.peaks.reserved.unwrap()),
        [("unattributed", Category::Unattributed, 1000, 0)],
        "at the first instant of the peak nothing was asked for yet"
    );
    assert_eq!(books.peaks.allocated, None);
}

#[test]
fn segments_that_cannot_hold_the_objects_are_unattributed() {
    let mut draft = gpu(Unit::Block);
    draft.alloc("before the recording", Category::Activation, 3000);
    let segment = draft.segment(GPU, 1000);
    draft.0.push(Event::SegmentAlloc(segment));
    let peak = books(&draft).peaks.reserved.unwrap();
    assert_eq!(rows(&peak), [("unattributed", Category::Unattributed, 1000, 0)]);
}

#[test]
fn the_first_recorded_oom_is_kept_and_the_books_go_on() {
    let mut draft = gpu(Unit::Requested);
    draft.mark(2, None, Phase::UPDATE);
    draft.0.push(Event::Oom { bytes: Bytes::new(7), device: GPU, stream: Stream(0) });
    draft.0.push(Event::Oom { bytes: Bytes::new(8), device: GPU, stream: Stream(0) });
    draft.alloc("a", Category::Activation, 5);
    let books = books(&draft);
    let oom = books.oom.unwrap();
    assert_eq!((oom.event, oom.requested, oom.object), (1, Bytes::new(7), None));
    assert_eq!(oom.at.unwrap().step, 2);
    assert_eq!(books.peaks.requested.unwrap().bytes, Bytes::new(5));
}

#[test]
fn an_empty_tape_has_no_peaks() {
    let books = books(&gpu(Unit::Requested));
    assert_eq!((books.phases.len(), books.peaks), (0, ledger::Peaks::default()));
}

/// An allocator that rounds to 512, takes segments of 1024 one by one, keeps them, and gives all
/// that is empty back before it takes one more than `room`.
struct Simple {
    blocks: BTreeMap<ObjectId, u64>,
    free: u64,
    reading: Reading,
    room: u64,
}

impl Simple {
    fn new(room: u64) -> Self {
        Self { blocks: BTreeMap::new(), free: 0, reading: Reading::default(), room }
    }
}

impl Meter for Simple {
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom> {
        let mut now = self.reading;
        now.reserved_high = now.reserved;
        match event {
            Event::Alloc { object, bytes, device, .. } if device == GPU => {
                let block = bytes.get().next_multiple_of(512);
                let segment = block.next_multiple_of(1024);
                let mut reserved = now.reserved.get();
                if self.free < block {
                    if reserved + segment > self.room {
                        reserved -= self.free;
                        self.free = 0;
                    }
                    if reserved + segment > self.room {
                        self.reading = Reading { reserved: Bytes::new(reserved), ..now };
                        let (requested, device_request) = (bytes, Bytes::new(segment));
                        return Err(Oom { event: index, object, device, requested, device_request });
                    }
                    reserved += segment;
                    self.free += segment;
                }
                self.free -= block;
                self.blocks.insert(object, block);
                let allocated = now.allocated + Bytes::new(block);
                let reserved = Bytes::new(reserved);
                let reserved_high = reserved.max(now.reserved_high);
                now = Reading { allocated, active: allocated, reserved, reserved_high };
            }
            Event::Free(object) => {
                if let Some(block) = self.blocks.remove(&object) {
                    self.free += block;
                    now.allocated -= Bytes::new(block);
                    now.active = now.allocated;
                }
            }
            _ => {}
        }
        self.reading = now;
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        (device == GPU).then_some(self.reading)
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        self.blocks.get(&object).copied().map(Bytes::new)
    }
}

#[test]
fn a_meter_tells_what_is_allocated_and_reserved() {
    let mut draft = Draft::new(Unit::Requested, &[DeviceKind::Gpu, DeviceKind::Cpu]);
    draft.mark(0, None, Phase::LOAD);
    draft.alloc("w", Category::Parameter, 100);
    draft.alloc_on(DeviceId(1), "host", Category::Input, 100);
    draft.mark(1, Some(1), Phase::FORWARD);
    draft.alloc("a", Category::Activation, 1000);
    let books = replay(&draft.0, Some(&mut Simple::new(1 << 20)));
    let totals = |requested, allocated: Option<u64>, reserved: Option<u64>| Totals {
        requested: Some(Bytes::new(requested)),
        allocated: allocated.map(Bytes::new),
        reserved: reserved.map(Bytes::new),
    };
    let ends: Vec<Totals> = books.phases.iter().map(|row| row.end).collect();
    assert_eq!(
        ends,
        [
            totals(100, Some(512), Some(1024)),
            totals(100, None, None),
            totals(1100, Some(1536), Some(2048)),
            totals(100, None, None),
        ]
    );
    let requested = books.peaks.requested.as_ref().unwrap();
    assert_eq!(rows(requested), [("a", Category::Activation, 1000, 1), ("w", Category::Parameter, 100, 1)]);
    let allocated = books.peaks.allocated.as_ref().unwrap();
    assert_eq!(rows(allocated), [("a", Category::Activation, 1024, 1), ("w", Category::Parameter, 512, 1)]);
    assert_eq!(allocated.at_peak.requested, Some(Bytes::new(1100)));
    let reserved = books.peaks.reserved.as_ref().unwrap();
    assert_eq!(
        rows(reserved),
        [
            ("a", Category::Activation, 1024, 1),
            ("cached", Category::Unattributed, 512, 0),
            ("w", Category::Parameter, 512, 1),
        ]
    );
}

/// A meter that does not know blocks one by one.
struct Blind(Simple);

impl Meter for Blind {
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom> {
        self.0.apply(index, event)
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        self.0.reading(device)
    }

    fn block_bytes(&self, _: ObjectId) -> Option<Bytes> {
        None
    }
}

#[test]
fn without_block_bytes_the_rounding_is_a_row() {
    let mut draft = gpu(Unit::Requested);
    draft.alloc("w", Category::Parameter, 100);
    draft.alloc("a", Category::Activation, 1000);
    let books = replay(&draft.0, Some(&mut Blind(Simple::new(1 << 20))));
    assert_eq!(
        rows(books.peaks.allocated.as_ref().unwrap()),
        [
            ("a", Category::Activation, 1000, 1),
            ("rounding", Category::Unattributed, 436, 0),
            ("w", Category::Parameter, 100, 1),
        ]
    );
}

#[test]
fn the_books_end_where_the_allocator_is_out_of_memory() {
    let mut draft = gpu(Unit::Requested);
    draft.mark(0, None, Phase::LOAD);
    draft.alloc("w", Category::Parameter, 1024);
    let gone = draft.alloc("a", Category::Activation, 1024);
    draft.mark(1, Some(1), Phase::FORWARD);
    draft.free(gone);
    draft.alloc("big", Category::Activation, 4000);
    draft.mark(1, Some(1), Phase::BACKWARD);
    let books = replay(&draft.0, Some(&mut Simple::new(4096)));
    let oom = books.oom.unwrap();
    assert_eq!((oom.event, oom.requested, oom.device_request), (5, Bytes::new(4000), Some(Bytes::new(4096))));
    assert_eq!(oom.object.as_deref(), Some("big"));
    assert_eq!(oom.at.unwrap().phase, "forward");
    // The failed request is in no total; what was given back in the attempt is reserved no more.
    assert_eq!(books.phases.len(), 2);
    assert_eq!(requested(&books.phases[1]), (2048, 1024));
    assert_eq!(books.phases[1].end.reserved, Some(Bytes::new(1024)));
    assert_eq!(books.peaks.reserved.unwrap().bytes, Bytes::new(2048));
}

/// A meter whose reserved bytes are above their end within the second event.
struct Spike(usize);

impl Meter for Spike {
    fn apply(&mut self, index: usize, _: Event) -> Result<(), Oom> {
        self.0 = index;
        Ok(())
    }

    fn reading(&self, _: DeviceId) -> Option<Reading> {
        let high = if self.0 == 1 { 900 } else { 500 };
        let reserved_high = Bytes::new(high);
        Some(Reading {
            allocated: Bytes::new(10),
            active: Bytes::new(10),
            reserved: Bytes::new(500),
            reserved_high,
        })
    }

    fn block_bytes(&self, _: ObjectId) -> Option<Bytes> {
        None
    }
}

#[test]
fn a_peak_within_an_event_sees_what_was_there_before_it() {
    let mut draft = gpu(Unit::Requested);
    draft.alloc("w", Category::Parameter, 10);
    draft.alloc("a", Category::Activation, 10);
    let peak = replay(&draft.0, Some(&mut Spike(0))).peaks.reserved.unwrap();
    assert_eq!((peak.bytes, peak.event), (Bytes::new(900), 1));
    assert_eq!(peak.at_peak.reserved, Some(Bytes::new(900)));
    assert_eq!(rows(&peak), [("cached", Category::Unattributed, 890, 0), ("w", Category::Parameter, 10, 1)]);
}

#[test]
fn validation_names_the_first_thing_that_is_wrong() {
    let broken = |events: &[Event]| {
        let mut draft = gpu(Unit::Requested);
        draft.alloc("a", Category::Activation, 10);
        events.iter().for_each(|event| draft.0.push(*event));
        draft.0.validate().unwrap_err()
    };
    let object = ObjectId(0);
    let alloc = |object, bytes, device| Event::Alloc {
        object,
        bytes: Bytes::new(bytes),
        device: DeviceId(device),
        stream: Stream(0),
        pool: Pool(0),
    };
    assert_eq!(broken(&[alloc(object, 1, 0)]), TapeError::MadeTwice { event: 1, object: 0 });
    assert_eq!(
        broken(&[Event::Free(object), alloc(object, 1, 0)]),
        TapeError::MadeTwice { event: 2, object: 0 }
    );
    assert_eq!(
        broken(&[Event::Free(object), Event::Free(object)]),
        TapeError::NotAlive { event: 2, object: 0 }
    );
    let twice = [Event::FreeRequested(object), Event::FreeRequested(object)];
    assert_eq!(broken(&twice), TapeError::NotAlive { event: 2, object: 0 });
    let dangling = |what, index, count| TapeError::Dangling { event: 1, what, index, count };
    assert_eq!(broken(&[Event::Free(ObjectId(9))]), dangling("object", 9, 1));
    assert_eq!(broken(&[Event::Relabel(object, ledger::LabelId(5))]), dangling("label", 5, 1));
    assert_eq!(broken(&[Event::Mark(ledger::MarkId(0))]), dangling("mark", 0, 0));
    let oom = Event::Oom { bytes: Bytes::ZERO, device: DeviceId(1), stream: Stream(0) };
    assert_eq!(broken(&[oom]), dangling("device", 1, 1));
    let segment = Segment {
        segment: SegmentId(0),
        bytes: Bytes::new(1),
        device: GPU,
        stream: Stream(0),
        pool: Pool(0),
    };
    assert_eq!(broken(&[Event::SegmentFree(segment)]), TapeError::NotReserved { event: 1, device: 0 });

    let mut draft = gpu(Unit::Requested);
    draft.alloc("a", Category::Activation, Bytes::MAX.get());
    draft.0.validate().unwrap();
    draft.alloc("a", Category::Activation, 1);
    assert_eq!(draft.0.validate(), Err(TapeError::TooManyBytes { event: 1 }));

    let mut draft = gpu(Unit::Requested);
    draft.mark(1, None, Phase(6));
    assert_eq!(draft.0.validate().unwrap_err().to_string(), "mark 0 names phase 6, of which the tape has 6");
}
