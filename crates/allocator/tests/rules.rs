//! Rules that no recording shows.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use allocator::{AddressOrder, CachingAllocator, DeviceMemory, Settings, TieRule, simulate};
use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Meter, Object, ObjectId, Pool, Stream, Tape,
    Unit,
};

const GPU: DeviceId = DeviceId(0);

fn alloc(object: u32, mib: u64) -> Event {
    let object = ObjectId(object);
    Event::Alloc { object, bytes: Bytes::mib(mib), device: GPU, stream: Stream(0), pool: Pool(0) }
}

fn free(object: u32) -> Event {
    Event::Free(ObjectId(object))
}

/// Of two free segments of one size, the one that `tie` takes, by the object that had it before.
fn taken(tie: TieRule, program: &[Event]) -> u32 {
    let memory = Some(DeviceMemory::default());
    let mut allocator = CachingAllocator::new(&Settings::default(), tie, &[memory]);
    let mut addresses = Vec::new();
    for (index, event) in program.iter().enumerate() {
        allocator.apply(index, *event).unwrap();
        if let Event::Alloc { object, .. } = event {
            addresses.push((allocator.block_address(*object).unwrap(), object.0));
        }
        if matches!(event, Event::Mark(_)) {
            allocator.empty_cache(GPU);
        }
    }
    let (last, _) = addresses.pop().unwrap();
    addresses.iter().rev().find(|(address, _)| *address == last).unwrap().1
}

#[test]
fn ties_go_to_the_first_segment_or_to_the_lowest_address() {
    let plain = [alloc(0, 30), alloc(1, 30), free(0), free(1), alloc(2, 30)];
    assert_eq!(taken(TieRule::SegmentCounter, &plain), 0);
    assert_eq!(taken(TieRule::Address(AddressOrder::Up), &plain), 0);
    assert_eq!(taken(TieRule::Address(AddressOrder::Down), &plain), 1);

    // Object 2 takes the place of object 0 after object 1 got its segment.
    let mark = Event::Mark(ledger::MarkId(0));
    let reused = [alloc(0, 30), alloc(1, 30), free(0), mark, alloc(2, 30), free(1), free(2), alloc(3, 30)];
    assert_eq!(taken(TieRule::SegmentCounter, &reused), 1);
    assert_eq!(taken(TieRule::Address(AddressOrder::Up), &reused), 2);
    assert_eq!(taken(TieRule::Address(AddressOrder::Down), &reused), 1);
}

fn tape(events: &[Event]) -> Tape {
    let gpu = Device { name: "gpu".into(), kind: DeviceKind::Gpu, capacity: None, context: None };
    let cpu = Device { name: "cpu".into(), kind: DeviceKind::Cpu, capacity: None, context: None };
    let mut tape = Tape::new(Unit::Requested, vec![gpu, cpu]);
    let name = tape.intern("object");
    let label =
        tape.intern_label(Label { name, owner: None, category: Category::Unattributed, saved: false });
    for event in events {
        if matches!(event, Event::Alloc { .. }) {
            tape.new_object(Object { label, layout: None }).unwrap();
        }
        tape.push(*event);
    }
    tape
}

fn settings(text: &str) -> Settings {
    Settings::parse(text).unwrap().0
}

#[test]
fn a_report_tells_what_fits_what_is_stranded_and_what_is_left() {
    // 30 MiB are given to the next 25, and 100 + 30 MiB do not become 120.
    let events = [alloc(0, 30), alloc(1, 100), free(0), alloc(2, 25), free(1), alloc(3, 120)];
    let texts = ["", "expandable_segments:True", "per_process_memory_fraction:0.5"];
    let settings = texts.map(settings);
    let memory = |mib| [Some(DeviceMemory { total: Some(Bytes::mib(mib)), outside: Bytes::mib(50) }), None];
    let tie = TieRule::SegmentCounter;
    let of = |mib| simulate(&tape(&events), &settings, tie, &memory(mib));

    let roomy = of(1000);
    assert!(roomy.iter().all(|report| report.fits == Some(true)));
    let reserved = [250, 160, 250].map(Bytes::mib);
    assert_eq!(roomy.iter().map(|report| report.devices[0].peak_reserved).collect::<Vec<_>>(), reserved);
    let headroom: Vec<i64> =
        roomy.iter().map(|report| report.devices[0].headroom.unwrap().get() >> 20).collect();
    assert_eq!(headroom, [700, 790, 250]);
    assert_eq!(roomy[0].devices[0].stranded_at_peak, Bytes::mib(105));

    // 230 MiB for the allocator: the 100 MiB must be given back first.
    let tight = of(280);
    assert_eq!(tight[0].fits, Some(true));
    assert_eq!(tight[0].devices[0].retries, 1);
    assert_eq!(tight[1].devices[0].retries, 0);
    // Half of 280 MiB is less than 30 + 120.
    let failure = tight[2].failure.unwrap();
    assert_eq!((failure.event, failure.object), (5, Some(ObjectId(3))));
    assert_eq!(failure.shortage.allowed, Some(Bytes::mib(140)));
    assert_eq!(tight[2].devices[0].headroom.unwrap().get(), -(10 << 20));

    // Without a limit it cannot be said that it fits.
    let unlimited = simulate(&tape(&events), &settings, tie, &[Some(DeviceMemory::default()), None]);
    assert_eq!((unlimited[0].fits, unlimited[0].devices[0].headroom), (None, None));
}

#[test]
fn host_memory_and_empty_objects_take_no_blocks() {
    let host = Event::Alloc {
        object: ObjectId(0),
        bytes: Bytes::mib(1),
        device: DeviceId(1),
        stream: Stream(0),
        pool: Pool(0),
    };
    let empty = alloc(1, 0);
    let mut allocator = CachingAllocator::new(
        &Settings::default(),
        TieRule::SegmentCounter,
        &[Some(DeviceMemory::default()), None],
    );
    allocator.apply(0, host).unwrap();
    allocator.apply(1, empty).unwrap();
    assert_eq!(allocator.block_bytes(ObjectId(0)), None);
    assert_eq!(allocator.reading(DeviceId(1)), None);
    assert_eq!(allocator.block_bytes(ObjectId(1)), Some(Bytes::ZERO));
    assert_eq!(allocator.reading(GPU).unwrap().reserved, Bytes::ZERO);
    allocator.apply(2, free(0)).unwrap();
    allocator.apply(3, free(1)).unwrap();
    assert_eq!(allocator.block_bytes(ObjectId(1)), None);
}

#[test]
fn statistics_have_the_names_of_torch() {
    let stats = simulate(
        &tape(&[alloc(0, 1)]),
        &[Settings::default()],
        TieRule::SegmentCounter,
        &[Some(DeviceMemory::default()), None],
    )[0]
    .devices[0]
        .stats;
    let entries = stats.entries();
    assert_eq!(entries.len(), 9 * 3 * 4 + 2 * 4 + 5);
    assert!(entries.is_sorted());
    let value = |name: &str| entries.iter().find(|(entry, _)| entry == name).unwrap().1;
    assert_eq!(value("allocated_bytes.small_pool.current"), 1 << 20);
    assert_eq!(value("reserved_bytes.all.peak"), 2 << 20);
    assert_eq!(value("segment.all.allocated"), 1);
    assert_eq!(value("num_alloc_retries"), 0);
}
