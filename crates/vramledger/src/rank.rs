//! What one rank of a planned run holds in its last step, and what ranks do together.

use ledger::{Bytes, Category, DeviceId, Event, LabelId, Tape};
use models::{Parallel, Run, Setup, State};
use wire::{RankBuffers, RankCollective, RankState, Ranks};

/// The states of a training that ranks divide, in the order in which they are told.
const STATES: [(Category, State); 4] = [
    (Category::Parameter, State::Parameter),
    (Category::MasterWeight, State::MasterWeight),
    (Category::Gradient, State::Gradient),
    (Category::OptimizerState, State::OptimizerState),
];

/// The rank that `run` is of, among those that divide the work as `parallel` says.
pub(crate) fn ranks(setup: &Setup, parallel: &Parallel, run: &Run) -> Ranks {
    let held = Held::in_last_step(&run.tape);
    let divided = |category: Category| {
        let state = STATES.iter().find(|(known, _)| *known == category);
        state.map_or(1, |(_, state)| parallel.divided_among(*state, setup.world_size))
    };
    Ranks {
        parallel: parallel.name().into(),
        world_size: setup.world_size.into(),
        rank: setup.rank.into(),
        states: held
            .states
            .iter()
            .filter(|(_, _, bytes)| *bytes > 0)
            .map(|(device, category, bytes)| RankState {
                device: device.0,
                category: wire::Category(*category),
                bytes: *bytes,
                divided_among: divided(*category).into(),
            })
            .collect(),
        buffers: held.buffers,
        collectives: run
            .collectives
            .iter()
            .map(|(kind, messages)| RankCollective {
                kind: kind.as_str().into(),
                count: messages.count,
                bytes: messages.bytes,
            })
            .collect(),
    }
}

/// What is held in the last step of a tape.
struct Held {
    /// The most at the end of a phase, state by state.
    states: Vec<(DeviceId, Category, u64)>,
    buffers: RankBuffers,
}

impl Held {
    fn in_last_step(tape: &Tape) -> Self {
        let last = tape.marks().last().map_or(0, |mark| mark.step);
        let devices = (0..tape.devices.len()).map(|index| DeviceId(index as u16));
        let mut states: Vec<(DeviceId, Category, u64)> =
            devices.flat_map(|device| STATES.map(|(category, _)| (device, category, 0))).collect();
        let mut most = states.clone();
        // Of each object its device, bytes and label.
        let mut objects: Vec<(DeviceId, u64, LabelId)> =
            tape.objects().iter().map(|object| (DeviceId(0), 0, object.label)).collect();
        let mut buffers: u64 = 0;
        let mut found: Option<RankBuffers> = None;
        let mut at = None;
        for event in tape.events() {
            let mut add = |(device, bytes, label): (DeviceId, u64, LabelId), more: bool| {
                let category = tape.label(label).category;
                let of_state = states.iter_mut().find(|(on, of, _)| (*on, *of) == (device, category));
                let total = match of_state {
                    Some((_, _, total)) => total,
                    None if category == Category::CommunicationBuffer && device == DeviceId(0) => {
                        &mut buffers
                    }
                    None => return,
                };
                *total = if more { *total + bytes } else { total.saturating_sub(bytes) };
            };
            match event {
                Event::Alloc { object, bytes, device, .. } => {
                    let of = &mut objects[object.0 as usize];
                    (of.0, of.1) = (device, Bytes::get(bytes));
                    add(*of, true);
                }
                Event::Free(object) => add(objects[object.0 as usize], false),
                Event::Relabel(object, label) => {
                    let of = &mut objects[object.0 as usize];
                    add(*of, false);
                    of.2 = label;
                    add(*of, true);
                }
                Event::Mark(mark) => {
                    // A phase ends here.
                    if at.is_some_and(|at: ledger::Mark| at.step == last) {
                        keep_most(&mut most, &states);
                    }
                    at = Some(tape.mark_of(mark));
                }
                _ => {}
            }
            let Some(at) = at.filter(|at| at.step == last) else { continue };
            let found =
                found.get_or_insert_with(|| RankBuffers { least_bytes: buffers, ..RankBuffers::default() });
            found.least_bytes = found.least_bytes.min(buffers);
            if buffers > found.most_bytes {
                found.most_bytes = buffers;
                found.micro_batch = at.micro_batch;
                found.phase = Some(tape.phase_name(at.phase).to_owned());
            }
        }
        keep_most(&mut most, &states);
        Self { states: most, buffers: found.unwrap_or_default() }
    }
}

/// Of each state the larger of both.
fn keep_most(most: &mut [(DeviceId, Category, u64)], states: &[(DeviceId, Category, u64)]) {
    for (most, now) in most.iter_mut().zip(states) {
        most.2 = most.2.max(now.2);
    }
}

#[cfg(test)]
mod tests {
    use ledger::Category;
    use wire::{RankCollective, RankState, Ranks};

    use models::{Ddp, Fsdp2, Parallel, Setup};

    use crate::{CONTEXT, PlanQuestion, find_gpu, load_model, plan};

    const WEIGHTS: u64 = 4 * 512 * 512 * 4;

    /// Four layers of 512 x 512 in fp32, which 8 ranks train with Adam.
    fn ranks(parallel: Parallel) -> Ranks {
        let model = load_model("mlp:4x512").unwrap();
        let setup = Setup { parallel: Some(parallel), world_size: 8, ..Setup::default() };
        let gpu = find_gpu("H100-80GB").unwrap().clone();
        let question =
            PlanQuestion { model: &model, setup, gpu, context: CONTEXT, alloc_conf: String::new() };
        plan(question).unwrap().ledger.ranks.unwrap()
    }

    fn states(bytes: u64, divided_among: u64) -> Vec<RankState> {
        let of = |category, bytes| RankState {
            device: 0,
            category: wire::Category(category),
            bytes,
            divided_among,
        };
        vec![
            of(Category::Parameter, bytes),
            of(Category::Gradient, bytes),
            of(Category::OptimizerState, 2 * bytes),
        ]
    }

    #[test]
    fn every_rank_of_ddp_holds_all_and_sums_each_gradient_once_a_step() {
        let found = ranks(Parallel::Ddp(Ddp::default()));
        assert_eq!(found.states, states(WEIGHTS, 1));
        // The first bucket is full after one layer, the second takes the rest.
        let sums = RankCollective { kind: "all-reduce".into(), count: 2, bytes: WEIGHTS };
        assert_eq!(found.collectives, [sums]);
        assert_eq!((found.buffers.most_bytes, found.buffers.least_bytes), (WEIGHTS, WEIGHTS));
    }

    #[test]
    fn gradients_that_lie_in_buckets_are_no_buffers() {
        let found = ranks(Parallel::Ddp(Ddp { gradient_as_bucket_view: true, ..Ddp::default() }));
        assert_eq!(found.states, states(WEIGHTS, 1));
        assert_eq!(found.buffers.most_bytes, 0);
    }

    #[test]
    fn a_rank_of_fsdp2_holds_its_part_and_gathers_the_rest_for_a_while() {
        let found = ranks(Parallel::Fsdp2(Fsdp2::default()));
        assert_eq!(found.states, states(WEIGHTS / 8, 8));
        assert_eq!(found.buffers.least_bytes, 0);
        assert!(found.buffers.most_bytes > WEIGHTS / 4);
        let kinds: Vec<&str> = found.collectives.iter().map(|messages| messages.kind.as_str()).collect();
        assert_eq!(kinds, ["all-gather", "reduce-scatter"]);
    }
}
