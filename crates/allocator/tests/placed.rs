//! Blocks that are followed by their addresses are those that the allocator hands out.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::collections::BTreeMap;

use allocator::{
    CachingAllocator, DeviceMemory, PlacedAllocator, Places, SegmentLayout, Settings, State, TieRule,
};
use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Meter, Object, ObjectId, Pool, Reading,
    Segment, SegmentId, Stream, Tape, Unit,
};
use proptest::prelude::*;

const GPU: DeviceId = DeviceId(0);

/// What a made-up program does.
#[derive(Clone, Debug)]
enum Deed {
    Make(u64, u16),
    /// Lets go of one of what it holds; whether another stream still uses it.
    Free(usize, bool),
    Empty,
}

/// Ranges with memory behind them, by address: their bytes, stream and whether they grow.
type Ranges = BTreeMap<u64, (u64, Stream, bool)>;

/// The ranges of `layout`.
fn ranges(layout: &[SegmentLayout]) -> Ranges {
    let mut ranges = Ranges::new();
    for segment in layout {
        let (mut address, mut last) = (segment.address, None);
        for block in &segment.blocks {
            let bytes = block.size.get();
            if block.state == State::Unmapped {
                last = None;
            } else {
                let start = *last.get_or_insert(address);
                ranges.entry(start).or_insert((0, segment.stream, segment.expandable)).0 += bytes;
            }
            address += bytes;
        }
    }
    ranges
}

/// A recording, and what the allocator said.
struct Recorded {
    tape: Tape,
    places: Places,
    /// The reading after the event before each of these.
    readings: Vec<(usize, Reading)>,
    layout: Vec<SegmentLayout>,
}

/// Runs `deeds` on the allocator, and records what a snapshot would: requests, segments, addresses.
fn record(deeds: &[Deed], settings: &Settings) -> Recorded {
    let device = Device { name: "GPU".into(), kind: DeviceKind::Gpu, capacity: None, context: None };
    let mut tape = Tape::new(Unit::Requested, vec![device]);
    let name = tape.intern("x");
    let label = tape.intern_label(Label { name, owner: None, category: Category::Temporary, saved: false });
    let memory = [Some(DeviceMemory::default())];
    let mut allocator = CachingAllocator::new(settings, TieRule::SegmentCounter, &memory);
    let (mut places, mut held) = (Places::default(), Vec::<ObjectId>::new());
    let mut known = Ranges::new();
    let (mut segments_taken, mut readings) = (0, Vec::new());
    for deed in deeds {
        let mut events = Vec::new();
        match deed {
            Deed::Make(bytes, stream) => {
                let object = tape.new_object(Object { label, layout: None }).unwrap();
                let (bytes, stream) = (Bytes::new(*bytes), Stream(*stream));
                events.push(Event::Alloc { object, bytes, device: GPU, stream, pool: Pool(0) });
                held.push(object);
            }
            Deed::Free(which, awaits) if !held.is_empty() => {
                let object = held.swap_remove(which % held.len());
                events.extend(awaits.then_some(Event::FreeRequested(object)));
                events.push(Event::Free(object));
            }
            Deed::Free(..) => {}
            Deed::Empty => allocator.empty_cache(GPU),
        }
        for event in &events {
            allocator.apply(0, *event).unwrap();
        }
        if let Some(Event::Alloc { object, .. }) = events.first() {
            places.objects.push(allocator.block_address(*object).unwrap_or(0));
            places.found.push(false);
        }
        let now = ranges(&allocator.layout(GPU));
        for (address, event) in changes(&known, &now, &mut segments_taken) {
            places.segments.push(address);
            tape.push(event);
        }
        known = now;
        events.into_iter().for_each(|event| tape.push(event));
        readings.push((tape.len(), allocator.reading(GPU).unwrap()));
    }
    Recorded { tape, places, readings, layout: allocator.layout(GPU) }
}

/// What was given back and taken between two sets of ranges, with the addresses.
fn changes(before: &Ranges, after: &Ranges, taken: &mut u32) -> Vec<(u64, Event)> {
    let within = |ranges: &Ranges, at: u64| {
        ranges
            .range(..=at)
            .next_back()
            .filter(|(start, (bytes, ..))| at < *start + bytes)
            .map(|(_, range)| *range)
    };
    let mut cuts: Vec<u64> =
        before.iter().chain(after).flat_map(|(start, (bytes, ..))| [*start, start + bytes]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut changes = Vec::new();
    for pair in cuts.windows(2) {
        let (old, new) = (within(before, pair[0]), within(after, pair[0]));
        let bytes = Bytes::new(pair[1] - pair[0]);
        let segment =
            |id: u32, stream| Segment { segment: SegmentId(id), bytes, device: GPU, stream, pool: Pool(0) };
        match (old, new) {
            (Some((_, stream, expandable)), None) => {
                let segment = segment(0, stream);
                let event =
                    if expandable { Event::SegmentUnmap(segment) } else { Event::SegmentFree(segment) };
                changes.insert(0, (pair[0], event));
            }
            (None, Some((_, stream, true))) => {
                // One expandable segment a stream and pool is enough here: small and large are far apart.
                changes.push((pair[0], Event::SegmentMap(segment(1_000_000 + u32::from(stream.0), stream))));
            }
            (None, Some((_, stream, false))) => {
                *taken += 1;
                changes.push((pair[0], Event::SegmentAlloc(segment(*taken, stream))));
            }
            _ => {}
        }
    }
    changes
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let size = prop_oneof![1..4096_u64, 1..3_000_000_u64, 1..50_000_000_u64];
    let deed = prop_oneof![
        6 => (size, 0..2_u16).prop_map(|(bytes, stream)| Deed::Make(bytes, stream)),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, awaits)| Deed::Free(which, awaits)),
        1 => Just(Deed::Empty),
    ];
    proptest::collection::vec(deed, 1..120)
}

fn settings() -> impl Strategy<Value = Settings> {
    let texts = ["", "max_split_size_mb:20", "roundup_power2_divisions:4", "expandable_segments:True"];
    proptest::sample::select(texts.to_vec()).prop_map(|text| Settings::parse(text).unwrap().0)
}

proptest! {
    #[test]
    fn followed_blocks_are_the_allocators(deeds in deeds(), settings in settings()) {
        let Recorded { tape, places, readings, layout } = record(&deeds, &settings);
        prop_assert_eq!(tape.validate(), Ok(()));
        let mut followed = PlacedAllocator::new(&tape, &places, &settings);
        let mut next = 0;
        for (events, said) in readings {
            for (index, event) in tape.events().enumerate().take(events).skip(next) {
                followed.apply(index, event).unwrap();
            }
            next = events;
            let ours = followed.reading(GPU).unwrap();
            prop_assert_eq!((ours.allocated, ours.active, ours.reserved), (said.allocated, said.active, said.reserved));
        }
        prop_assert_eq!(followed.disagreements(), 0);
        prop_assert!(followed.learnt().is_empty());
        let used = |layout: &[SegmentLayout]| {
            let mut blocks: Vec<_> = layout.iter().flat_map(|segment| {
                let mut at = segment.address;
                segment.blocks.iter().filter_map(move |block| {
                    let address = at;
                    at += block.size.get();
                    (block.state != State::Unmapped).then_some((address, block.size, block.state, block.object))
                })
            }).collect();
            blocks.sort_unstable_by_key(|block| block.0);
            blocks
        };
        prop_assert_eq!(used(&followed.layout(GPU)), used(&layout));
    }
}
