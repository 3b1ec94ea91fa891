//! Sizes as allocators print them.

use ledger::Bytes;
use regex::Captures;

/// A printed size: the nearest byte, and all sizes that are printed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Printed {
    /// The byte nearest to what is printed.
    pub nearest: Bytes,
    /// The least size that is printed so.
    pub low: Bytes,
    /// The largest.
    pub high: Bytes,
}

/// What stands for a size in the forms: a number and its unit.
pub(super) const SIZE: &str = r"([0-9]{1,30}(?:\.[0-9]{1,9})?)(bytes?|[KMGTP](?:i?B)?|B)";

/// Above this a size is no amount but a number that went below zero, or the absence of a limit.
const WRAPPED: f64 = 9_223_372_036_854_775_808.0;

impl Printed {
    /// The size in `captures`, whose groups from `group` on are those of [`SIZE`]; none where it is no amount.
    pub(super) fn of(captures: &Captures<'_>, group: usize) -> Option<Self> {
        let (bytes, half) = value(captures, group)?;
        (bytes < WRAPPED).then(|| Self {
            nearest: Bytes::new(bytes.round() as u64),
            low: Bytes::new((bytes - half).max(0.0).ceil() as u64),
            high: Bytes::new((bytes + half).floor() as u64),
        })
    }

    /// A size that is printed to the byte.
    pub(super) fn exact(bytes: Bytes) -> Self {
        Self { nearest: bytes, low: bytes, high: bytes }
    }
}

/// The size in `captures` where it may have gone below zero, and whether it did.
pub(super) fn signed(captures: &Captures<'_>, group: usize) -> Option<(i64, bool)> {
    let (bytes, _) = value(captures, group)?;
    if bytes < WRAPPED {
        return Some((bytes.round() as i64, false));
    }
    let below = bytes.round() as u128 as i128 - (1_i128 << 64);
    (below <= 0).then_some(below).and_then(|below| Some((i64::try_from(below).ok()?, true)))
}

/// The printed number of bytes, and half of its last digit.
fn value(captures: &Captures<'_>, group: usize) -> Option<(f64, f64)> {
    let (number, unit) = (captures.get(group)?.as_str(), captures.get(group + 1)?.as_str());
    let power = match unit.as_bytes()[0].to_ascii_uppercase() {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        b'T' => 40,
        b'P' => 50,
        _ => 0,
    };
    let unit = f64::from(power).exp2();
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let half = if power == 0 { 0.0 } else { unit * 0.5 / 10_f64.powi(decimals as i32) };
    Some((number.parse::<f64>().ok()? * unit, half))
}
