//! What totals at the ends of steps tell, of a tape and of a log alike: slopes, warm-up, and whether
//! what rises is allocated, only reserved, or follows the input.

use super::line::Line;

/// What is known of the end of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Moment {
    /// The step.
    pub(crate) step: u64,
    /// Allocated at the end.
    pub(crate) allocated: Option<u64>,
    /// Reserved at the end.
    pub(crate) reserved: Option<u64>,
    /// The most that was allocated in the step, or up to it.
    pub(crate) peak: Option<u64>,
    /// How large its input was.
    pub(crate) input: Option<f64>,
    /// What its forward pass left of its results, where a tape tells: an input is one if they follow it.
    pub(crate) results: Option<u64>,
    /// What is reserved in segments without a block in use, where that was looked at: the allocator gives
    /// them back when it has to.
    pub(crate) whole: Option<u64>,
}

/// The fewest ends after the warm-up that totals alone can be judged by.
pub(super) const LEAST_ENDS: usize = 4;
/// So little a step is not held against anyone: eight of the allocator's smallest blocks.
const LEAST_SLOPE: f64 = 8.0 * 512.0;
/// An end belongs to the warm-up where the rise after it is more than so many times any later change.
const WARM: u64 = 3;
/// What is allocated must rise by more than its interval is wide, and comes to rest where the later of two
/// halves rises by less than this part of the earlier.
const SURE: Rising = Rising { intervals: 2.0, rests: 0.25 };
/// What is reserved goes up in segments and seldom down: its line fits less well, and that it rises at all is
/// enough; but it does so at first in any run.
const LIKELY: Rising = Rising { intervals: 1.0, rests: 0.5 };
/// Reserved memory strands where what is in no block grows more than so many times faster than what is.
const FAR_FASTER: f64 = 3.0;
/// The share of pairs of steps with unlike inputs whose totals must be unlike in the same way.
const FOLLOWS: f64 = 0.8;

/// What it takes to rise.
#[derive(Clone, Copy, Debug)]
struct Rising {
    intervals: f64,
    rests: f64,
}

/// What moments tell.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Told {
    /// The moments that count come after so many.
    pub(crate) from: usize,
    pub(crate) allocated: Option<Line>,
    pub(crate) reserved: Option<Line>,
    /// Too few moments are left to say.
    pub(crate) too_few: bool,
    /// What is allocated grows, and the input does not make it.
    pub(crate) grows: bool,
    /// What is allocated is above all before at every second end or more.
    pub(crate) often: bool,
    /// What is reserved grows, and the input does not make it.
    pub(crate) reserved_grows: bool,
    /// What is reserved is more at each end than at the one before, and by more than what is allocated.
    pub(crate) reserved_rises: bool,
    /// What is reserved in no block grows, far faster than what is.
    pub(crate) strands: bool,
    /// The totals follow the input.
    pub(crate) follows: bool,
    /// The step with which something rose for the last time, where it is at rest since.
    pub(crate) rested: Option<u64>,
}

impl Told {
    /// How many times faster reserved rises than allocated; none where not both do.
    pub(crate) fn times_faster(&self) -> Option<f64> {
        let (reserved, allocated) = (self.reserved?.slope, self.allocated?.slope);
        (reserved > 0.0 && allocated >= 1.0).then(|| reserved / allocated)
    }
}

/// What `moments` tell, of which the first `from` are known to be warm-up.
pub(crate) fn told(moments: &[Moment], from: usize) -> Told {
    let allocated = |moment: &Moment| moment.allocated.map(signed);
    let reserved = |moment: &Moment| moment.reserved.map(signed);
    let from = warm(moments, from, &allocated).max(warm(moments, from, &reserved));
    let most = running_peaks(moments);
    let gaps: Vec<(u64, i64)> =
        moments.iter().zip(most).skip(from).filter_map(|(moment, most)| gap(moment, most)).collect();
    let column = |value: &dyn Fn(&Moment) -> Option<i64>| -> Vec<(u64, i64)> {
        moments[from..].iter().filter_map(|moment| Some((moment.step, value(moment)?))).collect()
    };
    let (allocations, reservations) = (column(&allocated), column(&reserved));
    let inputs = &moments[from..];
    let allocated_line = Line::through(&allocations);
    let reserved_line = Line::through(&reservations);
    let results = column(&|moment| moment.results.map(signed));
    let known = varied(inputs) && (results.is_empty() || follows(&results, inputs));
    let grows =
        |points: &[(u64, i64)], sure: Rising| grows(points, sure) && !(known && prompted(points, inputs));
    // What allocated grows by at least.
    let own = allocated_line.map_or(0.0, |line| line.slope - line.half).max(0.0);
    let peaks = column(&|moment| moment.peak.map(signed));
    let follows = known
        && (follows(&peaks, inputs)
            || follows(&allocations, inputs)
            || rises(&reservations).len() > 1 && prompted(&reservations, inputs));
    let pinned = column(&pinned);
    // Inputs of any length leave segments of any length, which are free as a whole and no harm.
    let strands = grows(&gaps, LIKELY)
        && grows(&reservations, LIKELY)
        && Line::through(&gaps).is_some_and(|line| line.slope > FAR_FASTER * own)
        && !(follows && !pinned.is_empty() && !grows(&pinned, SURE));
    Told {
        from,
        too_few: allocations.len().max(reservations.len()) < LEAST_ENDS,
        grows: grows(&allocations, SURE),
        often: 2 * rises(&allocations).len() > allocations.len(),
        reserved_grows: grows(&reservations, LIKELY),
        reserved_rises: gaps.len() > 1 && gaps.windows(2).all(|pair| pair[0].1 < pair[1].1),
        strands,
        follows,
        rested: rested(moments, &allocated).max(rested(moments, &reserved)),
        allocated: allocated_line,
        reserved: reserved_line,
    }
}

const fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}

/// What is reserved beyond all that was ever allocated at once.
fn gap(moment: &Moment, most: Option<u64>) -> Option<(u64, i64)> {
    Some((moment.step, signed(moment.reserved?) - signed(most?)))
}

/// What is reserved beside blocks in use.
fn pinned(moment: &Moment) -> Option<i64> {
    Some(signed(moment.reserved?) - signed(moment.whole?) - signed(moment.allocated?))
}

/// The most that is known to have been allocated up to each moment.
fn running_peaks(moments: &[Moment]) -> impl Iterator<Item = Option<u64>> + '_ {
    moments.iter().scan(None, |most, moment| {
        *most = moment.peak.max(moment.allocated).max(*most);
        Some(*most)
    })
}

/// How many moments are warm-up by `value`, at least `from` and at most half of them.
fn warm(moments: &[Moment], from: usize, value: &dyn Fn(&Moment) -> Option<i64>) -> usize {
    let mut from = from.min(moments.len());
    while from < moments.len() / 2 {
        let values: Vec<i64> = moments[from..].iter().filter_map(value).collect();
        let mut changes = values.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
        let Some(first) = changes.next().filter(|change| *change > 0) else { break };
        let later = changes.map(i64::unsigned_abs).max().unwrap_or(0);
        if values.len() < LEAST_ENDS || first.unsigned_abs() <= WARM.saturating_mul(later) {
            break;
        }
        from += 1;
    }
    from
}

/// The places of `points` that are above all before; the first is.
fn rises(points: &[(u64, i64)]) -> Vec<usize> {
    let mut most = None;
    let mut above = |(index, (_, value)): (usize, &(u64, i64))| {
        let rises = most.is_none_or(|most| *value > most);
        most = most.max(Some(*value));
        rises.then_some(index)
    };
    points.iter().enumerate().filter_map(&mut above).collect()
}

/// Whether `points` rise until the last of them: by more than their slope is uncertain, as often as before,
/// and not ever less.
fn grows(points: &[(u64, i64)], sure: Rising) -> bool {
    let steep =
        Line::through(points).is_some_and(|line| line.rises(sure.intervals) && line.slope > LEAST_SLOPE);
    if points.len() < LEAST_ENDS || !steep {
        return false;
    }
    let rises = rises(points);
    let wait = rises.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let since = points.len() - 1 - rises.last().copied().unwrap_or(0);
    let third = points.len() / 3;
    let mean = |part: &[(u64, i64)]| {
        part.iter().map(|point| (point.1 - points[0].1) as f64).sum::<f64>() / part.len().max(1) as f64
    };
    let (first, middle) = (mean(&points[..third]), mean(&points[third..points.len() - third]));
    let last = mean(&points[points.len() - third..]);
    let at_rest = third > 0 && last - middle < sure.rests * (middle - first);
    rises.len() > 2 && since <= wait && !at_rest
}

/// Whether the inputs are known and not all one.
fn varied(moments: &[Moment]) -> bool {
    let mut known = moments.iter().filter_map(|moment| moment.input);
    let first = known.next();
    first.is_some_and(|first| known.any(|input| input != first))
}

/// Whether `points` rise only where the input is larger than ever before.
fn prompted(points: &[(u64, i64)], moments: &[Moment]) -> bool {
    let mut most = f64::NEG_INFINITY;
    let mut rises = rises(points).into_iter().map(|index| points[index].0).skip(1).peekable();
    for moment in moments {
        let Some(input) = moment.input else { continue };
        let rose = rises.next_if(|step| *step <= moment.step).is_some();
        if rose && input <= most {
            return false;
        }
        most = most.max(input);
    }
    true
}

/// Whether unlike inputs have `points` that are unlike in the same way.
fn follows(points: &[(u64, i64)], moments: &[Moment]) -> bool {
    let mut rows = Vec::new();
    let mut inputs = moments.iter().peekable();
    for (step, value) in points {
        while inputs.next_if(|moment| moment.step < *step).is_some() {}
        let input = inputs.peek().filter(|moment| moment.step == *step).and_then(|moment| moment.input);
        rows.extend(input.map(|input| (input, *value)));
    }
    // Pairs at all distances, yet not all pairs of a long log.
    let distances = (0..usize::BITS).map(|power| 1 << power).take_while(|distance| *distance < rows.len());
    let pairs = distances.flat_map(|distance| rows.iter().zip(&rows[distance..]));
    let (mut unlike, mut alike) = (0_u32, 0_u32);
    for ((input, value), (other_input, other_value)) in pairs {
        if input != other_input {
            unlike += 1;
            alike += u32::from(if input < other_input { value < other_value } else { value > other_value });
        }
    }
    unlike > 0 && f64::from(alike) >= FOLLOWS * f64::from(unlike)
}

/// The step with which `value` rose for the last time, where it is at rest since: longer than it ever
/// waited before, and above where it began.
fn rested(moments: &[Moment], value: &dyn Fn(&Moment) -> Option<i64>) -> Option<u64> {
    let points: Vec<(u64, i64)> =
        moments.iter().filter_map(|moment| Some((moment.step, value(moment)?))).collect();
    let rises = rises(&points);
    let [.., last] = *rises.as_slice() else { return None };
    let wait = rises.windows(2).map(|pair| pair[1] - pair[0]).max()?;
    let least = points[last..].iter().map(|point| point.1).min()?;
    (points.len() - 1 - last >= wait && least > points[0].1).then_some(points[last].0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn moments(rows: impl IntoIterator<Item = (u64, u64, f64)>) -> Vec<Moment> {
        let rows = rows.into_iter().enumerate();
        rows.map(|(step, (allocated, reserved, input))| Moment {
            step: step as u64,
            allocated: Some(allocated * MIB),
            reserved: Some(reserved * MIB),
            input: Some(input),
            ..Moment::default()
        })
        .collect()
    }

    #[test]
    fn the_first_steps_are_set_apart() {
        let told = told(&moments([2, 90, 91, 92, 93, 94, 95].map(|at| (at, 200, 1.0))), 0);
        assert_eq!((told.from, told.grows, told.rested), (1, true, None));
        assert_eq!(told.allocated.unwrap().slope.round(), MIB as f64);
    }

    #[test]
    fn what_fills_and_stops_rests() {
        let told = told(&moments([10, 20, 30, 40, 50, 50, 50, 50, 50, 50].map(|at| (at, at, 1.0))), 0);
        assert_eq!(
            (told.grows, told.reserved_grows, told.strands, told.rested),
            (false, false, false, Some(4))
        );
    }

    #[test]
    fn what_comes_to_rest_slowly_does_not_grow() {
        let values = (1..40_u64).map(|step| (1000 - 1000 / step, 1000, 1.0));
        assert!(!told(&moments(values), 0).grows);
    }

    #[test]
    fn reserved_that_grows_alone_strands() {
        let told = told(&moments((0..8).map(|at| (10 + at, 100 + 60 * at, 1.0))), 0);
        assert!(told.strands && told.grows && told.reserved_grows);
    }

    #[test]
    fn the_longest_input_bounds_what_it_makes() {
        let lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3];
        let mut most = 0;
        let rows = lengths.map(|length| {
            most = most.max(length);
            (100 + length, 200 + 20 * most, length as f64)
        });
        let bounded = told(&moments(rows), 0);
        assert!(bounded.follows && !bounded.grows && !bounded.strands && !bounded.reserved_grows);
        // The same totals with inputs that say nothing of them.
        let other = told(&moments(rows.map(|(allocated, reserved, _)| (allocated, reserved, 1.0))), 0);
        assert!(!other.follows);
        // Longer and longer inputs are no growth either.
        let longer = told(&moments((1..9).map(|at| (100 + 10 * at, 200 + 30 * at, at as f64))), 0);
        assert!(longer.follows && !longer.grows && !longer.strands);
    }

    proptest! {
        #[test]
        fn a_constant_series_is_never_accused(
            level in 0_u64..1 << 20,
            inputs in proptest::collection::vec(0_u32..9, 0..40),
        ) {
            let told = told(&moments(inputs.iter().map(|input| (level, level, f64::from(*input)))), 0);
            prop_assert!(!told.grows && !told.reserved_grows && !told.strands && !told.follows);
            prop_assert_eq!(told.rested, None);
        }

        #[test]
        fn steady_growth_is_told_with_its_slope(
            start in 0_u64..1 << 20,
            slope in 1_u64..1 << 12,
            steps in 4_u64..60,
        ) {
            let told = told(&moments((0..steps).map(|step| (start + slope * step, 1 << 30, 0.0))), 0);
            prop_assert!(told.grows && !told.strands);
            prop_assert_eq!(told.allocated.unwrap().slope.round(), (slope * MIB) as f64);
        }

        #[test]
        fn what_falls_back_each_time_does_not_grow(
            levels in proptest::collection::vec(0_u64..1000, 2..6),
            times in 3_usize..12,
        ) {
            let mut rows: Vec<(u64, u64, f64)> = Vec::new();
            for _ in 0..times {
                rows.extend(levels.iter().map(|level| (*level, 1000, 0.0)));
            }
            prop_assert!(!told(&moments(rows), 0).grows);
        }
    }
}
