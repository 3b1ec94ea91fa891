//! `cargo xtask tape-diff`: a planned tape against a recorded event list or an emulated tape, event by event.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ledger::{Device, DeviceId, DeviceKind, Event, ObjectId, Tape};
use vramledger::wire::{self, About};

use crate::case::Case;
use crate::events;

/// Arguments of `tape-diff`.
#[derive(Args)]
pub struct TapeDiff {
    /// The recorded event list (.csv.gz) or a tape (.vlt), as `vramledger emulate -o` writes; or a folder of lists.
    events: PathBuf,
    /// The id of its case in the cases.jsonl beside it, or a tape, as `vramledger plan -o` writes; not for a folder.
    planned: Option<String>,
    /// Events shown before the place where the two part.
    #[arg(long, default_value_t = 12)]
    context: usize,
}

/// One action on memory: the n-th allocation of a size, or its free.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    Alloc(u64),
    Free(usize),
}

/// The actions of a tape on its GPUs, with the place of each in the tape.
fn actions(tape: &Tape) -> Vec<(Action, usize)> {
    let on_gpu = |device: DeviceId| tape.devices[usize::from(device.0)].kind == DeviceKind::Gpu;
    let mut order: HashMap<ObjectId, usize> = HashMap::new();
    let mut actions = Vec::new();
    for (index, event) in tape.events().enumerate() {
        match event {
            Event::Alloc { object, bytes, device, .. } if on_gpu(device) => {
                order.insert(object, order.len());
                actions.push((Action::Alloc(bytes.get()), index));
            }
            Event::Free(object) => {
                actions.extend(order.get(&object).map(|number| (Action::Free(*number), index)));
            }
            Event::Oom { .. } => break,
            _ => {}
        }
    }
    actions
}

/// The first action at which two tapes part, or none where they are equal. In an autocast run the
/// frees at the end of a region have no order: a run of frees of the same objects is equal.
fn first_difference(
    planned: &[(Action, usize)],
    recorded: &[(Action, usize)],
    autocast: bool,
) -> Option<usize> {
    let run = |actions: &[(Action, usize)], from: usize| -> Vec<Action> {
        let frees = actions[from..].iter().map(|(action, _)| *action);
        let mut frees: Vec<Action> = frees.take_while(|action| matches!(action, Action::Free(_))).collect();
        frees.sort();
        frees
    };
    let mut at = 0;
    while at < planned.len().max(recorded.len()) {
        match (planned.get(at), recorded.get(at)) {
            (Some((a, _)), Some((b, _))) if a == b => at += 1,
            (Some((Action::Free(_), _)), Some((Action::Free(_), _))) if autocast => {
                let (ours, theirs) = (run(planned, at), run(recorded, at));
                if ours != theirs {
                    return Some(at);
                }
                at += ours.len();
            }
            _ => return Some(at),
        }
    }
    None
}

/// A planned tape beside the recorded list of its case.
struct Comparison {
    planned: Tape,
    recorded: Tape,
    ours: Vec<(Action, usize)>,
    theirs: Vec<(Action, usize)>,
    difference: Option<usize>,
}

/// Plans `case` and compares it with the list at `events`.
fn compare(events: &Path, case: &Case) -> Result<Comparison> {
    let run = case.model()?.train(&case.setup()?, &case.gpu()?)?;
    Ok(compare_tapes(run.tape, read_recorded(events)?, case.setup.autocast.is_some()))
}

/// A `recorded` tape that ends in an OOM is compared up to it.
fn compare_tapes(planned: Tape, recorded: Tape, autocast: bool) -> Comparison {
    let (mut ours, theirs) = (actions(&planned), actions(&recorded));
    if recorded.events().any(|event| matches!(event, Event::Oom { .. })) {
        ours.truncate(theirs.len());
    }
    let difference = first_difference(&ours, &theirs, autocast);
    Comparison { planned, recorded, ours, theirs, difference }
}

/// The tape of an event list or of a tape file.
fn read_recorded(path: &Path) -> Result<Tape> {
    if is_tape(path) {
        return Ok(read_tape(path)?.1);
    }
    let device = Device { name: "recorded".into(), kind: DeviceKind::Gpu, capacity: None, context: None };
    events::read(path, device)
}

fn is_tape(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "vlt")
}

fn read_tape(path: &Path) -> Result<(About, Tape)> {
    let bytes = fs::read(path).with_context(|| format!("failed to read `{}`", path.display()))?;
    wire::read_tape(&bytes).with_context(|| format!("`{}` is no tape", path.display()))
}

/// The planned tape, which is one already or that of a case beside `events`, with its name and
/// whether it is of an autocast run.
fn planned(events: &Path, wanted: &str) -> Result<(Tape, String, bool)> {
    if is_tape(Path::new(wanted)) {
        let (about, tape) = read_tape(Path::new(wanted))?;
        let autocast = about.subject.get("setup").and_then(|setup| setup.get("autocast")?.as_str());
        return Ok((tape, wanted.to_owned(), autocast.is_some()));
    }
    let cases = events.parent().unwrap_or(Path::new(".")).join("cases.jsonl");
    let case = Case::read_all(&cases)?
        .into_iter()
        .find(|case| case.id == *wanted || case.id.strip_prefix("s-") == Some(wanted))
        .with_context(|| format!("no case `{wanted}` in `{}`", cases.display()))?;
    let run = case.model()?.train(&case.setup()?, &case.gpu()?)?;
    Ok((run.tape, case.id, case.setup.autocast.is_some()))
}

/// Compares the list of each plannable case in `folder`.
#[allow(clippy::print_stdout, reason = "a command of developers prints which lists part")]
fn run_folder(folder: &Path) -> Result<()> {
    let (mut equal, mut all) = (0, 0);
    for case in Case::read_all(&folder.join("cases.jsonl"))? {
        if !case.is_plannable() {
            continue;
        }
        let name = case.id.strip_prefix("s-").unwrap_or(&case.id);
        let comparison = compare(&folder.join(format!("{name}.csv.gz")), &case)?;
        all += 1;
        match comparison.difference {
            None => equal += 1,
            Some(at) => println!("{}: equal for {at} of {} actions", case.id, comparison.theirs.len()),
        }
    }
    println!("{equal} of {all} lists equal");
    ensure!(equal == all, "{} lists part from the recorded ones", all - equal);
    Ok(())
}

#[allow(clippy::print_stdout, reason = "a command of developers prints where tapes part")]
pub fn run(args: &TapeDiff) -> Result<()> {
    let Some(wanted) = &args.planned else { return run_folder(&args.events) };
    let (planned, name, autocast) = planned(&args.events, wanted)?;
    let comparison = compare_tapes(planned, read_recorded(&args.events)?, autocast);
    let Some(at) = comparison.difference else {
        println!("equal: {} actions of {name}", comparison.theirs.len());
        return Ok(());
    };
    println!("{name}: equal for {at} of {} actions", comparison.theirs.len());
    let from = at.saturating_sub(args.context);
    for index in from..at + 8 {
        let show = |tape: &Tape, actions: &[(Action, usize)]| match actions.get(index) {
            Some((action, place)) => describe(tape, *action, *place),
            None => "-".to_owned(),
        };
        let marker = if index == at { ">>" } else { "  " };
        let planned = show(&comparison.planned, &comparison.ours);
        println!("{marker} {planned:<70} | {}", show(&comparison.recorded, &comparison.theirs));
    }
    bail!("the planned tape parts from the recorded one");
}

fn describe(tape: &Tape, action: Action, place: usize) -> String {
    let label = |object: ObjectId| {
        let label = tape.label(tape.object(object).label);
        let owner = label.owner.map_or("", |owner| tape.name(owner));
        format!("{} [{owner}]", tape.name(label.name))
    };
    let place_of = |place: usize| {
        let mark = (0..place).rev().find_map(|index| match tape.event(index) {
            Event::Mark(mark) => Some(tape.mark_of(mark)),
            _ => None,
        });
        mark.map_or(String::new(), |mark| format!("{}{}", mark.step, &tape.phase_name(mark.phase)[..1]))
    };
    match (action, tape.event(place)) {
        (Action::Alloc(bytes), Event::Alloc { object, .. }) => {
            format!("{} +{bytes} #{} {}", place_of(place), object.0, label(object))
        }
        (_, Event::Free(object)) => format!("{} -  #{} {}", place_of(place), object.0, label(object)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn truth(folder: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/truth").join(folder)
    }

    #[test]
    fn planned_tapes_are_the_recorded_ones_event_by_event() {
        run_folder(&truth("events")).unwrap();
    }

    #[test]
    fn planned_tapes_of_random_runs_are_the_recorded_ones() {
        run_folder(&truth("random")).unwrap();
    }

    #[test]
    fn planned_tapes_of_every_strategy_are_the_recorded_ones() {
        run_folder(&truth("strategies")).unwrap();
    }

    #[test]
    fn planned_tapes_of_ranks_are_the_recorded_ones() {
        run_folder(&truth("ddp")).unwrap();
        run_folder(&truth("fsdp2")).unwrap();
        run_folder(&truth("megatron")).unwrap();
        run_folder(&truth("zero")).unwrap();
    }

    #[test]
    fn planned_tapes_of_every_family_are_the_recorded_ones() {
        run_folder(&truth("families")).unwrap();
    }

    #[test]
    fn planned_tapes_of_every_loss_are_the_recorded_ones() {
        run_folder(&truth("losses")).unwrap();
    }

    #[test]
    fn planned_tapes_with_adapters_are_the_recorded_ones() {
        run_folder(&truth("adapters")).unwrap();
    }

    #[test]
    fn planned_tapes_of_every_recipe_of_precision_are_the_recorded_ones() {
        run_folder(&truth("precision")).unwrap();
    }

    #[test]
    fn planned_tapes_of_frozen_and_quantized_weights_are_the_recorded_ones() {
        run_folder(&truth("frozen")).unwrap();
        run_folder(&truth("quantized")).unwrap();
    }

    #[test]
    fn frees_may_change_places_only_where_autocast_lets_them() {
        let list = |actions: &[Action]| actions.iter().map(|action| (*action, 0)).collect::<Vec<_>>();
        let one = list(&[Action::Alloc(1), Action::Alloc(2), Action::Free(0), Action::Free(1)]);
        let other = list(&[Action::Alloc(1), Action::Alloc(2), Action::Free(1), Action::Free(0)]);
        assert_eq!(first_difference(&one, &other, false), Some(2));
        assert_eq!(first_difference(&one, &other, true), None);
        assert_eq!(first_difference(&one, &one[..3], true), Some(3));
    }
}
