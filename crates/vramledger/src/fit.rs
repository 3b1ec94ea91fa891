//! Whether a tape fits: its replay through the caching allocator.

use std::fmt::Display;

use allocator::{CachingAllocator, Settings, SettingsWarning, TieRule, memory_of};
use ledger::{ByteDelta, DeviceId, Meter, Tape};
use models::Torch;

use crate::{Error, failure};

/// The books of a tape and what the allocator says to them.
pub(crate) struct Fit {
    /// The books; they end where a request found no room.
    pub(crate) books: ledger::Ledger,
    /// Whether everything found room.
    pub(crate) fits: bool,
    /// What the reserved peak leaves of the device; after a failure what was free less what was asked
    /// for, which is negative.
    pub(crate) headroom: Option<ByteDelta>,
    /// Requests that had to give back all cached blocks first.
    pub(crate) retries: u64,
    /// The request that found no room.
    pub(crate) oom: Option<wire::Oom>,
}

/// The settings of `PYTORCH_CUDA_ALLOC_CONF`, and what their reader should know.
pub(crate) fn settings(alloc_conf: &str) -> Result<(Settings, Vec<SettingsWarning>), Error> {
    Settings::parse(alloc_conf)
        .map_err(|problem| Error::Settings { settings: alloc_conf.to_owned(), problem })
}

/// The settings that were read; where they cannot be, the defaults, and why. What their reader should know
/// is added to `warnings`.
pub(crate) fn or_defaults<E: Display>(
    read: Result<(Settings, Vec<SettingsWarning>), E>,
    warnings: &mut Vec<String>,
) -> Settings {
    match read {
        Ok((settings, found)) => {
            warnings.extend(found.iter().map(ToString::to_string));
            settings
        }
        Err(refused) => {
            warnings.push(refused.to_string());
            Settings::default()
        }
    }
}

/// The rule by which `torch` chooses among equal blocks. Before 2.15 it goes by address, and drivers
/// hand out addresses upwards.
pub(crate) const fn tie_rule(torch: Torch) -> TieRule {
    match torch {
        Torch::V2_15 => TieRule::SegmentCounter,
        Torch::V2_6 | Torch::V2_11 => TieRule::Address(allocator::AddressOrder::Up),
    }
}

/// The modelled release of torch that `version` is, or the last one before it; none where it is no version.
pub(crate) fn torch(version: &str) -> Option<Torch> {
    Some(match release(version)? {
        (2, ..11) | (..2, _) => Torch::V2_6,
        (2, 11..15) => Torch::V2_11,
        _ => Torch::V2_15,
    })
}

/// Major and minor version: `2.15.0+cu132` is of 2.15.
pub(crate) fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(['.', '+', 'a', 'b', 'r']).map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// That requests found room only in the second attempt.
pub(crate) fn retried(count: u64) -> Option<String> {
    let who = match count {
        0 => return None,
        1 => "one request finds".to_owned(),
        _ => format!("{count} requests find"),
    };
    Some(format!("{who} room only after the allocator gives all its cached blocks back, which is slow"))
}

/// Replays `tape` through the allocator, on devices of the capacity and context that the tape names.
pub(crate) fn fit(tape: &Tape, settings: &Settings, tie: TieRule) -> Fit {
    let mut allocator = CachingAllocator::new(settings, tie, &memory_of(tape));
    let books = ledger::replay(tape, Some(&mut allocator));
    let device = allocator.failure().map_or(DeviceId(0), |failure| failure.device);
    let headroom = match allocator.failure() {
        Some(failure) => failure.shortage.headroom(),
        None => allocator
            .limit(device)
            .zip(books.peaks.reserved.as_ref())
            .map(|(limit, peak)| limit.delta(peak.bytes)),
    };
    debug_assert!(allocator.reading(device).is_some(), "the allocator keeps the books of every GPU");
    Fit {
        fits: allocator.failure().is_none(),
        headroom,
        oom: allocator.failure().map(|failure| failure::oom(tape, failure)),
        retries: allocator.stats(device).map_or(0, |stats| stats.num_alloc_retries),
        books,
    }
}
