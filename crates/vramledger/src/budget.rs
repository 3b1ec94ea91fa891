//! What a parameter costs by recipe, the largest model that some cards hold, the cards a size needs.

use models::Gpu;
use wire::answers::{Budget, BudgetCards, BudgetModel, BudgetRecipe};

use crate::Error;

/// Bytes of one parameter: weight, gradient, fp32 master weight, the two moments of Adam.
pub(crate) struct Recipe {
    pub(crate) name: &'static str,
    pub(crate) parts: [u64; 4],
    pub(crate) note: Option<&'static str>,
}

/// The recipes of training with Adam. The first three are the specification's (`TRAINING_SETUPS`);
/// the fourth is `torch.optim.AdamW` on bf16 weights, whose moments take the dtype of the weights;
/// the fifth is `torch.autocast` on fp32 weights.
pub(crate) const RECIPES: &[Recipe] = &[
    Recipe { name: "fp32", parts: [4, 4, 0, 8], note: None },
    Recipe { name: "bf16 weights and gradients, fp32 Adam", parts: [2, 2, 0, 8], note: None },
    Recipe { name: "mixed: bf16 copy, fp32 master weights", parts: [2, 2, 4, 8], note: None },
    Recipe { name: "pure bf16", parts: [2, 2, 0, 4], note: None },
    Recipe {
        name: "autocast on fp32 weights",
        parts: [4, 4, 0, 8],
        note: Some("and up to 2 bytes a parameter of bf16 casts inside an autocast region"),
    },
];

/// Bytes a parameter that the cards of a size are counted with: mixed precision, the specification's.
const MIXED: u64 = 16;

/// The sizes of the specification: 124M, 1.5B, 7B, 70B and 405B parameters.
pub const DEFAULT_SIZES: [u64; 5] =
    [124_000_000, 1_500_000_000, 7_000_000_000, 70_000_000_000, 405_000_000_000];

/// The budget of `count` cards, and the cards that models of `sizes` parameters need.
///
/// Largest model: all bytes of the cards over the bytes a parameter. Cards: the bytes of a model
/// over the bytes of one card, rounded up. Both take no activation, buffer or context into account,
/// and take the states as shared out evenly over the cards.
pub fn budget(sizes: &[u64], gpu: &Gpu, count: u64) -> Result<Budget, Error> {
    if !(1..=1_000_000).contains(&count) {
        return Err(Error::out_of_range("--gpus", "between 1 and 1000000", count));
    }
    check_sizes(sizes)?;
    let (nominal, capacity) = (gpu.nominal.get(), gpu.capacity.get());
    let recipes = RECIPES.iter().map(|recipe| {
        let [parameter, gradient, master_weight, optimizer_state] = recipe.parts;
        let sum: u64 = recipe.parts.iter().sum();
        BudgetRecipe {
            name: recipe.name.into(),
            parameter,
            gradient,
            master_weight,
            optimizer_state,
            bytes_per_parameter: sum,
            largest_model_nominal: count * nominal / sum,
            largest_model_capacity: count * capacity / sum,
            note: recipe.note.map(Into::into),
        }
    });
    let models = sizes.iter().map(|&parameters| {
        let bytes = parameters * MIXED;
        BudgetModel {
            parameters,
            bytes_per_parameter: MIXED,
            bytes,
            cards_nominal: bytes.div_ceil(nominal),
            cards_capacity: bytes.div_ceil(capacity),
        }
    });
    Ok(Budget {
        format: Budget::FORMAT.into(),
        cards: BudgetCards {
            gpu: gpu.name.into(),
            count,
            nominal_bytes: nominal,
            capacity_bytes: capacity,
        },
        recipes: recipes.collect(),
        models: models.collect(),
        interpretation_limits: vec![
            "weights, gradients and optimizer state only: activations, temporaries, workspaces and the CUDA context come on top"
                .into(),
            "several cards hold a model only where its states are sharded over them (ZeRO-3, FSDP)".into(),
        ],
    })
}

/// Refuses a number of parameters that no model has.
pub(crate) fn check_sizes(sizes: &[u64]) -> Result<(), Error> {
    match sizes.iter().find(|size| !(1..=1_000_000_000_000_000).contains(*size)) {
        Some(size) => Err(Error::out_of_range("--params", "between 1 and 10^15", size)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn h100() -> &'static Gpu {
        crate::find_gpu("H100-80GB").unwrap()
    }

    /// memory-accounting, part 1 (demonstration 1): 16, 12 and 16 bytes; 40, 53 and 40 B on 8 x 80 GB.
    #[test]
    fn bytes_a_parameter_and_the_largest_model_on_eight_cards() {
        let budget = budget(&[], h100(), 8).unwrap();
        let sums: Vec<u64> = budget.recipes.iter().map(|r| r.bytes_per_parameter).collect();
        assert_eq!(sums, [16, 12, 16, 8, 16]);
        let largest: Vec<u64> =
            budget.recipes.iter().map(|r| r.largest_model_nominal / 100_000_000).collect();
        assert_eq!(largest[..3], [400, 533, 400]);
        assert_eq!(budget.recipes[0].largest_model_capacity, 8 * 85_520_809_984 / 16);
    }

    /// memory-accounting, demonstration 6: cards of 80 GB at 16 bytes a parameter.
    #[test]
    fn cards_that_each_size_needs() {
        let budget = budget(&DEFAULT_SIZES, h100(), 1).unwrap();
        let cards: Vec<u64> = budget.models.iter().map(|m| m.cards_nominal).collect();
        assert_eq!(cards, [1, 1, 2, 14, 81]);
        assert_eq!(budget.models[4].bytes, 6_480_000_000_000);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(budget(&[0], h100(), 1).is_err());
        assert!(budget(&[u64::MAX], h100(), 1).is_err());
        assert!(budget(&[], h100(), 0).is_err());
        assert!(budget(&[], h100(), u64::MAX).is_err());
    }
}
