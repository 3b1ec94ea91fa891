//! A recorded run: its tape with phases and categories, its blocks, its books.

use allocator::{PlacedAllocator, Places, Settings};
use evidence::snapshot::{BlockState, Snapshot, Taped};
use ledger::{Bytes, DeviceId, Event, Meter as _, ObjectId, Tape};

use super::group::LookedAt;
use super::{MEASURES, ReadQuestion, settings};
use crate::Error;

/// A recorded run.
pub(super) struct Run {
    pub(super) snapshot: Snapshot,
    pub(super) taped: Taped,
    pub(super) places: Places,
    pub(super) settings: Settings,
    pub(super) books: ledger::Ledger,
    pub(super) block_disagreements: u64,
    pub(super) hidden: Bytes,
    pub(super) warnings: Vec<String>,
    /// The step that each object was made in.
    pub(super) births: Vec<Option<u32>>,
}

impl Run {
    /// The run of `snapshot`; `path` is what an error calls it.
    ///
    /// # Errors
    /// More than a tape holds.
    pub(super) fn of(path: &str, snapshot: Snapshot) -> Result<Self, Error> {
        let mut taped = snapshot.training().map_err(|problem| Error::Tape { name: path.into(), problem })?;
        let (settings, found) = settings::settings(&snapshot);
        let mut warnings: Vec<String> = snapshot.warnings.iter().map(ToString::to_string).collect();
        warnings.extend(taped.warnings.iter().map(ToString::to_string));
        warnings.extend(found);
        let mut places = places(&snapshot, &mut taped);
        let mut meter = PlacedAllocator::new(&taped.tape, &places, &settings);
        let mut books = ledger::replay(&taped.tape, Some(&mut meter));
        let learnt = meter.learnt().clone();
        let (mut block_disagreements, mut hidden) = (meter.disagreements(), meter.hidden());
        if !learnt.is_empty() {
            places.blocks.extend(learnt);
            let mut meter = PlacedAllocator::new(&taped.tape, &places, &settings);
            books = ledger::replay(&taped.tape, Some(&mut meter));
            (block_disagreements, hidden) = (meter.disagreements(), meter.hidden());
        }
        let births = births(&taped.tape);
        Ok(Self { snapshot, taped, places, settings, books, block_disagreements, hidden, warnings, births })
    }

    /// The instant that `question` asks for; none where nothing ever was. An error is what the run does
    /// not have.
    pub(super) fn instant_event(&self, question: &ReadQuestion) -> Result<Option<LookedAt>, String> {
        let tape = &self.taped.tape;
        let peak = MEASURES.iter().find_map(|measure| Some((*measure, self.books.peaks.get(*measure)?)));
        let Some((measure, peak)) = peak else { return Ok(None) };
        let device = peak.device;
        if let Some(event) = question.at {
            let event = usize::try_from(event).ok().filter(|event| *event < tape.len());
            let event = event.ok_or_else(|| format!("{} events, from 0 on", tape.len()))?;
            return Ok(Some(LookedAt { measure, device: self.device_at(event).unwrap_or(device), event }));
        }
        if let Some(step) = question.step {
            let event = self.peak_of_step(step, device);
            let event = event.ok_or_else(|| format!("no step {step}"))?;
            return Ok(Some(LookedAt { measure, device, event }));
        }
        // Who was in the way of a request that found no room is what a reader wants to know first.
        let (device, event) =
            self.books.oom.as_ref().map_or((device, peak.event), |oom| (oom.device, oom.event));
        Ok(Some(LookedAt { measure, device, event }))
    }

    /// The event with which the request is served that took memory from the device at `event`.
    pub(super) fn served(&self, event: usize) -> usize {
        let tape = &self.taped.tape;
        let takes = |event: &usize| {
            matches!(
                tape.event(*event),
                Event::SegmentAlloc(_)
                    | Event::SegmentMap(_)
                    | Event::SegmentFree(_)
                    | Event::SegmentUnmap(_)
            )
        };
        let next = (event..tape.len()).find(|event| !takes(event));
        let serves = |event: &usize| matches!(tape.event(*event), Event::Alloc { .. });
        next.filter(serves).unwrap_or(event)
    }

    /// The device that the event at `event` is of.
    fn device_at(&self, event: usize) -> Option<DeviceId> {
        match self.taped.tape.event(event) {
            Event::Alloc { object, .. } | Event::FreeRequested(object) | Event::Free(object) => {
                Some(self.taped.origins[object.0 as usize].device)
            }
            _ => None,
        }
    }

    /// The event with which the allocated bytes of `device` are the most in `step`.
    fn peak_of_step(&self, step: u32, device: DeviceId) -> Option<usize> {
        let tape = &self.taped.tape;
        let mut meter = PlacedAllocator::new(tape, &self.places, &self.settings);
        let (mut within, mut best) = (false, None);
        for (index, event) in tape.events().enumerate() {
            // Blocks that are followed never run out.
            let _ = meter.apply(index, event);
            if let Event::Mark(mark) = event {
                within = tape.mark_of(mark).step == step;
            }
            let allocated = meter.reading(device).unwrap_or_default().allocated;
            if within && best.is_none_or(|(most, _)| allocated > most) {
                best = Some((allocated, index));
            }
        }
        best.map(|(_, event)| event)
    }
}

/// Where everything of `taped` is.
fn places(snapshot: &Snapshot, taped: &mut Taped) -> Places {
    let listed = snapshot.segments.iter().flat_map(|segment| {
        let used = segment.blocks.iter().filter(|block| block.state != BlockState::Inactive);
        used.filter_map(move |block| Some(((segment.device?, block.address?), block.size)))
    });
    let listed: std::collections::HashMap<(u16, u64), Bytes> = listed.collect();
    let mut places = Places { segments: std::mem::take(&mut taped.segments), ..Places::default() };
    for (index, origin) in taped.origins.iter().enumerate() {
        places.objects.push(origin.address);
        places.found.push(origin.entry.is_none());
        let number = taped.devices[usize::from(origin.device.0)];
        if origin.entry.is_none()
            && origin.end.is_none()
            && let Some(bytes) = number.and_then(|number| listed.get(&(number as u16, origin.address)))
        {
            places.blocks.insert(ObjectId(index as u32), *bytes);
        }
    }
    places
}

/// The step that each object was made in, by its handle; none before the first mark.
fn births(tape: &Tape) -> Vec<Option<u32>> {
    let mut births = vec![None; tape.objects().len()];
    let mut step = None;
    for event in tape.events() {
        match event {
            Event::Mark(mark) => step = Some(tape.mark_of(mark).step),
            Event::Alloc { object, .. } => births[object.0 as usize] = step,
            _ => {}
        }
    }
    births
}
