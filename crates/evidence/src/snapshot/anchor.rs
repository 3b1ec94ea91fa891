//! What was in use before a recording began, found backward from its end.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use ledger::Bytes;

use super::ranges::{Mapped, Ranges};
use super::{Action, BlockState, Entry, Segment, Snapshot, Stack, Trace};

/// An object in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) bytes: Bytes,
    /// Whether the program has let go of it.
    pub(super) pending: bool,
    pub(super) stack: Stack,
    pub(super) stream: u16,
    pub(super) pool: u16,
}

/// What a device held before the first entry of its trace.
#[derive(Debug, Default)]
pub(super) struct Anchor {
    /// The objects, those that await their free first, by address.
    pub(super) objects: Vec<(u64, Held)>,
    /// The segments.
    pub(super) segments: Ranges,
    /// What came to be without an entry: the entry it must follow, its address, and it. In order.
    pub(super) late: Vec<(usize, u64, Held)>,
    /// Whether the frees of this trace have a second entry; else the first ends an object.
    pub(super) completes: bool,
    /// Objects that are let go and were never made: among `objects`.
    pub(super) unmatched_frees: u64,
    /// Segment entries that do not agree with what was found.
    pub(super) disagreements: u64,
}

/// Walks `trace` backward from `segments`, which are those of its device at the end.
pub(super) fn anchor(snapshot: &Snapshot, trace: &Trace, segments: &[&Segment]) -> Anchor {
    let mut walk = Backward { held: HashMap::new(), found: Anchor::default(), requests: false };
    for segment in segments {
        walk.begin_with(segment);
    }
    for entry in snapshot.entries(trace) {
        // Recordings may leave either half of a free out (`skip_actions`).
        walk.requests |= entry.action == Action::FreeRequested;
        walk.found.completes |= entry.action == Action::FreeCompleted;
    }
    for (index, entry) in snapshot.entries(trace).enumerate().rev() {
        walk.undo(index, &entry);
    }
    walk.finish()
}

struct Backward {
    /// In use before the entry that was undone last; and whether its free was among the entries.
    held: HashMap<u64, (Held, bool)>,
    found: Anchor,
    requests: bool,
}

impl Backward {
    /// The state at the end.
    fn begin_with(&mut self, segment: &Segment) {
        let (stream, pool) = (segment.stream, segment.pool);
        let what = Mapped { segment: 0, stream, pool, expandable: segment.expandable };
        let range = segment.address.and_then(|start| Some((start, start.checked_add(segment.size.get())?)));
        match range {
            Some((start, end)) if self.found.segments.insert(start, end, what) == segment.size.get() => {}
            _ => self.found.disagreements += 1,
        }
        for block in &segment.blocks {
            let Some(address) = block.address.filter(|_| block.state != BlockState::Inactive) else {
                continue;
            };
            let pending = block.state == BlockState::PendingFree;
            let held = Held { bytes: block.requested, pending, stack: block.stack, stream, pool };
            self.held.insert(address, (held, false));
        }
    }

    fn undo(&mut self, index: usize, entry: &Entry) {
        let end = entry.address.checked_add(entry.size.get());
        let (size, segments) = (entry.size.get(), &mut self.found.segments);
        match entry.action {
            Action::Alloc => {
                self.held.remove(&entry.address);
            }
            Action::FreeCompleted => self.revive(index, entry, self.requests),
            Action::FreeRequested => match self.held.get_mut(&entry.address) {
                Some((held, _)) if held.pending => held.pending = false,
                _ => self.revive(index, entry, false),
            },
            Action::SegmentAlloc | Action::SegmentMap => {
                let removed = end.map_or(0, |end| segments.remove(entry.address, end).0);
                self.found.disagreements += u64::from(removed != size);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                let what = Mapped {
                    segment: 0,
                    stream: entry.stream,
                    pool: entry.pool.unwrap_or(0),
                    expandable: entry.action == Action::SegmentUnmap,
                };
                let added = end.map_or(0, |end| segments.insert(entry.address, end, what));
                self.found.disagreements += u64::from(added != size);
            }
            Action::Snapshot | Action::Oom | Action::Annotate | Action::Other(_) => {}
        }
    }

    /// Takes back a free: before it, its object was in use.
    fn revive(&mut self, index: usize, entry: &Entry, pending: bool) {
        let around = self.found.segments.around(entry.address);
        let pool = entry.pool.or(around.map(|what| what.pool)).unwrap_or(0);
        let held = Held { bytes: entry.size, pending, stack: Stack(0), stream: entry.stream, pool };
        match self.held.entry(entry.address) {
            Slot::Vacant(slot) => {
                slot.insert((held, true));
            }
            Slot::Occupied(mut slot) => {
                // Something is there after this free that no later entry made.
                let (later, _) = slot.insert((held, true));
                self.found.late.push((index, entry.address, later));
            }
        }
    }

    fn finish(self) -> Anchor {
        let mut found = self.found;
        found.unmatched_frees = self.held.values().filter(|(_, freed)| *freed).count() as u64;
        found.objects = self.held.into_iter().map(|(address, (held, _))| (address, held)).collect();
        // Those that await their free come first: the program does not hold them, and no total should
        // count them beside what it holds.
        found.objects.sort_unstable_by_key(|(address, held)| (!held.pending, *address));
        found.late.reverse();
        found
    }
}
