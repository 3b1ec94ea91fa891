//! The instants of a trace as a tape of blocks.

use std::collections::{HashMap, HashSet};

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, LabelId, Mark, Object, ObjectId, Phase,
    Pool, Segment, SegmentId, Stream, Tape, Unit,
};

use super::attribute::{Around, attribute};
use super::phases::{Begin, phases};
use super::{Instant, Kept, SpanKind, Trace, TraceDevice, TraceError};
use crate::{Snapshot, Warning};

/// The name of what was there before.
const BEFORE: &str = "made before the recording";
/// The name of what was made inside no operator.
const NO_OPERATOR: &str = "no operator";

/// The type of host memory, as PyTorch numbers them.
const CPU: i16 = 0;

/// One device while its instants are taken over.
#[derive(Default)]
struct State {
    /// What is alive, by address.
    alive: HashMap<u64, (ObjectId, u64)>,
    /// What was there before and is let go: its object, by the place of the instant that does.
    before: HashMap<usize, ObjectId>,
    reserved: u64,
    /// The sum of what is alive, and of the rest that was there before.
    total: u64,
    says: TraceDevice,
    /// Instants whose total is not the sum of those up to it, and the most it is off by.
    disagreements: u64,
    off: u64,
    unrecorded_frees: u64,
    without_address: u64,
}

/// Where an object's life begins and ends, by the phase.
#[derive(Clone, Copy)]
struct Life {
    label: LabelId,
    born: Option<(u32, Phase)>,
    place: usize,
    /// Whether an optimizer's step made it.
    update: bool,
}

/// The tape of `kept`. `events` and `bytes` are those of the whole trace.
pub(super) fn tape(
    mut kept: Kept,
    device: Option<u16>,
    events: u64,
    bytes: u64,
    mut warnings: Vec<Warning>,
) -> Result<Trace, TraceError> {
    if let Some(number) = device {
        kept.instants.retain(|instant| instant.device.0 == CPU || instant.device.1 == i32::from(number));
    }
    let around = attribute(&mut kept);
    let mut order: Vec<usize> = (0..kept.instants.len()).collect();
    order.sort_by(|a, b| kept.instants[*a].time.total_cmp(&kept.instants[*b].time));
    let (begins, from_zero) = phases(&kept, &around, &order);
    if from_zero {
        warnings.push(Warning::StepsFromZero);
    }
    let devices = devices(&kept.instants);
    let described = devices.iter().map(|(kind, number)| describe(*kind, *number)).collect();
    let mut builder = Builder {
        tape: Tape::new(Unit::Block, described),
        states: devices.iter().map(|(kind, number)| State::of(*kind, *number)).collect(),
        lives: Vec::new(),
        numbers: devices.iter().zip(0..).map(|(device, index)| (*device, index)).collect(),
    };
    builder.before(&kept.instants, &order)?;
    builder.follow(&kept, &around, &order, &begins)?;
    let updates = kept.spans.iter().filter(|span| span.kind == SpanKind::Update).count() as u64;
    let made = kept.instants.iter().zip(&around).filter(|(instant, _)| instant.bytes > 0);
    let (mut requests, mut without_operator) = (0, 0);
    let mut operators = HashSet::new();
    for (instant, around) in made.filter(|(instant, _)| !instant.out_of_memory) {
        debug_assert!(instant.bytes > 0);
        requests += 1;
        without_operator += u64::from(around.operator.is_none());
        operators.extend(around.operator);
    }
    builder.warn(&mut warnings);
    let devices = builder.states.into_iter().map(|state| state.says).collect();
    let operators = operators.len() as u64;
    Ok(Trace {
        tape: builder.tape,
        devices,
        events,
        bytes,
        operators,
        without_operator,
        requests,
        updates,
        warnings,
    })
}

/// The devices of `instants`: the accelerators first, then the host.
fn devices(instants: &[Instant]) -> Vec<(i16, i32)> {
    let mut devices: Vec<(i16, i32)> = instants.iter().map(|instant| instant.device).collect();
    devices.sort_unstable_by_key(|(kind, number)| (*kind == CPU, *kind, *number));
    devices.dedup();
    devices.truncate(usize::from(u16::MAX));
    devices
}

fn describe(kind: i16, number: i32) -> Device {
    let name = match kind {
        CPU => "host".into(),
        _ => Snapshot::device_name(usize::try_from(number).unwrap_or(0)),
    };
    let kind = if kind == CPU { DeviceKind::Cpu } else { DeviceKind::Gpu };
    Device { name, kind, capacity: None, context: None }
}

impl State {
    fn of(kind: i16, number: i32) -> Self {
        let number = if kind == CPU { None } else { u16::try_from(number).ok() };
        Self { says: TraceDevice { number, ..TraceDevice::default() }, ..Self::default() }
    }
}

/// A tape in the making.
struct Builder {
    tape: Tape,
    states: Vec<State>,
    /// By object; none of what was there before.
    lives: Vec<Option<Life>>,
    numbers: HashMap<(i16, i32), u16>,
}

impl Builder {
    fn label(&mut self, name: &str, owner: Option<&str>, category: Category) -> LabelId {
        let name = self.tape.intern(name);
        let owner = owner.map(|owner| self.tape.intern(owner));
        self.tape.intern_label(Label { name, owner, category, saved: false })
    }

    fn make(&mut self, label: LabelId, bytes: u64, device: u16) -> Result<ObjectId, TraceError> {
        let object = self.tape.new_object(Object { label, layout: None })?;
        self.lives.push(None);
        let (stream, pool) = (Stream(0), Pool(0));
        self.tape.push(Event::Alloc {
            object,
            bytes: Bytes::new(bytes),
            device: DeviceId(device),
            stream,
            pool,
        });
        Ok(object)
    }

    /// Writes what was there before the first instant: what is let go without having been made, and of what the
    /// first total has besides, the sum.
    fn before(&mut self, instants: &[Instant], order: &[usize]) -> Result<(), TraceError> {
        let label = self.label(BEFORE, None, Category::Unattributed);
        let mut seen: Vec<HashMap<u64, ()>> = self.states.iter().map(|_| HashMap::new()).collect();
        let mut first: Vec<Option<usize>> = vec![None; self.states.len()];
        let mut let_go: Vec<(usize, u16, u64)> = Vec::new();
        for (place, index) in order.iter().enumerate() {
            let instant = &instants[*index];
            let Some(device) = self.numbers.get(&instant.device).copied() else { continue };
            if instant.out_of_memory {
                continue;
            }
            first[usize::from(device)].get_or_insert(*index);
            let Some(address) = instant.address.filter(|_| instant.bytes != 0) else { continue };
            let seen = &mut seen[usize::from(device)];
            if instant.bytes > 0 {
                seen.insert(address, ());
            } else if seen.remove(&address).is_none() {
                let_go.push((place, device, instant.bytes.unsigned_abs()));
            }
        }
        for (place, device, bytes) in let_go {
            let object = self.make(label, bytes, device)?;
            let state = &mut self.states[usize::from(device)];
            state.before.insert(place, object);
            state.says.objects_before += 1;
            state.says.let_go += 1;
            state.says.bytes_before = state.says.bytes_before.saturating_add(bytes);
        }
        for (device, first) in first.iter().enumerate() {
            let Some(instant) = first.map(|index| &instants[index]) else { continue };
            let known = self.states[device].says.bytes_before;
            let start = instant.allocated.map(|total| i128::from(total) - i128::from(instant.bytes));
            let rest = start.map_or(0, |start| start - i128::from(known));
            if let Ok(rest) = u64::try_from(rest)
                && rest > 0
            {
                self.make(label, rest, device as u16)?;
                let says = &mut self.states[device].says;
                says.objects_before += 1;
                says.bytes_before = says.bytes_before.saturating_add(rest);
            }
            self.states[device].total = self.states[device].says.bytes_before;
            self.reserve(device as u16, instant.reserved);
        }
        self.tape.before = self.tape.len();
        Ok(())
    }

    /// Records that `reserved` is held in segments.
    fn reserve(&mut self, device: u16, reserved: Option<u64>) {
        let state = &mut self.states[usize::from(device)];
        let Some(reserved) = reserved.filter(|reserved| *reserved != state.reserved) else { return };
        let before = std::mem::replace(&mut state.reserved, reserved);
        let segment = Segment {
            segment: SegmentId(u32::from(device)),
            bytes: Bytes::new(reserved.abs_diff(before)),
            device: DeviceId(device),
            stream: Stream(0),
            pool: Pool(0),
        };
        let event = if reserved > before { Event::SegmentMap(segment) } else { Event::SegmentUnmap(segment) };
        self.tape.push(event);
    }

    /// Takes the instants over, in the order of time.
    fn follow(
        &mut self,
        kept: &Kept,
        around: &[Around],
        order: &[usize],
        begins: &[Begin],
    ) -> Result<(), TraceError> {
        let mut begins = begins.iter().peekable();
        let mut at: Option<(u32, Phase)> = None;
        let earliest = order.first().map_or(0.0, |index| kept.instants[*index].time);
        for (place, index) in order.iter().enumerate() {
            let (instant, around) = (&kept.instants[*index], &around[*index]);
            // Times of a tape begin at 1: 0 is not known.
            let time = (instant.time - earliest).max(0.0) as u64 + 1;
            while let Some(begin) = begins.next_if(|begin| begin.instant <= place) {
                let Begin { step, micro_batch, phase, .. } = *begin;
                let mark = self.tape.new_mark(Mark { step, micro_batch, phase, text: None });
                self.tape.push_at(Event::Mark(mark), time);
                at = Some((step, phase));
            }
            let Some(device) = self.numbers.get(&instant.device).copied() else { continue };
            if instant.out_of_memory {
                let bytes = Bytes::new(instant.bytes.unsigned_abs());
                let event = Event::Oom { bytes, device: DeviceId(device), stream: Stream(0) };
                self.tape.push_at(event, time);
                continue;
            }
            self.states[usize::from(device)].says.entries += 1;
            match instant.bytes {
                0 => {}
                1.. => self.made(kept, instant, around, device, (place, time), at)?,
                _ => self.let_go(instant, device, (place, time), at),
            }
            self.states[usize::from(device)].compare(instant);
        }
        self.kept(at);
        Ok(())
    }

    fn made(
        &mut self,
        kept: &Kept,
        instant: &Instant,
        around: &Around,
        device: u16,
        (place, time): (usize, u64),
        at: Option<(u32, Phase)>,
    ) -> Result<(), TraceError> {
        let name = |name: u32| kept.names.get_index(name as usize).map_or("", String::as_str);
        let annotation = around.annotation.map(name);
        let operator = around.operator.map(name);
        let label =
            self.label(operator.or(annotation).unwrap_or(NO_OPERATOR), annotation, Category::Unattributed);
        let bytes = instant.bytes.unsigned_abs();
        let state = &mut self.states[usize::from(device)];
        let taken = instant.address.and_then(|address| state.alive.remove(&address));
        if let Some((object, held)) = taken {
            state.unrecorded_frees += 1;
            state.total = state.total.saturating_sub(held);
            self.tape.push_at(Event::Free(object), time);
        }
        if instant.reserved.is_some_and(|reserved| reserved > self.states[usize::from(device)].reserved) {
            self.reserve(device, instant.reserved);
        }
        let object = self.tape.new_object(Object { label, layout: None })?;
        self.lives.push(Some(Life { label, born: at, place, update: around.update }));
        let (stream, pool) = (Stream(0), Pool(0));
        let bytes_made = Bytes::new(bytes);
        self.tape.push_at(
            Event::Alloc { object, bytes: bytes_made, device: DeviceId(device), stream, pool },
            time,
        );
        self.reserve(device, instant.reserved);
        let state = &mut self.states[usize::from(device)];
        state.total = state.total.saturating_add(bytes);
        match instant.address {
            Some(address) => {
                state.alive.insert(address, (object, bytes));
            }
            None => state.without_address += 1,
        }
        Ok(())
    }

    fn let_go(
        &mut self,
        instant: &Instant,
        device: u16,
        (place, time): (usize, u64),
        at: Option<(u32, Phase)>,
    ) {
        let state = &mut self.states[usize::from(device)];
        let known = instant.address.and_then(|address| state.alive.remove(&address));
        let before = state.before.get(&place).map(|object| (*object, instant.bytes.unsigned_abs()));
        match known.or(before) {
            Some((object, bytes)) => {
                state.total = state.total.saturating_sub(bytes);
                self.tape.push_at(Event::Free(object), time);
                self.categorise(object, place, at);
            }
            None => state.without_address += 1,
        }
        self.reserve(device, instant.reserved);
    }

    /// What an optimizer's step made in an earlier step than the last, and is never let go, is its state.
    fn kept(&mut self, last: Option<(u32, Phase)>) {
        let alive = self.states.iter().flat_map(|state| state.alive.values().map(|(object, _)| *object));
        let kept: Vec<ObjectId> = alive
            .filter(|object| {
                let life = self.lives[object.0 as usize].filter(|life| life.update);
                let born = life.and_then(|life| life.born);
                born.zip(last).is_some_and(|((born, _), (last, _))| born < last)
            })
            .collect();
        for object in kept {
            self.relabel(object, Category::OptimizerState);
        }
    }

    /// What an object is for, where its life tells: what the forward pass makes and the backward pass lets go of is an
    /// activation; what dies in the phase that made it is a temporary; what the backward pass makes and outlives it,
    /// until the update or the next step, is a gradient.
    fn categorise(&mut self, object: ObjectId, place: usize, at: Option<(u32, Phase)>) {
        let Some(life) = self.lives[object.0 as usize] else { return };
        let (Some((born, made)), Some((dies, gone))) = (life.born, at) else { return };
        debug_assert!(life.place <= place);
        let category = match (made, gone) {
            (Phase::BACKWARD, Phase::UPDATE | Phase::ZERO_GRAD) if born == dies => Category::Gradient,
            (Phase::BACKWARD, Phase::FORWARD) if dies == born.saturating_add(1) => Category::Gradient,
            _ if born != dies => return,
            (Phase::FORWARD, Phase::BACKWARD) => Category::Activation,
            _ if made == gone => Category::Temporary,
            _ => return,
        };
        self.relabel(object, category);
    }

    fn relabel(&mut self, object: ObjectId, category: Category) {
        let Some(life) = self.lives[object.0 as usize] else { return };
        let saved = category == Category::Activation;
        let label = Label { category, saved, ..self.tape.label(life.label) };
        let label = self.tape.intern_label(label);
        self.tape.set_label(object, label);
    }

    fn warn(&self, warnings: &mut Vec<Warning>) {
        for (device, state) in self.tape.devices.iter().zip(&self.states) {
            let device = device.name.clone();
            if state.says.objects_before > 0 {
                let (objects, bytes) = (state.says.objects_before, Bytes::new(state.says.bytes_before));
                warnings.push(Warning::TraceBegunInTheMiddle { device: device.clone(), objects, bytes });
            }
            if state.unrecorded_frees > 0 {
                let count = state.unrecorded_frees;
                warnings.push(Warning::UnrecordedFrees { device: device.clone(), count });
            }
            if state.disagreements > 0 {
                let (count, bytes) = (state.disagreements, Bytes::new(state.off));
                warnings.push(Warning::TotalsDisagree { device: device.clone(), count, bytes });
            }
            if state.without_address > 0 {
                warnings.push(Warning::WithoutAddress { device, count: state.without_address });
            }
        }
    }
}

impl State {
    /// Holds the total that an instant notes against the sum of those up to it.
    fn compare(&mut self, instant: &Instant) {
        if let Some(noted) = instant.allocated.filter(|noted| *noted != self.total) {
            self.disagreements += 1;
            self.off = self.off.max(noted.abs_diff(self.total));
        }
    }
}
