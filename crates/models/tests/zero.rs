//! What a rank of DeepSpeed's ZeRO holds of states, against the arithmetic of DeepSpeed's own estimators
//! (`estimate_zero2_model_states_mem_needs`, `estimate_zero3_model_states_mem_needs`).
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use ledger::{Category, DeviceId, Dtype, Event, Label, Mark, ObjectId, Phase, Tape};
use models::{GPUS, Model, Offload, Parallel, Setup, Stage, Zero};

const RANKS: u32 = 8;
const WIDTH: u64 = 256;
/// One matrix a rank.
const PARAMETERS: u64 = RANKS as u64 * WIDTH * WIDTH;
const STATES: [Category; 4] =
    [Category::Parameter, Category::MasterWeight, Category::Gradient, Category::OptimizerState];

fn tape(stage: Stage, offload: &[Offload]) -> Tape {
    let model = Model::from_mlp_name(&format!("mlp:{RANKS}x{WIDTH}")).unwrap().unwrap();
    let setup = Setup {
        batch: 1,
        dtype: Some(Dtype::Fp16),
        offload: offload.to_vec(),
        steps: 2,
        world_size: RANKS,
        parallel: Some(Parallel::Zero(Zero::new(stage))),
        ..Setup::default()
    };
    model.train(&setup, &GPUS[0]).unwrap().tape
}

/// Bytes of each state on a device: at the end, and of all of them at their most in the last update.
fn states(tape: &Tape, device: u16) -> (BTreeMap<Category, u64>, u64) {
    let (mut held, mut most) = (BTreeMap::new(), 0);
    let mut objects: BTreeMap<ObjectId, (Category, u64)> = BTreeMap::new();
    let category = |label| -> Category {
        let Label { category, .. } = tape.label(label);
        category
    };
    let mut at = Phase::LOAD;
    for event in tape.events() {
        match event {
            Event::Mark(mark) => {
                let Mark { phase, .. } = tape.mark_of(mark);
                if phase == Phase::UPDATE {
                    most = 0;
                }
                at = phase;
            }
            Event::Alloc { object, bytes, device: on, .. } if on == DeviceId(device) => {
                let of = category(tape.object(object).label);
                objects.insert(object, (of, bytes.get()));
                *held.entry(of).or_insert(0) += bytes.get();
            }
            Event::Free(object) => {
                if let Some((of, bytes)) = objects.remove(&object) {
                    *held.entry(of).or_insert(0) -= bytes;
                }
            }
            Event::Relabel(object, label) => {
                if let Some((of, bytes)) = objects.get_mut(&object) {
                    *held.entry(*of).or_insert(0) -= *bytes;
                    *of = category(label);
                    *held.entry(*of).or_insert(0) += *bytes;
                }
            }
            _ => {}
        }
        if at == Phase::UPDATE {
            most = most.max(STATES.iter().filter_map(|state| held.get(state)).sum());
        }
    }
    (held, most)
}

fn of(held: &BTreeMap<Category, u64>, category: Category) -> u64 {
    held.get(&category).copied().unwrap_or(0)
}

/// Weights in 16 bits; of the partition gradients in 16 and in 32 bits, a master and two moments.
#[test]
fn stage_2_is_2_bytes_a_parameter_and_18_of_the_partition() {
    let (held, most) = states(&tape(Stage::Two, &[]), 0);
    assert_eq!(most, 2 * PARAMETERS + 18 * PARAMETERS / u64::from(RANKS));
    assert_eq!(of(&held, Category::Parameter), 2 * PARAMETERS);
}

/// The same formula without the weights has one gradient too few: those in 16 bits stay beside those in 32.
#[test]
fn stage_3_is_20_bytes_of_the_partition_where_the_estimate_has_18() {
    // The parts of one matrix for each rank lie in a row: they are joined in 16 bits first.
    let joined = 2 * PARAMETERS / u64::from(RANKS);
    let (held, most) = states(&tape(Stage::Three, &[]), 0);
    assert_eq!(most, 20 * PARAMETERS / u64::from(RANKS) + joined);
    assert_eq!(of(&held, Category::Parameter), 2 * PARAMETERS / u64::from(RANKS));
}

/// With the optimizer on the host the device keeps the weights, and the host 16 bytes of the partition; the weights in
/// 16 bits that DeepSpeed keeps beside them, and its buffers, are no part of its estimate.
#[test]
fn offloaded_states_are_16_bytes_of_the_partition() {
    let partition = PARAMETERS / u64::from(RANKS);
    for (stage, weights) in
        [(Stage::One, 2 * PARAMETERS), (Stage::Two, 2 * PARAMETERS), (Stage::Three, 2 * partition)]
    {
        let tape = tape(stage, &[Offload::Optimizer]);
        let (device, host) = (states(&tape, 0).0, states(&tape, 1).0);
        assert_eq!(of(&device, Category::Parameter), weights, "{stage:?}");
        assert_eq!(
            of(&device, Category::MasterWeight) + of(&device, Category::OptimizerState),
            0,
            "{stage:?}"
        );
        let wide = of(&host, Category::MasterWeight) + of(&host, Category::OptimizerState);
        assert_eq!(wide, 12 * partition, "{stage:?}");
        // In stage 3 gradients wait in 16 bits besides.
        let narrow = if stage == Stage::Three { 2 * partition } else { 0 };
        assert_eq!(of(&host, Category::Gradient), 4 * partition + narrow, "{stage:?}");
    }
}

/// With the parameters there too, nothing of the states stays on the device.
#[test]
fn offloaded_parameters_leave_no_state() {
    let (held, _) = states(&tape(Stage::Three, &[Offload::Optimizer, Offload::Parameters]), 0);
    assert!(STATES.iter().all(|state| of(&held, *state) == 0), "{held:?}");
}
