//! What checkpointing every S of L layers keeps: L/S + S units of one layer's activations.

use wire::answers::{CheckpointPlan, CheckpointSegment};

use crate::Error;

/// The most layers that are counted: their divisors and the best segment are found by trial.
const MOST_LAYERS: u64 = 1_000_000;

/// The plan of `layers` layers: `segment`, or every segment that divides them, and the best one.
///
/// Forward keeps the input of each segment (L/S); backward runs one segment again and keeps its
/// activations (S) until they are used. The sum is least near the square root of L (the
/// specification, memory-accounting, part 5).
pub fn checkpoint_plan(layers: u64, segment: Option<u64>) -> Result<CheckpointPlan, Error> {
    if !(1..=MOST_LAYERS).contains(&layers) {
        return Err(Error::out_of_range("--layers", format!("between 1 and {MOST_LAYERS}"), layers));
    }
    if let Some(segment) = segment.filter(|segment| !(1..=layers).contains(segment)) {
        let range = format!("between 1 and the {layers} layers");
        return Err(Error::out_of_range("--segment", range, segment));
    }
    let best = best_segment(layers);
    let mut shown: Vec<u64> = match segment {
        Some(segment) => vec![segment],
        None => (1..=layers).filter(|segment| layers.is_multiple_of(*segment)).collect(),
    };
    shown.push(best);
    shown.sort_unstable();
    shown.dedup();
    Ok(CheckpointPlan {
        format: CheckpointPlan::FORMAT.into(),
        layers,
        units_without: layers,
        segments: shown.into_iter().map(|segment| units(layers, segment)).collect(),
        best: units(layers, best),
        interpretation_limits: vec![
            "a unit is the activations of one layer, and the input of a layer counts as one too: a transformer layer keeps ten to some tens of its input, so that keeping only inputs saves far more there"
                .into(),
            "every segment is run once more in backward: about 8ND instead of 6ND floating-point operations".into(),
        ],
    })
}

/// Peak activations with checkpoints every `segment` layers.
fn units(layers: u64, segment: u64) -> CheckpointSegment {
    let kept = layers as f64 / segment as f64;
    CheckpointSegment { segment, kept_units: kept, recomputed_units: segment, units: kept + segment as f64 }
}

/// The segment with the least L/S + S, the shortest on ties, without rounding: L/S + S < L/T + T
/// exactly when (L + S*S)*T < (L + T*T)*S.
fn best_segment(layers: u64) -> u64 {
    let root = layers.isqrt();
    (root..=layers.min(root + 1)).fold(root, |best, segment| {
        if (layers + segment * segment) * best < (layers + best * best) * segment { segment } else { best }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// memory-accounting, part 5 (demonstration 5).
    #[test]
    fn sixteen_layers_in_segments_of_1_2_4_8_and_16() {
        let plan = checkpoint_plan(16, None).unwrap();
        let rows: Vec<(u64, f64)> = plan.segments.iter().map(|s| (s.segment, s.units)).collect();
        assert_eq!(rows, [(1, 17.0), (2, 10.0), (4, 8.0), (8, 10.0), (16, 17.0)]);
        assert_eq!((plan.best.segment, plan.best.units, plan.units_without), (4, 8.0, 16));
        assert_eq!(checkpoint_plan(100, None).unwrap().best.units, 20.0);
    }

    #[test]
    fn the_best_segment_is_the_best_of_all() {
        for layers in 1..500 {
            let best = checkpoint_plan(layers, None).unwrap().best;
            for segment in 1..=layers {
                assert!(units(layers, segment).units >= best.units - 1e-9, "{layers} layers by {segment}");
            }
        }
    }

    #[test]
    fn a_segment_is_between_one_and_all_layers() {
        assert!(checkpoint_plan(0, None).is_err());
        assert!(checkpoint_plan(16, Some(0)).is_err());
        assert!(checkpoint_plan(16, Some(17)).is_err());
        assert!(checkpoint_plan(u64::MAX, None).is_err());
        let plan = checkpoint_plan(16, Some(3)).unwrap();
        assert_eq!(plan.segments.iter().map(|s| s.segment).collect::<Vec<_>>(), [3, 4]);
    }
}
