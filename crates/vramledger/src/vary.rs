//! One plan under other settings, each beside the first.

use std::collections::BTreeMap;

use ledger::Named;
use wire::{Candidate, Comparison, Costs, SettingValue, Variation, VariationOutcome, Variations};

use crate::{Error, Plan, PlanQuestion, plan};

/// What is left out of every answer here.
pub(crate) const ONE_PROCESS: &str =
    "one process on one device: no other process, no NCCL, no data loader on the GPU";

/// A combination of values, and the plan that it asks for or a sentence that says why it cannot be one.
#[derive(Debug)]
pub struct Combination<'a> {
    /// The values that are varied, by their keys.
    pub settings: Vec<SettingValue>,
    /// The question with these values.
    pub question: Result<PlanQuestion<'a>, String>,
}

/// The table of `combinations`, each beside the first. One that cannot be planned is a row that says why.
///
/// # Errors
/// The first cannot be planned: there is nothing to hold the others against.
pub fn vary(model: &str, combinations: Vec<Combination<'_>>) -> Result<Variations, Error> {
    let mut base = None;
    let mut rows = Vec::new();
    for Combination { settings, question } in combinations {
        let planned = question.and_then(|question| plan(question).map_err(|refused| refused.to_string()));
        let planned = match (planned, &base) {
            (Ok(plan), _) => Planned::new(plan),
            (Err(what), None) => return Err(Error::Setup { what }),
            (Err(refused), Some(_)) => {
                rows.push(Variation { settings, refused: Some(refused), outcome: None });
                continue;
            }
        };
        let peaks = base.get_or_insert_with(|| planned.peaks.clone());
        let outcome = Some(planned.beside(peaks)?);
        rows.push(Variation { settings, refused: None, outcome });
    }
    tell_no_gain(&mut rows);
    Ok(Variations {
        format: Variations::FORMAT.into(),
        model: model.into(),
        rows,
        interpretation_limits: vec![
            "to be measured: the time of a step, what of the copies and of the recomputation hides behind other work, and what other arithmetic does to the training".into(),
            ONE_PROCESS.into(),
        ],
    })
}

/// What one plan gives.
struct Planned {
    /// On a card without end: what a run that finds no room would need can be compared too.
    peaks: ledger::Peaks,
    ledger: wire::Ledger,
}

impl Planned {
    fn new(plan: Plan<'_>) -> Self {
        Self { peaks: ledger::replay(&plan.tape, None).peaks, ledger: plan.ledger }
    }

    fn beside(self, base: &ledger::Peaks) -> Result<VariationOutcome, Error> {
        let named = |name, peaks| Named { name, peaks };
        let compared = ledger::compare(named("first", base), &[named("other", &self.peaks)])?;
        let candidate = Comparison::from(&compared).candidates.pop();
        let candidate = candidate.ok_or_else(|| Error::Setup { what: "there is nothing to vary".into() })?;
        let Candidate { peak, saving_bytes, saving_by_category, unchanged, .. } = candidate;
        let Self { ledger, .. } = self;
        let traffic = ledger.traffic.unwrap_or_default();
        let collectives = ledger.ranks.iter().flat_map(|ranks| &ranks.collectives);
        let fits = ledger.fits == Some(true);
        let of_run = |peak: &Option<wire::Peak>| peak.as_ref().map(|peak| peak.bytes).filter(|_| fits);
        Ok(VariationOutcome {
            fits,
            headroom_bytes: ledger.headroom_bytes,
            peak_allocated_bytes: of_run(&ledger.peaks.allocated),
            peak_reserved_bytes: of_run(&ledger.peaks.reserved),
            oom: ledger.oom,
            peak,
            saving_bytes,
            saving_by_category,
            unchanged,
            costs: Costs {
                flops: ledger.flops,
                to_host_bytes: traffic.to_host_bytes,
                from_host_bytes: traffic.from_host_bytes,
                collective_bytes: collectives.map(|messages| messages.bytes).sum(),
                forward_backward_rounds: ledger.batch.map_or(1, |batch| batch.forward_backward_rounds),
                tokens: ledger.tokens,
            },
            no_gain: None,
        })
    }
}

/// The setting that decides what is computed again.
const CHECKPOINT: &str = "checkpoint";

/// Says of a row that computes more again than one that differs in nothing else, and peaks no lower, why.
fn tell_no_gain(rows: &mut [Variation]) {
    let rest = |row: &Variation| -> BTreeMap<String, String> {
        let others = row.settings.iter().filter(|setting| setting.key != CHECKPOINT);
        others.map(|setting| (setting.key.clone(), setting.value.clone())).collect()
    };
    let facts = |row: &Variation| {
        let outcome = row.outcome.as_ref()?;
        let value = row.settings.iter().find(|setting| setting.key == CHECKPOINT)?.value.clone();
        Some((rest(row), value, outcome.costs.flops?.recompute, outcome.peak.bytes))
    };
    let known: Vec<_> = rows.iter().filter_map(facts).collect();
    for row in rows {
        let (Some((others, _, recompute, bytes)), Some(outcome)) = (facts(row), &mut row.outcome) else {
            continue;
        };
        let cheaper = known
            .iter()
            .filter(|(same, _, less, peak)| *same == others && *less < recompute && *peak <= bytes);
        let Some((_, value, ..)) = cheaper.min_by_key(|(.., less, _)| *less) else { continue };
        let phase = outcome.peak.phase.as_deref().unwrap_or("a phase of no name");
        let most = outcome.peak.by_category.iter().max_by_key(|(_, bytes)| **bytes);
        let most = most.map(|(category, _)| format!(", where most is {}", category.0.as_str()));
        outcome.no_gain = Some(format!(
            "more is computed again than with {CHECKPOINT}={value}, and the peak is no lower: it lies in {phase}{}, which that does not make smaller",
            most.unwrap_or_default()
        ));
    }
}
