//! A recorded failure told whole, and what other settings of the allocator would have done.

use allocator::{AddressOrder, DeviceMemory, Settings, State, TieRule, first_difference, memory_of};
use ledger::{Bytes, DeviceId, DeviceKind, Event, Ladder};
use wire::{Oom, Remedy, Simulated, WhatIf};

use super::recorded::Run;
use super::shots::Shot;
use crate::failure::add_rounding;
use crate::simulate::simulated;
use crate::{Error, fit};

/// Settings that can make room without changing what a program asks for.
const TRIED: [&str; 2] = ["expandable_segments:True", "max_split_size_mb:128"];
/// And those for a run that had the first.
const TRIED_INSTEAD: [&str; 1] = ["expandable_segments:False"];

/// The page by which the small pool's expandable segments grow.
const SMALL_PAGE: u64 = 2 << 20;

/// The first failure of `run`, whose event `shot` is of.
pub(super) fn out_of_memory(run: &Run, shot: &Shot) -> Oom {
    let tape = &run.taped.tape;
    let Event::Oom { bytes, device, stream } = tape.event(shot.event) else {
        unreachable!("the shot of a failure is of its event")
    };
    let reading = shot.readings.get(usize::from(device.0)).copied().flatten().unwrap_or_default();
    // The event has the size of the block that was looked for.
    let small = run.settings.is_small(bytes);
    let layout = shot.layouts.get(usize::from(device.0)).map(Vec::as_slice).unwrap_or_default();
    let pool = layout.iter().filter(|segment| segment.stream == stream && segment.pool.0 == 0);
    let blocks = pool.flat_map(|segment| segment.blocks.iter().map(move |block| (segment, block)));
    let usable = blocks.filter(|(segment, block)| {
        block.state == State::Free && (segment.small == small || segment.expandable)
    });
    let largest = usable.map(|(_, block)| block.size.get()).max().unwrap_or(0);
    let mut holders = ledger::holders(tape, shot.event, device);
    let requested = add_rounding(&mut holders, reading.allocated);
    let held = Ladder {
        requested: Some(requested),
        allocated: Some(reading.allocated),
        active: Some(reading.active),
        reserved: Some(reading.reserved),
        ..Ladder::default()
    };
    let failed = run.failed_entry(device);
    let at = shot.mark.map(|mark| tape.mark_of(mark));
    Oom {
        device: device.0,
        step: at.map(|at| at.step),
        micro_batch: at.and_then(|at| at.micro_batch),
        phase: at.map(|at| tape.phase_name(at.phase).to_owned()),
        event: shot.event as u64,
        requested_bytes: bytes.get(),
        rounded_bytes: Some(bytes.get()),
        device_request_bytes: Some(run.settings.segment_size(bytes).get()),
        largest_free_block_bytes: Some(largest),
        device_free_bytes: failed.as_ref().map(|(free, _)| *free),
        object: failed.and_then(|(_, site)| site),
        held: held.into(),
        holders: holders.iter().map(wire::Contributor::from).collect(),
    }
}

/// What the device had left less what was asked of it, which is negative where it is what failed.
pub(super) fn headroom(oom: &Oom) -> Option<i64> {
    let (free, asked) = (oom.device_free_bytes?, oom.device_request_bytes?);
    i64::try_from(i128::from(free) - i128::from(asked)).ok()
}

/// Whether another setting would have made room for the request of `oom`.
pub(super) fn remedy(run: &Run, oom: &Oom) -> Option<Remedy> {
    let (reserved, active) = (oom.held.reserved_bytes?, oom.held.active_bytes?);
    let (free, asked) = (oom.device_free_bytes?, oom.requested_bytes);
    let stranded = reserved.saturating_sub(active);
    let tell = |helps, explanation: String, tried| Some(Remedy { helps, explanation, tried });
    // Expandable segments grow by whole pages.
    let page = match (run.settings.expandable_segments, run.settings.is_small(Bytes::new(asked))) {
        (false, _) => 1,
        (true, true) => SMALL_PAGE,
        (true, false) => run.settings.large_segment_size.get().max(1),
    };
    let needed = match run.settings.expandable_segments {
        true => asked,
        false => oom.device_request_bytes.unwrap_or(asked),
    };
    if free / page * page >= needed {
        return tell(
            None,
            "the device had room for it: a limit of the process (a memory fraction), another process that took the room first, or the device's own pages stood in the way"
                .into(),
            None,
        );
    }
    if free.saturating_add(stranded) < asked {
        return tell(
            Some(false),
            "no setting of the allocator helps: what the device has left and what is reserved in no block are together less than the request"
                .into(),
            None,
        );
    }
    let tried: &[&str] = if run.settings.expandable_segments { &TRIED_INSTEAD } else { &TRIED };
    let settings: Vec<String> = tried.iter().map(ToString::to_string).collect();
    let tried = what_if(run, Some(oom), &settings).ok()?;
    let reproduced = tried.recorded.oom.as_ref().is_some_and(|found| found.event == oom.event);
    let helping: Vec<&str> =
        tried.settings.iter().filter(|row| row.oom.is_none()).map(|row| row.alloc_conf.as_str()).collect();
    let (helps, explanation) = match (helping.as_slice(), reproduced) {
        (_, false) => (
            None,
            "whether another setting helps cannot be told: the replay of the recording does not fail where the run did"
                .to_owned(),
        ),
        ([], true) => (Some(false), "none of the settings that were tried makes room for it".into()),
        (helping, true) => {
            let settings = helping.join("` or `");
            let text = "this request and all before it find room; what the run would have asked for after it is not known";
            (Some(true), format!("with `{settings}` {text}"))
        }
    };
    tell(helps, explanation, Some(tried))
}

/// The requests of `run` under each of `settings`, on a device that has no more than it had when `oom`
/// happened.
///
/// # Errors
/// Settings that PyTorch refuses.
pub(super) fn what_if(run: &Run, oom: Option<&Oom>, settings: &[String]) -> Result<WhatIf, Error> {
    let parsed = settings.iter().map(|text| Ok(fit::settings(text)?.0)).collect::<Result<Vec<_>, Error>>()?;
    let tape = &run.taped.tape;
    let capacity = oom.and_then(|oom| oom.held.reserved_bytes?.checked_add(oom.device_free_bytes?));
    let mut memory = memory_of(tape);
    if let (Some(oom), Some(capacity)) = (oom, capacity)
        && let Some(Some(device)) = memory.get_mut(usize::from(oom.device))
    {
        *device = DeviceMemory { total: Some(Bytes::new(capacity)), outside: Bytes::ZERO };
    }
    // Which release of PyTorch ran is not told; its rule is the one that agrees longest.
    let ties = [TieRule::SegmentCounter, TieRule::Address(AddressOrder::Up)];
    let differences = ties.map(|tie| first_difference(tape, &run.settings, tie, &memory));
    let best = (0..ties.len()).max_by_key(|tie| (differences[*tie].unwrap_or(usize::MAX), usize::MAX - tie));
    let (tie, differs) = best.map_or((ties[0], None), |best| (ties[best], differences[best]));
    let all: Vec<Settings> = std::iter::once(run.settings.clone()).chain(parsed).collect();
    let reports = allocator::simulate(tape, &all, tie, &memory);
    let recorded = run.alloc_conf().unwrap_or_default().to_owned();
    let names = std::iter::once(&recorded).chain(settings);
    let mut rows: Vec<Simulated> =
        names.zip(&reports).map(|(name, report)| simulated(tape, name, report)).collect();
    let others = rows.split_off(1);
    let recorded = rows.pop().unwrap_or_else(|| unreachable!("the recorded settings come first"));
    Ok(WhatIf {
        capacity_bytes: capacity,
        differs_from: differs.map(|event| event as u64),
        recorded,
        settings: others,
    })
}

impl Run {
    /// What the device had left when the first request of `device` failed, and where in the program
    /// that was.
    fn failed_entry(&self, device: DeviceId) -> Option<(u64, Option<String>)> {
        debug_assert_eq!(self.taped.tape.devices[usize::from(device.0)].kind, DeviceKind::Gpu);
        let trace = self.snapshot.traces.get(self.taped.devices[usize::from(device.0)]?)?;
        let mut entries = self.snapshot.entries(trace);
        let failed = entries.find(|entry| entry.action == evidence::snapshot::Action::Oom)?;
        Some((failed.address, self.snapshot.site(failed.stack, 2)))
    }
}
