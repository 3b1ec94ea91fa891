//! Which ranks do the same work: the stages of a pipeline told apart, and how far the peaks of a stage
//! lie apart.
//!
//! Ranks have the same parameters where those at their peaks are as many at each place in the program and
//! as large but for a 64th: shards need not be equal, and no layer of a stage is so small a part of it.

use std::collections::BTreeMap;

use wire::Alike;

/// What of a rank tells its stage.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Its peak.
    pub(super) bytes: u64,
    /// Bytes and objects of its parameters, by name.
    pub(super) parameters: BTreeMap<u32, (u64, u64)>,
}

/// Ranks that do the same work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stage {
    /// The ranks, in their order.
    pub(super) members: Vec<usize>,
    pub(super) alike: Alike,
    /// The member of the median peak, the lower of two.
    pub(super) median: usize,
    /// The median of what the peaks differ from the median by.
    pub(super) deviation: u64,
    /// What a peak may differ from the median by.
    pub(super) tolerance: u64,
}

/// The part of the parameters that ranks of one stage may differ by.
const SHARE: u64 = 64;
/// The part of the median below which no difference is worth a word.
const LEAST: u64 = 4096;
/// How many times as far as the ranks of a part are from each other parts are apart.
const APART: u64 = 4;

/// The stages of `samples`, in the order of their first ranks.
pub(super) fn stages(samples: &[Sample]) -> Vec<Stage> {
    let mut classes = classes(samples);
    adopt(samples, &mut classes);
    let mut stages = Vec::new();
    for class in classes {
        let known = class.iter().any(|member| !samples[*member].parameters.is_empty());
        let parts = parts(samples, &class);
        let alike = match (known, parts.len()) {
            (_, 2..) => Alike::Peaks,
            (true, _) => Alike::Parameters,
            (false, _) => Alike::Unknown,
        };
        stages.extend(parts.into_iter().map(|members| stage(samples, members, alike)));
    }
    stages.sort_by_key(|stage| stage.members.first().copied());
    stages
}

/// Ranks of about the same parameters.
fn classes(samples: &[Sample]) -> Vec<Vec<usize>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for index in 0..samples.len() {
        let same = |class: &&mut Vec<usize>| {
            let first = &samples[class[0]];
            let most = total(first).max(total(&samples[index]));
            counts(first) == counts(&samples[index]) && distance(first, &samples[index]) <= most / SHARE
        };
        match classes.iter_mut().find(same) {
            Some(class) => class.push(index),
            None => classes.push(vec![index]),
        }
    }
    classes
}

/// Puts ranks that are alone with their parameters where they belong: to those who have as many of the
/// same, of which theirs are smaller or larger shards. And one that is alone in a job whose other
/// stages have several ranks is no stage, but a rank unlike its own.
fn adopt(samples: &[Sample], classes: &mut Vec<Vec<usize>>) {
    let alone: Vec<usize> = classes.iter().filter(|class| class.len() == 1).map(|class| class[0]).collect();
    let only = alone.len() == 1 && classes.iter().all(|class| class.len() != 2);
    for rank in alone {
        let takes = |class: &&mut Vec<usize>| {
            class.len() > 1 && (only || counts(&samples[class[0]]) == counts(&samples[rank]))
        };
        let nearest =
            classes.iter_mut().filter(takes).min_by_key(|class| distance(&samples[class[0]], &samples[rank]));
        if let Some(class) = nearest {
            class.push(rank);
            class.sort_unstable();
            classes.retain(|class| *class != [rank]);
        }
    }
}

/// The ranks of `class` in parts whose peaks lie together and apart from those of the others: as many
/// in each, as the stages of a pipeline have. One part where they do not fall apart like that.
fn parts(samples: &[Sample], class: &[usize]) -> Vec<Vec<usize>> {
    let mut sorted = class.to_vec();
    sorted.sort_by_key(|member| (samples[*member].bytes, *member));
    let spread = |from: usize, to: usize| samples[sorted[to]].bytes - samples[sorted[from]].bytes;
    for count in 2..=sorted.len() / 2 {
        if !sorted.len().is_multiple_of(count) {
            continue;
        }
        let each = sorted.len() / count;
        let within = (0..count).map(|part| spread(part * each, part * each + each - 1)).max();
        let between = (1..count).map(|part| spread(part * each - 1, part * each)).min();
        let (Some(within), Some(between)) = (within, between) else { continue };
        let least = samples[sorted[0]].bytes / LEAST;
        if between > within.saturating_mul(APART).max(least) {
            let part = |members: &[usize]| {
                let mut members = members.to_vec();
                members.sort_unstable();
                members
            };
            return sorted.chunks(each).map(part).collect();
        }
    }
    vec![class.to_vec()]
}

fn stage(samples: &[Sample], members: Vec<usize>, alike: Alike) -> Stage {
    let mut sorted: Vec<(u64, usize)> =
        members.iter().map(|member| (samples[*member].bytes, *member)).collect();
    sorted.sort_unstable();
    let (bytes, median) = sorted[(sorted.len() - 1) / 2];
    let mut differences: Vec<u64> = sorted.iter().map(|(other, _)| other.abs_diff(bytes)).collect();
    differences.sort_unstable();
    let deviation = differences[(differences.len() - 1) / 2];
    // The deviation of a normal distribution is 1.4826 times its median deviation; 5 of them.
    let far = u128::from(deviation) * 7413 / 1000;
    let tolerance = u64::try_from(far).unwrap_or(u64::MAX).max(bytes / LEAST);
    Stage { members, alike, median, deviation, tolerance }
}

/// How many parameters there are at each place.
fn counts(of: &Sample) -> Vec<(u32, u64)> {
    of.parameters.iter().map(|(name, (_, count))| (*name, *count)).collect()
}

fn total(of: &Sample) -> u64 {
    of.parameters.values().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
}

/// What the parameters of two ranks differ by.
fn distance(a: &Sample, b: &Sample) -> u64 {
    let held = |of: &Sample, name| of.parameters.get(name).map_or(0, |held| held.0);
    let names: std::collections::BTreeSet<_> = a.parameters.keys().chain(b.parameters.keys()).collect();
    names.into_iter().fold(0, |sum: u64, name| sum.saturating_add(held(a, name).abs_diff(held(b, name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank of this peak, with parameters of these names, bytes and numbers.
    fn rank(bytes: u64, parameters: &[(u32, u64, u64)]) -> Sample {
        Sample {
            bytes,
            parameters: parameters.iter().map(|(name, bytes, count)| (*name, (*bytes, *count))).collect(),
        }
    }

    /// The members of each stage, and those of them that are too far from the median.
    fn told(samples: &[Sample]) -> Vec<(Vec<usize>, Vec<usize>)> {
        let far = |stage: &Stage| {
            let median = samples[stage.median].bytes;
            let far = |member: &&usize| samples[**member].bytes.abs_diff(median) > stage.tolerance;
            stage.members.iter().filter(far).copied().collect()
        };
        stages(samples).iter().map(|stage| (stage.members.clone(), far(stage))).collect()
    }

    #[test]
    fn stages_are_told_apart_by_their_parameters() {
        let first = || rank(5000, &[(0, 1000, 10), (1, 500, 1)]);
        let last = || rank(4000, &[(0, 1000, 10), (2, 800, 1)]);
        let mut samples = vec![first(), last(), first(), last(), first(), last()];
        assert_eq!(told(&samples), [(vec![0, 2, 4], vec![]), (vec![1, 3, 5], vec![])]);
        samples[3].bytes += 700;
        assert_eq!(told(&samples), [(vec![0, 2, 4], vec![]), (vec![1, 3, 5], vec![3])]);
        // An embedding and a head may be equally large.
        let equal = [first(), rank(4500, &[(0, 1000, 10), (1, 501, 2)]), first()];
        assert_eq!(told(&[&equal[..], &equal[1..2]].concat()).len(), 2);
        // A pipeline without copies: nobody has the same.
        let alone = [first(), rank(4500, &[(0, 1000, 10)]), last()];
        assert_eq!(told(&alone).len(), 3);
    }

    #[test]
    fn a_rank_alone_with_its_parameters_is_one_of_the_others() {
        // The last shard is the smallest.
        let mut samples: Vec<Sample> = (0..4).map(|_| rank(5000, &[(0, 1000, 10)])).collect();
        samples[3] = rank(4600, &[(0, 600, 10)]);
        assert_eq!(told(&samples), [(vec![0, 1, 2, 3], vec![3])]);
        // A module that only one has.
        samples[3] = rank(5600, &[(0, 1000, 10), (5, 600, 1)]);
        assert_eq!(told(&samples), [(vec![0, 1, 2, 3], vec![3])]);
    }

    #[test]
    fn stages_of_the_same_parameters_are_told_apart_by_peaks_that_lie_apart() {
        let peaks = |peaks: &[u64]| -> Vec<Sample> {
            peaks.iter().map(|bytes| rank(*bytes, &[(0, 1000, 10)])).collect()
        };
        let told = |of: &[u64]| told(&peaks(of));
        let stages = told(&[90_000, 90_010, 80_000, 80_005, 70_000, 70_000]);
        assert_eq!(stages, [(vec![0, 1], vec![]), (vec![2, 3], vec![]), (vec![4, 5], vec![])]);
        // Two of eight are no stage, and neither is a spread.
        assert_eq!(told(&[100, 100, 100, 100, 100, 100, 900, 900]), [((0..8).collect(), vec![6, 7])]);
        assert_eq!(told(&[100, 110, 120, 130, 140, 150, 160, 170]), [((0..8).collect(), vec![])]);
    }

    #[test]
    fn what_is_far_is_told_by_the_median_and_its_deviation() {
        let of = |peaks: &[u64]| {
            let samples: Vec<Sample> = peaks.iter().map(|bytes| rank(*bytes, &[])).collect();
            let stage = stages(&samples).remove(0);
            (samples[stage.median].bytes, stage.deviation, stage.tolerance)
        };
        assert_eq!(of(&[1000, 1010, 1020, 1030, 9000]), (1020, 10, 74));
        assert_eq!(of(&[8192, 8192, 8192, 9000]), (8192, 0, 2));
        assert_eq!(of(&[5, 7]), (5, 0, 0));
    }
}
