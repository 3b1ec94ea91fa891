//! Random tapes that are consistent.

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Dtype, Event, Label, Layout, Mark, Object, ObjectId,
    Phase, Pool, Segment, SegmentId, Stream, Tape, Unit,
};
use proptest::prelude::*;

/// One step of making a tape. Numbers are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc { bytes: u64, label: usize, device: u16 },
    FreeRequested(usize),
    Free(usize),
    Relabel { object: usize, label: usize },
    SegmentAlloc { bytes: u64, device: u16 },
    SegmentFree(usize),
    Oom { bytes: u64 },
    Mark { step: u32, micro_batch: u32, phase: u16 },
}

fn op(segments: bool) -> impl Strategy<Value = Op> {
    let bytes = || prop_oneof![1 => Just(0), 8 => 1..5000_u64, 1 => 1..(1_u64 << 40)];
    let size = || 0..usize::MAX;
    let segment = u32::from(segments);
    prop_oneof![
        8 => (bytes(), size(), 0..3_u16).prop_map(|(bytes, label, device)| Op::Alloc { bytes, label, device }),
        1 => size().prop_map(Op::FreeRequested),
        5 => size().prop_map(Op::Free),
        1 => (size(), size()).prop_map(|(object, label)| Op::Relabel { object, label }),
        segment * 2 => (bytes(), 0..3_u16).prop_map(|(bytes, device)| Op::SegmentAlloc { bytes, device }),
        segment => size().prop_map(Op::SegmentFree),
        segment => bytes().prop_map(|bytes| Op::Oom { bytes }),
        2 => (0..3_u32, 0..3_u32, 0..6_u16)
            .prop_map(|(step, micro_batch, phase)| Op::Mark { step, micro_batch, phase }),
    ]
}

/// A consistent tape on two GPUs and the host; with segment events of its own or without.
pub fn tape(segments: bool) -> impl Strategy<Value = Tape> {
    let unit = prop_oneof![Just(Unit::Requested), Just(Unit::Block)];
    let ops = prop::collection::vec(op(segments), 0..120);
    (unit, ops, 0..40_usize).prop_map(|(unit, ops, timed)| build(unit, &ops, timed))
}

fn build(unit: Unit, ops: &[Op], timed: usize) -> Tape {
    let device = |name: &str, kind| Device {
        name: name.into(),
        kind,
        capacity: (kind == DeviceKind::Gpu).then_some(Bytes::mib(80 << 10)),
        context: None,
    };
    let devices = vec![
        device("gpu 0", DeviceKind::Gpu),
        device("gpu 1", DeviceKind::Gpu),
        device("host", DeviceKind::Cpu),
    ];
    let mut tape = Tape::new(unit, devices);
    let owner = Some(tape.intern("model.layers.3"));
    let layout = tape.intern_layout(&Layout { dtype: Dtype::Bf16, shape: [3, 4].into() });
    let mut labels = Vec::new();
    // Several labels share a name and a category, and several a name alone.
    for category in Category::ALL {
        for (name, saved) in [("a", false), ("a", true), ("b", false)] {
            let name = tape.intern(name);
            labels.push(tape.intern_label(Label { name, owner, category: *category, saved }));
        }
    }
    let (mut held, mut alive, mut segments) = (Vec::new(), Vec::<ObjectId>::new(), Vec::new());
    for (index, op) in ops.iter().enumerate() {
        let event = match *op {
            Op::Alloc { bytes, label, device } => {
                let layout = (label % 2 == 0).then_some(layout);
                let object = tape.new_object(Object { label: labels[label % labels.len()], layout }).unwrap();
                held.push(object);
                alive.push(object);
                let (bytes, device) = (Bytes::new(bytes), DeviceId(device));
                Event::Alloc { object, bytes, device, stream: Stream(device.0), pool: Pool(1) }
            }
            Op::FreeRequested(at) if !held.is_empty() => {
                Event::FreeRequested(held.swap_remove(at % held.len()))
            }
            Op::Free(at) if !alive.is_empty() => {
                let object = alive.swap_remove(at % alive.len());
                held.retain(|other| *other != object);
                Event::Free(object)
            }
            Op::Relabel { object, label } if !alive.is_empty() => {
                Event::Relabel(alive[object % alive.len()], labels[label % labels.len()])
            }
            Op::SegmentAlloc { bytes, device } => {
                let segment = SegmentId(segments.len() as u32);
                let (bytes, device) = (Bytes::new(bytes), DeviceId(device));
                let segment = Segment { segment, bytes, device, stream: Stream(0), pool: Pool(0) };
                segments.push(segment);
                Event::SegmentAlloc(segment)
            }
            Op::SegmentFree(at) if !segments.is_empty() => {
                Event::SegmentFree(segments.swap_remove(at % segments.len()))
            }
            Op::Oom { bytes } => {
                Event::Oom { bytes: Bytes::new(bytes), device: DeviceId(1), stream: Stream(2) }
            }
            Op::Mark { step, micro_batch, phase } => {
                let micro_batch = (micro_batch > 0).then_some(micro_batch);
                let text = (step == 2).then(|| tape.intern("a mark"));
                Event::Mark(tape.new_mark(Mark { step, micro_batch, phase: Phase(phase), text }))
            }
            _ => continue,
        };
        match index < timed {
            true => tape.push_at(event, index as u64 * 7),
            false => tape.push(event),
        }
    }
    tape
}
