//! Segments of a model's layers under a memory budget, by dynamic programming.
//!
//! Layers are recomputed from the first on, in segments, and the last ones are not: what the last layers keep is
//! gone by the time backward reaches the others, so that no other place is better for it.

/// What of a run depends on the segments, in bytes, and what does not.
#[derive(Clone, Debug)]
pub(crate) struct Extents {
    /// What each layer keeps where it is not recomputed.
    pub(crate) kept: Vec<u64>,
    /// What stands for a segment until backward reaches it: the input of the next one.
    pub(crate) input: u64,
    /// What the pass and the loss hold besides, at the most, until backward reaches the layers.
    pub(crate) besides_loss: u64,
    /// What backward holds besides while it runs a segment again, by the last layer of the segment: the
    /// gradients of later layers are among it.
    pub(crate) besides_segment: Vec<u64>,
    /// The work of running a layer again.
    pub(crate) layer_work: u64,
    /// What of it each segment saves: its last result is not computed.
    pub(crate) segment_saves: u64,
}

/// Layers in segments that are recomputed, those after them not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segments {
    /// Layers of each segment.
    pub(crate) counts: Vec<u64>,
    /// The largest total of the pass and the loss.
    pub(crate) at_loss: u64,
    /// The largest total while a segment is run again; none without segments.
    pub(crate) at_segment: Option<u64>,
}

/// For each number of segments and each number of layers in them: the lowest total at the worst segment, and
/// where the last segment begins.
struct Table {
    rows: Vec<Vec<(u64, usize)>>,
}

impl Table {
    fn new(extents: &Extents) -> Self {
        let layers = extents.kept.len();
        let mut sums = vec![0; layers + 1];
        for (index, kept) in extents.kept.iter().enumerate() {
            sums[index + 1] = sums[index] + kept;
        }
        let mut rows: Vec<Vec<(u64, usize)>> = vec![vec![(u64::MAX, 0); layers + 1]];
        rows[0][0] = (0, 0);
        for segments in 1..=layers {
            let before = &rows[segments - 1];
            let inputs = (segments as u64 - 1) * extents.input;
            let best = |end: usize| {
                let besides = inputs + extents.besides_segment[end - 1];
                let cost = |begin: usize| before[begin].0.max(besides + sums[end] - sums[begin]);
                (segments - 1..end).map(|begin| (cost(begin), begin)).min().unwrap_or((u64::MAX, 0))
            };
            rows.push(
                (0..=layers).map(|end| if end < segments { (u64::MAX, 0) } else { best(end) }).collect(),
            );
        }
        Self { rows }
    }

    /// The layers of each of the `segments` over the first `layers` layers.
    fn counts(&self, mut segments: usize, mut layers: usize) -> Vec<u64> {
        let mut counts = Vec::new();
        while segments > 0 {
            let begin = self.rows[segments][layers].1;
            counts.push((layers - begin) as u64);
            (segments, layers) = (segments - 1, begin);
        }
        counts.reverse();
        counts
    }
}

impl Segments {
    /// The largest total.
    pub(crate) fn total(&self) -> u64 {
        self.at_loss.max(self.at_segment.unwrap_or(0))
    }
}

/// The segments whose recomputation is the least work within `budget`, and of these the ones with the lowest
/// total; none where none hold it.
pub(crate) fn least_work(extents: &Extents, budget: u64) -> Option<Segments> {
    let work = |(layers, segments): (usize, usize)| {
        (layers as u64 * extents.layer_work).saturating_sub(segments as u64 * extents.segment_saves)
    };
    best(extents, |found, at| (found.total() <= budget).then(|| (work(at), found.total())))
}

/// The segments with the lowest total.
pub(crate) fn least_memory(extents: &Extents) -> Option<Segments> {
    best(extents, |found, at| Some((found.total(), at.0)))
}

/// The segments that rank lowest, of the best ones for each number of layers and of segments.
fn best<R: Ord>(
    extents: &Extents,
    rank: impl Fn(&Segments, (usize, usize)) -> Option<R>,
) -> Option<Segments> {
    let table = Table::new(extents);
    let layers = extents.kept.len();
    let not_recomputed = |from: usize| extents.kept[from..].iter().sum::<u64>();
    let pairs = (0..=layers)
        .flat_map(|layers| (usize::from(layers > 0)..=layers).map(move |segments| (layers, segments)));
    let of = |(layers, segments): (usize, usize)| Segments {
        counts: Vec::new(),
        at_loss: extents.besides_loss + segments as u64 * extents.input + not_recomputed(layers),
        at_segment: (segments > 0).then(|| table.rows[segments][layers].0),
    };
    let ranked = pairs.filter_map(|at| Some((rank(&of(at), at)?, at)));
    let (_, at) = ranked.min()?;
    Some(Segments { counts: table.counts(at.1, at.0), ..of(at) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extents(kept: Vec<u64>, input: u64) -> Extents {
        let besides_segment = vec![0; kept.len()];
        Extents { kept, input, besides_loss: 0, besides_segment, layer_work: 1, segment_saves: 0 }
    }

    /// memory-accounting, part 5: sixteen layers of one unit whose input is one unit too.
    #[test]
    fn sixteen_layers_of_one_unit_need_segments_near_the_square_root() {
        let layers = extents(vec![1; 16], 1);
        assert_eq!(least_work(&layers, 16).unwrap().counts, [] as [u64; 0]);
        // Segments of four need 4 + 4 units. Longer ones towards the first layer, before which fewer inputs are
        // kept, and three layers that are not recomputed at all need 6.
        let least = least_memory(&layers).unwrap();
        assert_eq!(least.counts, [5, 4, 4]);
        assert_eq!((least.at_loss, least.at_segment), (6, Some(6)));
        assert_eq!(least_work(&layers, 6).unwrap(), least);
        assert_eq!(least_work(&layers, 5), None);
    }

    /// Every way to cut the first layers into segments.
    fn all(layers: u64) -> Vec<Vec<u64>> {
        if layers == 0 {
            return vec![Vec::new()];
        }
        let first =
            |count: u64| all(layers - count).into_iter().map(move |rest| [vec![count], rest].concat());
        (1..=layers).flat_map(first).collect()
    }

    fn total(extents: &Extents, counts: &[u64]) -> u64 {
        let (mut next, mut worst) = (0, 0);
        for (before, count) in counts.iter().enumerate() {
            let end = next + *count as usize;
            let own: u64 = extents.kept[next..end].iter().sum();
            let besides = extents.besides_segment[end - 1] + before as u64 * extents.input;
            worst = worst.max(besides + own);
            next = end;
        }
        let inputs = counts.len() as u64 * extents.input;
        let at_loss = extents.besides_loss + inputs + extents.kept[next..].iter().sum::<u64>();
        worst.max(at_loss)
    }

    proptest! {
        #[test]
        fn no_other_segments_are_less_work_within_the_budget_or_less_memory(
            layers in prop::collection::vec((1..20_u64, 0..30_u64), 1..8),
            input in 0..10_u64,
            besides_loss in 0..30_u64,
            budget in 0..120_u64,
            (layer_work, segment_saves) in (1..9_u64, 0..4_u64),
        ) {
            let (kept, besides_segment) = layers.into_iter().unzip();
            let extents = Extents { kept, input, besides_loss, besides_segment, layer_work, segment_saves };
            let cost = |counts: &[u64]| {
                let layers: u64 = counts.iter().sum();
                let work = (layers * layer_work).saturating_sub(counts.len() as u64 * segment_saves);
                (work, total(&extents, counts))
            };
            let every = || (0..=extents.kept.len() as u64).flat_map(all).map(|counts| cost(&counts));
            let found = least_work(&extents, budget).map(|segments| cost(&segments.counts));
            prop_assert_eq!(found, every().filter(|(_, total)| *total <= budget).min());
            let lowest = least_memory(&extents).map(|segments| total(&extents, &segments.counts));
            prop_assert_eq!(lowest, every().map(|(_, total)| total).min());
        }
    }
}
