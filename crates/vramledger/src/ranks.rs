//! What one rank of a job holds of the states of training, by recipe and by how they are divided.

use models::{Sharding, State};
use wire::{RankBudget, RankBytes, RankModel, RankPart, RankRate};

use crate::budget::{RECIPES, Recipe, check_sizes};
use crate::{Error, NamedModel};

/// What is asked of [`rank_budget`].
#[derive(Clone, Copy, Debug)]
pub struct RankQuestion<'a> {
    /// How the states are divided.
    pub parallel: Sharding,
    /// The ranks of the job.
    pub world_size: u32,
    /// Which of them.
    pub rank: u32,
    /// The ranks of a group of hsdp.
    pub shard_size: Option<u32>,
    /// The model; none: only sizes are known.
    pub model: Option<&'a NamedModel>,
    /// Numbers of parameters, where there is no model.
    pub sizes: &'a [u64],
}

/// fp16 weights and gradients beside fp32 master weights.
const FP16: Recipe = Recipe { name: "fp16, fp32 master weights", parts: [2, 2, 4, 8], note: None };

/// Bytes of weight, gradient, master weight, moments and fp32 copy of the gradient under Megatron's distributed
/// optimizer, by recipe: 8 + 8/d, 6 + 12/d and 4 + 16/d of its documentation. bf16 gradients are summed in fp32.
const MEGATRON: [(&str, [u64; 5]); 3] =
    [(RECIPES[0].name, [4, 4, 0, 8, 0]), (RECIPES[2].name, [2, 4, 4, 8, 0]), (FP16.name, [2, 2, 4, 8, 4])];

/// What `rank` holds of each size, or of the model, under every recipe and division.
///
/// # Errors
/// A rank or a group that is none, or a size that no model has.
pub fn rank_budget(question: &RankQuestion<'_>) -> Result<RankBudget, Error> {
    let RankQuestion { parallel, world_size, rank, shard_size, model, sizes } = *question;
    check_sizes(sizes)?;
    if world_size == 0 {
        return Err(Error::out_of_range("--world-size", "at least 1", world_size));
    }
    if rank >= world_size {
        let what = format!("`--rank {rank}`: ranks count from 0, and `--world-size` is {world_size}");
        return Err(Error::Setup { what });
    }
    check_group(parallel, world_size, shard_size)?;
    let layouts: Vec<(Option<String>, Vec<Vec<u64>>)> = match model {
        Some(NamedModel { name, model }) => {
            let shapes = model.shapes().map_err(|problem| Error::Model { name: name.clone(), problem })?;
            vec![(Some(name.clone()), shapes)]
        }
        None => sizes.iter().map(|&size| (None, vec![vec![size]])).collect(),
    };
    let recipes = || RECIPES.iter().chain([&FP16]);
    let shardings = Sharding::ALL.iter().filter(|one| **one != Sharding::Hsdp || shard_size.is_some());
    let rows: Vec<(Sharding, &Recipe, [u64; 5])> = shardings
        .flat_map(|&one| recipes().filter_map(move |recipe| Some((one, recipe, parts(one, recipe)?))))
        .collect();
    // How many ranks share what is divided, and which of them it is.
    let group = |one: Sharding| match shard_size {
        Some(size) if one == Sharding::Hsdp => (u64::from(size), u64::from(rank % size)),
        _ => (u64::from(world_size), u64::from(rank)),
    };
    let rates = rows.iter().map(|&(one, recipe, parts)| rate(one, recipe, parts, group(one).0));
    let models = layouts.into_iter().map(|(name, shapes)| RankModel {
        name,
        parameters: shapes.iter().map(|shape| shape.iter().product::<u64>()).sum(),
        rows: rows
            .iter()
            .map(|&(one, recipe, parts)| bytes(one, recipe, parts, &shapes, group(one)))
            .collect(),
    });
    Ok(RankBudget {
        format: RankBudget::FORMAT.into(),
        parallel: parallel.as_str().into(),
        world_size: world_size.into(),
        rank: rank.into(),
        shard_size: shard_size.map(Into::into),
        rates: rates.collect(),
        models: models.collect(),
        interpretation_limits: limits(model.is_none()),
    })
}

/// Refuses groups that hsdp cannot have, and groups of anything else.
fn check_group(parallel: Sharding, world_size: u32, group: Option<u32>) -> Result<(), Error> {
    let what = match group {
        None if parallel == Sharding::Hsdp => {
            "`--parallel hsdp` needs `--shard-size`, the ranks that share one copy of the parameters".into()
        }
        Some(_) if parallel != Sharding::Hsdp => {
            format!("`--shard-size` is of hsdp, and `--parallel` is {}", parallel.as_str())
        }
        Some(size) if size == 0 || !world_size.is_multiple_of(size) => {
            format!("`--shard-size {size}`: {world_size} ranks of `--world-size` are not a multiple of it")
        }
        _ => return Ok(()),
    };
    Err(Error::Setup { what })
}

/// Bytes a parameter of each state, where somebody runs the recipe so.
fn parts(sharding: Sharding, recipe: &Recipe) -> Option<[u64; 5]> {
    let [parameter, gradient, master, moments] = recipe.parts;
    match sharding {
        Sharding::Ddp => Some([parameter, gradient, master, moments, if master > 0 { 4 } else { 0 }]),
        // The weights are the fp32 ones, of which 16-bit copies are gathered, and gradients come in their dtype.
        Sharding::Fsdp2 | Sharding::Hsdp if master > 0 => Some([master, master, 0, moments, 0]),
        Sharding::Fsdp2 | Sharding::Hsdp => Some([parameter, gradient, 0, moments, 0]),
        // DeepSpeed steps copies in the dtype of the moments, of fp32 weights too, and copies the gradients for that.
        Sharding::Zero1 | Sharding::Zero2 | Sharding::Zero3 => {
            let copy = moments / 2;
            (master > 0 || parameter >= copy).then_some([parameter, gradient, copy, moments, copy])
        }
        Sharding::MegatronDo => {
            MEGATRON.iter().find(|(name, _)| *name == recipe.name).map(|(_, parts)| *parts)
        }
    }
}

fn rate(sharding: Sharding, recipe: &Recipe, parts: [u64; 5], divisor: u64) -> RankRate {
    let part = |state: State| RankPart { bytes: parts[state as usize], divided: sharding.divides(state) };
    let states = State::ALL.map(part);
    let sum = |divided| {
        states[..4].iter().filter(|part| part.divided == divided).map(|part| part.bytes).sum::<u64>()
    };
    let [parameter, gradient, master_weight, optimizer_state, update_gradient] = states;
    RankRate {
        parallel: sharding.as_str().into(),
        recipe: recipe.name.into(),
        divisor: if sharding == Sharding::Ddp { 1 } else { divisor },
        parameter,
        gradient,
        master_weight,
        optimizer_state,
        update_gradient,
        on_every_rank: sum(false),
        divided: sum(true),
        bytes_per_parameter: sum(false) as f64 + sum(true) as f64 / divisor as f64,
    }
}

fn bytes(
    sharding: Sharding,
    recipe: &Recipe,
    parts: [u64; 5],
    shapes: &[Vec<u64>],
    (ranks, rank): (u64, u64),
) -> RankBytes {
    let held = State::ALL.map(|state| {
        let (share, bytes) = (sharding.share(state, shapes, ranks, rank), parts[state as usize]);
        (share.elements * bytes, share.padding * bytes)
    });
    let [parameter, gradient, master, moments, update] = held.map(|(bytes, _)| bytes);
    RankBytes {
        parallel: sharding.as_str().into(),
        recipe: recipe.name.into(),
        parameter_bytes: parameter,
        gradient_bytes: gradient,
        master_weight_bytes: master,
        optimizer_state_bytes: moments,
        bytes: parameter + gradient + master + moments,
        padding_bytes: held[..4].iter().map(|(_, padding)| padding).sum(),
        update_gradient_bytes: update,
    }
}

fn limits(sizes_alone: bool) -> Vec<String> {
    let mut limits = vec![
        "states only: activations, buckets, gathered weights, temporaries, workspaces and the context come on top; `vramledger plan --parallel` has them".to_owned(),
        "the copy of the gradients that the update makes lives in it alone and is not in the sums: with it ZeRO-2 is the 2P + 18P/N of DeepSpeed's estimator, ZeRO-1 the 4P + 16P/N that its documentation gives for ZeRO-2, and Megatron in fp16 the published 4 + 16/d".to_owned(),
        "zero1 to zero3 are DeepSpeed's, which steps a copy of its partition even where weights are fp32; fsdp2 and hsdp hold fp32 weights and gather 16-bit copies; megatron-do sums bf16 gradients in fp32".to_owned(),
        "ddp has buckets of the gradients' size besides, unless gradient_as_bucket_view is set".to_owned(),
    ];
    if sizes_alone {
        limits.push(
            "a number of parameters is divided as one tensor; a model's own parameters are padded each"
                .into(),
        );
    }
    let notes = RECIPES.iter().filter_map(|recipe| Some(format!("{}: {}", recipe.name, recipe.note?)));
    limits.extend(notes);
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(parallel: Sharding, world_size: u32, sizes: &[u64]) -> RankQuestion<'_> {
        RankQuestion { parallel, world_size, rank: 0, shard_size: None, model: None, sizes }
    }

    /// ZeRO (arXiv 1910.02054), table 1: 7.5B parameters on 64 ranks, and 128B and 1T on 1024, K = 12.
    #[test]
    fn the_table_of_the_zero_paper() {
        let rows = |ranks, size| {
            let budget = rank_budget(&question(Sharding::Zero3, ranks, &[size])).unwrap();
            let fp16 = budget.models[0].rows.iter().filter(|row| row.recipe == FP16.name);
            fp16.take(4).map(|row| format!("{:.1}", row.bytes as f64 / 1e9)).collect::<Vec<_>>()
        };
        assert_eq!(rows(64, 7_500_000_000), ["120.0", "31.4", "16.6", "1.9"]);
        assert_eq!(rows(1024, 128_000_000_000), ["2048.0", "513.5", "257.8", "2.0"]);
        assert_eq!(rows(1024, 1_000_000_000_000), ["16000.0", "4011.7", "2013.7", "15.6"]);
    }

    /// 8 + 8/d, 6 + 12/d and 4 + 16/d of Megatron's documentation.
    #[test]
    fn the_formulas_of_megatron() {
        let budget = rank_budget(&question(Sharding::MegatronDo, 8, &[1])).unwrap();
        let rates = budget.rates.iter().filter(|rate| rate.parallel == "megatron-do");
        let formulas: Vec<(u64, u64)> =
            rates.map(|rate| (rate.on_every_rank, rate.divided + rate.update_gradient.bytes)).collect();
        assert_eq!(formulas, [(8, 8), (6, 12), (4, 16)]);
    }

    /// `estimate_zero2_model_states_mem_needs` of DeepSpeed says 2P + 18P/N. Its 18P/N of stage 3 has the
    /// weights in place of the 16-bit gradients, which come to it here.
    #[test]
    fn the_estimators_of_deepspeed() {
        let size = 1_000_000;
        let budget = rank_budget(&question(Sharding::Zero2, 4, &[size])).unwrap();
        let with_update = |parallel: &str| {
            let mut rows = budget.models[0].rows.iter();
            let row = rows.find(|row| row.parallel == parallel && row.recipe == FP16.name).unwrap();
            row.bytes + row.update_gradient_bytes
        };
        assert_eq!(with_update("zero2"), 2 * size + 18 * size / 4);
        assert_eq!(with_update("zero3"), (2 + 18) * size / 4);
    }
}
