//! Rounds of what a program repeats, where no marks tell its steps: a bare loop, passes of an evaluation.
//!
//! What is made at one place once a round comes back at an even distance. Most places of a loop do so as
//! often as it goes round; those of inner loops come more often, and not all equally so. What stays each
//! time makes no round: a model is loaded layer by layer. Where models run, the layers of one are no rounds
//! either: what the program itself makes for a pass, its input above all, tells them.

use std::collections::BTreeMap;

use ledger::{Category, DeviceId, DeviceKind, Event, Name, Phase, Tape};
use rustc_hash::FxHashMap;

use super::walk::End;

/// The fewest rounds.
const LEAST_ROUNDS: u32 = 4;
/// The longest distance may be so many times the shortest.
const EVEN: usize = 3;

/// Where something is made: the first event, and distances in requests.
#[derive(Clone, Copy, Debug)]
struct Place {
    times: u32,
    /// How often it was let go of.
    gone: u32,
    first_event: usize,
    first: usize,
    last: usize,
    shortest: usize,
    longest: usize,
}

/// The ends of the rounds of `tape` from the event `from` on; none where nothing repeats.
pub(super) fn rounds(tape: &Tape, from: usize) -> Vec<End> {
    let runs_models = tape.marks().iter().any(|mark| mark.phase == Phase::FORWARD);
    let mut places: FxHashMap<Name, Place> = FxHashMap::default();
    let mut requests = 0;
    for index in from..tape.len() {
        let (event, name) = match tape.event(index) {
            Event::Alloc { object, device, .. } if is_gpu(tape, device) => {
                requests += 1;
                let label = tape.label(tape.object(object).label);
                let is_input = || label.category == Category::Input || is_own(tape.name(label.name));
                if runs_models && !is_input() {
                    continue;
                }
                (index, label.name)
            }
            Event::Free(object) => {
                let place = places.get_mut(&tape.label(tape.object(object).label).name);
                if let Some(place) = place {
                    place.gone += 1;
                }
                continue;
            }
            _ => continue,
        };
        let at = requests - 1;
        let place = places.entry(name).or_insert(Place {
            times: 0,
            gone: 0,
            first_event: event,
            first: at,
            last: at,
            shortest: usize::MAX,
            longest: 0,
        });
        if place.times > 0 {
            let distance = at - place.last;
            place.shortest = place.shortest.min(distance);
            place.longest = place.longest.max(distance);
        }
        (place.times, place.last) = (place.times + 1, at);
    }
    let even = |place: &Place| {
        place.times >= LEAST_ROUNDS
            && place.gone * 2 > place.times
            && place.longest <= EVEN * place.shortest
            && place.first <= requests / 3
            && requests - place.last <= 2 * place.longest
    };
    // How often, and so how many places: the most places, then the fewest times.
    let mut often: BTreeMap<u32, u32> = BTreeMap::new();
    for place in places.values().filter(|place| even(place)) {
        *often.entry(place.times).or_default() += 1;
    }
    let Some(times) = often.into_iter().rev().max_by_key(|(_, places)| *places).map(|(times, _)| times)
    else {
        return Vec::new();
    };
    let begins = places.iter().filter(|(_, place)| place.times == times && even(place));
    let Some((anchor, _)) = begins.min_by_key(|(_, place)| place.first_event) else { return Vec::new() };
    let starts = (from..tape.len()).filter(|index| makes(tape, *index, *anchor));
    let failed = tape.events().any(|event| matches!(event, Event::Oom { .. }));
    let last = (!failed).then_some(tape.len());
    starts.chain(last).zip(0..).map(|(event, step)| End { event, step }).collect()
}

/// Whether the program makes it itself, and no module does.
fn is_own(name: &str) -> bool {
    name.contains("<module>") && !name.contains(" forward")
}

/// Whether the event at `index` makes something of `name` on a GPU.
fn makes(tape: &Tape, index: usize, name: Name) -> bool {
    match tape.event(index) {
        Event::Alloc { object, device, .. } => {
            is_gpu(tape, device) && tape.label(tape.object(object).label).name == name
        }
        _ => false,
    }
}

fn is_gpu(tape: &Tape, device: DeviceId) -> bool {
    tape.devices[usize::from(device.0)].kind == DeviceKind::Gpu
}
