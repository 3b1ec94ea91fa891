//! What a plan says of one rank: the specification's sentence of sharding, and the budget of a rank.
#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use vramledger::ledger::Category::{Activation, Gradient, MasterWeight, OptimizerState, Parameter};
use vramledger::ledger::{Category, Dtype};
use vramledger::models::{Ddp, Fsdp2, GPUS, Megatron, Model, Parallel, Setup, Sharding, Stage, State, Zero};
use vramledger::wire::{self, Ledger, RankBytes};
use vramledger::{CONTEXT, NamedModel, PlanQuestion, RankQuestion, plan, rank_budget};

/// The ways to divide a model that are planned, but for groups of ranks.
const KINDS: [Sharding; 6] =
    [Sharding::Ddp, Sharding::Zero1, Sharding::Zero2, Sharding::Zero3, Sharding::Fsdp2, Sharding::MegatronDo];

fn parallel(kind: Sharding) -> Parallel {
    match kind {
        Sharding::Ddp => Parallel::Ddp(Ddp::default()),
        Sharding::Zero1 => Parallel::Zero(Zero::new(Stage::One)),
        Sharding::Zero2 => Parallel::Zero(Zero::new(Stage::Two)),
        // No parameter stays whole for being small.
        Sharding::Zero3 => Parallel::Zero(Zero { param_persistence_threshold: 0, ..Zero::new(Stage::Three) }),
        Sharding::Fsdp2 => Parallel::Fsdp2(Fsdp2::default()),
        Sharding::Hsdp => Parallel::Fsdp2(Fsdp2 { shard_size: Some(1), ..Fsdp2::default() }),
        Sharding::MegatronDo => Parallel::MegatronDo(Megatron::default()),
    }
}

/// A llama of odd extents, tied to its embedding or not.
fn llama(width: u64, tied: bool) -> NamedModel {
    let (hidden, ffn) = (width * 8, width * 13);
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": 101, "hidden_size": {hidden}, "intermediate_size": {ffn},
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 512,
            "tie_word_embeddings": {tied}}}"#
    );
    NamedModel { name: "llama".into(), model: Model::from_config(&config).unwrap() }
}

fn planned(model: &NamedModel, setup: &Setup) -> Ledger {
    let question = PlanQuestion {
        model,
        setup: Setup { seqs: vec![8], ..setup.clone() },
        gpu: GPUS[0].clone(),
        context: CONTEXT,
        alloc_conf: String::new(),
    };
    plan(question).unwrap().ledger
}

fn ranked(kind: Sharding, dtype: Dtype, world_size: u32, rank: u32) -> Setup {
    Setup {
        dtype: Some(dtype),
        world_size,
        rank,
        parallel: Some(parallel(kind)),
        steps: 2,
        ..Setup::default()
    }
}

/// Requested bytes by category at the end of the last phase of that name.
fn held(ledger: &Ledger, phase: &str) -> BTreeMap<wire::Category, u64> {
    ledger.phases.iter().rfind(|row| row.phase == phase && row.device == 0).unwrap().end_by_category.clone()
}

fn of(held: &BTreeMap<wire::Category, u64>, category: Category) -> u64 {
    held.get(&wire::Category(category)).copied().unwrap_or(0)
}

fn peak(ledger: &Ledger) -> u64 {
    ledger.peaks.requested.as_ref().unwrap().bytes
}

/// What the budget says of one rank, for the recipe that a plan of weights in `dtype` runs.
fn budgeted(model: &NamedModel, kind: Sharding, dtype: Dtype, world_size: u32, rank: u32) -> RankBytes {
    let question =
        RankQuestion { parallel: kind, world_size, rank, shard_size: None, model: Some(model), sizes: &[] };
    let recipe = match (kind, dtype) {
        (_, Dtype::Fp32) => "fp32",
        (Sharding::Ddp | Sharding::Fsdp2, _) => "pure bf16",
        _ => "mixed",
    };
    let budget = rank_budget(&question).unwrap();
    let mut rows = budget.models[0].rows.iter();
    rows.find(|row| row.parallel == kind.as_str() && row.recipe.starts_with(recipe)).unwrap().clone()
}

fn ranks() -> impl Strategy<Value = (u64, bool, Dtype, u32)> {
    (1..6_u64, any::<bool>(), prop_oneof![Just(Dtype::Fp32), Just(Dtype::Bf16)], 2..7_u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// The sum over ranks of a sharded state is the unsharded one plus padding, and each rank holds what its budget
    /// says, to the byte.
    #[test]
    fn ranks_hold_the_whole_and_padding((width, tied, dtype, world) in ranks()) {
        let model = llama(width, tied);
        let shapes = model.model.shapes().unwrap();
        let unsharded = held(&planned(&model, &ranked(Sharding::Ddp, Dtype::Fp32, 1, 0)), "update");
        let whole = of(&unsharded, OptimizerState);
        for kind in KINDS {
            let mut sum = 0;
            for rank in 0..world {
                let ledger = planned(&model, &ranked(kind, dtype, world, rank));
                let budget = budgeted(&model, kind, dtype, world, rank);
                let (after, backward) = (held(&ledger, "update"), held(&ledger, "backward"));
                prop_assert_eq!(of(&after, Parameter), budget.parameter_bytes, "{:?} {}", kind, rank);
                prop_assert_eq!(of(&after, MasterWeight), budget.master_weight_bytes, "{:?} {}", kind, rank);
                prop_assert_eq!(of(&after, OptimizerState), budget.optimizer_state_bytes, "{:?} {}", kind, rank);
                // DeepSpeed lets gradients go as they are reduced, to the partition that the update takes.
                if !matches!(kind, Sharding::Zero1 | Sharding::Zero2 | Sharding::Zero3) {
                    prop_assert_eq!(of(&backward, Gradient), budget.gradient_bytes, "{:?} {}", kind, rank);
                }
                let share = kind.share(State::OptimizerState, &shapes, world.into(), rank.into());
                sum += of(&after, OptimizerState) / share.elements.max(1) * share.real();
            }
            // Moments in bf16 are half of those in fp32.
            let narrow = dtype == Dtype::Bf16 && matches!(kind, Sharding::Ddp | Sharding::Fsdp2);
            let copies = if kind == Sharding::Ddp { u64::from(world) } else { 1 };
            prop_assert_eq!(sum, whole * copies / if narrow { 2 } else { 1 }, "{:?}", kind);
        }
    }

    /// However many ranks there are, the peak of one does not fall below what it gathers at once: the largest unit of
    /// FSDP2, the largest parameter of ZeRO-3, and all weights where they are not divided.
    #[test]
    fn a_peak_is_not_below_the_largest_gather((width, tied, dtype, _) in ranks(), world in 2..3000_u32) {
        let model = llama(width, tied);
        let bytes = |shape: &Vec<u64>| shape.iter().product::<u64>() * dtype.size();
        let shapes = model.model.shapes().unwrap();
        // The root has the embeddings, the last norm and the head; the two blocks nine parameters each.
        let (blocks, all) = (&shapes[1..19], shapes.iter().map(bytes).sum::<u64>());
        let of_blocks = blocks.iter().map(bytes).sum::<u64>();
        for kind in KINDS {
            let ledger = planned(&model, &ranked(kind, dtype, world, world - 1));
            let gather = match kind {
                Sharding::Fsdp2 => (of_blocks / 2).max(all - of_blocks),
                Sharding::Zero3 => shapes.iter().map(bytes).max().unwrap_or(0),
                _ => all,
            };
            prop_assert!(peak(&ledger) >= gather, "{:?}: {} below {}", kind, peak(&ledger), gather);
        }
    }
}

/// Where activations make the peak, dividing what is not there saves nothing, and dividing the rest no more than that:
/// in the first step the optimizer has no state yet.
#[test]
fn sharding_saves_nothing_of_activations() {
    let model = llama(4, false);
    let run = |kind, world, batch| {
        let setup = Setup { batch, steps: 1, ..ranked(kind, Dtype::Fp32, world, 0) };
        planned(&model, &setup)
    };
    for kind in KINDS {
        let (few, many) = (run(kind, 2, 256), run(kind, 64, 256));
        let at_peak = |ledger: &Ledger| ledger.peaks.requested.clone().unwrap();
        assert_ne!(at_peak(&few).phase.as_deref(), Some("update"), "{kind:?}");
        let [before, after] = [&few, &many].map(|ledger| at_peak(ledger).by_category);
        assert_eq!(of(&before, Activation), of(&after, Activation), "{kind:?}");
        assert!(of(&before, Activation) > 10 * of(&before, Parameter), "{kind:?}");
        assert_eq!((of(&before, OptimizerState), of(&after, OptimizerState)), (0, 0), "{kind:?}");
        match kind {
            // Nothing that is there is divided.
            Sharding::Ddp => assert_eq!(peak(&few), peak(&many)),
            // What is there is weights and gradients: the master weights of ZeRO alone are divided.
            Sharding::MegatronDo => {
                let padding = of(&after, Parameter) + of(&after, Gradient)
                    - of(&before, Parameter)
                    - of(&before, Gradient);
                assert_eq!(peak(&few) + padding, peak(&many));
            }
            Sharding::Zero1 => {
                assert!(peak(&few) - peak(&many) <= of(&before, MasterWeight));
            }
            _ => assert!(peak(&few) >= peak(&many), "{kind:?}"),
        }
    }
}
