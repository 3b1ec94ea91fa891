//! The allocator's own account as PyTorch prints it: `memory_summary()` and `memory_stats()`.

use ledger::Bytes;

use crate::log::scale_of;
use crate::{Instant, Source};

/// What the heading of a summary says.
const HEADING: &str = "PyTorch CUDA memory summary, device ID";
/// A name that every print of statistics has.
const STATISTIC: &str = "allocated_bytes.all.current";
/// The most accounts that are read from one text.
const MOST: usize = 1 << 16;

/// Whether `text` has an account of the allocator.
pub fn is_summary(text: &str) -> bool {
    text.contains(HEADING) || text.contains(STATISTIC)
}

/// The accounts in `text`, whatever else it holds, in order.
pub fn summaries(text: &str) -> Vec<Instant> {
    let mut found: Vec<(usize, Instant)> = Vec::new();
    for (place, _) in text.match_indices(HEADING).take(MOST) {
        found.push((place, summary(&text[place..])));
    }
    for (place, instant) in statistics(text) {
        found.push((place, instant));
    }
    found.sort_by_key(|(place, _)| *place);
    found.into_iter().map(|(_, instant)| instant).collect()
}

/// The table at whose heading `text` begins.
fn summary(text: &str) -> Instant {
    let mut instant = Instant { source: Source::Summary, backend: Some("cuda".into()), ..Instant::default() };
    let rest = text.trim_start_matches(HEADING).trim_start();
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    instant.device = rest[..digits].parse().ok();
    for line in text.lines().skip(1) {
        if line.contains(HEADING) {
            break;
        }
        instant.out_of_memory = instant.out_of_memory.or_else(|| after(line, "CUDA OOMs:"));
        instant.retries = instant.retries.or_else(|| after(line, "cudaMalloc retries:"));
        // A logger may put its own words before the table.
        let Some(row) = line.find('|').map(|start| &line[start + 1..]) else { continue };
        let mut cells = row.split('|').map(str::trim);
        let (Some(name), Some(current), Some(peak)) = (cells.next(), cells.next(), cells.next()) else {
            continue;
        };
        let (current, peak) = (size(current), size(peak));
        let of = |cell: Option<(Bytes, Bytes)>| cell.map(|(bytes, _)| bytes);
        match name {
            "Allocated memory" => (instant.allocated, instant.peak_allocated) = (of(current), of(peak)),
            "Active memory" => instant.active = of(current),
            "Requested memory" => instant.held = of(current),
            "GPU reserved memory" => (instant.reserved, instant.peak_reserved) = (of(current), of(peak)),
            "Non-releasable memory" => {
                instant.inactive_split = of(current);
                break;
            }
            _ => continue,
        }
        let units = [current, peak].into_iter().flatten().map(|(_, unit)| unit);
        instant.unit = instant.unit.max(units.max());
    }
    finish(instant)
}

/// The number behind `name` in `line`.
fn after(line: &str, name: &str) -> Option<u64> {
    let rest = line[line.find(name)? + name.len()..].trim_start();
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

/// A size of a summary, which is rounded down to its unit, and that unit.
fn size(cell: &str) -> Option<(Bytes, Bytes)> {
    let (number, unit) = cell.split_once(char::is_whitespace)?;
    let unit = scale_of(unit.trim())?;
    let bytes = number.parse::<u64>().ok()?.checked_mul(unit).filter(|bytes| *bytes < 1 << 63)?;
    Some((Bytes::new(bytes), Bytes::new(unit)))
}

/// The prints of `memory_stats()` in `text`: as Python's own, as JSON, a name a line.
fn statistics(text: &str) -> Vec<(usize, Instant)> {
    let mut found: Vec<(usize, Instant)> = Vec::new();
    let mut known: Vec<&str> = Vec::new();
    let part = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '.');
    let mut at = 0;
    while let Some(start) = text[at..].find(|c: char| c.is_ascii_alphabetic()).map(|next| at + next) {
        let end = text[start..].find(|c| !part(c)).map_or(text.len(), |length| start + length);
        at = end;
        let name = &text[start..end];
        if !(name.contains(".all.") || matches!(name, "num_ooms" | "num_alloc_retries")) {
            continue;
        }
        let rest = text[end..].trim_start_matches(['"', '\'', ' ', ',', ':', '=', '|', '\t']);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let Ok(number) = rest[..digits].parse::<u64>() else { continue };
        // A name that comes again begins another print.
        if known.contains(&name) || found.is_empty() {
            if found.len() >= MOST {
                break;
            }
            known.clear();
            let backend = Some("cuda".into());
            found.push((start, Instant { source: Source::Statistics, backend, ..Instant::default() }));
        }
        known.push(name);
        let Some((_, instant)) = found.last_mut() else { break };
        let bytes = (number < 1 << 63).then_some(Bytes::new(number));
        match name {
            "allocated_bytes.all.current" => instant.allocated = bytes,
            "allocated_bytes.all.peak" => instant.peak_allocated = bytes,
            "reserved_bytes.all.current" => instant.reserved = bytes,
            "reserved_bytes.all.peak" => instant.peak_reserved = bytes,
            "active_bytes.all.current" => instant.active = bytes,
            "requested_bytes.all.current" => instant.held = bytes,
            "inactive_split_bytes.all.current" => instant.inactive_split = bytes,
            "num_ooms" => instant.out_of_memory = Some(number),
            "num_alloc_retries" => instant.retries = Some(number),
            _ => {}
        }
    }
    found.retain(|(_, instant)| instant.allocated.is_some() || instant.reserved.is_some());
    found.into_iter().map(|(place, instant)| (place, finish(instant))).collect()
}

/// What follows from the figures.
fn finish(mut instant: Instant) -> Instant {
    let unallocated = instant.reserved.zip(instant.allocated);
    instant.unallocated = unallocated.and_then(|(reserved, allocated)| reserved.checked_sub(allocated));
    instant
}
