//! The allocator of a recorded run: it knows the blocks by replay, and is held to the segments that
//! the recording tells of.

use allocator::{Action, CachingAllocator, OutOfMemory, SegmentLayout, Settings, TieRule, memory_of};
use ledger::{Bytes, DeviceId, Event, MarkId, Meter, ObjectId, Oom, Reading, Tape};

use crate::growth::Books;

/// Follows a recorded tape with the rules of PyTorch's allocator.
///
/// Where the segments it takes and gives back are those recorded, everything it says is what was.
/// `torch.cuda.empty_cache()`, which a tape does not tell of, is known by segments that are given
/// back without need. From the first event where the two differ, reserved bytes are the recorded
/// ones, and blocks those of the replay.
pub(crate) struct Recorded {
    allocator: CachingAllocator,
    /// Segment bytes of each device, as recorded.
    reserved: Vec<Bytes>,
    /// What was done for the next event, as recorded.
    done: Vec<Action>,
    /// The device of `done`.
    device: DeviceId,
    /// The event before which the recorded segments are not those of the replay.
    difference: Option<usize>,
    /// The allocated bytes at each mark that came by, on each device.
    at_marks: Vec<(MarkId, Vec<Bytes>)>,
}

impl Recorded {
    pub(crate) fn new(tape: &Tape, settings: &Settings, tie: TieRule) -> Self {
        Self {
            allocator: CachingAllocator::new(settings, tie, &memory_of(tape)),
            reserved: vec![Bytes::ZERO; tape.devices.len()],
            done: Vec::new(),
            device: DeviceId(0),
            difference: None,
            at_marks: Vec::new(),
        }
    }

    /// The event before which the recorded segments are not those of the replay.
    pub(super) fn difference(&self) -> Option<usize> {
        self.difference
    }

    /// The most that may be reserved on `device`, where known.
    pub(super) fn limit(&self, device: DeviceId) -> Option<Bytes> {
        self.allocator.limit(device)
    }

    /// The first request that failed, as the replay tells it.
    pub(super) fn failure(&self) -> Option<&OutOfMemory> {
        self.allocator.failure()
    }

    /// Requests on `device` that had to give back all cached blocks first.
    pub(super) fn retries(&self, device: DeviceId) -> u64 {
        self.allocator.stats(device).map_or(0, |stats| stats.num_alloc_retries)
    }

    /// The allocated bytes at each mark that came by, by device.
    pub(super) fn at_marks(&self) -> &[(MarkId, Vec<Bytes>)] {
        &self.at_marks
    }

    /// Keeps what the recording says was done to a device.
    fn keep(&mut self, index: usize, device: DeviceId, action: Action) {
        if device != self.device && !self.done.is_empty() {
            // What one device did belongs to the next event, whichever device that is of.
            self.difference.get_or_insert(index);
            self.done.clear();
        }
        self.device = device;
        self.done.push(action);
        let reserved = &mut self.reserved[usize::from(device.0)];
        match action {
            Action::SegmentAlloc(bytes) | Action::SegmentMap(bytes) => *reserved += bytes,
            Action::SegmentFree(bytes) | Action::SegmentUnmap(bytes) => *reserved -= bytes,
            Action::Oom(_) => {}
        }
    }

    /// Follows `event`, before which the recording says that `done` was.
    fn follow(&mut self, index: usize, event: Event) {
        let done = std::mem::take(&mut self.done);
        if self.difference.is_some() {
            // A request that fails here alone has no block here.
            let _ = self.allocator.apply(index, event);
            return;
        }
        let gives_back = matches!(done.first(), Some(Action::SegmentFree(_) | Action::SegmentUnmap(_)));
        let before = gives_back.then(|| self.allocator.clone());
        let fails = self.allocator.apply(index, event).is_err();
        if !fails && same(self.allocator.actions(), &done) {
            return;
        }
        if let Some(mut emptied) = before {
            emptied.empty_cache(self.device);
            let mut actions = emptied.actions().to_vec();
            let fails = emptied.apply(index, event).is_err();
            actions.extend_from_slice(emptied.actions());
            if !fails && same(&actions, &done) {
                self.allocator = emptied;
                return;
            }
        }
        self.difference = Some(index);
    }
}

/// Whether two lists tell the same. Segments are given back together, stream after stream, and the
/// numbers of streams on a tape are not in the order in which PyTorch goes through them.
fn same(ours: &[Action], recorded: &[Action]) -> bool {
    let in_order = |actions: &[Action]| {
        let mut actions = actions.to_vec();
        actions.sort_by_key(|action| match action {
            Action::SegmentFree(bytes) | Action::SegmentUnmap(bytes) => (0, *bytes),
            _ => (1, Bytes::ZERO),
        });
        actions
    };
    ours == recorded || in_order(ours) == in_order(recorded)
}

impl Books for Recorded {
    fn segments(&self, device: DeviceId) -> Vec<SegmentLayout> {
        self.allocator.layout(device)
    }
}

impl Meter for Recorded {
    fn apply(&mut self, index: usize, event: Event) -> Result<(), Oom> {
        match event {
            Event::SegmentAlloc(s) => self.keep(index, s.device, Action::SegmentAlloc(s.bytes)),
            Event::SegmentFree(s) => self.keep(index, s.device, Action::SegmentFree(s.bytes)),
            Event::SegmentMap(s) => self.keep(index, s.device, Action::SegmentMap(s.bytes)),
            Event::SegmentUnmap(s) => self.keep(index, s.device, Action::SegmentUnmap(s.bytes)),
            Event::Oom { bytes, device, .. } => {
                self.keep(index, device, Action::Oom(bytes));
                self.follow(index, event);
            }
            Event::Alloc { .. } | Event::FreeRequested(_) | Event::Free(_) => self.follow(index, event),
            Event::Mark(mark) => {
                let device = |device| self.reading(DeviceId(device as u16)).unwrap_or_default().allocated;
                let allocated = (0..self.reserved.len()).map(device).collect();
                self.at_marks.push((mark, allocated));
            }
            Event::Relabel(..) => {}
        }
        Ok(())
    }

    fn reading(&self, device: DeviceId) -> Option<Reading> {
        let reading = self.allocator.reading(device)?;
        if self.difference.is_none() {
            return Some(reading);
        }
        let reserved = self.reserved[usize::from(device.0)];
        Some(Reading { reserved, reserved_high: reserved, ..reading })
    }

    fn block_bytes(&self, object: ObjectId) -> Option<Bytes> {
        self.allocator.block_bytes(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ledger::{
        Category, Device, DeviceKind, Label, Object, Pool, Segment, SegmentId, Stream, Unit, replay,
    };

    const MIB: u64 = 1 << 20;

    /// A tape in the making.
    struct Run(Tape);

    impl Run {
        fn new(capacity: u64) -> Self {
            let capacity = Some(Bytes::new(capacity));
            let device = Device { name: "GPU".into(), kind: DeviceKind::Gpu, capacity, context: None };
            Self(Tape::new(Unit::Requested, vec![device]))
        }

        fn alloc(&mut self, mib: u64) -> ObjectId {
            let name = self.0.intern("x");
            let label = Label { name, owner: None, category: Category::Activation, saved: false };
            let label = self.0.intern_label(label);
            let object = self.0.new_object(Object { label, layout: None }).unwrap();
            let (bytes, device) = (Bytes::new(mib * MIB), DeviceId(0));
            self.0.push(Event::Alloc { object, bytes, device, stream: Stream(0), pool: Pool(0) });
            object
        }

        fn segment(&mut self, mib: i64) {
            let bytes = Bytes::new(mib.unsigned_abs() * MIB);
            let (device, stream, pool) = (DeviceId(0), Stream(0), Pool(0));
            let segment = Segment { segment: SegmentId(0), bytes, device, stream, pool };
            self.0.push(if mib > 0 { Event::SegmentAlloc(segment) } else { Event::SegmentFree(segment) });
        }

        fn free(&mut self, object: ObjectId) {
            self.0.push(Event::Free(object));
        }

        fn recorded(&self) -> (Recorded, ledger::Ledger) {
            let mut recorded = Recorded::new(&self.0, &Settings::default(), TieRule::SegmentCounter);
            let books = replay(&self.0, Some(&mut recorded));
            (recorded, books)
        }
    }

    #[test]
    fn a_run_that_the_allocator_explains_has_no_difference() {
        let mut run = Run::new(100 * MIB);
        run.segment(30);
        let first = run.alloc(30);
        run.free(first);
        // No room beside the cached 30 MiB: they are given back first.
        run.segment(-30);
        run.segment(80);
        run.alloc(80);
        let (recorded, books) = run.recorded();
        assert_eq!((recorded.difference(), recorded.retries(DeviceId(0))), (None, 1));
        assert_eq!(books.peaks.reserved.unwrap().bytes, Bytes::new(80 * MIB));
    }

    #[test]
    fn an_emptied_cache_is_known_by_segments_given_back_without_need() {
        let mut run = Run::new(1000 * MIB);
        run.segment(30);
        let first = run.alloc(30);
        run.segment(40);
        let second = run.alloc(40);
        run.free(first);
        // Emptied before a free,
        run.segment(-30);
        run.free(second);
        // and before a request that the cached 40 MiB would have served.
        run.segment(-40);
        run.segment(40);
        run.alloc(40);
        let (recorded, books) = run.recorded();
        assert_eq!((recorded.difference(), recorded.retries(DeviceId(0))), (None, 0));
        assert_eq!(books.peaks.reserved.unwrap().bytes, Bytes::new(70 * MIB));
    }

    #[test]
    fn the_order_in_which_segments_are_given_back_together_is_free() {
        let mut run = Run::new(1000 * MIB);
        run.segment(30);
        let first = run.alloc(30);
        run.segment(40);
        let second = run.alloc(40);
        let kept = run.alloc(0);
        run.free(first);
        run.free(second);
        run.segment(-40);
        run.segment(-30);
        run.free(kept);
        assert_eq!(run.recorded().0.difference(), None);
    }

    #[test]
    fn recorded_segments_win_over_those_of_the_replay() {
        let mut run = Run::new(1000 * MIB);
        run.segment(30);
        run.alloc(30);
        run.segment(50);
        run.alloc(40);
        run.segment(60);
        run.alloc(60);
        let (recorded, books) = run.recorded();
        assert_eq!(recorded.difference(), Some(3));
        assert_eq!(books.peaks.reserved.unwrap().bytes, Bytes::new(140 * MIB));
        assert_eq!(books.peaks.allocated.unwrap().bytes, Bytes::new(130 * MIB));
    }

    #[test]
    fn a_recorded_failure_is_the_replays_too() {
        let mut run = Run::new(100 * MIB);
        run.segment(30);
        run.alloc(30);
        let bytes = Bytes::new(80 * MIB);
        run.0.push(Event::Oom { bytes, device: DeviceId(0), stream: Stream(0) });
        let (recorded, books) = run.recorded();
        assert_eq!(recorded.difference(), None);
        assert_eq!(recorded.failure().unwrap().shortage.requested, bytes);
        assert_eq!(books.oom.unwrap().requested, bytes);
    }
}
