//! What grows from step to step, by where it is made; warm-up told from growth.

use ledger::{Category, DeviceKind, Event, LabelId, Phase, Tape};
use rustc_hash::FxHashMap;
use wire::{Growing, Growth, Trend};

/// The ends of steps that it takes to tell growth from warm-up: the state of an optimizer comes in the
/// first step, and what comes in a second one and again in a third is kept.
const LEAST_STEPS: u32 = 3;
/// How often something that is replaced by something larger must grow in a row to count: of batches
/// of any length two are so by chance often, and three at times.
const LEAST_WITHOUT_COUNT: u32 = 4;

/// What there is of one label at the ends of steps.
#[derive(Clone, Copy, Debug, Default)]
struct Track {
    /// Now.
    bytes: u64,
    count: u64,
    /// At the end of the last step that touched it.
    end_bytes: u64,
    end_count: u64,
    /// Since it last shrank: what there was, how often it grew, how often in number too, and the first
    /// and last steps that did.
    base: u64,
    times: u32,
    times_in_number: u32,
    first: u32,
    last: u32,
    touched: bool,
}

/// What grows on the GPUs of `tape`.
pub(super) fn growth(tape: &Tape) -> Growth {
    let mut tracks: FxHashMap<LabelId, Track> = FxHashMap::default();
    let mut touched: Vec<LabelId> = Vec::new();
    let mut sizes = vec![0_u64; tape.objects().len()];
    let mut step = None;
    let (mut steps, mut updated) = (0, false);
    let updates = tape.marks().iter().any(|mark| mark.phase == Phase::UPDATE);
    let end_of = |step: u32, tracks: &mut FxHashMap<LabelId, Track>, touched: &mut Vec<LabelId>| {
        for label in touched.drain(..) {
            if let Some(track) = tracks.get_mut(&label) {
                track.end(step);
            }
        }
    };
    for event in tape.events() {
        let (object, made) = match event {
            Event::Mark(mark) => {
                let mark = tape.mark_of(mark);
                if let Some(before) = step.filter(|before| *before != mark.step) {
                    end_of(before, &mut tracks, &mut touched);
                    steps += u32::from(before > 0);
                    updated = false;
                }
                updated |= mark.phase == Phase::UPDATE;
                step = Some(mark.step);
                continue;
            }
            Event::Alloc { object, bytes, device, .. } => {
                if tape.devices[usize::from(device.0)].kind == DeviceKind::Gpu {
                    sizes[object.0 as usize] = bytes.get();
                    (object, true)
                } else {
                    continue;
                }
            }
            Event::FreeRequested(object) | Event::Free(object) => (object, false),
            _ => continue,
        };
        let bytes =
            if made { sizes[object.0 as usize] } else { std::mem::take(&mut sizes[object.0 as usize]) };
        if bytes == 0 {
            continue;
        }
        let label = tape.object(object).label;
        let track = tracks.entry(label).or_default();
        if made {
            (track.bytes, track.count) = (track.bytes + bytes, track.count + 1);
        } else {
            (track.bytes, track.count) = (track.bytes - bytes, track.count - 1);
        }
        if !std::mem::replace(&mut track.touched, true) {
            touched.push(label);
        }
    }
    // A step that was cut off has no end.
    let failed = tape.events().any(|event| matches!(event, Event::Oom { .. }));
    if let Some(last) = step.filter(|last| *last > 0 && (updated || !updates && !failed)) {
        end_of(last, &mut tracks, &mut touched);
        steps += 1;
    }
    let last = step.unwrap_or(0);
    tell(tape, &tracks, steps, last)
}

impl Track {
    /// The step `step` is over.
    fn end(&mut self, step: u32) {
        self.touched = false;
        let (before, count) = (self.end_bytes, self.end_count);
        (self.end_bytes, self.end_count) = (self.bytes, self.count);
        // What is there when the first step is over is where growth is counted from.
        if step <= 1 || self.bytes < before {
            let fresh = Self { base: self.bytes, times: 0, times_in_number: 0, ..*self };
            *self = fresh;
        } else if self.bytes > before {
            if self.times == 0 {
                self.first = step;
            }
            self.times += 1;
            self.times_in_number += u32::from(self.count > count);
            self.last = step;
        }
    }

    /// Whether it grows until the last of the steps: as often since it began as one would expect of
    /// something that grows at an even pace.
    fn grows(&self, last_step: u32) -> bool {
        let in_number = self.times_in_number >= 2 && self.times_in_number == self.times;
        let pace = (self.last - self.first).div_ceil(self.times.saturating_sub(1).max(1));
        (in_number || self.times >= LEAST_WITHOUT_COUNT)
            && last_step.saturating_sub(self.last) <= 2 * pace.max(1)
    }

    fn bytes_per_step(&self) -> u64 {
        // The first growth came within a step as the others did.
        let pace = (self.last - self.first).div_ceil(self.times.saturating_sub(1).max(1)).max(1);
        (self.end_bytes - self.base) / u64::from(self.last - self.first + pace)
    }
}

/// What the tracks tell after `steps` ends of steps, the last of which is of the step `last`.
fn tell(tape: &Tape, tracks: &FxHashMap<LabelId, Track>, steps: u32, last: u32) -> Growth {
    let last_end = tracks.values().map(|track| track.last).max().unwrap_or(0).min(last);
    let mut rows: Vec<Growing> = Vec::new();
    let mut warm_up = 0;
    for (label, track) in tracks {
        if track.times == 0 {
            continue;
        }
        if steps < LEAST_STEPS || !track.grows(last.max(last_end)) {
            // What is new in the last step may be let go of in the next.
            if track.times_in_number > 0 && track.last < last {
                warm_up = warm_up.max(track.last);
            }
            continue;
        }
        let label = tape.label(*label);
        rows.push(Growing {
            name: tape.name(label.name).to_owned(),
            category: wire::Category(label.category),
            bytes_per_step: track.bytes_per_step(),
            first_step: track.first,
            last_step: track.last,
            bytes: track.end_bytes,
            count: track.end_count,
        });
    }
    rows.sort_by(|a, b| {
        b.bytes_per_step
            .cmp(&a.bytes_per_step)
            .then_with(|| a.name.cmp(&b.name))
            .then(a.category.cmp(&b.category))
    });
    let verdict = match (steps < LEAST_STEPS, rows.is_empty()) {
        (true, _) => Trend::TooFewSteps,
        (false, false) => Trend::Growing,
        (false, true) if warm_up > 1 => Trend::WarmUp,
        (false, true) => Trend::Steady,
    };
    let bytes_per_step = rows.iter().map(|row| row.bytes_per_step).sum();
    let trains = tape.marks().iter().any(|mark| mark.phase == Phase::BACKWARD);
    let explanation = explanation(verdict, &rows, steps, warm_up, trains);
    let warm_up_steps = (steps >= LEAST_STEPS).then_some(warm_up.max(1));
    Growth { verdict, steps, warm_up_steps, bytes_per_step, explanation, rows }
}

fn explanation(verdict: Trend, rows: &[Growing], steps: u32, warm_up: u32, trains: bool) -> String {
    let graph: u64 =
        rows.iter().filter(|row| row.category.0 == Category::Activation).map(|row| row.bytes_per_step).sum();
    let all: u64 = rows.iter().map(|row| row.bytes_per_step).sum();
    match verdict {
        Trend::TooFewSteps => {
            let steps = match steps {
                0 => "no whole step tells".to_owned(),
                1 => "one whole step does not tell".into(),
                _ => format!("{steps} whole steps do not tell"),
            };
            format!("{steps} it from warm-up; record {LEAST_STEPS} or more")
        }
        Trend::Steady => "nothing that is made in a step is there when later ones are over".into(),
        Trend::WarmUp => format!("what grew at first grows no more after step {warm_up}"),
        Trend::Growing if graph * 2 > all && !trains => {
            "every pass leaves results behind that no later one lets go: something keeps the outputs of each, such as a list"
                .into()
        }
        Trend::Growing if graph * 2 > all => {
            "every step leaves results of its forward pass behind, which its backward pass does not let go: something keeps the graph of each step, such as a list of losses without `.detach()` or `.item()`, or `retain_graph=True`"
                .into()
        }
        Trend::Growing => "every step leaves something behind that no later one lets go".into(),
    }
}
