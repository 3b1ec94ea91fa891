//! What a column of a log is, by the words of its name.

use crate::series::Figure;

/// A unit of memory as people write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scale {
    /// Its bytes.
    pub(crate) bytes: u64,
    /// How it is written.
    pub(crate) name: &'static str,
    /// Whether some mean the decimal unit by it.
    pub(crate) decimal_in_doubt: bool,
}

/// What a column is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Role {
    /// The step; a smaller rank is the better name.
    Step { rank: u8 },
    /// The device or the rank.
    Device { rank: u8 },
    /// Memory of a device.
    Memory {
        figure: Figure,
        scale: Option<Scale>,
        /// Whether the name tells the measure.
        sure: bool,
    },
}

/// Names of steps, the best first.
const STEPS: [&str; 14] = [
    "step",
    "global step",
    "train step",
    "iteration",
    "iter",
    "it",
    "train global step",
    "cycle",
    "update",
    "batch",
    "batch idx",
    "i",
    "epoch",
    "train epoch",
];
/// Names of what tells devices and ranks apart, the best first.
const DEVICES: [&str; 9] =
    ["rank", "global rank", "local rank", "device", "gpu", "gpu id", "gpu index", "device id", "index"];
/// Words with which a number is no amount of a device's memory.
const NO_BYTES: [&str; 28] = [
    "count",
    "num",
    "number",
    "calls",
    "retries",
    "ooms",
    "oom",
    "percent",
    "pct",
    "ratio",
    "fraction",
    "frac",
    "util",
    "utilization",
    "cpu",
    "host",
    "ram",
    "rss",
    "swap",
    "disk",
    "time",
    "clock",
    "bandwidth",
    "delta",
    "diff",
    "id",
    "blocks",
    "segments",
];

/// The unit that `word`, in lower case, names.
pub(crate) fn scale(word: &str) -> Option<Scale> {
    let sure = |bytes, name| Some(Scale { bytes, name, decimal_in_doubt: false });
    let doubt = |bytes, name| Some(Scale { bytes, name, decimal_in_doubt: true });
    match word {
        "b" | "byte" | "bytes" => sure(1, "bytes"),
        "kib" | "kibibytes" => sure(1 << 10, "KiB"),
        "mib" | "mebibytes" => sure(1 << 20, "MiB"),
        "gib" | "gibibytes" => sure(1 << 30, "GiB"),
        "tib" => sure(1 << 40, "TiB"),
        "kb" | "kilobytes" => doubt(1 << 10, "KB"),
        "mb" | "megabytes" => doubt(1 << 20, "MB"),
        "gb" | "gigabytes" => doubt(1 << 30, "GB"),
        "tb" => doubt(1 << 40, "TB"),
        _ => None,
    }
}

/// The number in `text`, and the unit behind it, where there is one.
pub(crate) fn amount(text: &str) -> Option<(f64, Option<Scale>)> {
    let text = text.trim().trim_matches(['"', '\'']).trim();
    let end =
        text.find(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+' | 'e' | 'E')).unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let number: f64 = number.parse().ok().filter(|number: &f64| number.is_finite())?;
    match rest.trim().to_ascii_lowercase().as_str() {
        "" => Some((number, None)),
        unit => Some((number, Some(scale(unit)?))),
    }
}

/// The words of `name`, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for piece in name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|piece| !piece.is_empty()) {
        if scale(&piece.to_ascii_lowercase()).is_some() {
            words.push(piece.to_ascii_lowercase());
            continue;
        }
        let mut word = String::new();
        let mut small = false;
        for character in piece.chars() {
            if character.is_ascii_uppercase() && small {
                words.push(std::mem::take(&mut word));
            }
            small = character.is_ascii_lowercase() || character.is_ascii_digit();
            word.push(character.to_ascii_lowercase());
        }
        // `MiB` is one word.
        match words.last_mut() {
            Some(last) if word == "b" && matches!(last.as_str(), "ki" | "mi" | "gi" | "ti") => last.push('b'),
            _ => words.push(word),
        }
    }
    words
}

/// What the column called `name` is; none where it is none of what is looked for.
pub(super) fn role(name: &str) -> Option<Role> {
    let words = words(name);
    let whole = words.join(" ");
    if let Some(rank) = STEPS.iter().position(|step| *step == whole) {
        return Some(Role::Step { rank: rank as u8 });
    }
    if let Some(rank) = DEVICES.iter().position(|device| *device == whole) {
        return Some(Role::Device { rank: rank as u8 });
    }
    let has = |wanted: &[&str]| words.iter().any(|word| wanted.contains(&word.as_str()));
    if name.contains('%') || has(&NO_BYTES) {
        return None;
    }
    let memory = has(&["mem", "memory", "vram", "hbm", "cuda", "gpu"]);
    let scale = words.iter().rev().find_map(|word| scale(word));
    let peak = has(&["max", "peak", "maximum", "peaked"]);
    let (figure, sure) = if has(&["reserved", "reserve", "cached"]) {
        (if peak { Figure::PeakReserved } else { Figure::Reserved }, true)
    } else if has(&["allocated", "alloc", "allocation"]) {
        (if peak { Figure::PeakAllocated } else { Figure::Allocated }, true)
    } else if has(&["active", "free", "requested", "inactive"]) {
        return None;
    } else if memory && has(&["total", "capacity"]) {
        (Figure::Capacity, true)
    } else if memory && has(&["used", "usage"]) {
        (Figure::Used, true)
    } else if has(&["mem", "memory", "vram", "hbm"]) {
        (if peak { Figure::PeakAllocated } else { Figure::Allocated }, false)
    } else {
        return None;
    };
    Some(Role::Memory { figure, scale, sure })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(name: &str) -> Option<(Figure, Option<u64>)> {
        match role(name) {
            Some(Role::Memory { figure, scale, .. }) => Some((figure, scale.map(|scale| scale.bytes))),
            _ => None,
        }
    }

    #[test]
    fn names_of_many_loggers() {
        for (name, figure, bytes) in [
            ("memory_allocated", Figure::Allocated, None),
            ("cuda/allocated_gb", Figure::Allocated, Some(1 << 30)),
            ("reserved_mib", Figure::Reserved, Some(1 << 20)),
            ("mem_MB", Figure::Allocated, Some(1 << 20)),
            ("memory/max_reserved(GiB)", Figure::PeakReserved, Some(1 << 30)),
            ("mem-allocated-bytes", Figure::Allocated, Some(1)),
            ("system.gpu.0.memoryAllocatedBytes", Figure::Allocated, Some(1)),
            ("allocMiB", Figure::Allocated, Some(1 << 20)),
            ("memory.used [MiB]", Figure::Used, Some(1 << 20)),
            ("gpu_memory_total_gib", Figure::Capacity, Some(1 << 30)),
            ("peak_mem", Figure::PeakAllocated, None),
            ("memory_cached", Figure::Reserved, None),
        ] {
            assert_eq!(memory(name), Some((figure, bytes)), "{name}");
        }
        for name in [
            "loss",
            "seq_len",
            "memory/max_active(%)",
            "mem-allocated-count",
            "cpu_mem_gb",
            "gpu_util",
            "tokens",
        ] {
            assert_eq!(memory(name), None, "{name}");
        }
        assert_eq!(role("train/global_step"), Some(Role::Step { rank: 6 }));
        assert_eq!(role("_step"), Some(Role::Step { rank: 0 }));
        assert_eq!(role("Rank"), Some(Role::Device { rank: 0 }));
    }

    #[test]
    fn amounts_with_units() {
        assert_eq!(amount(" 66 MiB ").map(|(n, s)| (n, s.map(|s| s.bytes))), Some((66.0, Some(1 << 20))));
        assert_eq!(amount("\"1.5e3\""), Some((1500.0, None)));
        assert_eq!(amount("2.5GB").map(|(n, s)| (n, s.map(|s| s.name))), Some((2.5, Some("GB"))));
        for text in ["", "MiB", "[N/A]", "1.2.3", "inf", "7 apples"] {
            assert_eq!(amount(text), None, "{text}");
        }
    }
}
