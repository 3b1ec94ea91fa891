//! What grows from step to step, of a tape and of a log: how fast, since when, who, and what it means.
//!
//! Slopes are those of [`line::Line`], the line of least squares through the ends of the steps after the
//! warm-up. [`totals`] judges a series of ends; of a tape, [`walk`] and [`track`] tell who makes it
//! grow, which counts more than the totals do.

mod line;
mod log;
mod rounds;
#[cfg(test)]
mod tests;
mod totals;
mod track;
mod walk;
mod words;

use allocator::{CachingAllocator, memory_of};
use ledger::{Bytes, Category, Event, LabelId, Phase, Tape, Unit};
use models::Torch;
use wire::{About, Growing, Growth, Slope, Trend};

pub(crate) use log::of_log;
pub(crate) use walk::Books;

use crate::emulate::Recorded;
use crate::fit;
use crate::simulate::known_torch;
use line::Line;
use rounds::rounds;
use totals::{Told, told};
use track::Track;
use walk::{End, Walked, after_updates, ends, walk};

/// The ends of steps that it takes to tell growth from warm-up: the state of an optimizer comes in the
/// first step, and what comes in a second one and again in a third is kept.
const LEAST_STEPS: usize = 3;

/// More places than a program that only runs a model keeps outputs from.
const LEAST_PLACES: usize = 5;

/// What is kept less than this in a round after the training is no more than what an evaluation counts.
const LEAST_PER_ROUND: u64 = 8 * 512;

/// What grows on a tape that was kept, under the settings of its run.
pub(crate) fn of_kept(about: &About, tape: &Tape, capacity: Option<Bytes>) -> Growth {
    if tape.unit != Unit::Requested {
        return of_tape(tape, &|| None, capacity);
    }
    let setup = about.subject.get("setup").and_then(|setup| setup.get("alloc_conf"));
    let conf = setup.and_then(|conf| conf.as_str()).unwrap_or_default();
    let settings = fit::or_defaults(fit::settings(conf), &mut Vec::new());
    let tie = fit::tie_rule(known_torch(about).unwrap_or(Torch::V2_15));
    let has_segments =
        tape.events().any(|event| matches!(event, Event::SegmentAlloc(_) | Event::SegmentMap(_)));
    let meter = || -> Option<Box<dyn Books>> {
        Some(match has_segments {
            true => Box::new(Recorded::new(tape, &settings, tie)),
            false => Box::new(CachingAllocator::new(&settings, tie, &memory_of(tape))),
        })
    };
    of_tape(tape, &meter, capacity)
}

/// What grows on the GPUs of `tape`: on the one that grows most. `meter` makes what tells blocks and
/// segments, and `capacity` is what the device has in place of what the tape tells.
pub(crate) fn of_tape<'a>(
    tape: &Tape,
    meter: &dyn Fn() -> Option<Box<dyn Books + 'a>>,
    capacity: Option<Bytes>,
) -> Growth {
    let trains = tape.marks().iter().any(|mark| mark.phase == Phase::BACKWARD);
    let judge = |ends: &[End], per: &str| {
        let meter = meter();
        let measure = match (meter.is_some(), tape.unit) {
            (false, Unit::Requested) => "requested",
            _ => "allocated",
        };
        let found = walk(tape, ends, meter).into_iter().map(|(device, walked)| {
            let device = &tape.devices[usize::from(device.0)];
            let known = device.capacity.map(|total| total.saturating_sub(device.context.unwrap_or_default()));
            let room = capacity.or(known).map(Bytes::get);
            Judge { tape, walked: &walked, measure, trains: trains && per == "step", room }.growth(per)
        });
        let worst = |growth: &Growth| (gravity(growth.verdict), growth.bytes_per_step);
        found.reduce(|a, b| if worst(&b) > worst(&a) { b } else { a }).unwrap_or_else(|| nothing(per))
    };
    let per =
        if trains || tape.marks().iter().any(|mark| mark.phase == Phase::UPDATE) { "step" } else { "pass" };
    let marked = judge(&ends(tape), per);
    if marked.verdict == Trend::TooFewSteps {
        let rounds = rounds(tape, 0);
        return if rounds.is_empty() { marked } else { judge(&rounds, "round") };
    }
    // What a program does after its training may grow as well.
    let rests = !matches!(marked.verdict, Trend::Growing | Trend::Stranding);
    let after = after_updates(tape).filter(|_| rests).map(|from| rounds(tape, from)).unwrap_or_default();
    if !after.is_empty() {
        let after = judge(&after, "round");
        if after.verdict == Trend::Growing && after.bytes_per_step >= LEAST_PER_ROUND {
            return after;
        }
    }
    marked
}

/// How much there is to do about a verdict.
const fn gravity(verdict: Trend) -> u8 {
    match verdict {
        Trend::TooFewSteps => 0,
        Trend::Steady => 1,
        Trend::WarmUp => 2,
        Trend::LongestInput => 3,
        Trend::Stranding => 4,
        Trend::Growing => 5,
    }
}

/// Nothing is known.
fn nothing(per: &str) -> Growth {
    Growth {
        verdict: Trend::TooFewSteps,
        explanation: String::new(),
        per: per.into(),
        steps: 0,
        warm_up_steps: None,
        allocated: None,
        reserved: None,
        times_faster: None,
        bytes_per_step: 0,
        kept_graph: false,
        bounded_by: None,
        capacity_bytes: None,
        steps_until_full: None,
        full_at_step: None,
        advice: None,
        rows: Vec::new(),
        settled: Vec::new(),
        trifles: Vec::new(),
    }
}

/// What one GPU of a tape had, and what it takes to judge it.
struct Judge<'a> {
    tape: &'a Tape,
    walked: &'a Walked,
    measure: &'static str,
    trains: bool,
    room: Option<u64>,
}

impl Judge<'_> {
    fn growth(&self, per: &str) -> Growth {
        let moments = &self.walked.moments;
        let last = moments.last().map_or(0, |moment| moment.step as u32);
        let enough = moments.len() >= LEAST_STEPS;
        let (mut rows, mut settled, mut warm_up) = (Vec::new(), Vec::new(), 0);
        for (label, track) in &self.walked.tracks {
            if !track.grew() {
                continue;
            }
            if enough && track.grows(last) {
                rows.push(self.row(*label, track));
                continue;
            }
            // What is new in the last step may be let go of in the next.
            if track.came_to_stay() && track.last < last {
                warm_up = warm_up.max(track.last);
                if enough && track.piled_up() {
                    settled.push(self.row(*label, track));
                }
            }
        }
        rows.sort_by(most_first);
        settled.sort_by(most_first);
        let graph = self.kept_graph(&rows);
        // One scalar a step is not worth a word of blame, unless it is the end of a graph.
        let (trifles, rows) =
            if graph { (Vec::new(), rows) } else { rows.into_iter().partition::<Vec<_>, _>(|row| row.small) };
        let since = rows.iter().map(|row| row.growing.first_step - 1).min();
        let from = since.unwrap_or(0).max(warm_up).max(1);
        let from = moments.partition_point(|moment| moment.step < from.into());
        // The last step ends with the recording, whatever the program did until then.
        let whole = &moments[..moments.len() - usize::from(moments.len() > totals::LEAST_ENDS)];
        let told = told(whole, from.min(whole.len().saturating_sub(LEAST_STEPS)));
        // What was there before the recording may go as fast as the same comes.
        let sum: u64 = rows.iter().map(|row| row.growing.bytes_per_step).sum();
        let rows = if told.allocated.is_some_and(|line| line.is_below(sum as f64 / 4.0)) {
            Vec::new()
        } else {
            rows
        };
        let plain = |rows: Vec<Candidate>| rows.into_iter().map(|row| row.growing).collect::<Vec<_>>();
        let unnamed = told.grows && trifles.is_empty();
        let verdict = match () {
            () if !enough => Trend::TooFewSteps,
            () if told.strands => Trend::Stranding,
            () if !rows.is_empty() || unnamed => Trend::Growing,
            () if told.follows => Trend::LongestInput,
            () if told.too_few && told.reserved_rises => Trend::TooFewSteps,
            () if warm_up > 1 => Trend::WarmUp,
            () => Trend::Steady,
        };
        let slope = |figure: &str, line: Option<Line>| slope(figure, line?, whole, told.from);
        let mut growth = Growth {
            verdict,
            steps: moments.len() as u64,
            warm_up_steps: enough.then_some(warm_up.max(1).into()),
            allocated: slope(self.measure, told.allocated).filter(|_| enough),
            reserved: slope("reserved", told.reserved).filter(|_| enough),
            times_faster: told.times_faster(),
            bytes_per_step: rows.iter().map(|row| row.growing.bytes_per_step).sum(),
            kept_graph: graph && !rows.is_empty(),
            bounded_by: (verdict == Trend::LongestInput).then(|| "input".into()),
            capacity_bytes: self.room,
            rows: plain(rows),
            settled: plain(settled),
            trifles: plain(trifles),
            ..nothing(per)
        };
        self.until_full(&mut growth, &told);
        words::tell(&mut growth, self.trains);
        growth
    }

    fn row(&self, label: LabelId, track: &Track) -> Candidate {
        let label = self.tape.label(label);
        let growing = Growing {
            name: self.tape.name(label.name).to_owned(),
            category: wire::Category(label.category),
            saved: label.saved,
            bytes_per_step: track.bytes_per_step(),
            objects_per_step: track.objects_per_step(),
            object_bytes: track.object_bytes(),
            first_step: track.first,
            last_step: track.last,
            bytes: track.end_bytes,
            count: track.end_count,
        };
        Candidate { growing, at_once: track.bytes_at_once(), small: track.is_small() }
    }

    /// Whether `rows` are a graph: of several places, and half of what forward passes leave for their
    /// backward. Without backward passes it takes more places than a program keeps outputs from.
    fn kept_graph(&self, rows: &[Candidate]) -> bool {
        let results = || rows.iter().filter(|row| row.growing.category.0 == Category::Activation);
        let bytes: u64 = results().map(|row| row.at_once).sum();
        let least = if self.trains { 2 } else { LEAST_PLACES };
        results().count() >= least && bytes.saturating_mul(2) >= self.walked.results
    }

    /// When the device is full, where that is known: what grows meets what the device has beyond the
    /// largest totals so far.
    fn until_full(&self, growth: &mut Growth, told: &Told) {
        let Some(last) = self.walked.moments.last() else { return };
        let line = match growth.verdict {
            Trend::Stranding => told.reserved,
            Trend::Growing => told.allocated,
            _ => return,
        };
        let held = self.walked.moments.iter().map(|moment| match growth.verdict {
            Trend::Stranding => moment.reserved.unwrap_or(0),
            _ => moment.peak.unwrap_or(0),
        });
        let left = self.room.zip(held.max()).map(|(room, held)| room.saturating_sub(held));
        let slope = line.map_or(growth.bytes_per_step as f64, |line| line.slope);
        if let Some(left) = left.filter(|_| slope >= 1.0) {
            let steps = (left as f64 / slope).ceil() as u64;
            growth.steps_until_full = Some(steps);
            growth.full_at_step = Some(last.step.saturating_add(steps));
        }
    }
}

/// A row, what it grows by each time, and whether its objects are as small as a block can be.
struct Candidate {
    growing: Growing,
    at_once: u64,
    small: bool,
}

fn most_first(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let (a, b) = (&a.growing, &b.growing);
    b.bytes_per_step
        .cmp(&a.bytes_per_step)
        .then_with(|| a.name.cmp(&b.name))
        .then(a.category.cmp(&b.category))
        .then(a.saved.cmp(&b.saved))
}

/// The slope of `figure`, of the moments after the first `from`.
fn slope(figure: &str, line: Line, moments: &[totals::Moment], from: usize) -> Option<Slope> {
    let counted = moments.get(from..)?;
    Some(Slope {
        figure: figure.into(),
        bytes_per_step: line.slope.round() as i64,
        low_bytes_per_step: (line.slope - line.half).round() as i64,
        high_bytes_per_step: (line.slope + line.half).round() as i64,
        points: counted.len() as u64,
        from_step: counted.first()?.step,
        to_step: counted.last()?.step,
    })
}
