//! `cargo xtask truth`: planned ledgers against recorded training steps, to the byte.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::Args;
use vramledger::ledger::Category;
use vramledger::wire::{Ledger, PhaseRow};
use vramledger::{NamedModel, PlanQuestion, plan};

use crate::case::{Case, TruthPhase};

/// Arguments of `truth`.
#[derive(Args)]
pub struct Truth {
    /// Recorded cases, a JSON object a line.
    cases: Vec<PathBuf>,
    /// Where the figures go; `-` for nowhere.
    #[arg(long, default_value = "docs/accuracy.md")]
    output: String,
}

/// How far a planned case is from its record.
struct Verdict {
    id: String,
    /// What was recorded and what was planned: peak requested bytes.
    peak: (u64, u64),
    /// What differs, a sentence each; empty where everything is equal.
    differences: Vec<String>,
}

#[allow(clippy::print_stdout, reason = "a command of developers prints what falls short")]
pub fn run(args: &Truth) -> Result<()> {
    let mut verdicts = Vec::new();
    let mut skipped = 0;
    for path in &args.cases {
        for case in Case::read_all(path)? {
            if case.is_plannable() && case.truth.num_ooms == 0 {
                verdicts.push(judge(&case)?);
            } else {
                skipped += 1;
            }
        }
    }
    ensure!(!verdicts.is_empty(), "no case of the files given can be planned");
    verdicts.sort_by(|a, b| a.id.cmp(&b.id));
    let short: Vec<&Verdict> = verdicts.iter().filter(|verdict| !verdict.differences.is_empty()).collect();
    for verdict in &short {
        println!("{}: {} differences", verdict.id, verdict.differences.len());
        for difference in verdict.differences.iter().take(4) {
            println!("    {difference}");
        }
    }
    println!(
        "{} of {} cases equal to the byte; {skipped} not planned",
        verdicts.len() - short.len(),
        verdicts.len()
    );
    if args.output != "-" {
        std::fs::write(&args.output, page(&verdicts))?;
    }
    if !short.is_empty() {
        bail!("{} cases fall short", short.len());
    }
    Ok(())
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
    let ledger = plan(&question)?.ledger;
    let mut differences = Vec::new();
    phases(case, &ledger, &mut differences);
    let truth = &case.truth;
    let mut planned_peak = 0;
    match &ledger.peaks.requested {
        None => differences.push("no peak was planned".into()),
        Some(peak) => {
            planned_peak = peak.bytes;
            compare("peak requested", truth.peak_requested_bytes, peak.bytes, &mut differences);
            // The first phase that reaches the recorded peak of requested bytes.
            let first =
                truth.phases.iter().find(|row| row.peak_requested_bytes == truth.peak_requested_bytes);
            if let Some(first) = first
                && (peak.step, peak.phase.as_deref()) != (Some(first.step), Some(&first.phase))
            {
                differences.push(format!(
                    "the peak is in {} of step {}, planned in {:?} of step {:?}",
                    first.phase, first.step, peak.phase, peak.step
                ));
            }
        }
    }
    Ok(Verdict { id: case.id.clone(), peak: (truth.peak_requested_bytes, planned_peak), differences })
}

/// Compares the rows of the phase table.
fn phases(case: &Case, ledger: &Ledger, differences: &mut Vec<String>) {
    let truth = &case.truth.phases;
    if truth.len() != ledger.phases.len() {
        differences.push(format!("{} phases recorded, {} planned", truth.len(), ledger.phases.len()));
    }
    for (recorded, planned) in truth.iter().zip(&ledger.phases) {
        let place = format!("step {} {}", recorded.step, recorded.phase);
        let same = (recorded.step, recorded.micro_batch, &recorded.phase)
            == (planned.step, planned.micro_batch, &planned.phase);
        if !same {
            differences.push(format!("{place} recorded, step {} {} planned", planned.step, planned.phase));
            continue;
        }
        let mut equal = |what: &str, recorded: u64, planned: Option<u64>| {
            compare(&format!("{place}: {what}"), recorded, planned.unwrap_or(0), differences);
        };
        equal("peak requested", recorded.peak_requested_bytes, planned.peak.requested_bytes);
        equal("end requested", recorded.end_requested_bytes, planned.end.requested_bytes);
        for (category, recorded, planned) in owners(recorded, planned) {
            equal(category, recorded, Some(planned));
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

fn compare(what: &str, recorded: u64, planned: u64, differences: &mut Vec<String>) {
    if recorded != planned {
        let difference = i128::from(planned) - i128::from(recorded);
        differences.push(format!("{what}: {recorded} recorded, {planned} planned ({difference:+})"));
    }
}

/// docs/accuracy.md.
fn page(verdicts: &[Verdict]) -> String {
    let equal = verdicts.iter().filter(|verdict| verdict.differences.is_empty()).count();
    let mut page = format!(
        "# Accuracy\n\n\
         Written by `cargo xtask truth CASES.jsonl`. Each case is a training run of real PyTorch 2.15 with\n\
         transformers 5.24 on an emulated H100, recorded by PyTorch itself. A case is *equal* when the peak of\n\
         requested bytes, its phase, and in every step and phase the peak and end of requested bytes and the bytes of\n\
         parameters, buffers, gradients and optimizer state are the recorded ones to the byte.\n\n\
         {equal} of {} cases are equal.\n\n\
         | case | peak requested, recorded | planned | equal |\n|---|---:|---:|---|\n",
        verdicts.len()
    );
    for verdict in verdicts {
        let (recorded, planned) = verdict.peak;
        let equal = if verdict.differences.is_empty() { "yes" } else { "no" };
        let _ = writeln!(page, "| {} | {recorded} | {planned} | {equal} |", verdict.id);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planned_ledgers_are_the_recorded_ones() {
        let truth = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/truth");
        let cases = ["cases.jsonl", "events/cases.jsonl", "random/cases.jsonl"].map(|file| truth.join(file));
        run(&Truth { cases: cases.into(), output: "-".into() }).unwrap();
    }
}
