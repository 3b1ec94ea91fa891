//! The segments that hold a memory budget with the least recomputation: found by dynamic programming on what two
//! runs show of the layers, and checked by a run of their own.

use std::collections::BTreeMap;

use ledger::{Bytes, Category, DeviceId, Event, LabelId, Phase, Tape};
use models::Checkpoint;
use wire::answers::{CheckpointBudget, CheckpointStrategy};

use crate::levers::STEADY;
use crate::segments::{Extents, Segments, least_memory, least_work};
use crate::{Error, PlanQuestion, plan};

/// Segments are tried until they repeat, and not more often than this.
const MOST_TRIALS: usize = 8;
/// The most layers whose segments are searched.
const MOST_LAYERS: u64 = 512;

/// A run with one form of checkpointing.
struct Trial {
    strategy: CheckpointStrategy,
    measured: Measured,
}

/// What a run holds, in requested bytes.
#[derive(Default)]
struct Measured {
    /// What each layer holds when the first forward pass ends.
    layers: BTreeMap<usize, u64>,
    /// The largest total of the passes before backward runs a layer again.
    at_loss: u64,
    /// The largest total while backward runs a layer again, by layer.
    at_layer: BTreeMap<usize, u64>,
    /// How much more blocks are, at the peak.
    rounding: u64,
}

impl Measured {
    fn at_segment(&self) -> Option<u64> {
        self.at_layer.values().max().copied()
    }
}

/// The segments of the model's layers that recompute least within `budget` of allocated bytes, beside no
/// checkpointing, that of every layer, and segments of the square root of all layers.
///
/// # Errors
/// A setup that the model cannot run, or more layers than are searched.
pub fn checkpoint_budget(mut question: PlanQuestion<'_>, budget: Bytes) -> Result<CheckpointBudget, Error> {
    let layers = question.model.model.layers();
    if layers > MOST_LAYERS {
        return Err(Error::out_of_range("layers", format!("at most {MOST_LAYERS} for a search"), layers));
    }
    if question.setup.seqs.is_empty() {
        question.setup.seqs.extend(question.model.model.usual_seq());
    }
    question.setup.steps = question.setup.steps.min(STEADY);
    question.setup.accumulate = question.setup.accumulate.min(STEADY);
    let search = Search { question, budget, layers };
    let none = search.trial("none", Checkpoint::None)?;
    let full = search.trial("every layer", Checkpoint::Full)?;
    let root = search.trial("square root", search.even(layers.isqrt()))?;
    let extents = search.extents(&none, &full, &root);
    let (kept_bytes, input_bytes) = (extents.kept.iter().copied().max().unwrap_or(0), extents.input);
    let rounding = full.measured.rounding;
    let mut strategies = vec![none.strategy, full.strategy, root.strategy];
    let lowest = |tried: &CheckpointStrategy| Some((tried.peak_allocated_bytes, tried.recompute_flops));
    let least = |extents: &Extents, _| least_memory(extents);
    strategies.extend(search.refine("least memory", extents.clone(), rounding, least, lowest)?);
    let cheapest = |tried: &CheckpointStrategy| {
        tried.within_budget.then_some((tried.recompute_flops, tried.peak_allocated_bytes))
    };
    let found = search.refine("least recomputation", extents, rounding, least_work, cheapest)?;
    let ranked = strategies.iter().chain(&found).filter_map(|tried| Some((cheapest(tried)?, tried)));
    let best = ranked.min_by_key(|(rank, _)| *rank).map(|(_, tried)| tried.clone());
    Ok(CheckpointBudget {
        format: CheckpointBudget::FORMAT.into(),
        subject: plan::subject(&search.question),
        budget_bytes: budget.get(),
        layers,
        kept_bytes,
        input_bytes,
        strategies,
        best,
        interpretation_limits: vec![
            "recomputed are layers from the first on, in segments, and the last layers are not: elsewhere they would save less".into(),
            "the dynamic programme takes what each layer keeps, its input and what backward holds besides from three runs; each row is a run of its own".into(),
        ],
    })
}

struct Search<'a> {
    question: PlanQuestion<'a>,
    budget: Bytes,
    layers: u64,
}

impl Search<'_> {
    /// Segments of `size` layers, the last one shorter.
    fn even(&self, size: u64) -> Checkpoint {
        let size = size.max(1);
        let whole = (0..self.layers / size).map(|_| size);
        let rest = self.layers % size;
        Checkpoint::Segments(whole.chain((rest > 0).then_some(rest)).collect())
    }

    /// A run with `checkpoint`.
    fn trial(&self, name: &str, checkpoint: Checkpoint) -> Result<Trial, Error> {
        let mut question = self.question.clone();
        question.setup.checkpoint = checkpoint;
        question.setup.checkpoint_reentrant &= question.setup.checkpoint != Checkpoint::None;
        let mut run = plan::run(&question)?;
        let mut measured = measure(&run.tape);
        for device in &mut run.tape.devices {
            device.capacity = None;
        }
        let books = plan::fitted(&question, &run.tape)?.books;
        let peak = books.peaks.allocated.as_ref();
        let bytes = peak.map_or(0, |peak| peak.bytes.get());
        measured.rounding = bytes.saturating_sub(measured.at_loss.max(measured.at_segment().unwrap_or(0)));
        let at = peak.and_then(|peak| peak.at.as_ref());
        let strategy = CheckpointStrategy {
            name: name.into(),
            checkpoint: question.setup.checkpoint.to_string(),
            peak_allocated_bytes: bytes,
            peak_step: at.map(|at| at.step),
            peak_phase: at.map(|at| at.phase.clone()),
            recompute_flops: run.flops.recompute,
            forward_flops: run.flops.forward,
            within_budget: bytes <= self.budget.get(),
        };
        Ok(Trial { strategy, measured })
    }

    /// The strategy of the lowest rank of those that `choose` finds for a budget of requested bytes; what it
    /// expected is corrected by each run. `rounding` is how much more blocks are than what is requested.
    fn refine<R: Ord>(
        &self,
        name: &str,
        mut extents: Extents,
        mut rounding: u64,
        choose: impl Fn(&Extents, u64) -> Option<Segments>,
        rank: impl Fn(&CheckpointStrategy) -> Option<R>,
    ) -> Result<Option<CheckpointStrategy>, Error> {
        let mut best: Option<(R, CheckpointStrategy)> = None;
        let mut tried = Vec::new();
        while tried.len() < MOST_TRIALS {
            let Some(found) = choose(&extents, self.budget.get().saturating_sub(rounding)) else { break };
            if found.counts.is_empty() || tried.contains(&found.counts) {
                break;
            }
            let Trial { strategy, measured } =
                self.trial(name, Checkpoint::Segments(found.counts.clone()))?;
            rounding = measured.rounding;
            correct(&mut extents.besides_loss, found.at_loss, measured.at_loss);
            if let (Some(expected), Some(seen)) = (found.at_segment, measured.at_segment()) {
                extents.besides_segment.iter_mut().for_each(|besides| correct(besides, expected, seen));
            }
            if let Some(rank) = rank(&strategy)
                && best.as_ref().is_none_or(|(lowest, _)| rank < *lowest)
            {
                best = Some((rank, strategy));
            }
            tried.push(found.counts);
        }
        Ok(best.map(|(_, strategy)| strategy))
    }

    /// What the runs without checkpointing, with that of every layer and with segments tell of the layers.
    fn extents(&self, none: &Trial, full: &Trial, root: &Trial) -> Extents {
        let layers = 0..self.layers as usize;
        let of = |map: &BTreeMap<usize, u64>, layer: usize| map.get(&layer).copied().unwrap_or(0);
        let kept: Vec<u64> = layers.clone().map(|layer| of(&none.measured.layers, layer)).collect();
        let input = full.measured.layers.values().max().copied().unwrap_or(0);
        let besides = |layer: usize| {
            of(&full.measured.at_layer, layer).saturating_sub(layer as u64 * input + kept[layer])
        };
        // Both run every layer again; the one with fewer segments saves less.
        let fewer_segments = self.layers - self.layers.div_ceil(self.layers.isqrt().max(1));
        let [all, rooted] = [full, root].map(|trial| trial.strategy.recompute_flops);
        let segment_saves = rooted.saturating_sub(all).checked_div(fewer_segments).unwrap_or(0);
        Extents {
            besides_loss: full.measured.at_loss.saturating_sub(self.layers * input),
            besides_segment: layers.map(besides).collect(),
            kept,
            input,
            layer_work: all / self.layers + segment_saves,
            segment_saves,
        }
    }
}

/// Moves `value` by what was seen more, or less, than expected.
fn correct(value: &mut u64, expected: u64, seen: u64) {
    *value = (*value + seen).saturating_sub(expected);
}

/// What the layers of a run hold, and when.
fn measure(tape: &Tape) -> Measured {
    let mut measured = Measured::default();
    let mut held: BTreeMap<u32, (u64, Option<usize>)> = BTreeMap::new();
    let (mut total, mut phase, mut layer) = (0, None, None);
    for event in tape.events() {
        match event {
            Event::Mark(mark) => {
                let mark = tape.mark_of(mark);
                if mark.phase == Phase::BACKWARD && measured.layers.is_empty() {
                    for (bytes, layer) in held.values() {
                        if let Some(layer) = layer {
                            *measured.layers.entry(*layer).or_default() += bytes;
                        }
                    }
                }
                (phase, layer) = (Some(mark.phase), None);
            }
            Event::Alloc { object, bytes, device: DeviceId(0), .. } => {
                let of = layer_of(tape, tape.object(object).label);
                if phase == Some(Phase::BACKWARD) && of.is_some() {
                    layer = of;
                }
                total += bytes.get();
                held.insert(object.0, (bytes.get(), of));
            }
            Event::Free(object) => {
                if let Some((bytes, _)) = held.remove(&object.0) {
                    total -= bytes;
                }
            }
            _ => {}
        }
        match (phase, layer) {
            (Some(Phase::BACKWARD), Some(layer)) => {
                let highest = measured.at_layer.entry(layer).or_default();
                *highest = total.max(*highest);
            }
            (Some(Phase::FORWARD | Phase::BACKWARD), _) => measured.at_loss = measured.at_loss.max(total),
            _ => {}
        }
    }
    measured
}

/// The layer that an activation is of: the first number in the path of its module.
fn layer_of(tape: &Tape, label: LabelId) -> Option<usize> {
    let label = tape.label(label);
    let owner = label.owner.filter(|_| label.category == Category::Activation)?;
    tape.name(owner).split('.').find_map(|part| part.parse().ok())
}
