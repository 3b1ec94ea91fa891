//! Events per second of the replay of a million-event tape.

use std::hint::black_box;
use std::path::PathBuf;

use allocator::{Settings, TieRule, memory_of, simulate};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, Object, ObjectId, Pool, Stream, Tape, Unit,
};

#[path = "../../../xtask/src/events.rs"]
mod events;

const EVENTS: usize = 1_000_000;

fn device() -> Device {
    Device { name: "H100-80GB".into(), kind: DeviceKind::Gpu, capacity: None, context: None }
}

/// The recorded steps of a small llama in bf16, again and again.
fn training() -> Tape {
    let list = "../../tests/truth/events/llama-bf16.csv.gz";
    let recorded = events::read(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(list), device())
        .expect("the list is in the repository");
    let mut tape = Tape::new(Unit::Requested, vec![device()]);
    let object = any_object(&mut tape);
    let mut alive = Vec::new();
    let mut made: Vec<ObjectId> = Vec::new();
    while tape.len() < EVENTS {
        let first = made.len() as u32;
        for event in recorded.events() {
            let event = match event {
                Event::Alloc { object: ObjectId(id), bytes, device, stream, pool } => {
                    let new = tape.new_object(object).expect("fewer than 2^32 objects");
                    assert_eq!(new.0, first + id);
                    made.push(new);
                    alive.push(new);
                    Event::Alloc { object: new, bytes, device, stream, pool }
                }
                Event::Free(ObjectId(id)) => {
                    alive.retain(|object| object.0 != first + id);
                    Event::Free(ObjectId(first + id))
                }
                _ => continue,
            };
            tape.push(event);
        }
        alive.drain(..).for_each(|object| tape.push(Event::Free(object)));
    }
    tape
}

/// Objects of many sizes that die in no order, ten thousand alive: many free blocks of all sizes.
fn fragmented() -> Tape {
    let mut tape = Tape::new(Unit::Requested, vec![device()]);
    let object = any_object(&mut tape);
    let mut random = 1_u64;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut alive = Vec::new();
    while tape.len() < EVENTS {
        if alive.len() > 10_000 {
            let index = next(alive.len() as u64) as usize;
            tape.push(Event::Free(alive.swap_remove(index)));
        }
        let object = tape.new_object(object).expect("fewer than 2^32 objects");
        let magnitude = 9 + next(15);
        let bytes = Bytes::new(1 + next(1 << magnitude));
        tape.push(Event::Alloc { object, bytes, device: DeviceId(0), stream: Stream(0), pool: Pool(0) });
        alive.push(object);
    }
    tape
}

fn any_object(tape: &mut Tape) -> Object {
    let name = tape.intern("object");
    let label =
        tape.intern_label(Label { name, owner: None, category: Category::Unattributed, saved: false });
    Object { label, layout: None }
}

fn replay(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocator");
    group.sample_size(10);
    for (name, tape) in [("training", training()), ("fragmented", fragmented())] {
        group.throughput(Throughput::Elements(tape.len() as u64));
        for (setting, text) in [("default", ""), ("expandable", "expandable_segments:True")] {
            let settings = [Settings::parse(text).expect("a setting of PyTorch").0];
            let memory = memory_of(&tape);
            group.bench_function(format!("{name}/{setting}"), |bencher| {
                bencher.iter(|| simulate(black_box(&tape), &settings, TieRule::SegmentCounter, &memory));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default();
    targets = replay
}
criterion_main!(benches);
