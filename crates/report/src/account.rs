//! The report of an instant that is no failure: what the allocator or `nvidia-smi` says of a device.

use wire::DeviceInstant;

use crate::units::{Unit, size};
use crate::{Block, Column};

/// The most processes that are shown.
const MOST_PROCESSES: usize = 20;

/// One account, told whole.
pub(crate) fn account(name: &str, instant: &DeviceInstant) -> Vec<Block> {
    let device = instant.device.map_or(String::new(), |device| format!(" on device {device}"));
    let called = instant.device_name.as_ref().map_or(String::new(), |name| format!(" ({name})"));
    let amounts = [
        (instant.allocated_bytes, "allocated"),
        (instant.reserved_bytes, "reserved"),
        (instant.peak_allocated_bytes, "allocated at most so far"),
        (instant.used_bytes, "in use on the card"),
        (instant.capacity_bytes, "all of it"),
    ];
    let mut amounts: Vec<String> =
        amounts.iter().filter_map(|(bytes, what)| Some(format!("{} {what}", size((*bytes)?)))).collect();
    if amounts.is_empty() {
        amounts.push(match instant.other_processes.len() {
            1 => "one process".into(),
            count => format!("{count} processes"),
        });
    }
    let text = format!("{name}{device}{called}: {}", amounts.join(", "));
    let mut blocks = vec![Block::Verdict { good: None, text }, Block::Line(source(instant))];
    blocks.extend(figures(instant));
    blocks.extend(processes(instant));
    blocks
}

/// What the account is, and what it means.
fn source(instant: &DeviceInstant) -> String {
    let what = match instant.source.as_str() {
        "summary" => "a table of `torch.cuda.memory_summary()`",
        "stats" => "figures of `torch.cuda.memory_stats()`",
        _ => "what `nvidia-smi` says",
    };
    let rounded = instant.unit_bytes.map_or(String::new(), |unit| {
        format!(", which is rounded: each figure may be up to {} more", size(unit))
    });
    format!("{what}{rounded}. {}", instant.explanation)
}

fn figures(instant: &DeviceInstant) -> Option<Block> {
    let rows = [
        ("held", instant.held_bytes, "asked for by the program"),
        ("allocated", instant.allocated_bytes, "in blocks"),
        ("active", instant.active_bytes, "with blocks that wait for other streams"),
        ("reserved", instant.reserved_bytes, "in segments"),
        ("in no block", instant.unallocated_bytes, "reserved less allocated"),
        (
            "kept by others",
            instant.inactive_split_bytes,
            "free parts of segments in use, which cannot be given back",
        ),
        ("peak allocated", instant.peak_allocated_bytes, "the most so far"),
        ("peak reserved", instant.peak_reserved_bytes, "the most so far"),
        ("used", instant.used_bytes, "on the card, by all processes"),
        ("free", instant.free_bytes.and_then(|free| u64::try_from(free).ok()), "on the card"),
        ("device", instant.capacity_bytes, "all of it"),
    ];
    let known = rows.iter().filter_map(|(name, bytes, what)| Some((*name, (*bytes)?, *what)));
    let unit = Unit::of_largest(known.clone().map(|row| row.1));
    let mut rows: Vec<Vec<String>> =
        known.map(|(name, bytes, what)| vec![name.into(), unit.number(bytes), what.into()]).collect();
    let counts = [
        ("no room", instant.out_of_memory_count, "requests so far"),
        ("retries", instant.retries, "times that the cache was given back"),
    ];
    rows.extend(counts.iter().filter_map(|(name, count, what)| {
        Some(vec![(*name).to_owned(), (*count)?.to_string(), (*what).to_owned()])
    }));
    (!rows.is_empty()).then(|| Block::Table {
        title: Some(format!("Figures, {}", unit.name())),
        columns: vec![Column::words("figure"), Column::numbers("amount"), Column::words("which is")],
        rows,
    })
}

fn processes(instant: &DeviceInstant) -> Option<Block> {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "not said".into(), size);
    let rows = instant.other_processes.iter().take(MOST_PROCESSES).map(|process| {
        vec![process.pid.to_string(), process.name.clone().unwrap_or_default(), known(process.bytes)]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let more = instant.other_processes.len() - rows.len();
    let more = if more > 0 { format!(" ({more} more in --format json)") } else { String::new() };
    (!rows.is_empty()).then(|| Block::Table {
        title: Some(format!("Processes{more}")),
        columns: vec![Column::numbers("process"), Column::words("name"), Column::numbers("holds")],
        rows,
    })
}
