//! What holds after every event, whatever the tape and the settings.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use allocator::{
    AddressOrder, CachingAllocator, DeviceMemory, SegmentLayout, Settings, State, TieRule, simulate,
};
use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Meter, Object, ObjectId, Pool, Stream, Tape,
    Unit,
};
use proptest::prelude::*;

const GPU: DeviceId = DeviceId(0);

/// A step of a random program. Indices are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Alloc { bytes: u64, stream: u16, pool: u16 },
    RequestFree(usize),
    Free(usize),
    RecordedOom { bytes: u64 },
    EmptyCache,
    NoSplit,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        4 => 0..(1_u64 << 20) + 2,
        3 => (1_u64 << 20)..(10 << 20) + 2,
        2 => (10_u64 << 20)..(100 << 20),
        1 => any::<u64>(),
    ];
    let stream = prop_oneof![4 => Just(0_u16), 1 => 1..3_u16, 1 => Just(u16::MAX)];
    let pool = prop_oneof![4 => Just(0_u16), 1 => 1..3_u16];
    prop_oneof![
        10 => (bytes, stream, pool).prop_map(|(bytes, stream, pool)| Step::Alloc { bytes, stream, pool }),
        7 => any::<usize>().prop_map(Step::Free),
        2 => any::<usize>().prop_map(Step::RequestFree),
        1 => any::<u64>().prop_map(|bytes| Step::RecordedOom { bytes: bytes >> (bytes % 64) }),
        1 => Just(Step::EmptyCache),
        1 => Just(Step::NoSplit),
    ]
}

/// Settings that PyTorch accepts.
fn settings() -> impl Strategy<Value = String> {
    let option = |values: &'static [&'static str]| prop::option::of(prop::sample::select(values));
    (
        option(&["expandable_segments:True"]),
        option(&["max_split_size_mb:20", "max_split_size_mb:64", "max_split_size_mb:-5"]),
        option(&["max_non_split_rounding_mb:20", "max_non_split_rounding_mb:18446744073709551615"]),
        option(&["garbage_collection_threshold:0.3", "garbage_collection_threshold:0.999"]),
        option(&["per_process_memory_fraction:0", "per_process_memory_fraction:0.5"]),
        option(&["roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,>:9223372036854775808]"]),
        option(&["large_segment_size_mb:11", "large_segment_size_mb:18446744073709551615"]),
    )
        .prop_map(|(a, b, c, d, e, f, g)| {
            let mut settings: Vec<&str> = [a, b, c, d, e, f, g].into_iter().flatten().collect();
            if settings.iter().any(|setting| setting.ends_with("64") || setting.ends_with("20")) {
                // Bounds from below by the large segment.
                settings.retain(|setting| *setting != "large_segment_size_mb:18446744073709551615");
            }
            settings.join(",")
        })
}

/// Strings made of what settings are made of, in no order.
fn nonsense() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "expandable_segments",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "per_process_memory_fraction",
        "roundup_power2_divisions",
        "large_segment_size_mb",
        "backend",
        "pinned_num_register_threads",
        "expandable_segments_reserve_by_class",
        "unknown",
        "True",
        "False",
        "native",
        ":",
        ":",
        ":",
        ",",
        ",",
        "[",
        "]",
        ">",
        "0.5",
        "1",
        "20",
        "64",
        "-1",
        "99999999999999999999",
        "nan",
        "é",
        " ",
    ]);
    prop::collection::vec(word, 0..24).prop_map(|words| words.concat())
}

fn tie() -> impl Strategy<Value = TieRule> {
    prop::sample::select(vec![
        TieRule::SegmentCounter,
        TieRule::Address(AddressOrder::Up),
        TieRule::Address(AddressOrder::Down),
    ])
}

fn memory() -> impl Strategy<Value = DeviceMemory> {
    let total = prop_oneof![
        Just(None),
        (0..400_u64).prop_map(|mib| Some(Bytes::mib(mib))),
        any::<u64>().prop_map(|bytes| Some(Bytes::new(bytes >> 1))),
    ];
    let outside = prop_oneof![3 => Just(0), 1 => 0..(100_u64 << 20), 1 => any::<u64>()];
    (total, outside).prop_map(|(total, outside)| DeviceMemory { total, outside: Bytes::new(outside) })
}

/// Runs `steps`, looks at the allocator after each, and lets everything go at the end.
fn run(steps: &[Step], text: &str, tie: TieRule, memory: DeviceMemory) {
    let settings = Settings::parse(text).unwrap().0;
    let mut allocator = CachingAllocator::new(&settings, tie, &[Some(memory)]);
    let mut alive: Vec<ObjectId> = Vec::new();
    let mut objects = 0;
    for (index, step) in steps.iter().enumerate() {
        match *step {
            Step::Alloc { bytes, stream, pool } => {
                let object = ObjectId(objects);
                objects += 1;
                let (bytes, stream, pool) = (Bytes::new(bytes), Stream(stream), Pool(pool));
                let event = Event::Alloc { object, bytes, device: GPU, stream, pool };
                if allocator.apply(index, event).is_ok() {
                    assert!(allocator.block_bytes(object).unwrap() >= bytes);
                    alive.push(object);
                } else {
                    assert_eq!(allocator.block_bytes(object), None);
                }
            }
            Step::Free(which) if !alive.is_empty() => {
                let object = alive.swap_remove(which % alive.len());
                allocator.apply(index, Event::Free(object)).unwrap();
            }
            Step::RequestFree(which) if !alive.is_empty() => {
                let object = alive[which % alive.len()];
                allocator.apply(index, Event::FreeRequested(object)).unwrap();
            }
            Step::RecordedOom { bytes } => {
                let event = Event::Oom { bytes: Bytes::new(bytes), device: GPU, stream: Stream(0) };
                allocator.apply(index, event).unwrap();
            }
            Step::EmptyCache => allocator.empty_cache(GPU),
            Step::NoSplit => allocator.set_no_split(GPU, Pool(1)),
            Step::Free(_) | Step::RequestFree(_) => {}
        }
        look(&allocator, memory);
    }
    for object in alive {
        allocator.apply(steps.len(), Event::Free(object)).unwrap();
        look(&allocator, memory);
    }
    let stats = allocator.stats(GPU).unwrap();
    assert_eq!(stats.allocated_bytes.all.current, 0, "nothing is alive");
    assert_eq!(stats.active_bytes.all.current, 0, "nothing awaits free");
    assert_eq!(stats.requested_bytes.all.current, 0);
    (1..3).for_each(|pool| allocator.release_pool(GPU, Pool(pool)));
    allocator.empty_cache(GPU);
    assert_eq!(allocator.reading(GPU).unwrap().reserved, Bytes::ZERO, "nothing pins a segment");
    look(&allocator, memory);
}

/// What holds at any moment.
fn look(allocator: &CachingAllocator, memory: DeviceMemory) {
    let layout = allocator.layout(GPU);
    for pair in layout.windows(2) {
        let size: u64 = pair[0].blocks.iter().map(|block| block.size.get()).sum();
        assert!(pair[0].address + size <= pair[1].address, "segments overlap");
    }
    let sum = |wanted: &[State]| -> u64 {
        let blocks = layout.iter().flat_map(|segment| &segment.blocks);
        blocks.filter(|block| wanted.contains(&block.state)).map(|block| block.size.get()).sum()
    };
    let stats = allocator.stats(GPU).unwrap();
    assert_eq!(stats.allocated_bytes.all.current, sum(&[State::Allocated]));
    assert_eq!(stats.active_bytes.all.current, sum(&[State::Allocated, State::Pending]));
    let reserved: Bytes = layout.iter().map(SegmentLayout::reserved).sum();
    assert_eq!(stats.reserved_bytes.all.current, reserved.get(), "reserved is the sum of segments");
    if let Some(total) = memory.total {
        assert!(reserved <= total.saturating_sub(memory.outside).max(Bytes::ZERO));
    }
    for segment in &layout {
        for pair in segment.blocks.windows(2) {
            let mergeable = matches!(pair[0].state, State::Free | State::Unmapped);
            assert!(!mergeable || pair[0].state != pair[1].state, "neighbours are not merged: {pair:?}");
        }
        for block in &segment.blocks {
            assert!(block.size > Bytes::ZERO);
            assert!(block.object.is_none_or(|(_, requested)| requested <= block.size));
            assert!(block.state != State::Unmapped || segment.expandable);
        }
    }
    let split = |segment: &&SegmentLayout| !segment.expandable && segment.blocks.len() > 1;
    let inactive = layout.iter().filter(split).flat_map(|segment| &segment.blocks);
    let inactive: Vec<u64> =
        inactive.filter(|block| block.state == State::Free).map(|block| block.size.get()).collect();
    assert_eq!(stats.inactive_split.all.current, inactive.len() as u64);
    assert_eq!(stats.inactive_split_bytes.all.current, inactive.iter().sum::<u64>());
    let pools = [&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.segment];
    for stat in pools {
        assert_eq!(stat.all.current, stat.small_pool.current + stat.large_pool.current);
        assert!(stat.all.peak >= stat.all.current);
    }
}

/// The same program as a tape.
fn tape(steps: &[Step]) -> Tape {
    let device = Device { name: "any".into(), kind: DeviceKind::Gpu, capacity: None, context: None };
    let mut tape = Tape::new(Unit::Requested, vec![device]);
    let name = tape.intern("object");
    let label =
        tape.intern_label(Label { name, owner: None, category: Category::Unattributed, saved: false });
    let mut alive = Vec::new();
    for step in steps {
        match *step {
            Step::Alloc { bytes, stream, pool } => {
                let object = tape.new_object(Object { label, layout: None }).unwrap();
                let (bytes, stream, pool) = (Bytes::new(bytes), Stream(stream), Pool(pool));
                tape.push(Event::Alloc { object, bytes, device: GPU, stream, pool });
                alive.push(object);
            }
            Step::Free(which) if !alive.is_empty() => {
                let object = alive.swap_remove(which % alive.len());
                tape.push(Event::Free(object));
            }
            Step::RequestFree(which) if !alive.is_empty() => {
                tape.push(Event::FreeRequested(alive[which % alive.len()]));
            }
            Step::RecordedOom { bytes } => {
                tape.push(Event::Oom { bytes: Bytes::new(bytes), device: GPU, stream: Stream(0) });
            }
            _ => {}
        }
    }
    tape
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_where_the_books_say(
        steps in prop::collection::vec(step(), 0..120),
        text in settings(),
        tie in tie(),
        memory in memory(),
    ) {
        run(&steps, &text, tie, memory);
    }

    /// Nothing that can be written in a settings string or on a tape makes the allocator panic, and a
    /// report never contradicts itself.
    #[test]
    fn any_tape_under_any_settings_gets_a_report(
        steps in prop::collection::vec(step(), 0..120),
        texts in prop::collection::vec(prop_oneof![settings(), nonsense(), any::<String>()], 1..4),
        tie in tie(),
        memory in memory(),
    ) {
        let settings: Vec<Settings> =
            texts.iter().filter_map(|text| Settings::parse(text).ok()).map(|(settings, _)| settings).collect();
        let reports = simulate(&tape(&steps), &settings, tie, &[Some(memory)]);
        prop_assert_eq!(reports.len(), settings.len());
        for report in reports {
            let device = &report.devices[0];
            prop_assert!(device.peak_allocated <= device.peak_reserved);
            prop_assert!(device.stranded_at_peak <= device.peak_reserved);
            prop_assert_eq!(device.stats.reserved_bytes.all.peak, device.peak_reserved.get());
            prop_assert_eq!(report.fits == Some(false), device.ooms > 0);
            prop_assert_eq!(report.fits.is_none(), device.ooms == 0 && memory.total.is_none());
        }
    }
}
