//! One walk over a tape: what is there at the ends of its steps, in all and by where it was made.

use allocator::{CachingAllocator, PlacedAllocator, SegmentLayout, State};
use ledger::{Category, DeviceId, DeviceKind, Event, LabelId, Mark, Meter, Phase, Tape};
use rustc_hash::FxHashMap;

use super::totals::Moment;
use super::track::Track;

/// Where a step ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The event before which it does.
    pub(super) event: usize,
    /// The step; 0 is what comes before the first.
    pub(super) step: u32,
}

/// An allocator that tells what of its segments is free as a whole.
pub(crate) trait Books: Meter {
    /// The segments of `device` with their blocks.
    fn segments(&self, device: DeviceId) -> Vec<SegmentLayout>;
}

impl Books for CachingAllocator {
    fn segments(&self, device: DeviceId) -> Vec<SegmentLayout> {
        self.layout(device)
    }
}

impl Books for PlacedAllocator<'_> {
    fn segments(&self, device: DeviceId) -> Vec<SegmentLayout> {
        self.layout(device)
    }
}

/// At so many ends, evenly spread, the segments are looked through.
const LOOKS: usize = 16;

/// What one GPU had.
#[derive(Clone, Debug, Default)]
pub(super) struct Walked {
    /// At the end of each step but 0.
    pub(super) moments: Vec<Moment>,
    /// By where it was made.
    pub(super) tracks: FxHashMap<LabelId, Track>,
    /// What the last forward pass left of its results when it was over, or an earlier one of its step.
    pub(super) results: u64,
    now: Now,
}

/// What is there now.
#[derive(Clone, Debug, Default)]
struct Now {
    allocated: u64,
    reserved: Option<u64>,
    /// The most of `allocated` in this step.
    peak: u64,
    /// Input that came in this step and is there; and the most of it when a forward pass ended.
    input: u64,
    most_input: u64,
    /// Results of forward passes that came in this step and are there; and the most when one ended.
    results: u64,
    most_results: u64,
    /// `most_input` and `most_results` of the step before.
    before: (u64, u64),
    touched: Vec<LabelId>,
}

/// The ends of the steps of `tape` by its marks. A step that was cut off has none.
pub(super) fn ends(tape: &Tape) -> Vec<End> {
    let updates = tape.marks().iter().any(|mark| mark.phase == Phase::UPDATE);
    let (mut ends, mut now, mut updated, mut failed) = (Vec::new(), None, false, false);
    for (event, entry) in tape.events().enumerate() {
        match entry {
            Event::Mark(mark) => {
                let Mark { step, phase, .. } = tape.mark_of(mark);
                if let Some(before) = now.filter(|before| *before != step) {
                    ends.push(End { event, step: before });
                    updated = false;
                }
                updated |= phase == Phase::UPDATE;
                now = Some(step);
            }
            Event::Oom { .. } => failed = true,
            _ => {}
        }
    }
    if let Some(step) = now.filter(|step| *step > 0 && (updated || !updates && !failed)) {
        ends.push(End { event: tape.len(), step });
    }
    ends
}

/// Where the first forward pass after the last update of `tape` begins; none where there is none.
pub(super) fn after_updates(tape: &Tape) -> Option<usize> {
    let mut passes = None;
    for (index, event) in tape.events().enumerate() {
        let Event::Mark(mark) = event else { continue };
        match tape.mark_of(mark).phase {
            Phase::UPDATE => passes = None,
            Phase::FORWARD => passes = passes.or(Some(index)),
            _ => {}
        }
    }
    passes
}

/// Walks over `tape` up to the last of `ends`. `meter` tells blocks and segments; without one the sizes on the
/// tape count, and its own segments.
pub(super) fn walk<'a>(
    tape: &Tape,
    ends: &[End],
    mut meter: Option<Box<dyn Books + 'a>>,
) -> Vec<(DeviceId, Walked)> {
    let mut devices: Vec<Option<Walked>> = tape.devices.iter().map(|device| gpu(device.kind)).collect();
    // Of each object its size, its device and the step it was made in.
    let mut objects = vec![(0_u64, 0_u16, 0_u32); tape.objects().len()];
    let mut waiting = ends.iter().enumerate().peekable();
    let mut phase = None;
    let looks =
        |index: usize| ends.len() <= LOOKS || index * LOOKS / ends.len() != (index + 1) * LOOKS / ends.len();
    for (index, event) in tape.events().enumerate() {
        while let Some((at, end)) = waiting.next_if(|(_, end)| end.event <= index) {
            over(&mut devices, end.step, phase, meter.as_deref().filter(|_| looks(at)));
        }
        let Some(step) = waiting.peek().map(|(_, end)| end.step) else { break };
        if meter.as_mut().is_some_and(|meter| meter.apply(index, event).is_err()) {
            return gpus(devices);
        }
        match event {
            Event::Mark(mark) => {
                if phase == Some(Phase::FORWARD) {
                    devices.iter_mut().flatten().for_each(Walked::passed);
                }
                phase = Some(tape.mark_of(mark).phase);
            }
            Event::Alloc { object, bytes, device, .. } => {
                objects[object.0 as usize] = (bytes.get(), device.0, step);
                if let Some(walked) = &mut devices[usize::from(device.0)] {
                    walked.made(tape, tape.object(object).label, bytes.get(), step);
                    walked.read(device, meter.as_deref());
                }
            }
            Event::FreeRequested(object) | Event::Free(object) => {
                let (bytes, device, born) = std::mem::take(&mut objects[object.0 as usize]);
                if let Some(walked) = devices[usize::from(device)].as_mut().filter(|_| bytes > 0) {
                    walked.gone(tape, tape.object(object).label, bytes, (born, step));
                    walked.read(DeviceId(device), meter.as_deref());
                }
            }
            Event::SegmentAlloc(s) | Event::SegmentMap(s) => {
                if let Some(walked) = &mut devices[usize::from(s.device.0)] {
                    walked.now.reserved = Some(walked.now.reserved.unwrap_or(0) + s.bytes.get());
                }
            }
            Event::SegmentFree(s) | Event::SegmentUnmap(s) => {
                if let Some(walked) = &mut devices[usize::from(s.device.0)] {
                    let left = walked.now.reserved.map(|reserved| reserved.saturating_sub(s.bytes.get()));
                    walked.now.reserved = left;
                }
            }
            Event::Oom { .. } | Event::Relabel(..) => {}
        }
    }
    for (_, end) in waiting {
        over(&mut devices, end.step, phase, meter.as_deref());
    }
    gpus(devices)
}

fn gpu(kind: DeviceKind) -> Option<Walked> {
    (kind == DeviceKind::Gpu).then(Walked::default)
}

fn gpus(devices: Vec<Option<Walked>>) -> Vec<(DeviceId, Walked)> {
    let devices = devices.into_iter().enumerate();
    devices.filter_map(|(index, walked)| Some((DeviceId(index as u16), walked?))).collect()
}

/// The step `step` is over, in its phase `phase`; `books` are there to be looked through.
fn over(devices: &mut [Option<Walked>], step: u32, phase: Option<Phase>, books: Option<&(dyn Books + '_)>) {
    for (index, walked) in devices.iter_mut().enumerate() {
        let Some(walked) = walked else { continue };
        if phase == Some(Phase::FORWARD) {
            walked.passed();
        }
        walked.over(step);
        if let Some((books, moment)) = books.zip(walked.moments.last_mut().filter(|_| step > 0)) {
            let segments = books.segments(DeviceId(index as u16));
            let free =
                segments.iter().filter(|segment| segment.blocks.iter().all(|b| b.state == State::Free));
            moment.whole = Some(free.map(|segment| segment.reserved().get()).sum());
        }
    }
}

impl Walked {
    fn made(&mut self, tape: &Tape, label: LabelId, bytes: u64, step: u32) {
        self.now.allocated += bytes;
        self.track(label).made(bytes, step);
        match tape.label(label).category {
            Category::Input => self.now.input += bytes,
            Category::Activation => self.now.results += bytes,
            _ => {}
        }
    }

    /// Something that was made in the first of `steps` goes in the second.
    fn gone(&mut self, tape: &Tape, label: LabelId, bytes: u64, (born, step): (u32, u32)) {
        self.now.allocated = self.now.allocated.saturating_sub(bytes);
        self.track(label).gone(bytes, born);
        if born != step {
            return;
        }
        let now = &mut self.now;
        match tape.label(label).category {
            Category::Input => now.input = now.input.saturating_sub(bytes),
            Category::Activation => now.results = now.results.saturating_sub(bytes),
            _ => {}
        }
    }

    fn track(&mut self, label: LabelId) -> &mut Track {
        let track = self.tracks.entry(label).or_default();
        if track.touch() {
            self.now.touched.push(label);
        }
        track
    }

    /// What is there after an event.
    fn read(&mut self, device: DeviceId, meter: Option<&(dyn Books + '_)>) {
        if let Some(reading) = meter.and_then(|meter| meter.reading(device)) {
            self.now.allocated = reading.allocated.get();
            self.now.reserved = Some(reading.reserved.get());
        }
        self.now.peak = self.now.peak.max(self.now.allocated);
    }

    /// A forward pass is over.
    fn passed(&mut self) {
        self.now.most_input = self.now.most_input.max(self.now.input);
        self.now.most_results = self.now.most_results.max(self.now.results);
    }

    /// A step is over.
    fn over(&mut self, step: u32) {
        let now = &mut self.now;
        let (input, results) = (now.most_input, now.most_results);
        // A larger input than the one before, of which more results are made, may leave more behind.
        let prompted = (input > now.before.0 || input == 0) && results > now.before.1;
        for label in now.touched.drain(..) {
            if let Some(track) = self.tracks.get_mut(&label) {
                track.over(step, prompted);
            }
        }
        if step > 0 {
            self.moments.push(Moment {
                step: step.into(),
                allocated: Some(now.allocated),
                reserved: now.reserved,
                peak: Some(now.peak),
                input: (input > 0).then_some(input as f64),
                results: (results > 0).then_some(results),
                whole: None,
            });
            now.before = (input, results);
        }
        if results > 0 {
            self.results = results;
        }
        (now.peak, now.input, now.most_input) = (now.allocated, 0, 0);
        (now.results, now.most_results) = (0, 0);
    }
}
