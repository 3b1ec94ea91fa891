//! The one replay of a tape: phase totals, peaks, contributors.
//!
//! Two walks. The first keeps totals, and knows at its end at which events the peaks are; the
//! second stops at those events and sees who is there.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::tape::Life;
use crate::{
    Bytes, Category, Contributor, DeviceId, DeviceKind, Event, Failure, Label, LabelId, Ladder, Ledger,
    MarkId, Measure, Meter, Name, ObjectId, Peak, Peaks, PhaseRow, Position, Reading, Tape, Totals, Unit,
};

/// Replays `tape`.
///
/// A meter, where there is one, tells what the allocator holds after each event; where it is out
/// of memory the books end. Without a meter the tape tells what it can: requested bytes where its
/// unit is requested bytes, allocated where its unit is blocks, reserved of the devices it has
/// segment events of.
///
/// # Panics
/// Where the tape is not consistent. One from outside is to pass [`Tape::validate`] first.
pub fn replay(tape: &Tape, meter: Option<&mut dyn Meter>) -> Ledger {
    let mut totals = Replay::new(tape, meter.as_deref());
    totals.run(meter);
    totals.ledger()
}

/// The objects held on `device` after the event at `event`, largest first, in the tape's unit.
///
/// # Panics
/// As [`replay`] does.
pub fn holders(tape: &Tape, event: usize, device: DeviceId) -> Vec<Contributor> {
    let mut held = Held::new(tape);
    held.follow(tape, event + 1);
    rows(tape, held.shares(tape, device, &[]))
}

/// The number of categories.
const CATEGORIES: usize = Category::ALL.len();

/// What the walks keep of an object.
#[derive(Clone, Copy)]
struct Storage {
    bytes: u64,
    label: LabelId,
    device: DeviceId,
    life: Life,
}

/// The storages of a tape up to some event.
struct Held {
    storages: Vec<Storage>,
    /// How many events [`Held::follow`] has behind it.
    behind: usize,
}

/// What changed with an event: totals of one device.
enum Change {
    /// An object came to be.
    Made(ObjectId),
    /// The program let go of an object: it counts no more, but its block stays.
    Released(ObjectId),
    /// The block of an object that was let go before is free.
    BlockFree(ObjectId),
    /// An object was let go and its block is free.
    Freed(ObjectId),
    /// A held object changed its label from this one.
    Relabelled(ObjectId, LabelId),
    /// Nothing that totals count.
    Nothing,
}

impl Held {
    fn new(tape: &Tape) -> Self {
        let unborn = |label| Storage { bytes: 0, label, device: DeviceId(0), life: Life::Unborn };
        Self { storages: tape.objects().iter().map(|object| unborn(object.label)).collect(), behind: 0 }
    }

    fn of(&self, object: ObjectId) -> Storage {
        self.storages[object.0 as usize]
    }

    /// Follows one event.
    fn apply(&mut self, event: Event) -> Change {
        match event {
            Event::Alloc { object, bytes, device, .. } => {
                let storage = &mut self.storages[object.0 as usize];
                assert!(storage.life == Life::Unborn, "an object is made once");
                *storage = Storage { bytes: bytes.get(), label: storage.label, device, life: Life::Held };
                Change::Made(object)
            }
            Event::FreeRequested(object) => {
                let storage = &mut self.storages[object.0 as usize];
                assert!(storage.life == Life::Held, "only what is held is let go");
                storage.life = Life::Awaiting;
                Change::Released(object)
            }
            Event::Free(object) => {
                let storage = &mut self.storages[object.0 as usize];
                match std::mem::replace(&mut storage.life, Life::Gone) {
                    Life::Held => Change::Freed(object),
                    Life::Awaiting => Change::BlockFree(object),
                    Life::Unborn | Life::Gone => panic!("only what is alive is freed"),
                }
            }
            Event::Relabel(object, label) => {
                let storage = &mut self.storages[object.0 as usize];
                let before = std::mem::replace(&mut storage.label, label);
                if storage.life == Life::Held { Change::Relabelled(object, before) } else { Change::Nothing }
            }
            _ => Change::Nothing,
        }
    }

    /// Follows `tape` until `events` of its events are behind.
    fn follow(&mut self, tape: &Tape, events: usize) {
        while self.behind < events.min(tape.len()) {
            self.apply(tape.event(self.behind));
            self.behind += 1;
        }
    }

    /// The bytes and count of what is held on `device`, by label. `blocks` are the block bytes of
    /// each object, where known.
    fn shares(&self, tape: &Tape, device: DeviceId, blocks: &[Option<Bytes>]) -> Vec<Share> {
        let mut shares = vec![Share::default(); tape.labels().len()];
        for (index, storage) in self.storages.iter().enumerate() {
            if storage.life == Life::Held && storage.device == device {
                let share = &mut shares[storage.label.0 as usize];
                share.bytes += blocks.get(index).copied().flatten().map_or(storage.bytes, Bytes::get);
                share.count += 1;
            }
        }
        shares
    }

    fn awaiting(&self, device: DeviceId) -> u64 {
        let waits = |storage: &&Storage| storage.life == Life::Awaiting && storage.device == device;
        self.storages.iter().filter(waits).count() as u64
    }
}

/// What the objects of one label hold together.
#[derive(Clone, Copy, Default)]
struct Share {
    bytes: u64,
    count: u64,
}

/// One row for each name and category of `shares`, largest first, then by name.
fn rows(tape: &Tape, shares: Vec<Share>) -> Vec<Contributor> {
    let mut index: FxHashMap<(Name, Category), usize> = FxHashMap::default();
    let mut rows: Vec<Contributor> = Vec::new();
    for (label, share) in tape.labels().iter().zip(shares).filter(|(_, share)| share.count > 0) {
        let Label { name, category, saved, .. } = *label;
        let at = *index.entry((name, category)).or_insert_with(|| {
            let name = tape.name(name).into();
            rows.push(Contributor { name, category, bytes: Bytes::ZERO, count: 0, saved: Bytes::ZERO });
            rows.len() - 1
        });
        let bytes = Bytes::new(share.bytes);
        rows[at].bytes += bytes;
        rows[at].count += share.count;
        if saved {
            rows[at].saved += bytes;
        }
    }
    sort(&mut rows);
    rows
}

fn sort(rows: &mut [Contributor]) {
    rows.sort_by(|a, b| {
        b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)).then(a.category.cmp(&b.category))
    });
}

/// The totals of one device at one instant. Which of them are known is the same all along.
#[derive(Clone, Copy, Default)]
struct Instant {
    /// Held by the program, in the tape's unit.
    held: u64,
    /// Held or awaiting, in the tape's unit.
    alive: u64,
    /// What the allocator says, or the tape's own segments.
    reading: Reading,
}

/// The largest total of one measure so far.
#[derive(Clone, Copy, Default)]
struct Best {
    bytes: u64,
    /// The event that brought it there.
    event: usize,
    /// How many events are behind at that instant.
    behind: usize,
    mark: Option<MarkId>,
    instant: Instant,
}

/// What is known of a device's measures, and how.
#[derive(Clone, Copy)]
struct Known {
    metered: bool,
    segments: bool,
}

/// The books of one device.
#[derive(Clone)]
struct Books {
    known: Known,
    now: Instant,
    by_category: [u64; CATEGORIES],
    phase_peak: [u64; 3],
    best: [Best; 3],
}

/// The first walk.
struct Replay<'a> {
    tape: &'a Tape,
    held: Held,
    devices: Vec<Books>,
    /// The block bytes of each object, where a meter knows them.
    blocks: Vec<Option<Bytes>>,
    mark: Option<MarkId>,
    phases: Vec<PhaseRow>,
    oom: Option<Failure>,
    categories: Vec<Category>,
}

impl Known {
    /// Requested, allocated and reserved; none where not known.
    fn totals(self, unit: Unit, now: &Instant) -> [Option<u64>; 3] {
        let blocks = if self.metered { Some(now.reading.allocated.get()) } else { None };
        let segments = self.metered || self.segments;
        match unit {
            Unit::Requested => [Some(now.held), blocks, segments.then_some(now.reading.reserved.get())],
            Unit::Block => [None, blocks.or(Some(now.held)), segments.then_some(now.reading.reserved.get())],
        }
    }

    fn ladder(self, unit: Unit, now: &Instant) -> Ladder {
        let [requested, allocated, reserved] = self.totals(unit, now).map(|total| total.map(Bytes::new));
        let active = match unit {
            _ if self.metered => Some(now.reading.active),
            Unit::Block => Some(Bytes::new(now.alive)),
            Unit::Requested => None,
        };
        Ladder { requested, allocated, active, reserved, ..Ladder::default() }
    }
}

impl Books {
    /// Takes a total of the measure in `slot`. On ties the earlier stays.
    fn offer(&mut self, slot: usize, total: Best) {
        if total.bytes > self.phase_peak[slot] {
            self.phase_peak[slot] = total.bytes;
            if total.bytes > self.best[slot].bytes {
                self.best[slot] = total;
            }
        }
    }
}

fn totals([requested, allocated, reserved]: [Option<u64>; 3]) -> Totals {
    let bytes = |total: Option<u64>| total.map(Bytes::new);
    Totals { requested: bytes(requested), allocated: bytes(allocated), reserved: bytes(reserved) }
}

impl<'a> Replay<'a> {
    fn new(tape: &'a Tape, meter: Option<&dyn Meter>) -> Self {
        let mut devices: Vec<Books> = (0..tape.devices.len())
            .map(|index| {
                let reading = meter.and_then(|meter| meter.reading(DeviceId(index as u16)));
                Books {
                    known: Known { metered: reading.is_some(), segments: false },
                    now: Instant { reading: reading.unwrap_or_default(), ..Instant::default() },
                    by_category: [0; CATEGORIES],
                    phase_peak: [0; 3],
                    best: [Best::default(); 3],
                }
            })
            .collect();
        for event in tape.events() {
            if let Event::SegmentAlloc(segment) | Event::SegmentMap(segment) = event {
                devices[usize::from(segment.device.0)].known.segments = true;
            }
        }
        let mut categories: Vec<Category> = tape.labels().iter().map(|label| label.category).collect();
        categories.sort_unstable();
        categories.dedup();
        let blocks = if meter.is_some() { vec![None; tape.objects().len()] } else { Vec::new() };
        let held = Held::new(tape);
        Self { tape, held, devices, blocks, mark: None, phases: Vec::new(), oom: None, categories }
    }

    fn run(&mut self, mut meter: Option<&mut dyn Meter>) {
        for (index, event) in self.tape.events().enumerate() {
            if let Some(meter) = &mut meter
                && let Err(oom) = meter.apply(index, event)
            {
                let object = self.tape.label(self.held.of(oom.object).label).name;
                self.oom = Some(Failure {
                    device: oom.device,
                    at: self.position(self.mark),
                    event: oom.event,
                    requested: oom.requested,
                    device_request: Some(oom.device_request),
                    object: Some(self.tape.name(object).into()),
                });
                self.observe(index, oom.device, Some(&**meter));
                break;
            }
            if let Event::Mark(mark) = event {
                self.begin(index, mark);
            }
            let moved = self.count(index, event);
            if let (Some(meter), Event::Alloc { object, .. }) = (&meter, event) {
                self.blocks[object.0 as usize] = meter.block_bytes(object);
            }
            match (index + 1).cmp(&self.tape.before) {
                // What was there before was there at once.
                Ordering::Less => {}
                Ordering::Equal => {
                    for device in 0..self.devices.len() {
                        self.observe(index, DeviceId(device as u16), meter.as_deref());
                    }
                }
                Ordering::Greater => {
                    if let Some(device) = moved {
                        self.observe(index, device, meter.as_deref());
                    }
                }
            }
        }
        self.close();
    }

    /// Follows `event` in the totals that the tape itself tells; the device whose totals it may have moved.
    fn count(&mut self, index: usize, event: Event) -> Option<DeviceId> {
        let category = |label: LabelId| self.tape.label(label).category as usize;
        match event {
            Event::SegmentAlloc(segment) | Event::SegmentMap(segment) => {
                let books = &mut self.devices[usize::from(segment.device.0)];
                if !books.known.metered {
                    books.now.reading.reserved += segment.bytes;
                }
                return Some(segment.device);
            }
            Event::SegmentFree(segment) | Event::SegmentUnmap(segment) => {
                let books = &mut self.devices[usize::from(segment.device.0)];
                if !books.known.metered {
                    books.now.reading.reserved -= segment.bytes;
                }
                return Some(segment.device);
            }
            Event::Oom { bytes, device, .. } => {
                if self.oom.is_none() {
                    let at = self.position(self.mark);
                    let (device_request, object) = (None, None);
                    self.oom =
                        Some(Failure { device, at, event: index, requested: bytes, device_request, object });
                }
                return Some(device);
            }
            _ => {}
        }
        let (object, held, alive, old_label) = match self.held.apply(event) {
            Change::Made(object) => (object, 1, 1, None),
            Change::Released(object) => (object, -1, 0, None),
            Change::BlockFree(object) => (object, 0, -1, None),
            Change::Freed(object) => (object, -1, -1, None),
            Change::Relabelled(object, before) => (object, 0, 0, Some(before)),
            Change::Nothing => return None,
        };
        let Storage { bytes, label, device, .. } = self.held.of(object);
        let books = &mut self.devices[usize::from(device.0)];
        let moved = |total: u64, by: i64| match by {
            1 => (Bytes::new(total) + Bytes::new(bytes)).get(),
            -1 => total - bytes,
            _ => total,
        };
        books.now.held = moved(books.now.held, held);
        books.now.alive = moved(books.now.alive, alive);
        let share = &mut books.by_category[category(label)];
        *share = moved(*share, held);
        if let Some(before) = old_label {
            books.by_category[category(before)] -= bytes;
            books.by_category[category(label)] += bytes;
        }
        Some(device)
    }

    /// Takes the totals of `device` after event `index` into its peaks.
    fn observe(&mut self, index: usize, device: DeviceId, meter: Option<&dyn Meter>) {
        let unit = self.tape.unit;
        let books = &mut self.devices[usize::from(device.0)];
        let before = books.now;
        if books.known.metered
            && let Some(reading) = meter.and_then(|meter| meter.reading(device))
        {
            books.now.reading = reading;
            let high = reading.reserved_high;
            if high > reading.reserved {
                // The segments were there before the event was over: the instant is that before it.
                let reading = Reading { reserved: high, ..before.reading };
                let mark = self.mark;
                books.offer(
                    2,
                    Best {
                        bytes: high.get(),
                        event: index,
                        behind: index,
                        mark,
                        instant: Instant { reading, ..before },
                    },
                );
            }
        }
        let now = books.now;
        let totals = books.known.totals(unit, &now);
        for (slot, bytes) in totals.into_iter().enumerate() {
            if let Some(bytes) = bytes {
                books.offer(
                    slot,
                    Best { bytes, event: index, behind: index + 1, mark: self.mark, instant: now },
                );
            }
        }
    }

    /// A phase begins where a mark names another step, micro-batch or phase than the last.
    fn begin(&mut self, index: usize, mark: MarkId) {
        let key = |mark: MarkId| {
            let mark = self.tape.mark_of(mark);
            (mark.step, mark.micro_batch, mark.phase)
        };
        if self.mark.map(key) == Some(key(mark)) {
            return;
        }
        self.close();
        self.mark = Some(mark);
        let unit = self.tape.unit;
        for books in &mut self.devices {
            for (slot, total) in books.known.totals(unit, &books.now).into_iter().enumerate() {
                books.phase_peak[slot] = total.unwrap_or(0);
                let best = &mut books.best[slot];
                if best.bytes == 0 && best.mark.is_none() {
                    *best = Best {
                        bytes: 0,
                        event: index,
                        behind: index + 1,
                        mark: Some(mark),
                        instant: books.now,
                    };
                }
            }
        }
    }

    /// Ends the running phase, if any.
    fn close(&mut self) {
        let Some(at) = self.position(self.mark) else { return };
        for (index, books) in self.devices.iter().enumerate() {
            let end = books.known.totals(self.tape.unit, &books.now);
            let peak: [Option<u64>; 3] =
                std::array::from_fn(|slot| end[slot].map(|_| books.phase_peak[slot]));
            let share = |category: &Category| (*category, Bytes::new(books.by_category[*category as usize]));
            self.phases.push(PhaseRow {
                device: DeviceId(index as u16),
                at: at.clone(),
                peak: totals(peak),
                end: totals(end),
                end_by_category: self.categories.iter().map(share).collect(),
            });
        }
    }

    fn position(&self, mark: Option<MarkId>) -> Option<Position> {
        let mark = self.tape.mark_of(mark?);
        let phase = self.tape.phase_name(mark.phase).into();
        Some(Position { step: mark.step, micro_batch: mark.micro_batch, phase })
    }

    /// The second walk, and the ledger of both.
    fn ledger(mut self) -> Ledger {
        let mut peaks: Vec<(Measure, DeviceId, Best)> = Vec::new();
        // What runs without an accelerator has its peaks on the host.
        let on_gpu = self.tape.devices.iter().any(|device| device.kind == DeviceKind::Gpu);
        let counted = if on_gpu { DeviceKind::Gpu } else { DeviceKind::Cpu };
        for (slot, measure) in Measure::ALL.iter().enumerate() {
            let mut first: Option<(Measure, DeviceId, Best)> = None;
            for (index, books) in self.devices.iter().enumerate() {
                let known = books.known.totals(self.tape.unit, &books.now)[slot].is_some();
                if !known || self.tape.devices[index].kind != counted || self.tape.is_empty() {
                    continue;
                }
                let best = books.best[slot];
                if first.is_none_or(|(_, _, other)| {
                    best.bytes > other.bytes || (best.bytes == other.bytes && best.behind < other.behind)
                }) {
                    first = Some((*measure, DeviceId(index as u16), best));
                }
            }
            peaks.extend(first);
        }
        peaks.sort_by_key(|(_, _, best)| best.behind);
        let mut found = Peaks::default();
        let mut held = Held::new(self.tape);
        for (measure, device, best) in peaks {
            held.follow(self.tape, best.behind);
            let peak = Some(self.peak(measure, device, &best, &mut held));
            match measure {
                Measure::Requested => found.requested = peak,
                Measure::Allocated => found.allocated = peak,
                Measure::Reserved => found.reserved = peak,
            }
        }
        Ledger {
            devices: self.tape.devices.clone(),
            phases: std::mem::take(&mut self.phases),
            peaks: found,
            oom: self.oom.take(),
        }
    }

    fn peak(&self, measure: Measure, device: DeviceId, best: &Best, held: &mut Held) -> Peak {
        let tape = self.tape;
        // What is made of no bytes while the total stands at its peak is there at the peak.
        while let Some(Event::Alloc { bytes: Bytes::ZERO, .. }) =
            (held.behind < tape.len()).then(|| tape.event(held.behind))
        {
            held.follow(tape, held.behind + 1);
        }
        let place = usize::from(device.0);
        let ladder = self.devices[place].known.ladder(tape.unit, &best.instant).on(&tape.devices[place]);
        let blocks = if measure == Measure::Requested { &[] } else { self.blocks.as_slice() };
        let mut contributors = rows(tape, held.shares(tape, device, blocks));
        let bytes = Bytes::new(best.bytes);
        let objects: Bytes = contributors.iter().map(|row| row.bytes).sum();
        // A recording that begins in the middle may not know segments enough for its objects.
        let plausible = objects <= bytes;
        if !plausible {
            contributors.clear();
        }
        let mut open = if plausible { bytes - objects } else { bytes };
        let mut explain = |name: &str, amount: Bytes, count: u64| {
            let amount = amount.min(open);
            if amount > Bytes::ZERO {
                open -= amount;
                let (category, saved) = (Category::Unattributed, Bytes::ZERO);
                contributors.push(Contributor { name: name.into(), category, bytes: amount, count, saved });
            }
        };
        if let Some(allocated) = ladder.allocated.filter(|_| plausible) {
            explain(Contributor::ROUNDING, allocated.saturating_sub(objects), 0);
            if measure == Measure::Reserved
                && let Some(active) = ladder.active
            {
                explain(Contributor::AWAITING_FREE, active.saturating_sub(allocated), held.awaiting(device));
                explain(Contributor::CACHED, bytes.saturating_sub(active), 0);
            }
        }
        explain(Contributor::UNATTRIBUTED, Bytes::MAX, 0);
        sort(&mut contributors);
        let mut by_category: BTreeMap<Category, Bytes> = BTreeMap::new();
        for row in &contributors {
            *by_category.entry(row.category).or_default() += row.bytes;
        }
        let at = self.position(best.mark);
        Peak { device, bytes, at, event: best.event, at_peak: ladder, by_category, contributors }
    }
}
