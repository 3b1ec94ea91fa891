//! What grows in a step log.

use evidence::Series;
use evidence::series::{Extra, Figure};
use ledger::Bytes;
use wire::{Growth, Trend};

use super::line::Line;
use super::totals::{Moment, Told, told};
use super::{nothing, slope, words};

/// What is looked at for what is allocated, and for what is reserved: the first of these that the log has.
const ALLOCATED: [Figure; 2] = [Figure::Allocated, Figure::PeakAllocated];
const RESERVED: [Figure; 3] = [Figure::Reserved, Figure::PeakReserved, Figure::Used];
/// Parts of names of columns that tell how large an input is,
const LENGTHS: [&str; 6] = ["seq", "len", "resolution", "pixel", "frames", "width"];
/// and of such as may count what came so far instead, and then only ever rise.
const AMOUNTS: [&str; 6] = ["token", "batch", "sample", "nodes", "edges", "atoms"];

/// What grows in `series`; `capacity` is that of its device, in place of what the log tells.
pub(crate) fn of_log(series: &Series, capacity: Option<Bytes>) -> Growth {
    let has = |figure: &Figure| series.column(*figure).next().is_some();
    let allocated = ALLOCATED.into_iter().find(has);
    let reserved = RESERVED.into_iter().find(has);
    let counted = series.points.windows(2).all(|pair| pair[0].step < pair[1].step);
    let bytes = |index: usize, figure: Option<Figure>| -> Option<u64> {
        figure.and_then(|figure| series.points[index].get(figure)).map(Bytes::get)
    };
    let moment = |index: usize| Moment {
        // Where steps begin again, rows are counted.
        step: if counted { series.points[index].step } else { index as u64 },
        allocated: bytes(index, allocated),
        reserved: bytes(index, reserved),
        peak: bytes(index, Some(Figure::PeakAllocated)),
        ..Moment::default()
    };
    let mut moments: Vec<Moment> = (0..series.points.len()).map(moment).collect();
    let mut found = told(&moments, 0);
    let mut bounded_by = None;
    for extra in series.extras.iter().filter(|extra| is_input(extra)) {
        for (moment, value) in moments.iter_mut().zip(&extra.values) {
            moment.input = value.filter(|value| value.is_finite());
        }
        let with_input = told(&moments, 0);
        if with_input.follows {
            (found, bounded_by) = (with_input, Some(extra.name.clone()));
            break;
        }
    }
    // The most so far rises with every chance, yet seldom.
    found.grows &= allocated != Some(Figure::PeakAllocated) || found.often;
    let verdict = verdict(&found, allocated.is_some());
    let capacity =
        capacity.or_else(|| series.column(Figure::Capacity).last().map(|(_, bytes)| bytes)).map(Bytes::get);
    let line = |figure: Option<Figure>, line: Option<Line>| {
        slope(figure?.as_str(), line?, &moments, found.from).filter(|_| !found.too_few)
    };
    let mut growth = Growth {
        verdict,
        steps: moments.len() as u64,
        warm_up_steps: warm_up(&moments, &found),
        allocated: line(allocated, found.allocated),
        reserved: line(reserved, found.reserved),
        times_faster: found.times_faster(),
        bounded_by: bounded_by.filter(|_| verdict == Trend::LongestInput),
        capacity_bytes: capacity,
        ..nothing(if counted { "step" } else { "row" })
    };
    until_full(&mut growth, &found, moments.last().map_or(0, |moment| moment.step));
    words::tell_log(&mut growth);
    growth
}

fn verdict(told: &Told, allocated_is_known: bool) -> Trend {
    match () {
        () if told.too_few => Trend::TooFewSteps,
        () if told.strands => Trend::Stranding,
        () if told.grows || told.reserved_grows && !allocated_is_known => Trend::Growing,
        () if told.follows => Trend::LongestInput,
        () if told.rested.is_some() => Trend::WarmUp,
        () => Trend::Steady,
    }
}

/// The step after which nothing grows that does not grow still.
fn warm_up(moments: &[Moment], told: &Told) -> Option<u64> {
    if told.too_few {
        return None;
    }
    let rested = told.rested.filter(|_| !told.grows && !told.reserved_grows);
    rested.or_else(|| moments.get(told.from).map(|moment| moment.step))
}

/// When the first of the lines that rise meets the capacity.
fn until_full(growth: &mut Growth, told: &Told, last: u64) {
    if !matches!(growth.verdict, Trend::Growing | Trend::Stranding) {
        return;
    }
    let Some(capacity) = growth.capacity_bytes else { return };
    let reserved = told.reserved.filter(|_| told.reserved_grows);
    let allocated = told.allocated.filter(|_| told.grows);
    let met = [reserved, allocated].into_iter().flatten().filter_map(|line| line.reaches(capacity as f64));
    if let Some(at) = met.reduce(f64::min) {
        let steps = (at - last as f64).max(0.0).ceil() as u64;
        growth.steps_until_full = Some(steps);
        growth.full_at_step = Some(last.saturating_add(steps));
    }
}

/// Whether `extra` tells how large an input is, by its name.
fn is_input(extra: &Extra) -> bool {
    let name = extra.name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let rises = || {
        let values: Vec<f64> = extra.values.iter().flatten().copied().collect();
        values.windows(2).all(|pair| pair[0] < pair[1])
    };
    has(&LENGTHS) || has(&AMOUNTS) && !rises()
}

#[cfg(test)]
mod tests {
    use evidence::StepLog;

    use super::*;

    /// What grows in the log `text`, on a device of `capacity` MiB.
    fn growth(text: &str, capacity: Option<u64>) -> Growth {
        let log = StepLog::read(text).unwrap();
        of_log(&log.series[0], capacity.map(Bytes::mib))
    }

    /// A log of `head` with a row for each of `rows`.
    fn log<const N: usize>(head: &str, rows: impl IntoIterator<Item = [u64; N]>) -> String {
        let row = |row: [u64; N]| row.map(|cell| cell.to_string()).join(",");
        std::iter::once(head.to_owned()).chain(rows.into_iter().map(row)).collect::<Vec<_>>().join("\n")
    }

    const STRANDS: [[u64; 3]; 6] = [
        [0, 66, 220],
        [20, 106, 2980],
        [40, 146, 5760],
        [60, 186, 8520],
        [80, 226, 11300],
        [100, 266, 14060],
    ];

    #[test]
    fn reserved_that_grows_alone_strands_until_the_card_is_full() {
        let text = log("cycle,allocated_mib,reserved_mib", STRANDS);
        let found = growth(&text, Some(16_384));
        assert_eq!(found.verdict, Trend::Stranding);
        let mib = |slope: &Option<wire::Slope>| slope.as_ref().unwrap().bytes_per_step as f64 / 1_048_576.0;
        assert_eq!(format!("{:.1} {:.1}", mib(&found.allocated), mib(&found.reserved)), "2.0 138.5");
        assert_eq!(format!("{:.0}", found.times_faster.unwrap()), "69");
        assert_eq!((found.full_at_step, found.steps_until_full), (Some(117), Some(17)));
        let said = found.explanation + &found.advice.unwrap_or_default();
        assert!(!said.contains("leak") && said.contains("69 times faster"), "{said}");
        // The log may tell the capacity itself; without one nothing is said of it.
        let rows = STRANDS.map(|[step, allocated, reserved]| [step, allocated, reserved, 16_384]);
        let told = growth(&log("cycle,allocated_mib,reserved_mib,total_memory_mib", rows), None);
        assert_eq!(told.full_at_step, Some(117));
        assert_eq!(growth(&text, None).full_at_step, None);
    }

    #[test]
    fn what_is_allocated_grows_and_what_was_there_at_first_does_not_count() {
        let rows = (0..12).map(|step| [step, if step == 0 { 400 } else { 1990 + 10 * step }, 4096]);
        let found = growth(&log("step,memory_allocated_mib,memory_reserved_mib", rows), Some(4096));
        assert_eq!((found.verdict, found.warm_up_steps), (Trend::Growing, Some(1)));
        assert_eq!(found.allocated.unwrap().bytes_per_step, 10 << 20);
        assert_eq!(found.steps_until_full, Some((4096 - 2100_u64).div_ceil(10)));
    }

    #[test]
    fn a_column_of_lengths_says_what_bounds_it() {
        let lengths = [512, 128, 700, 300, 900, 256, 1024, 640, 1000, 96];
        let mut most = 0;
        let rows: Vec<[u64; 4]> = lengths
            .iter()
            .zip(0..)
            .map(|(length, step)| {
                most = most.max(*length);
                [step, 800, 1000 + most, *length]
            })
            .collect();
        let found = growth(&log("step,allocated_mib,reserved_mib,seq_len", rows), None);
        assert_eq!((found.verdict, found.bounded_by.as_deref()), (Trend::LongestInput, Some("seq_len")));
        assert!(found.explanation.contains("`seq_len`"), "{}", found.explanation);
        // A counter is no length.
        let rows = (0..10).map(|step| [step, 800 + 7 * step, 2000, 4096 * (step + 1)]);
        let found = growth(&log("step,allocated_mib,reserved_mib,tokens_seen", rows), None);
        assert_eq!(found.verdict, Trend::Growing);
    }

    #[test]
    fn other_verdicts() {
        let allocated = |values: &[u64]| {
            let rows = values.iter().zip(0..).map(|(value, step)| [step, *value]);
            growth(&log("step,allocated_mib", rows), None).verdict
        };
        assert_eq!(allocated(&[5, 6, 7]), Trend::TooFewSteps);
        assert_eq!(allocated(&[9, 9, 9, 9, 9, 9]), Trend::Steady);
        assert_eq!(allocated(&[50, 47, 52, 49, 51, 48, 50, 52, 49]), Trend::Steady);
        assert_eq!(allocated(&[5, 10, 15, 20, 25, 25, 25, 25, 25]), Trend::WarmUp);
        assert_eq!(allocated(&[5, 10, 10, 15, 15, 20, 20, 25]), Trend::Growing);
        // What is reserved follows the most that ever was allocated.
        let mut most = 0;
        let rows: Vec<[u64; 3]> = [1700, 1100, 2300, 1900, 2600, 1200, 2100, 2800, 1500, 2950]
            .iter()
            .zip(0..)
            .map(|(value, step)| {
                most = most.max(value + 200);
                [step, *value, most]
            })
            .collect();
        let found = growth(&log("step,allocated_mib,reserved_mib", rows.clone()), None);
        assert!(!matches!(found.verdict, Trend::Stranding | Trend::Growing), "{:?}", found.verdict);
        let peaks = log("step,max_memory_allocated_mib", rows.iter().map(|row| [row[0], row[2] - 200]));
        assert_ne!(growth(&peaks, None).verdict, Trend::Growing);
        // What only the card tells is not said to be anyone's.
        let rows = (0..9).map(|step| [step, 900 + 20 * step]);
        let used = growth(&log("step,memory_used_mib", rows), None);
        assert_eq!(used.verdict, Trend::Growing);
        assert!(used.explanation.contains("does not tell"), "{}", used.explanation);
    }
}
