//! Amounts of memory: exact, checked, never floating point.

use std::fmt;
use std::iter::Sum;

/// An amount of memory in bytes.
///
/// Arithmetic that would leave the range panics in every build: a total that wrapped would be a
/// wrong answer. Where input decides the operands use [`Bytes::checked_add`] and its kin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);
    /// The largest amount a tape may hold: 2^63 - 1 bytes.
    pub const MAX: Self = Self(i64::MAX as u64);

    /// An amount of `bytes`.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// `mib` times 2^20 bytes.
    pub const fn mib(mib: u64) -> Self {
        Self(mib << 20)
    }

    /// The plain number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The sum, or `None` past [`Bytes::MAX`].
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self).filter(|sum| *sum <= Self::MAX)
    }

    /// The difference, or `None` where it would be negative.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// The product, or `None` past [`Bytes::MAX`].
    pub fn checked_mul(self, factor: u64) -> Option<Self> {
        self.0.checked_mul(factor).map(Self).filter(|product| *product <= Self::MAX)
    }

    /// The difference, or zero where it would be negative.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `self - other` with its sign.
    pub fn delta(self, other: Self) -> ByteDelta {
        ByteDelta(self.0.cast_signed() - other.0.cast_signed())
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        self.checked_add(other).expect("a total of bytes stays below 2^63")
    }
}

impl std::ops::Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self.checked_sub(other).expect("no more bytes are given back than were taken")
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::ops::SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, |total, amount| total + amount)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

/// A difference of two amounts, with its sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteDelta(i64);

impl ByteDelta {
    /// A difference of `bytes`.
    pub const fn new(bytes: i64) -> Self {
        Self(bytes)
    }

    /// The plain signed number of bytes.
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Display for ByteDelta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:+} B", self.0)
    }
}
