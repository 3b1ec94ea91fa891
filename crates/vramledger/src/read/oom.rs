//! What an out-of-memory message says: the ladder, the arithmetic, who else is on the card, and what was asked for.

mod verdict;
mod work;

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use evidence::oom::Message;
use ledger::{Bytes, DeviceId};
use wire::{DeviceInstant, Instants, OtherProcess, ProgramNeeds, SizedObject, StackFrame};

use self::verdict::judge;
pub(crate) use self::verdict::printed_slack;
use self::work::Work;
use crate::known::{Known, KnownObject, Run};

/// The most objects that are listed for one message.
const MOST_OBJECTS: usize = 200;

/// The document of the out-of-memory messages in `bytes`; what is `known` of the run besides names what was asked for.
pub(super) fn instants(bytes: &[u8], known: Option<&Known>) -> Instants {
    let instants = evidence::read_oom(bytes).iter().map(|message| instant(message, known)).collect();
    Instants { format: Instants::FORMAT.into(), instants }
}

/// What one message says.
fn instant(message: &Message, known: Option<&Known>) -> DeviceInstant {
    let said = &message.instant;
    let bytes = |bytes: Option<Bytes>| bytes.map(Bytes::get);
    let work = Work::of(&message.stack);
    let processes = processes(message);
    let others = processes.iter().filter(|process| process.role != "own");
    let known_processes =
        !processes.is_empty() && (said.process.is_some() || message.own_process_guess.is_some());
    let mut instant = DeviceInstant {
        source: said.source.as_str().into(),
        backend: said.backend.clone(),
        family: Some(message.family.as_str().into()),
        line: Some(message.line),
        rank: message.rank,
        speaker: message.speaker.clone(),
        device: said.device,
        requested_bytes: bytes(said.requested),
        requested_bytes_range: message.requested.map(|printed| [printed.low.get(), printed.high.get()]),
        tensor_bytes_range: tensor_range(message),
        capacity_bytes: bytes(said.capacity),
        free_bytes: said.free,
        allocated_bytes: bytes(said.allocated),
        active_bytes: bytes(said.active),
        reserved_bytes: bytes(said.reserved),
        unallocated_bytes: bytes(said.unallocated),
        private_pool_bytes: bytes(said.private_pools),
        allowed_bytes: bytes(said.allowed),
        process_bytes: bytes(said.process),
        outside_bytes: said
            .process
            .zip(said.reserved)
            .and_then(|(process, reserved)| bytes(process.checked_sub(reserved))),
        beside_bytes: bytes(message.other),
        own_process_guess: message.own_process_guess,
        other_processes_bytes: known_processes.then(|| others.filter_map(|process| process.bytes).sum()),
        other_processes: processes,
        needs: message.needs.map(|needs| ProgramNeeds {
            parameter_bytes: bytes(needs.parameters),
            constant_bytes: bytes(needs.constants),
            output_bytes: bytes(needs.outputs),
            temp_bytes: bytes(needs.temporaries),
            total_bytes: bytes(needs.total),
            fragmentation_bytes: bytes(needs.fragmentation),
        }),
        stack: message.stack.iter().map(frame).collect(),
        work: work.map(|work| work.what.into()),
        phase: work.and_then(|work| work.phase).map(Into::into),
        warnings: message.warnings.iter().map(ToString::to_string).collect(),
        ..DeviceInstant::default()
    };
    let mut sentences = judge(&mut instant, message);
    if let Some(known) = known {
        sentences.extend(name(&mut instant, message, work, known));
    }
    instant.explanation = sentences.join(" ");
    instant
}

fn frame(frame: &evidence::oom::Frame) -> StackFrame {
    StackFrame {
        file: frame.file.clone(),
        line: frame.line,
        function: frame.function.clone(),
        code: frame.code.clone(),
    }
}

/// Whether the device was asked for by PyTorch's caching allocator, which rounds what it asks for.
fn is_rounded(message: &Message) -> bool {
    use evidence::oom::Family::{Bare, Paren, Sentence, WarningLine};
    let backend = message.instant.backend.as_deref();
    matches!(message.family, Paren | Sentence | Bare | WarningLine)
        && matches!(backend, Some("cuda" | "hip" | "xpu"))
}

/// The least and the most bytes of the tensor behind the figure that the message gives.
fn tensor_range(message: &Message) -> Option<[u64; 2]> {
    let asked = message.instant.requested.filter(|asked| is_rounded(message) && asked.get() > 0)?;
    let exact = allocator::requests_behind(asked, asked);
    match (exact.first(), exact.last()) {
        (Some(first), Some(last)) => Some([*first.start(), *last.end()]),
        // Printed with two decimals, it is none that the allocator asks for to the byte.
        _ => Some([asked.get().saturating_sub(ROUND) + 1, asked.get()]),
    }
}

/// What large segments are rounded to.
const ROUND: u64 = 2 << 20;

/// All sizes that the object behind the request may have, for all figures that are printed so.
fn sizes(message: &Message) -> Vec<RangeInclusive<u64>> {
    let Some(printed) = message.requested else { return Vec::new() };
    if is_rounded(message) {
        return allocator::requests_behind(printed.low, printed.high);
    }
    vec![printed.low.get()..=printed.high.get()]
}

/// The processes on the card, and what each is to this one.
fn processes(message: &Message) -> Vec<OtherProcess> {
    let said = &message.instant.processes;
    let own = message.own_process_guess;
    let foreign: Vec<Option<Bytes>> =
        said.iter().filter(|process| Some(process.pid) != own).map(|process| process.bytes).collect();
    // The ranks of a job do the same on the card that none of them should have opened.
    let alike = foreign.len() > 1 && foreign.windows(2).all(|pair| pair[0].is_some() && pair[0] == pair[1]);
    let role = |pid: u64| {
        if Some(pid) == own {
            "own"
        } else if alike || message.job_processes.contains(&pid) {
            "rank"
        } else {
            "other"
        }
    };
    let process = |process: &evidence::Process| OtherProcess {
        pid: process.pid,
        name: process.name.clone(),
        bytes: process.bytes.map(Bytes::get),
        role: role(process.pid).into(),
    };
    said.iter().map(process).collect()
}

/// Names what was asked for; answers with sentences on it.
fn name(instant: &mut DeviceInstant, message: &Message, work: Option<Work>, known: &Known) -> Vec<String> {
    let sizes = sizes(message);
    let fits = |object: &&KnownObject| sizes.iter().any(|range| range.contains(&object.bytes));
    let multiples = known.multiples();
    let run = known.run(message.stack.iter().any(|frame| frame.function.starts_with("_single_tensor_")));
    let mut found: Vec<&KnownObject> = run.objects.iter().chain(&multiples).filter(fits).collect();
    let speaks = |object: &KnownObject| {
        work.is_some_and(|work| work.makes(&object.name, object.category, object.phase.as_deref()))
    };
    found.sort_by_key(|object| (!speaks(object), object.category.is_none()));
    let decides = found.iter().any(|object| speaks(object));
    let likely = match (decides, found.len()) {
        (true, _) => found.iter().take_while(|object| speaks(object)).count(),
        (false, 1) => 1,
        (false, all) => {
            if known.takes_nearest {
                all
            } else {
                0
            }
        }
    };
    if let Some(place) = predict(instant, &found[..likely], run) {
        found[..=place].rotate_right(1);
    }
    let mut sentences = Vec::new();
    match (found.len(), decides) {
        (0, _) if !sizes.is_empty() => {
            sentences.push("Nothing of what is known of this run has a size that asks for this much.".into());
        }
        (_, true) => {
            let first = found[0];
            sentences
                .push(format!("The stack decides what was asked for: {} of {} B.", first.name, first.bytes));
        }
        (1, false) => sentences.push(format!(
            "One object has a size that asks for this much: {} of {} B.",
            found[0].name, found[0].bytes
        )),
        (0, _) => {}
        (count, false) => {
            sentences.push(format!(
                "{count} objects have a size that asks for this much; no stack decides among them."
            ));
        }
    }
    if let (false, Some(work)) = (found.is_empty(), work) {
        sentences.push(format!("At work, by the stack: {}.", work.what));
    }
    let whole = multiples.iter().filter(fits).any(|object| !object.name.contains("share"));
    if let (true, Some(parameters)) = (whole, known.parameters)
        && let Some(states) = parameters.checked_mul(16)
    {
        let card = instant.capacity_bytes.map_or(String::new(), |card| format!("; the card has {card} B"));
        sentences.push(format!(
            "The request is a multiple of the number of parameters: it grows with the model and with nothing else. Weights, \
             gradients and both moments of AdamW in fp32 are {states} B a device where nothing is sharded{card}."
        ));
    }
    let row = |object: &&KnownObject| SizedObject {
        name: object.name.clone(),
        category: object.category.map(wire::Category),
        bytes: object.bytes,
        count: object.count,
        dtype: object.dtype.clone(),
        shape: object.shape.clone(),
        phase: object.phase.clone(),
        decided: decides.then(|| speaks(object)),
    };
    instant.candidates = found.iter().take(MOST_OBJECTS).map(row).collect();
    sentences
}

/// The most objects that are looked at for what is in place before them.
const MOST_PREDICTED: usize = 32;

/// What the plan has in place when it makes one of `objects`: the one before which it holds what is nearest to
/// what the message says. Answers with its place.
fn predict(instant: &mut DeviceInstant, objects: &[&KnownObject], run: &Run) -> Option<usize> {
    let tape = run.tape.as_ref()?;
    let mut best: Option<(u64, usize, BTreeMap<wire::Category, u64>)> = None;
    let events = objects.iter().enumerate().flat_map(|(place, object)| {
        let before = object.events.iter().filter_map(|event| event.checked_sub(1));
        before.map(move |before| (place, before))
    });
    for (place, before) in events.take(MOST_PREDICTED) {
        let mut held: BTreeMap<wire::Category, u64> = BTreeMap::new();
        for holder in ledger::holders(tape, before, DeviceId(0)) {
            *held.entry(wire::Category(holder.category)).or_default() += holder.bytes.get();
        }
        let total: u64 = held.values().sum();
        let off = instant.allocated_bytes.map_or(place as u64, |allocated| allocated.abs_diff(total));
        if best.as_ref().is_none_or(|best| off < best.0) {
            best = Some((off, place, held));
        }
    }
    let (_, place, held) = best?;
    instant.predicted_bytes = Some(held.values().sum());
    instant.predicted_by_category = held;
    if instant.phase.is_none() {
        instant.phase.clone_from(&objects[place].phase);
    }
    Some(place)
}
