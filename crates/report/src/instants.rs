//! The report of instants: what a message says, why there was no room, and what was asked for.

use wire::{DeviceInstant, Instants, SizedObject};

use crate::account::account;
use crate::units::{Unit, as_printed as size, spelled, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most messages that are told whole; of more, the table alone.
const MOST_MESSAGES: usize = 8;
/// The most objects that are shown of one message.
const MOST_OBJECTS: usize = 20;
/// The most processes that are shown of one message.
const MOST_PROCESSES: usize = 20;
/// The innermost calls that are shown of a stack.
const MOST_CALLS: usize = 3;

/// Instants and what to call their file.
#[derive(Clone, Copy, Debug)]
pub struct InstantsReport<'a> {
    /// What to call the file.
    pub name: &'a str,
    /// What it says.
    pub instants: &'a Instants,
}

impl Report for InstantsReport<'_> {
    fn page(&self) -> Page {
        let instants = &self.instants.instants;
        let mut blocks = Vec::new();
        let failures: Vec<&DeviceInstant> = instants.iter().filter(|instant| is_failure(instant)).collect();
        if failures.len() > 1 {
            blocks.push(Block::Verdict {
                good: None,
                text: format!("{} has {} messages", self.name, failures.len()),
            });
            blocks.push(summary(&failures));
        }
        for instant in instants.iter().take(MOST_MESSAGES) {
            blocks.extend(match is_failure(instant) {
                true => message(self.name, instant),
                false => account(self.name, instant),
            });
        }
        if let Some(rest @ 1..) = instants.len().checked_sub(MOST_MESSAGES) {
            blocks
                .push(Block::Line(format!("{rest} messages are not told here; --format json has them all")));
        }
        Page::of(blocks)
    }

    /// A row for each message.
    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let signed = |bytes: Option<i64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let row = |instant: &DeviceInstant| {
            let [low, high] = instant.tensor_bytes_range.map_or([None; 2], |range| range.map(Some));
            vec![
                number(instant.line),
                instant.rank.map(|rank| rank.to_string()).unwrap_or_default(),
                instant.backend.clone().unwrap_or_default(),
                instant.device.map(|device| device.to_string()).unwrap_or_default(),
                number(instant.requested_bytes),
                number(low),
                number(high),
                number(instant.capacity_bytes),
                signed(instant.free_bytes),
                number(instant.allocated_bytes),
                number(instant.reserved_bytes),
                number(instant.unallocated_bytes),
                number(instant.process_bytes),
                number(instant.other_processes_bytes),
                signed(instant.short_bytes),
                instant.verdict.clone().unwrap_or_default(),
                instant.source.clone(),
                number(instant.used_bytes),
                number(instant.peak_allocated_bytes),
                number(instant.peak_reserved_bytes),
            ]
        };
        Sheet {
            head: vec![
                "line",
                "rank",
                "backend",
                "device",
                "requested_bytes",
                "tensor_least_bytes",
                "tensor_most_bytes",
                "capacity_bytes",
                "free_bytes",
                "allocated_bytes",
                "reserved_bytes",
                "unallocated_bytes",
                "process_bytes",
                "other_processes_bytes",
                "short_bytes",
                "verdict",
                "source",
                "used_bytes",
                "peak_allocated_bytes",
                "peak_reserved_bytes",
            ],
            rows: self.instants.instants.iter().map(row).collect(),
        }
    }
}

/// Whether a request found no room there.
fn is_failure(instant: &DeviceInstant) -> bool {
    instant.source == "oom"
}

/// A row for each message.
fn summary(instants: &[&DeviceInstant]) -> Block {
    let known = |bytes: Option<u64>| bytes.map_or_else(String::new, size);
    let row = |instant: &DeviceInstant| {
        vec![
            instant.line.map(|line| line.to_string()).unwrap_or_default(),
            speaker(instant),
            instant.device.map(|device| device.to_string()).unwrap_or_default(),
            known(instant.requested_bytes),
            instant.free_bytes.map_or_else(String::new, amount),
            known(instant.unallocated_bytes),
            verdict(instant).into(),
        ]
    };
    Block::Table {
        title: None,
        columns: vec![
            Column::numbers("line"),
            Column::words("who"),
            Column::numbers("device"),
            Column::numbers("asked for"),
            Column::numbers("free"),
            Column::numbers("in no block"),
            Column::words("why"),
        ],
        rows: instants.iter().map(|instant| row(instant)).collect(),
    }
}

/// One message, told whole.
fn message(name: &str, instant: &DeviceInstant) -> Vec<Block> {
    let place = instant.device.map_or(String::new(), |device| format!(" on device {device}"));
    let who = match speaker(instant) {
        who if who.is_empty() => String::new(),
        who => format!(" by {who}"),
    };
    let line = instant.line.map_or(String::new(), |line| format!(" (line {line})"));
    let asked = instant
        .requested_bytes
        .map_or("what was asked for is not said".into(), |bytes| format!("{} asked for", size(bytes)));
    let backend = instant.backend.as_deref().unwrap_or("a device");
    let text = format!("{name}{line}: out of memory in {backend}{place}, {asked}{who}: {}", verdict(instant));
    let mut blocks =
        vec![Block::Verdict { good: Some(false), text }, Block::Line(spelled(&instant.explanation))];
    blocks.extend(ladder(instant));
    blocks.extend(processes(instant));
    blocks.extend(stack(instant));
    blocks.extend(tensor(instant));
    blocks.extend(candidates(instant));
    blocks.extend(predicted(instant));
    blocks.extend(needs(instant));
    blocks.push(Block::List { title: "Odd about it".into(), items: instant.warnings.clone() });
    blocks
}

/// The verdict in words.
fn verdict(instant: &DeviceInstant) -> &'static str {
    match instant.verdict.as_deref() {
        Some("fragmentation") => "the room is there, in pieces",
        Some("capacity") => "the device is full",
        Some("other_process") => "other processes have the room",
        Some("limit") => "a limit of the process",
        _ => "the message does not tell why",
    }
}

fn speaker(instant: &DeviceInstant) -> String {
    match (instant.rank, &instant.speaker) {
        (Some(rank), _) => format!("rank {rank}"),
        (None, Some(speaker)) => speaker.clone(),
        (None, None) => String::new(),
    }
}

/// An amount that may be below zero.
fn amount(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// What the message says of the device.
fn ladder(instant: &DeviceInstant) -> Option<Block> {
    let unsigned = |bytes: Option<u64>| bytes.map(size);
    let rows = [
        ("asked for", unsigned(instant.requested_bytes), "of the device, not of the allocator"),
        ("free", instant.free_bytes.map(amount), "on the device"),
        ("allocated", unsigned(instant.allocated_bytes), "in blocks"),
        ("private pools", unsigned(instant.private_pool_bytes), "of the allocated, for graphs"),
        ("active", unsigned(instant.active_bytes), "with blocks that wait for other streams"),
        ("reserved", unsigned(instant.reserved_bytes), "in segments"),
        ("in no block", unsigned(instant.unallocated_bytes), "reserved less allocated"),
        ("this process", unsigned(instant.process_bytes), "inside the allocator and out of it"),
        ("outside the allocator", unsigned(instant.outside_bytes), "of this process"),
        ("beside the allocator", unsigned(instant.beside_bytes), "as Metal tells it"),
        ("other processes", unsigned(instant.other_processes_bytes), "that are named"),
        ("allowed", unsigned(instant.allowed_bytes), "what the process may use"),
        ("device", unsigned(instant.capacity_bytes), "all of it"),
    ];
    let said =
        instant.capacity_bytes.is_some() || instant.allocated_bytes.is_some() || instant.free_bytes.is_some();
    let always = ["asked for", "free", "allocated", "reserved", "in no block", "this process", "device"];
    let rows = rows.into_iter().filter(|(name, value, _)| value.is_some() || always.contains(name));
    let rows = rows.map(|(name, value, what)| {
        vec![name.to_owned(), value.unwrap_or_else(|| "not said".into()), what.to_owned()]
    });
    said.then(|| Block::Table {
        title: Some("What the message says".into()),
        columns: vec![Column::words("measure"), Column::numbers("size"), Column::words("what")],
        rows: rows.collect(),
    })
}

fn processes(instant: &DeviceInstant) -> Option<Block> {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "not said".into(), size);
    let role = |role: &str| match role {
        "own" => "probably this one",
        "rank" => "of the same job",
        _ => "another",
    };
    let rows = instant.other_processes.iter().take(MOST_PROCESSES);
    let rows: Vec<Vec<String>> = rows
        .map(|process| vec![process.pid.to_string(), known(process.bytes), role(&process.role).to_owned()])
        .collect();
    (!rows.is_empty()).then(|| Block::Table {
        title: Some("Processes on the card".into()),
        columns: vec![Column::numbers("process"), Column::numbers("holds"), Column::words("whose")],
        rows,
    })
}

fn stack(instant: &DeviceInstant) -> Option<Block> {
    let calls = instant.stack.iter().rev().take(MOST_CALLS);
    let call = |frame: &wire::StackFrame| {
        let line = frame.line.map_or(String::new(), |line| format!(":{line}"));
        let code = frame.code.as_ref().map_or(String::new(), |code| format!(": {code}"));
        format!("{}{line} {}{code}", frame.file, frame.function)
    };
    let work = instant.work.as_ref().map_or(String::new(), |work| format!(": {work}"));
    let phase = instant.phase.as_ref().map_or(String::new(), |phase| format!(", phase {phase}"));
    (!instant.stack.is_empty()).then(|| Block::List {
        title: format!("Where it was, innermost first{work}{phase}"),
        items: calls.map(call).collect(),
    })
}

fn tensor(instant: &DeviceInstant) -> Option<Block> {
    let [low, high] = instant.tensor_bytes_range?;
    Some(Block::Line(format!(
        "The allocator rounds what it asks for: the tensor has {} to {} bytes, give or take what the printed figure hides.",
        thousands(low),
        thousands(high)
    )))
}

fn candidates(instant: &DeviceInstant) -> Option<Block> {
    let row = |object: &SizedObject| {
        let shape = object.shape.as_ref().map(|shape| {
            let extents: Vec<String> = shape.iter().map(ToString::to_string).collect();
            extents.join(" x ")
        });
        let form = [shape, object.dtype.clone()].into_iter().flatten().collect::<Vec<_>>().join(" ");
        let decided = match object.decided {
            Some(true) => "yes",
            Some(false) => "no",
            None => "",
        };
        vec![
            object.name.clone(),
            object.category.map_or(String::new(), |category| category.0.as_str().to_owned()),
            form,
            size(object.bytes),
            object.count.map_or(String::new(), |count| count.to_string()),
            object.phase.clone().unwrap_or_default(),
            decided.into(),
        ]
    };
    let shown: Vec<Vec<String>> = instant.candidates.iter().take(MOST_OBJECTS).map(row).collect();
    let more = instant.candidates.len() - shown.len();
    let more = if more > 0 { format!(" ({more} more in --format json)") } else { String::new() };
    (!shown.is_empty()).then(|| Block::Table {
        title: Some(format!("Objects of a size that asks for this much{more}")),
        columns: vec![
            Column::words("object"),
            Column::words("category"),
            Column::words("form"),
            Column::numbers("size"),
            Column::numbers("count"),
            Column::words("phase"),
            Column::words("by the stack"),
        ],
        rows: shown,
    })
}

fn predicted(instant: &DeviceInstant) -> Option<Block> {
    let total = instant.predicted_bytes?;
    let unit = Unit::of_largest([total, instant.allocated_bytes.unwrap_or(0)]);
    let mut rows: Vec<(&str, u64)> =
        instant.predicted_by_category.iter().map(|(category, bytes)| (category.0.as_str(), *bytes)).collect();
    rows.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let row = |name: &str, bytes: u64| vec![name.to_owned(), unit.number(bytes)];
    let mut rows: Vec<Vec<String>> = rows.into_iter().map(|(name, bytes)| row(name, bytes)).collect();
    rows.push(row("all that is predicted", total));
    if let Some(allocated) = instant.allocated_bytes {
        rows.push(row("allocated, by the message", allocated));
    }
    Some(Block::Table {
        title: Some(format!("What the plan has in place just before, {}", unit.name())),
        columns: vec![Column::words("category"), Column::numbers("asked for")],
        rows,
    })
}

fn needs(instant: &DeviceInstant) -> Option<Block> {
    let needs = instant.needs?;
    let rows = [
        ("parameters", needs.parameter_bytes),
        ("constants", needs.constant_bytes),
        ("results", needs.output_bytes),
        ("temporaries", needs.temp_bytes),
        ("all", needs.total_bytes),
        ("lost between them", needs.fragmentation_bytes),
    ];
    let rows = rows.into_iter().filter_map(|(name, bytes)| Some(vec![name.to_owned(), size(bytes?)]));
    Some(Block::Table {
        title: Some("What the program needs".into()),
        columns: vec![Column::words("part"), Column::numbers("size")],
        rows: rows.collect(),
    })
}
