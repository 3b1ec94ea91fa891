//! Many ranks: each file is read alone and let go of, and what is needed to hold the ranks against each
//! other is kept.

mod peak;
mod stages;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::io;

use ledger::Measure;
use wire::{Alike, Ledger, RankOom, RankOutlier, RankReading, RankReadings, RankStage, UnreadRank};

use self::peak::{Names, PeakOf};
use self::stages::{Sample, Stage};
use super::{Answer, DEPTH, MEASURES, ReadQuestion, read};
use crate::Error;

/// Reads the files of the ranks of a job, one after another.
#[derive(Debug, Default)]
pub struct RankReader {
    device: Option<u16>,
    names: Names,
    ranks: Vec<Rank>,
    unread: Vec<UnreadRank>,
    /// The ranks that each sentence is of.
    warnings: BTreeMap<String, Vec<String>>,
    limits: Vec<String>,
}

/// What is kept of a rank.
#[derive(Debug)]
struct Rank {
    name: String,
    /// The number that the file has, and the one that its name ends in.
    number: (Option<u64>, Option<u64>),
    /// The peaks of [`MEASURES`].
    peaks: [Option<PeakOf>; MEASURES.len()],
    reserved_bytes: Option<u64>,
    stranded_bytes: Option<u64>,
    oom: Option<RankOom>,
}

impl RankReader {
    /// A reader that looks at the GPU `device` alone of each file, or at all of them.
    pub fn new(device: Option<u16>) -> Self {
        Self { device, ..Self::default() }
    }

    /// Reads the file of one rank, called `name`. One that cannot be read is kept as that.
    pub fn read(&mut self, name: &str, path: &str, source: impl io::Read) {
        let question = ReadQuestion { depth: DEPTH, device: self.device, ..ReadQuestion::default() };
        let ledger = match read(path, source, &question) {
            Ok(Answer::Ledger(read)) => read.ledger,
            Ok(Answer::Series(_)) => {
                return self.fail(name, &Error::NoLedger { name: path.into(), what: "a step log" });
            }
            Ok(Answer::Instants(_)) => {
                return self
                    .fail(name, &Error::NoLedger { name: path.into(), what: "a message or an account" });
            }
            Err(error) => return self.fail(name, &error),
        };
        self.take(name, &ledger);
    }

    /// Keeps that the file called `name` was not read, and why.
    pub fn unread(&mut self, name: &str, reason: String) {
        self.unread.push(UnreadRank { name: name.into(), reason });
    }

    fn fail(&mut self, name: &str, error: &Error) {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        self.unread(name, format!("{error}{cause}"));
    }

    fn take(&mut self, name: &str, ledger: &Ledger) {
        let peaks = MEASURES.map(|measure| PeakOf::new(ledger, measure, &mut self.names));
        if peaks.iter().all(Option::is_none) {
            return self.unread(name, format!("`{name}` has no objects: nothing ever was on its devices"));
        }
        for warning in &ledger.warnings {
            self.warnings.entry(warning.clone()).or_default().push(name.into());
        }
        for limit in &ledger.interpretation_limits {
            if !self.limits.contains(limit) {
                self.limits.push(limit.clone());
            }
        }
        let stranding = ledger.reading.iter().flat_map(|reading| &reading.stranding);
        let oom = ledger.oom.as_ref().map(|oom| RankOom {
            step: oom.step,
            phase: oom.phase.clone(),
            requested_bytes: oom.requested_bytes,
        });
        self.ranks.push(Rank {
            name: name.into(),
            number: (ledger.ranks.as_ref().map(|ranks| ranks.rank), number(name)),
            peaks,
            reserved_bytes: ledger.peaks.reserved.as_ref().map(|peak| peak.bytes),
            stranded_bytes: stranding
                .filter(|stranding| stranding.at == "reserved_peak")
                .map(|stranding| stranding.stranded_bytes)
                .next(),
            oom,
        });
    }

    /// The ranks side by side.
    ///
    /// # Errors
    /// Not one file that could be read.
    pub fn answer(mut self) -> Result<RankReadings, Error> {
        self.ranks.sort_by(|a, b| natural(&a.name, &b.name));
        let measure = self.measure();
        let known = |rank: &Rank| rank.peaks[measure].is_some();
        let (ranks, without): (Vec<Rank>, Vec<Rank>) = self.ranks.into_iter().partition(known);
        let word = MEASURES[measure].as_str();
        self.unread.extend(without.into_iter().map(|rank| UnreadRank {
            reason: format!(
                "`{}` does not tell the {word} bytes, in which the others are compared",
                rank.name
            ),
            name: rank.name,
        }));
        let peaks: Vec<&PeakOf> = ranks.iter().filter_map(|rank| rank.peaks[measure].as_ref()).collect();
        if peaks.is_empty() {
            let first = self.unread.into_iter().next();
            return Err(Error::NoRanks { first: first.map(|unread| unread.reason).unwrap_or_default() });
        }
        let samples: Vec<Sample> = peaks.iter().map(|peak| peak.sample()).collect();
        let stages = stages::stages(&samples);
        let mut rows: Vec<RankReading> = rows(&ranks, &peaks);
        let mut outliers = Vec::new();
        for (index, stage) in stages.iter().enumerate() {
            let median = &peaks[stage.median];
            for member in &stage.members {
                let row = &mut rows[*member];
                row.stage = index as u64;
                row.difference_bytes = signed(peaks[*member].bytes) - signed(median.bytes);
                let shards = peak::smaller_shards(median, peaks[*member]);
                row.outlier = (row.difference_bytes + signed(shards)).unsigned_abs() > stage.tolerance;
                if row.outlier {
                    outliers.push(RankOutlier {
                        name: row.name.clone(),
                        reference: ranks[stage.median].name.clone(),
                        difference_bytes: row.difference_bytes,
                        other_phase: median.phase.clone().filter(|phase| row.phase.as_ref() != Some(phase)),
                        differences: peak::differences(&self.names, median, peaks[*member]),
                    });
                }
            }
        }
        outliers.sort_by_key(|outlier| std::cmp::Reverse(outlier.difference_bytes.unsigned_abs()));
        let told = |stage: &Stage| told(stage, &ranks, &samples);
        let stages: Vec<RankStage> = stages.iter().map(told).collect();
        Ok(RankReadings {
            format: RankReadings::FORMAT.into(),
            measure: wire::Measure(MEASURES[measure]),
            ranks: rows,
            interpretation_limits: limits(&stages, self.limits),
            stages,
            outliers,
            unread: self.unread,
            warnings: self.warnings.into_iter().map(|(text, names)| warning(&text, &names)).collect(),
        })
    }

    /// The measure to compare in, by its place in [`MEASURES`]: the first that all know, else the one
    /// that most do.
    fn measure(&self) -> usize {
        let knowing =
            |measure: &usize| self.ranks.iter().filter(|rank| rank.peaks[*measure].is_some()).count();
        (0..MEASURES.len()).rev().max_by_key(knowing).unwrap_or(0)
    }
}

/// The rows of `ranks`, whose stages are not known yet.
fn rows(ranks: &[Rank], peaks: &[&PeakOf]) -> Vec<RankReading> {
    // Numbers that names share count something else.
    let mut seen = BTreeSet::new();
    let distinct = ranks.iter().filter_map(|rank| rank.number.1).all(|number| seen.insert(number));
    let row = |(rank, peak): (&Rank, &&PeakOf)| RankReading {
        name: rank.name.clone(),
        rank: rank.number.0.or(rank.number.1.filter(|_| distinct)),
        stage: 0,
        peak_bytes: peak.bytes,
        step: peak.step,
        micro_batch: peak.micro_batch,
        phase: peak.phase.clone(),
        difference_bytes: 0,
        outlier: false,
        reserved_bytes: rank.reserved_bytes,
        stranded_bytes: rank.stranded_bytes,
        end_bytes: peak.end_bytes,
        oom: rank.oom.clone(),
    };
    ranks.iter().zip(peaks).map(row).collect()
}

fn told(stage: &Stage, ranks: &[Rank], samples: &[Sample]) -> RankStage {
    let peaks = || stage.members.iter().map(|member| samples[*member].bytes);
    let of = |sum: fn(&(u64, u64)) -> u64| {
        let parameters = &samples[stage.median].parameters;
        (!parameters.is_empty()).then(|| parameters.values().map(sum).sum())
    };
    RankStage {
        ranks: stage.members.iter().map(|member| ranks[*member].name.clone()).collect(),
        alike: stage.alike,
        parameter_bytes: of(|parameter| parameter.0),
        parameter_objects: of(|parameter| parameter.1),
        reference: ranks[stage.median].name.clone(),
        median_bytes: samples[stage.median].bytes,
        least_bytes: peaks().min().unwrap_or_default(),
        most_bytes: peaks().max().unwrap_or_default(),
        deviation_bytes: stage.deviation,
        tolerance_bytes: stage.tolerance,
    }
}

fn limits(stages: &[RankStage], of_files: Vec<String>) -> Vec<String> {
    let mut limits = vec![
        "each rank is told at its own peak: the peaks of two ranks are different instants, and their difference is not what one holds more at any one moment".to_owned(),
    ];
    if stages.iter().any(|stage| stage.alike == Alike::Unknown) {
        limits.push(
            "not every rank tells which of its objects are parameters: without them, stages of a pipeline are not told apart"
                .into(),
        );
    }
    if stages.iter().any(|stage| stage.ranks.len() == 2 && stage.least_bytes < stage.most_bytes) {
        limits.push("of two ranks that differ, neither is known to be the odd one".into());
    }
    limits.extend(of_files);
    limits
}

/// `text`, with whom it is of.
fn warning(text: &str, names: &[String]) -> String {
    match names {
        [name] => format!("{name}: {text}"),
        [first, rest @ ..] => format!("{first} and {} more: {text}", rest.len()),
        [] => text.into(),
    }
}

/// The number of the rank called `name`: the digits after the word "rank", else those at the end.
fn number(name: &str) -> Option<u64> {
    let lower = name.to_ascii_lowercase();
    let digits =
        |text: &str| text.len() - text.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
    if let Some((_, after)) = lower.rsplit_once("rank") {
        let after = after.trim_start_matches(['_', '-', '.', '=']);
        if let Ok(number) = after[..digits(after)].parse() {
            return Some(number);
        }
    }
    let stem = lower.strip_suffix(".json").unwrap_or(&lower);
    let end = stem.trim_end_matches(|letter: char| letter.is_ascii_digit()).len();
    stem[end..].parse().ok()
}

/// The order of names in which numbers count as numbers: `rank2` is before `rank10`.
fn natural(a: &str, b: &str) -> std::cmp::Ordering {
    let parts = |text: &str| -> Vec<(String, Option<u128>)> {
        let mut parts: Vec<(String, Option<u128>)> = Vec::new();
        for letter in text.chars() {
            let digit = letter.to_digit(10).map(u128::from);
            match (parts.last_mut(), digit) {
                (Some((_, Some(number))), Some(digit)) => {
                    *number = number.saturating_mul(10).saturating_add(digit);
                }
                (_, Some(digit)) => parts.push((String::new(), Some(digit))),
                (Some((word, None)), None) => word.push(letter),
                (_, None) => parts.push((letter.into(), None)),
            }
        }
        parts
    };
    parts(a).cmp(&parts(b)).then_with(|| a.cmp(b))
}

const fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}

const _: () = assert!(matches!(MEASURES[0], Measure::Allocated));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_numbers() {
        let mut names = ["rank10", "rank2", "rank1", "node2-rank0", "node10-rank0", "rank02"];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(names, ["node2-rank0", "node10-rank0", "rank1", "rank02", "rank2", "rank10"]);
        let numbers =
            ["rank7", "Rank_12.step3", "snapshot.3", "trace4.json", "a", "rank", "frank_x"].map(number);
        assert_eq!(numbers, [Some(7), Some(12), Some(3), Some(4), None, None, None]);
    }
}
