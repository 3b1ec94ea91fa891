//! Growth on tapes that are made by hand.

use ledger::{Device, DeviceId, DeviceKind, Label, Mark, Object, ObjectId, Pool, Stream};
use proptest::prelude::*;

use super::*;

const KIB: u64 = 1 << 10;

/// A training run in the making.
struct Run {
    tape: Tape,
    step: u32,
}

impl Run {
    fn new() -> Self {
        let gpu = Device {
            name: "GPU".into(),
            kind: DeviceKind::Gpu,
            capacity: Some(Bytes::mib(1024)),
            context: Some(Bytes::mib(24)),
        };
        let mut run = Self { tape: Tape::new(Unit::Requested, vec![gpu]), step: 0 };
        run.mark(Phase::LOAD);
        run.make("weight", Category::Parameter, 1 << 20);
        run
    }

    fn mark(&mut self, phase: Phase) {
        let micro_batch = (phase == Phase::FORWARD || phase == Phase::BACKWARD).then_some(1);
        self.tape.mark(Mark { step: self.step, micro_batch, phase, text: None });
    }

    fn make(&mut self, name: &str, category: Category, bytes: u64) -> ObjectId {
        let name = self.tape.intern(name);
        let label = self.tape.intern_label(Label { name, owner: None, category, saved: false });
        let object = self.tape.new_object(Object { label, layout: None }).unwrap();
        let (bytes, device) = (Bytes::new(bytes), DeviceId(0));
        self.tape.push(Event::Alloc { object, bytes, device, stream: Stream(0), pool: Pool(0) });
        object
    }

    fn free(&mut self, object: ObjectId) {
        self.tape.push(Event::Free(object));
    }

    /// A step on an input of `input` bytes; `own` is what the program does besides, in its forward pass.
    fn step(&mut self, input: u64, own: impl FnOnce(&mut Self)) {
        self.step += 1;
        self.mark(Phase::FORWARD);
        let batch = self.make("batch", Category::Input, input);
        let results = ["hidden", "logits"].map(|name| self.make(name, Category::Activation, 4 * input));
        own(self);
        self.mark(Phase::BACKWARD);
        for result in results {
            self.free(result);
        }
        self.mark(Phase::UPDATE);
        if self.step == 1 {
            self.make("moment", Category::OptimizerState, 2 << 20);
        }
        self.free(batch);
    }

    fn growth(&self) -> Growth {
        of_kept(&About::new(ledger::Provenance::Constructed), &self.tape, None)
    }
}

/// A run of `steps` equal steps, in each of which `own` is done as well.
fn run(steps: u32, mut own: impl FnMut(&mut Run, u32)) -> Growth {
    let mut run = Run::new();
    for step in 1..=steps {
        run.step(64 * KIB, |run| own(run, step));
    }
    run.growth()
}

#[test]
fn a_list_of_features_has_its_owner_and_its_bytes_a_step() {
    let found = run(8, |run, _| {
        run.make("feature", Category::Activation, 96 * KIB);
    });
    assert_eq!((found.verdict, found.kept_graph), (Trend::Growing, false));
    let [row] = found.rows.as_slice() else { panic!("{:?}", found.rows) };
    assert_eq!((row.name.as_str(), row.bytes_per_step, row.object_bytes), ("feature", 96 * KIB, 96 * KIB));
    assert_eq!((row.objects_per_step, row.count, row.first_step, row.last_step), (1.0, 8, 2, 8));
    let slope = found.allocated.unwrap();
    let slopes = (slope.low_bytes_per_step, slope.bytes_per_step, slope.high_bytes_per_step);
    assert_eq!(slopes, (98_304, 98_304, 98_304));
    // 1000 MiB less 4 MiB and eight features that are there at most.
    let left = (1000 << 20) - found_peak(8);
    assert_eq!(found.steps_until_full, Some(left.div_ceil(96 * KIB)));
    assert!(found.advice.unwrap().contains("`loss.detach()`"));
}

/// What is allocated at most: a weight, the moments, a batch with its results, and features.
const fn found_peak(features: u64) -> u64 {
    (3 << 20) + (64 + 2 * 256 + features * 96) * KIB
}

#[test]
fn all_that_a_pass_leaves_is_its_graph() {
    let found = run(4, |run, _| {
        run.make("hidden", Category::Activation, 256 * KIB);
        run.make("logits", Category::Activation, 256 * KIB);
        run.make("loss", Category::Activation, 4);
    });
    assert_eq!((found.verdict, found.kept_graph), (Trend::Growing, true));
    assert_eq!(found.bytes_per_step, 512 * KIB + 4);
    assert!(found.explanation.contains("the graph of each step"));
}

#[test]
fn scalars_are_told_and_not_accused() {
    let found = run(30, |run, _| {
        run.make("loss", Category::Activation, 4);
    });
    assert_eq!((found.verdict, found.rows.len(), found.bytes_per_step), (Trend::Steady, 0, 0));
    assert_eq!((found.trifles[0].name.as_str(), found.trifles[0].count), ("loss", 30));
    assert_eq!(found.advice, None);
}

#[test]
fn growth_may_start_late_and_come_every_few_steps() {
    let late = run(12, |run, step| {
        if step > 8 {
            run.make("kept", Category::Input, 10 * KIB);
        }
    });
    assert_eq!((late.verdict, late.rows[0].first_step, late.bytes_per_step), (Trend::Growing, 9, 10 * KIB));
    let seldom = run(14, |run, step| {
        if step % 4 == 0 {
            run.make("kept", Category::Activation, 80 * KIB);
        }
    });
    assert_eq!((seldom.verdict, seldom.bytes_per_step), (Trend::Growing, 20 * KIB));
    assert_eq!(seldom.rows[0].objects_per_step, 0.25);
}

#[test]
fn a_cache_that_fills_is_warm_up() {
    let found = run(12, |run, step| {
        if step <= 6 {
            run.make("cache", Category::Activation, 10 * KIB);
        }
    });
    assert_eq!((found.verdict, found.warm_up_steps), (Trend::WarmUp, Some(6)));
    let settled = &found.settled[0];
    assert_eq!((settled.name.as_str(), settled.bytes_per_step, settled.last_step), ("cache", 10 * KIB, 6));
}

#[test]
fn what_is_replaced_is_steady_and_what_is_joined_grows() {
    // The copy of the last steps, which are let go of in turn.
    let mut kept: Vec<ObjectId> = Vec::new();
    let queue = run(12, |run, _| {
        kept.push(run.make("queue", Category::Activation, 10 * KIB));
        if kept.len() > 3 {
            run.free(kept.remove(0));
        }
    });
    assert_eq!((queue.verdict, queue.rows.len()), (Trend::WarmUp, 0));
    let mut all = None;
    let joined = run(9, |run, step| {
        let next = run.make("joined", Category::Input, u64::from(step) * 10 * KIB);
        if let Some(before) = all.replace(next) {
            run.free(before);
        }
    });
    assert_eq!((joined.verdict, joined.bytes_per_step), (Trend::Growing, 10 * KIB));
}

#[test]
fn lengths_bound_what_they_make() {
    let mut run = Run::new();
    let mut last = None;
    for length in [40, 64, 80, 96, 120, 48, 128, 72, 144, 60] {
        run.step(length * KIB, |run| {
            let output = run.make("output", Category::Activation, 8 * length * KIB);
            if let Some(before) = last.replace(output) {
                run.free(before);
            }
        });
    }
    let found = run.growth();
    assert_eq!((found.verdict, found.bounded_by.as_deref()), (Trend::LongestInput, Some("input")));
    assert_eq!(found.rows, []);
}

#[test]
fn scratch_that_leaves_holes_strands() {
    let found = run(8, |run, step| {
        // What is kept splits the block that was free, and the next is a little larger.
        let scratch = run.make("scratch", Category::Temporary, u64::from(60 + step) << 20);
        run.free(scratch);
        run.make("kept", Category::Input, 2 << 20);
    });
    assert_eq!(found.verdict, Trend::Stranding);
    assert!(found.times_faster.unwrap() > 10.0, "{:?}", found.times_faster);
    assert!(found.steps_until_full.unwrap() < 20, "{:?}", found.steps_until_full);
    assert_eq!((found.rows[0].name.as_str(), found.bytes_per_step), ("kept", 2 << 20));
    assert!(!found.explanation.contains("leak"));
}

#[test]
fn rounds_of_a_bare_loop_are_steps() {
    let mut run = Run::new();
    run.tape = Tape::new(Unit::Requested, run.tape.devices.clone());
    let load = run.make("weight", Category::Unattributed, 3 << 20);
    for _ in 0..7 {
        let scratch = run.make("scratch", Category::Unattributed, 5 << 20);
        run.make("kept", Category::Unattributed, 70 * KIB);
        run.free(scratch);
    }
    let found = run.growth();
    assert_eq!((found.verdict, found.per.as_str(), found.steps), (Trend::Growing, "round", 7));
    assert_eq!((found.rows[0].name.as_str(), found.bytes_per_step), ("kept", 70 * KIB));
    run.free(load);
    // A model that is loaded layer by layer lets go of nothing.
    let mut load = Run::new();
    for _ in 0..9 {
        load.make("layer", Category::Parameter, 1 << 20);
    }
    assert_eq!(load.growth().verdict, Trend::TooFewSteps);
}

#[test]
fn an_evaluation_after_the_training_may_keep_its_outputs() {
    let evaluate = |keeps: bool| {
        let mut run = Run::new();
        for _ in 0..4 {
            run.step(64 * KIB, |_| {});
        }
        run.step += 1;
        run.mark(Phase::FORWARD);
        for _ in 0..6 {
            let batch = run.make("batch", Category::Input, 64 * KIB);
            let output = run.make("output", Category::Activation, 200 * KIB);
            run.free(batch);
            if !keeps {
                run.free(output);
            }
        }
        run.growth()
    };
    let kept = evaluate(true);
    assert_eq!((kept.verdict, kept.per.as_str(), kept.bytes_per_step), (Trend::Growing, "round", 200 * KIB));
    assert_eq!((evaluate(false).verdict, evaluate(false).per.as_str()), (Trend::Steady, "step"));
}

#[test]
fn what_goes_as_fast_as_it_comes_is_no_growth() {
    // A queue of which the first were there before the recording, which does not know where they are from.
    let mut run = Run::new();
    let mut queue: Vec<ObjectId> = (0..6).map(|_| run.make("?", Category::Unattributed, 90 * KIB)).collect();
    for _ in 0..6 {
        run.step(64 * KIB, |run| {
            let next = run.make("queue", Category::Activation, 90 * KIB);
            queue.push(next);
            run.free(queue.remove(0));
        });
    }
    let found = run.growth();
    assert_eq!((found.verdict, found.rows.len()), (Trend::Steady, 0));
}

#[test]
fn leftovers_of_any_number_are_no_growth() {
    // What a step leaves behind is let go of in the next, and is more and more by chance.
    let mut left: Vec<ObjectId> = Vec::new();
    let found = run(9, |run, step| {
        for object in std::mem::take(&mut left) {
            run.free(object);
        }
        let count = [3, 1, 4, 1, 5, 2, 3, 4, 6][step as usize - 1];
        left = (0..count).map(|_| run.make("part", Category::Activation, 10 * KIB)).collect();
    });
    assert_eq!((found.verdict, found.rows.len()), (Trend::Steady, 0));
}

#[test]
fn two_steps_do_not_tell() {
    let found = run(2, |run, _| {
        run.make("kept", Category::Activation, 10 * KIB);
    });
    assert_eq!((found.verdict, found.steps, found.warm_up_steps), (Trend::TooFewSteps, 2, None));
    assert_eq!(found.rows, []);
}

proptest! {
    #[test]
    fn every_kept_size_gives_its_bytes_a_step(
        sizes in proptest::collection::vec(1_u64..1 << 20, 1..4),
        steps in 3_u32..20,
    ) {
        let found = run(steps, |run, _| {
            for (place, size) in sizes.iter().enumerate() {
                run.make(&format!("kept {place}"), Category::Input, 512 + size);
            }
        });
        prop_assert_eq!(found.verdict, Trend::Growing);
        prop_assert_eq!(found.bytes_per_step, sizes.iter().map(|size| 512 + size).sum::<u64>());
        prop_assert_eq!(found.rows.len(), sizes.len());
    }

    #[test]
    fn steps_that_keep_nothing_are_never_accused(
        inputs in proptest::collection::vec(1_u64..1 << 10, 0..16),
    ) {
        let mut run = Run::new();
        for input in inputs {
            run.step(input * KIB, |_| {});
        }
        let found = run.growth();
        prop_assert!(!matches!(found.verdict, Trend::Growing | Trend::Stranding), "{:?}", found);
    }
}
