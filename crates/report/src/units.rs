//! How amounts are written: 1 KiB = 2^10 B, 1 MiB = 2^20 B, 1 GiB = 2^30 B, never called KB, MB, GB.

/// A unit of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    B,
    KiB,
    MiB,
    GiB,
}

impl Unit {
    /// The unit in which the largest of some amounts is easiest to read: whole numbers of four
    /// digits at most, with MiB up to 4 GiB.
    pub(crate) fn of_largest(amounts: impl IntoIterator<Item = u64>) -> Self {
        match amounts.into_iter().max().unwrap_or_default() {
            0..10_000 => Self::B,
            10_000..1_048_576 => Self::KiB,
            1_048_576..4_294_967_296 => Self::MiB,
            _ => Self::GiB,
        }
    }

    /// Its name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::B => "B",
            Self::KiB => "KiB",
            Self::MiB => "MiB",
            Self::GiB => "GiB",
        }
    }

    const fn bytes(self) -> f64 {
        match self {
            Self::B => 1.0,
            Self::KiB => 1024.0,
            Self::MiB => 1_048_576.0,
            Self::GiB => 1_073_741_824.0,
        }
    }

    /// `bytes` in this unit, without its name; what would round to nothing is not written as zero.
    pub(crate) fn number(self, bytes: u64) -> String {
        match self {
            Self::B => bytes.to_string(),
            _ if bytes == 0 => "0".into(),
            _ => {
                let number = bytes as f64 / self.bytes();
                if number < 0.005 { "<0.01".into() } else { format!("{number:.2}") }
            }
        }
    }

    /// `bytes` in this unit, with its name.
    pub(crate) fn size(self, bytes: u64) -> String {
        format!("{} {}", self.number(bytes), self.name())
    }

    /// A difference in this unit, with its sign and without its name.
    pub(crate) fn difference(self, bytes: i64) -> String {
        let sign = match bytes {
            0 => "",
            1.. => "+",
            _ => "-",
        };
        format!("{sign}{}", self.number(bytes.unsigned_abs()))
    }
}

/// `bytes` in the unit that suits it, with its name.
pub fn size(bytes: u64) -> String {
    Unit::of_largest([bytes]).size(bytes)
}

/// A difference in the unit that suits it, with its sign and the name of the unit.
pub(crate) fn difference(bytes: i64) -> String {
    let unit = Unit::of_largest([bytes.unsigned_abs()]);
    format!("{} {}", unit.difference(bytes), unit.name())
}

/// `bytes` in the unit in which the allocators' own messages have them: GiB from one on.
pub(crate) fn as_printed(bytes: u64) -> String {
    let unit = if bytes < 1 << 30 { Unit::of_largest([bytes]) } else { Unit::GiB };
    unit.size(bytes)
}

/// `text` with its amounts, `123 B`, in units as messages have them.
pub(crate) fn spelled(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        // The unit may have the end of its sentence with it.
        let bytes =
            word.strip_prefix('B').filter(|rest| rest.chars().all(|letter| letter.is_ascii_punctuation()));
        let number = words.last().and_then(|number| number.parse::<i64>().ok());
        match (bytes, number) {
            (Some(end), Some(number)) => {
                let sign = if number < 0 { "-" } else { "" };
                words.pop();
                words.push(format!("{sign}{}{end}", as_printed(number.unsigned_abs())));
            }
            _ => words.push(word.to_owned()),
        }
    }
    words.join(" ")
}

/// A count as people say it: 124M, 1.5B, 8.03B, 405B (decimal).
pub(crate) fn count(count: u64) -> String {
    let (number, suffix) = match count {
        0..1_000_000 => return count.to_string(),
        1_000_000..1_000_000_000 => (count as f64 / 1e6, "M"),
        1_000_000_000..1_000_000_000_000 => (count as f64 / 1e9, "B"),
        _ => (count as f64 / 1e12, "T"),
    };
    let text = format!("{number:.2}");
    format!("{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// An amount of work, decimal: `1.2 PFLOP`.
pub(crate) fn flops(count: u64) -> String {
    let (number, unit) = match count {
        0..1_000_000_000 => (count as f64 / 1e6, "MFLOP"),
        1_000_000_000..1_000_000_000_000 => (count as f64 / 1e9, "GFLOP"),
        1_000_000_000_000..1_000_000_000_000_000 => (count as f64 / 1e12, "TFLOP"),
        _ => (count as f64 / 1e15, "PFLOP"),
    };
    format!("{number:.1} {unit}")
}

/// A decimal size, as cards are sold: `80 GB`.
pub(crate) fn nominal(bytes: u64) -> String {
    format!("{} GB", thousands((bytes as f64 / 1e9).round() as u64))
}

/// A number with a comma between each three digits.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_their_unit() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(9_999), "9999 B");
        assert_eq!(size(19_947_520), "19.02 MiB");
        assert_eq!(size(2_306_867_200), "2200.00 MiB");
        assert_eq!(size(85_520_809_984), "79.65 GiB");
        assert_eq!(Unit::GiB.number(100), "<0.01");
        assert_eq!(difference(-(300 << 20)), "-300.00 MiB");
        assert_eq!(difference(3 << 20), "+3.00 MiB");
        assert_eq!(difference(0), "0 B");
        assert_eq!(difference(i64::MIN), "-8589934592.00 GiB");
    }

    #[test]
    fn amounts_in_a_sentence_are_spelled() {
        let text = "3371549327 B were asked for, 15 of 1277752771 B each; short by -7 B. A B.";
        let expected = "3.14 GiB were asked for, 15 of 1.19 GiB each; short by -7 B. A B.";
        assert_eq!(spelled(text), expected);
    }

    #[test]
    fn counts_are_decimal() {
        let counts = [999, 124_000_000, 1_500_000_000, 8_030_261_248, 405_000_000_000].map(count);
        assert_eq!(counts, ["999", "124M", "1.5B", "8.03B", "405B"]);
        assert_eq!(thousands(6_480), "6,480");
        assert_eq!(nominal(6_480_000_000_000), "6,480 GB");
    }
}
