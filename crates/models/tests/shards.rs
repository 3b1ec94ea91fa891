//! How states are divided: what all ranks hold together is the whole, and padding.

use models::{FlatBuffer, Model, Sharding, Share, State};
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let shape = prop_oneof![
        prop::collection::vec(1..200_u64, 1),
        prop::collection::vec(1..40_u64, 2),
        prop::collection::vec(1..12_u64, 3)
    ];
    prop::collection::vec(shape, 1..12)
}

fn total(shapes: &[Vec<u64>]) -> u64 {
    shapes.iter().map(|shape| shape.iter().product::<u64>()).sum()
}

proptest! {
    /// The sum over ranks of a divided state is the undivided one plus padding; what is not divided is whole on each.
    #[test]
    fn all_ranks_hold_the_whole(shapes in shapes(), ranks in 1..40_u64) {
        let total = total(&shapes);
        for (&sharding, state) in Sharding::ALL.iter().flat_map(|one| State::ALL.map(|state| (one, state))) {
            let shares: Vec<Share> = (0..ranks).map(|rank| sharding.share(state, &shapes, ranks, rank)).collect();
            if sharding.divides(state) {
                prop_assert_eq!(shares.iter().map(|share| share.real()).sum::<u64>(), total, "{:?} {:?}", sharding, state);
            } else {
                prop_assert!(shares.iter().all(|share| share.real() == total), "{:?} {:?}", sharding, state);
            }
        }
    }

    /// Nobody holds less than an even part, padding included, of what comes in equal pieces.
    #[test]
    fn no_rank_holds_less_than_its_part(shapes in shapes(), ranks in 1..40_u64) {
        for sharding in [Sharding::Zero2, Sharding::Zero3, Sharding::Fsdp2] {
            for rank in 0..ranks {
                let share = sharding.share(State::Gradient, &shapes, ranks, rank);
                prop_assert!(share.elements >= total(&shapes).div_ceil(ranks), "{:?}", sharding);
            }
        }
    }

    /// Buckets follow each other, end at multiples of the ranks, and their pieces cover every parameter once.
    #[test]
    fn buckets_cover_every_parameter(sizes in prop::collection::vec(1..500_u64, 1..20), ranks in 1..20_u64, size in 1..900_u64) {
        for bucket_size in [None, Some(size)] {
            let buffer = FlatBuffer::new(&sizes, ranks, bucket_size);
            let ends: Vec<u64> = buffer.buckets().iter().map(|bucket| bucket.end).collect();
            let starts: Vec<u64> = buffer.buckets().iter().map(|bucket| bucket.start).collect();
            prop_assert_eq!(&starts[1..], &ends[..ends.len() - 1]);
            prop_assert!(ends.iter().all(|end| end % ranks == 0 && end % 128 == 0));
            let mut covered: Vec<u64> = vec![0; sizes.len()];
            for (index, piece) in (0..ranks).flat_map(|rank| buffer.pieces(ranks, rank)) {
                covered[index] += piece.end - piece.start;
            }
            prop_assert_eq!(&covered, &sizes);
        }
    }
}

#[test]
fn a_model_has_its_parameters_in_their_order() {
    let model = Model::from_mlp_name("mlp:3x8").unwrap().unwrap();
    assert_eq!(model.shapes().unwrap(), vec![vec![8, 8]; 3]);
    let gpt2 = models::PRESETS.iter().find(|preset| preset.name == "gpt2").unwrap();
    let shapes = Model::from_config(gpt2.config).unwrap().shapes().unwrap();
    assert_eq!((&shapes[0], total(&shapes)), (&vec![50_257, 768], 124_439_808));
}
