//! `cargo xtask truth`: planned ledgers and emulated runs against recorded training steps, to the byte.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;
use vramledger::ledger::Category;
use vramledger::wire::{Ledger, PhaseRow};
use vramledger::{NamedModel, PlanQuestion, plan};

use crate::case::{Case, CaseParallel, TruthPhase};

/// Arguments of `truth`.
#[derive(Args)]
pub struct Truth {
    /// Recorded cases, a JSON object a line.
    cases: Vec<PathBuf>,
    /// The same cases on the emulated GPU, from `cargo xtask emulation`.
    #[arg(long, value_name = "FILE")]
    emulated: Option<PathBuf>,
    /// Where the figures go; `-` for nowhere.
    #[arg(long, default_value = "docs/accuracy.md")]
    output: String,
}

/// How far a planned or emulated case is from its record.
struct Verdict {
    id: String,
    /// Recorded peaks: requested, allocated, reserved.
    recorded: [u64; 3],
    /// The planned or emulated ones.
    found: [u64; 3],
    /// Where the recorded run failed.
    failed: Option<String>,
    /// What differs, a sentence each; empty where everything holds.
    differences: Vec<String>,
}

pub fn run(args: &Truth) -> Result<()> {
    let mut recorded = Vec::new();
    for path in &args.cases {
        recorded.extend(Case::read_all(path)?);
    }
    let (plannable, others): (Vec<&Case>, Vec<&Case>) = recorded.iter().partition(|case| case.is_plannable());
    ensure!(!plannable.is_empty(), "no case of the files given can be planned");
    let planned = plannable.into_iter().map(judge).collect::<Result<_>>()?;
    let mut page = PLANNED.to_owned();
    let mut short = section("planned", planned, &mut page);
    tell(&format!("{} cases not planned", others.len()));
    if let Some(path) = &args.emulated {
        let emulated = Case::read_all(path)?;
        let emulated = emulated.iter().map(|case| judge_emulated(case, &recorded));
        page.push_str(EMULATED);
        short += section("emulated", emulated.collect::<Result<_>>()?, &mut page);
    }
    if args.output != "-" {
        std::fs::write(&args.output, page)?;
    }
    ensure!(short == 0, "{short} cases fall short");
    Ok(())
}

/// Tells of the cases that fall short, adds the table to the page and answers how many they are.
fn section(found: &str, mut verdicts: Vec<Verdict>, page: &mut String) -> usize {
    verdicts.sort_by(|a, b| a.id.cmp(&b.id));
    let short: Vec<&Verdict> = verdicts.iter().filter(|verdict| !verdict.differences.is_empty()).collect();
    for verdict in &short {
        tell(&format!("{} {found}: {} differences", verdict.id, verdict.differences.len()));
        for difference in verdict.differences.iter().take(4) {
            tell(&format!("    {difference}"));
        }
    }
    tell(&format!("{} of {} cases hold {found}", verdicts.len() - short.len(), verdicts.len()));
    table(found, &verdicts, page);
    short.len()
}

#[allow(clippy::print_stdout, reason = "a command of developers prints what falls short")]
fn tell(line: &str) {
    println!("{line}");
}

fn judge(case: &Case) -> Result<Verdict> {
    let model = NamedModel { name: case.id.clone(), model: case.model()? };
    let question = PlanQuestion {
        model: &model,
        setup: case.setup()?,
        gpu: case.gpu()?,
        context: vramledger::ledger::Bytes::new(case.truth.context_bytes),
        alloc_conf: case.setup.alloc_conf.clone(),
    };
    let ledger = plan(question)?.ledger;
    let truth = &case.truth;
    let mut differences = Vec::new();
    failure(case, &ledger, &mut differences);
    phases(case, &ledger, &mut differences);
    let recorded = [truth.peak_requested_bytes, truth.peak_allocated_bytes, truth.peak_reserved_bytes];
    let peaks = [&ledger.peaks.requested, &ledger.peaks.allocated, &ledger.peaks.reserved];
    let found = peaks.map(|peak| peak.as_ref().map_or(0, |peak| peak.bytes));
    for ((measure, recorded), planned) in MEASURES.iter().zip(recorded).zip(found) {
        let allowed = measure.allowed(case, recorded);
        compare(&format!("peak {}", measure.name), recorded, planned, allowed, &mut differences);
    }
    // The first phase that reaches the recorded peak of requested bytes.
    let first = truth.phases.iter().find(|row| row.peak_requested_bytes == truth.peak_requested_bytes);
    if let (Some(first), Some(peak)) = (first, &ledger.peaks.requested)
        && (peak.step, peak.phase.as_deref()) != (Some(first.step), Some(&first.phase))
    {
        let (phase, step) = (&peak.phase, peak.step);
        differences.push(format!(
            "the peak is in {} of step {}, planned in {phase:?} of step {step:?}",
            first.phase, first.step
        ));
    }
    Ok(Verdict { id: case.id.clone(), recorded, found, failed: failed(case), differences })
}

/// Where a run failed, in words.
fn failed(case: &Case) -> Option<String> {
    case.truth.oom.as_ref().map(|oom| format!("{} of step {}", oom.phase, oom.step))
}

/// Holds an emulated run against its record. Autocast's frees have no fixed order: there the peaks count.
fn judge_emulated(case: &Case, recorded: &[Case]) -> Result<Verdict> {
    let Some(record) = recorded.iter().find(|record| record.id == case.id) else {
        bail!("`{}` was emulated, and no file given has it", case.id);
    };
    let mut differences = Vec::new();
    if failed(case) != failed(record) {
        differences.push(format!("recorded to fail at {:?}, emulated at {:?}", failed(record), failed(case)));
    }
    let [recorded, found] = [&record.truth, &case.truth]
        .map(|truth| [truth.peak_requested_bytes, truth.peak_allocated_bytes, truth.peak_reserved_bytes]);
    for ((measure, recorded), found) in MEASURES.iter().zip(recorded).zip(found) {
        if recorded != found {
            differences.push(format!("peak {}: {recorded} recorded, {found} emulated", measure.name));
        }
    }
    let phases = [&record.truth.phases, &case.truth.phases];
    if record.setup.autocast.is_none() && phases[0] != phases[1] {
        let first = phases[0].iter().zip(phases[1]).find(|(recorded, found)| recorded != found);
        differences.push(match first {
            Some((row, _)) => format!("step {} {} is not as recorded", row.step, row.phase),
            None => format!("{} phases recorded, {} emulated", phases[0].len(), phases[1].len()),
        });
    }
    Ok(Verdict { id: case.id.clone(), recorded, found, failed: failed(record), differences })
}

/// A measure and how near it must be.
struct Measure {
    name: &'static str,
    /// The share of the recorded bytes that autocast, whose frees have no fixed order, may move it by.
    autocast: f64,
}

const MEASURES: [Measure; 3] = [
    Measure { name: "requested", autocast: 0.0 },
    Measure { name: "allocated", autocast: 0.001 },
    Measure { name: "reserved", autocast: 0.02 },
];

impl Measure {
    /// The bytes that this measure of `case` may be off.
    fn allowed(&self, case: &Case, recorded: u64) -> u64 {
        if case.setup.autocast.is_some() { (recorded as f64 * self.autocast) as u64 } else { 0 }
    }
}

/// Whether the run fails, and at which step and phase, as it did.
fn failure(case: &Case, ledger: &Ledger, differences: &mut Vec<String>) {
    let recorded = case.truth.oom.as_ref().map(|oom| (oom.step, oom.phase.clone()));
    let planned =
        ledger.oom.as_ref().map(|oom| (oom.step.unwrap_or(0), oom.phase.clone().unwrap_or_default()));
    if recorded != planned {
        differences.push(format!("recorded to fail at {recorded:?}, planned at {planned:?}"));
    }
    if ledger.fits != Some(planned.is_none()) {
        differences.push("`fits` does not say whether it fails".into());
    }
    if let Some(oom) = &ledger.oom
        && oom.object.is_none()
    {
        differences.push("the object that failed is not named".into());
    }
}

/// Compares the rows of the phase table, the GPU's; where a run failed, those before.
fn phases(case: &Case, ledger: &Ledger, differences: &mut Vec<String>) {
    let truth = &case.truth.phases;
    let failed = case.truth.oom.is_some();
    let planned: Vec<_> = ledger.phases.iter().filter(|row| row.device == 0).collect();
    if truth.len() != planned.len() && !failed {
        differences.push(format!("{} phases recorded, {} planned", truth.len(), planned.len()));
    }
    let complete = if failed { planned.len().saturating_sub(1) } else { planned.len() };
    for (recorded, planned) in truth.iter().zip(&planned[..complete]) {
        let place = format!("step {} {}", recorded.step, recorded.phase);
        let same = (recorded.step, recorded.micro_batch, &recorded.phase)
            == (planned.step, planned.micro_batch, &planned.phase);
        if !same {
            differences.push(format!("{place} recorded, step {} {} planned", planned.step, planned.phase));
            continue;
        }
        let peaks =
            [recorded.peak_requested_bytes, recorded.peak_allocated_bytes, recorded.peak_reserved_bytes];
        let ends = [recorded.end_requested_bytes, recorded.end_allocated_bytes, recorded.end_reserved_bytes];
        for (what, recorded, planned) in [("peak", peaks, &planned.peak), ("end", ends, &planned.end)] {
            // PyTorch calls requested what waits for another stream, and the plan does not.
            let waits = recorded[0] > recorded[1];
            let planned = [planned.requested_bytes, planned.allocated_bytes, planned.reserved_bytes];
            for ((measure, recorded), planned) in
                MEASURES.iter().zip(recorded).zip(planned).skip(usize::from(waits))
            {
                let what = format!("{place}: {what} {}", measure.name);
                let allowed = measure.allowed(case, recorded);
                compare(&what, recorded, planned.unwrap_or(0), allowed, differences);
            }
        }
        // Between forward and backward the modules hold gathered parameters, which the plan books as buffers.
        let gathered =
            recorded.phase == "forward" && case.setup.parallel.as_ref().is_some_and(CaseParallel::gathers);
        let owners = if gathered { Vec::new() } else { owners(recorded, planned) };
        for (category, recorded, planned) in owners {
            compare(&format!("{place}: {category}"), recorded, planned, 0, differences);
        }
    }
}

/// Recorded and planned bytes by owner at the end of a phase.
fn owners(recorded: &TruthPhase, planned: &PhaseRow) -> Vec<(&'static str, u64, u64)> {
    let Some(owners) = recorded.end_requested_by_owner else { return Vec::new() };
    let of = |category: Category| {
        planned.end_by_category.get(&vramledger::wire::Category(category)).copied().unwrap_or(0)
    };
    vec![
        ("parameter", owners.parameter, of(Category::Parameter)),
        ("buffer", owners.buffer, of(Category::Buffer)),
        ("gradient", owners.gradient, of(Category::Gradient)),
        ("optimizer_state", owners.optimizer_state, of(Category::OptimizerState)),
    ]
}

fn compare(what: &str, recorded: u64, planned: u64, allowed: u64, differences: &mut Vec<String>) {
    if recorded.abs_diff(planned) > allowed {
        let difference = i128::from(planned) - i128::from(recorded);
        differences.push(format!("{what}: {recorded} recorded, {planned} planned ({difference:+})"));
    }
}

/// The head of docs/accuracy.md.
const PLANNED: &str = "# Accuracy

Written by `cargo xtask truth CASES.jsonl … --emulated target/emulated.jsonl`; `cargo xtask emulation` makes the
last file. Each case is a training run of real PyTorch 2.15 with transformers 5.24 on an emulated H100, recorded by
PyTorch itself.

## Planned

A case *holds* when, in every step and
phase, peak and end of requested, allocated and reserved bytes and the bytes of parameters, buffers, gradients
and optimizer state are the recorded ones to the byte, and so are the run's peaks and the phase of the
requested one. Under autocast, whose frees have no fixed order in PyTorch itself, allocated may be off by
0.1 % and reserved by 2 %. A run that fails must be planned to fail at the same step and phase, with the
object that found no room named.
";

/// The head of its second part.
const EMULATED: &str = "
## Emulated

The same training runs, written out in `scripts/truth_case.py`, on this project's emulated GPU, sharded and adapted
ones too. A case *holds* when the peaks of the run, the peak and the end of every phase and the bytes of each owner
there are the recorded ones to the byte (under autocast: the peaks), and it fails where it failed.
";

/// Adds how many cases hold, and each one's peaks.
fn table(found: &str, verdicts: &[Verdict], page: &mut String) {
    let held = verdicts.iter().filter(|verdict| verdict.differences.is_empty()).count();
    let _ = write!(
        page,
        "\n{held} of {} cases hold.\n\n\
         | case | peak requested | {found} | peak allocated | {found} | peak reserved | {found} | fails | holds |\n\
         |---|---:|---:|---:|---:|---:|---:|---|---|\n",
        verdicts.len()
    );
    for verdict in verdicts {
        let holds = if verdict.differences.is_empty() { "yes" } else { "no" };
        let _ = write!(page, "| {} ", verdict.id);
        for (recorded, found) in verdict.recorded.iter().zip(verdict.found) {
            let found = if *recorded == found { "=".to_owned() } else { found.to_string() };
            let _ = write!(page, "| {recorded} | {found} ");
        }
        let _ = writeln!(page, "| {} | {holds} |", verdict.failed.as_deref().unwrap_or(""));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planned_ledgers_are_the_recorded_ones() {
        let truth = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/truth");
        let folders = [
            "",
            "adapters/",
            "events/",
            "families/",
            "frozen/",
            "ddp/",
            "fsdp2/",
            "losses/",
            "megatron/",
            "precision/",
            "quantized/",
            "random/",
            "strategies/",
            "tight/",
            "zero/",
        ];
        let cases = folders.map(|folder| truth.join(format!("{folder}cases.jsonl")));
        run(&Truth { cases: cases.into(), emulated: None, output: "-".into() }).unwrap();
    }
}
