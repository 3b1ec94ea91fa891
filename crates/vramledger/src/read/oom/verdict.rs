//! Why there was no room, by the arithmetic of the message.

use evidence::oom::{Family, Message, OomWarning};
use wire::DeviceInstant;

/// Sets the verdict of `instant`, which is of `message`; answers with the sentences that explain it.
pub(super) fn judge(instant: &mut DeviceInstant, message: &Message) -> Vec<String> {
    let mut sentences = Vec::new();
    let (verdict, why) = arithmetic(instant, message);
    let others = others(instant);
    let verdict = match others {
        // What they hold would have served the request, and is more than what the cache holds back.
        Some(others) if verdict != "limit" && covers(instant, others) => "other_process",
        _ => verdict,
    };
    instant.verdict = Some(verdict.into());
    // That the cache holds a little more than the rest of the request is not what stands in the way.
    if verdict != "other_process" || instant.short_bytes.is_some_and(|short| short > 0) {
        sentences.push(why);
    }
    sentences.extend(of_processes(instant, verdict));
    if message.family == Family::WarningLine {
        sentences.push(
            "It is a warning: the allocator gives back its cache and asks again, and that may succeed."
                .into(),
        );
    }
    sentences
}

/// By how much a figure may be off that is printed with two decimals.
pub(crate) const fn printed_slack(bytes: u64) -> u64 {
    let unit = match bytes {
        0..1024 => return 0,
        1024..0x10_0000 => 1 << 10,
        0x10_0000..0x4000_0000 => 1 << 20,
        _ => 1 << 30,
    };
    unit / 200 + 1
}

fn slack(bytes: u64) -> i128 {
    i128::from(printed_slack(bytes))
}

/// The verdict of the figures alone, and its sentence.
fn arithmetic(instant: &mut DeviceInstant, message: &Message) -> (&'static str, String) {
    if let Some(answer) = of_program(instant).or_else(|| of_metal(instant, message)) {
        return answer;
    }
    let Some(asked) = instant.requested_bytes else {
        let why = match message.family {
            Family::Masked => {
                "A library could not get memory on the device; its error has no figures. PyTorch's cache is not given back to libraries."
            }
            _ => {
                "The message has no figures: what was asked for, what was free and what was held is not known."
            }
        };
        return ("unknown", why.into());
    };
    if message.family == Family::Cpu {
        return (
            "unknown",
            format!(
                "It is memory of the host that ran out, {asked} B were asked for; the device is not concerned."
            ),
        );
    }
    if let (Some(capacity), true) = (instant.capacity_bytes, instant.capacity_bytes < Some(asked)) {
        return ("capacity", format!("{asked} B are more than the whole device, which has {capacity} B."));
    }
    let Some(free) = instant.free_bytes else {
        let why = match instant.capacity_bytes.zip(instant.reserved_bytes) {
            Some((capacity, reserved)) if reserved <= capacity => format!(
                "{asked} B were asked for. What was free is not said: {} B of the device are not this allocator's, and who has them is not known.",
                capacity - reserved
            ),
            _ => format!("{asked} B were asked for; what was free and what was held is not said."),
        };
        return ("unknown", why);
    };
    let there = u64::try_from(free).unwrap_or(0);
    if there >= asked {
        return match instant.allowed_bytes {
            Some(allowed) => (
                "limit",
                format!(
                    "The device had {there} B free; this process may use no more than {allowed} B (a memory fraction), and {asked} B more went beyond it."
                ),
            ),
            None => (
                "unknown",
                format!(
                    "The device had {there} B free, more than the {asked} B that were asked for: a limit of the process, another process that took the room first, or the device's own pages stood in the way."
                ),
            ),
        };
    }
    let unmapped = message.warnings.contains(&OomWarning::ReservedAboveDevice);
    let Some(unallocated) = instant.unallocated_bytes.filter(|_| !unmapped) else {
        let why = if unmapped {
            format!(
                "{asked} B were asked for and {there} B were free. More is reserved than the device has, so that it is not known how much of the cache is really there."
            )
        } else {
            format!(
                "{asked} B were asked for and {there} B were free; what the allocator holds in no block is not said."
            )
        };
        return ("unknown", why);
    };
    let short = i128::from(asked) - i128::from(there) - i128::from(unallocated);
    instant.short_bytes = i64::try_from(short).ok();
    let coarse = slack(asked) + slack(there) + slack(unallocated);
    let cache = match unallocated {
        0 => "nothing was reserved beyond what is in blocks".to_owned(),
        _ => format!("{unallocated} B were reserved and in no block"),
    };
    if short.abs() <= coarse {
        let why = format!(
            "{asked} B were asked for, {there} B were free and {cache}: together as much as was asked for, as far as the printed figures tell."
        );
        ("unknown", why)
    } else if short > 0 {
        (
            "capacity",
            format!(
                "{asked} B were asked for, {there} B were free and {cache}: short by {short} B. No setting of the allocator can make that up."
            ),
        )
    } else {
        (
            "fragmentation",
            format!(
                "{asked} B were asked for and {there} B were free, but {cache}: the room is there, in pieces. A setting that joins them (expandable_segments:True, from PyTorch 2.1 on) can help; a snapshot tells which blocks keep them apart."
            ),
        )
    }
}

/// A program of XLA that is larger than its device.
fn of_program(instant: &mut DeviceInstant) -> Option<(&'static str, String)> {
    let total = instant.needs?.total_bytes?;
    let Some(capacity) = instant.capacity_bytes else {
        return Some((
            "unknown",
            format!("The program needs {total} B in all; what the device has is not said."),
        ));
    };
    let short = i64::try_from(i128::from(total) - i128::from(capacity)).ok()?;
    instant.short_bytes = Some(short);
    (short > 0)
        .then(|| ("capacity", format!("The program needs {total} B of {capacity} B: short by {short} B.")))
}

/// Metal, whose limit is set by PyTorch or by the device.
fn of_metal(instant: &mut DeviceInstant, message: &Message) -> Option<(&'static str, String)> {
    let (asked, allowed) = (instant.requested_bytes?, instant.allowed_bytes?);
    let held = match message.family {
        Family::Mlx => 0,
        Family::Mps => instant.allocated_bytes?.checked_add(instant.beside_bytes.unwrap_or(0))?,
        _ => return None,
    };
    let short = i128::from(asked) + i128::from(held) - i128::from(allowed);
    instant.short_bytes = i64::try_from(short).ok();
    Some((
        "limit",
        match message.family {
            Family::Mlx => format!("{asked} B were asked for in one buffer; the device allows {allowed} B."),
            _ => format!(
                "{held} B were held and {asked} B asked for; PyTorch allows {allowed} B of the memory that the machine shares, short by {short} B."
            ),
        },
    ))
}

/// What processes that are not this one hold; none where it is not known or there are none.
fn others(instant: &DeviceInstant) -> Option<u64> {
    instant.other_processes_bytes.filter(|bytes| *bytes > 0)
}

/// Whether `others` would have served the request, and are more than what the cache holds back.
fn covers(instant: &DeviceInstant, others: u64) -> bool {
    let free = instant.free_bytes.and_then(|free| u64::try_from(free).ok()).unwrap_or(0);
    let missing = instant.requested_bytes.map(|asked| asked.saturating_sub(free));
    let cache = instant.unallocated_bytes.unwrap_or(0);
    missing.is_some_and(|missing| missing > 0 && others >= missing) && others > cache
}

/// Who is on the card, and what of this process the allocator does not see.
fn of_processes(instant: &DeviceInstant, verdict: &str) -> Vec<String> {
    let mut sentences = Vec::new();
    let share = |bytes: u64| {
        let capacity = instant.capacity_bytes.filter(|capacity| *capacity > 0);
        capacity.map_or(String::new(), |capacity| {
            format!(", {:.0} % of the card", bytes as f64 * 100.0 / capacity as f64)
        })
    };
    let foreign: Vec<_> = instant.other_processes.iter().filter(|process| process.role != "own").collect();
    if let (Some(total), [first, ..]) = (others(instant), foreign.as_slice()) {
        let device = instant.device.map_or("this device".into(), |device| format!("device {device}"));
        if foreign.len() > 1 && foreign.iter().all(|process| process.role == "rank") {
            let each = first.bytes.filter(|_| foreign.iter().all(|process| process.bytes == first.bytes));
            let each = each.map_or(String::new(), |each| format!(" of {each} B each"));
            sentences.push(format!(
                "{} processes{each}, {total} B together, are ranks of this job: every rank opened a context on {device}. Each must choose its own device (torch.cuda.set_device, or CUDA_VISIBLE_DEVICES) before it touches any.",
                foreign.len()
            ));
        } else {
            let who = match foreign.as_slice() {
                [only] => format!("Process {} holds {total} B{}", only.pid, share(total)),
                _ => format!("{} other processes hold {total} B together{}", foreign.len(), share(total)),
            };
            let own = if foreign.iter().any(|process| process.role == "rank") {
                " (some of them of this job, as the log's prefixes say)"
            } else {
                ""
            };
            let served = if verdict == "other_process" {
                ": without that the request would have found room"
            } else {
                ""
            };
            sentences.push(format!("{who}{own}{served}."));
        }
    }
    if let Some(own) = instant.own_process_guess {
        sentences.push(format!("Process {own} is this process itself, as far as the figures tell: it alone holds what the allocator has reserved."));
    }
    if let Some(outside) = instant.outside_bytes.filter(|outside| *outside > 0) {
        sentences.push(format!(
            "{outside} B of this process lie outside the allocator: the context, the libraries' own memory, communication."
        ));
    }
    if let (Some(process), Some(capacity), Some(free)) =
        (instant.process_bytes, instant.capacity_bytes, instant.free_bytes)
    {
        let parts = i128::from(free) + i128::from(process) + i128::from(others(instant).unwrap_or(0));
        let left = i128::from(capacity) - parts;
        if left.abs() < i128::from(capacity / 100) {
            sentences
                .push(format!("What is free and what all processes hold sum to {parts} B of {capacity} B."));
        } else if left > 0 {
            sentences.push(format!("{left} B of the card are held by nobody that the message names."));
        }
    }
    sentences
}
