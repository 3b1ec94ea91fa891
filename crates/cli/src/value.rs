//! How values are written on the command line.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use vramledger::ledger::{Bytes, Dtype};
use vramledger::models::Checkpoint;

use crate::args::{Autocast, Steps};

/// A SIZE: an integer of bytes, or a number with KiB, MiB or GiB.
pub fn size(text: &str) -> Result<Bytes, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "KB" | "MB" | "GB" | "kB" => {
            return Err("1 GB may be 10^9 or 2^30 bytes: write KiB, MiB, GiB or plain bytes".into());
        }
        _ => return Err("a size is an integer of bytes, or has KiB, MiB or GiB: 512MiB".into()),
    };
    let bytes = match number.parse::<u64>() {
        Ok(number) => number.checked_mul(1 << shift),
        Err(_) if shift > 0 => {
            let number: f64 = number.parse().map_err(|_| "the number of a size is like 80 or 79.5")?;
            let bytes = (number * f64::from(1_u32 << shift)).round();
            (bytes < 9e15).then_some(bytes as u64)
        }
        Err(_) if number.contains('.') => return Err("a fraction of a byte is no size".into()),
        Err(_) => None,
    };
    bytes
        .map(Bytes::new)
        .filter(|bytes| *bytes <= Bytes::MAX)
        .ok_or_else(|| "a size is below 2^63 bytes".into())
}

/// A number of parameters: an integer, or a number with K, M, B or T (decimal): `1.5B`.
pub fn parameters(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    let complaint = "a number of parameters is an integer, or has K, M, B or T: 7B, 1.5B";
    let unit = text.chars().next_back().map(|unit| unit.to_ascii_uppercase());
    let factor = match unit {
        Some('K') => 1e3,
        Some('M') => 1e6,
        Some('B') => 1e9,
        Some('T') => 1e12,
        _ => return Err(complaint.into()),
    };
    let number: f64 = text[..text.len() - 1].parse().map_err(|_| complaint)?;
    let parameters = (number * factor).round();
    if (1.0..=1e15).contains(&parameters) {
        Ok(parameters as u64)
    } else {
        Err("a model has 1 to 10^15 parameters".into())
    }
}

/// A whole number that is at least 1.
pub fn positive(text: &str) -> Result<u64, String> {
    match text.trim().parse::<u64>() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("it must be a whole number of at least 1".into()),
    }
}

/// A whole number of at least 1 that counts steps, micro-batches or ranks.
pub fn positive_u32(text: &str) -> Result<u32, String> {
    positive(text)?.try_into().map_err(|_| "it must be below 2^32".into())
}

/// A number of frames.
pub fn depth(text: &str) -> Result<usize, String> {
    positive(text)?.try_into().map_err(|_| "it must be below 2^63".into())
}

/// A number of steps, or all.
pub fn steps(text: &str) -> Result<Steps, String> {
    if text == "all" {
        return Ok(Steps(None));
    }
    positive_u32(text).map(|steps| Steps(Some(steps))).map_err(|refused| format!("{refused}, or `all`"))
}

/// Which layers backward computes again.
pub fn checkpoint(text: &str) -> Result<Checkpoint, String> {
    text.parse()
}

/// A number that is finite.
pub fn finite(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        _ => Err("it must be a number".into()),
    }
}

/// A floating-point element type.
pub fn float_dtype() -> impl TypedValueParser<Value = Dtype> {
    choice(&[Dtype::Fp32, Dtype::Bf16, Dtype::Fp16], Dtype::as_str)
}

/// The element type of an autocast region, or none.
pub fn autocast() -> impl TypedValueParser<Value = Autocast> {
    let all: &'static [Option<Dtype>] = &[None, Some(Dtype::Bf16), Some(Dtype::Fp16)];
    choice(all, |dtype| dtype.map_or("none", Dtype::as_str)).map(Autocast)
}

/// One of `all`, by name.
pub fn choice<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(all.iter().map(|&one| name(one)))
        .try_map(move |word| all.iter().copied().find(|&one| name(one) == word).ok_or("no such choice"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("1024"), Ok(Bytes::new(1024)));
        assert_eq!(size("550MiB"), Ok(Bytes::mib(550)));
        assert_eq!(size("550 MiB"), Ok(Bytes::mib(550)));
        assert_eq!(size("79.5GiB"), Ok(Bytes::new(85_362_475_008)));
        for bad in [
            "",
            "GiB",
            "-1",
            "nan",
            "inf",
            "1.5",
            "80GB",
            "1e9",
            "1..5GiB",
            "9223372036854775808",
            "99999999999GiB",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_of_parameters() {
        assert_eq!(parameters("124M"), Ok(124_000_000));
        assert_eq!(parameters("1.5b"), Ok(1_500_000_000));
        assert_eq!(parameters("405B"), Ok(405_000_000_000));
        for bad in ["", "B", "-7B", "nanB", "0K", "7X", "1e40B", "百B", "7é"] {
            assert!(parameters(bad).is_err(), "{bad}");
        }
    }
}
