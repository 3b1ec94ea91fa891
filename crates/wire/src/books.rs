//! `vramledger/1`: the ledger.

use std::collections::BTreeMap;

use ledger::{Bytes, DeviceId, Position};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Category, Growth, Provenance, Ranks, ReadError, Reading};

/// The books of one run: what was on the devices in each phase, and what made the peaks.
///
/// What is not known is null. Amounts are bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Ledger {
    /// `vramledger/1`.
    #[schemars(extend("const" = Ledger::FORMAT))]
    pub format: String,
    /// Where the numbers come from.
    pub provenance: Provenance,
    /// What was run: the model, the setup, the software.
    #[serde(default)]
    pub subject: Map<String, Value>,
    /// The devices; `device` elsewhere is an index into them.
    pub devices: Vec<Device>,
    /// What lies on the devices outside the allocator, as far as it is known.
    #[serde(default)]
    pub outside: Vec<Outside>,
    /// A row for each phase in the order of the timeline, and in it one for each device.
    pub phases: Vec<PhaseRow>,
    /// The peaks of the GPU devices; where there is none, of the host.
    pub peaks: Peaks,
    /// The parameters of the model.
    pub parameters: Option<Parameters>,
    /// Floating-point operations of one step.
    pub flops: Option<Flops>,
    /// The batch of one step.
    pub batch: Option<Batch>,
    /// Tokens of one update on all ranks, at the longest sequence; null for a model without one.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// What is copied between the devices and the host in one step, but for the batch.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// The rank that this is of, where ranks divide the work.
    #[serde(default)]
    pub ranks: Option<Ranks>,
    /// Whether the run fits on its devices.
    pub fits: Option<bool>,
    /// What the peak leaves of the device; negative where it does not fit.
    pub headroom_bytes: Option<i64>,
    /// The request that found no room.
    pub oom: Option<Oom>,
    /// What had to be assumed, a sentence each.
    #[serde(default)]
    pub assumptions: Vec<String>,
    /// What must not be read into the numbers.
    #[serde(default)]
    pub interpretation_limits: Vec<String>,
    /// What a reader could not read or make sense of.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The tape file the ledger was made from.
    pub tape: Option<String>,
    /// What a recording says besides, where the ledger was read from one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<Box<Reading>>,
    /// What grows from step to step, of an emulated run and of a tape; of a recording it is in `reading`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<Box<Growth>>,
}

/// What is known of a run besides its tape: the rest of a ledger, kept in a tape file as well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// Where the numbers come from.
    pub provenance: Provenance,
    /// What was run: the model, the setup, the software.
    #[serde(default)]
    pub subject: Map<String, Value>,
    /// The parameters of the model.
    pub parameters: Option<Parameters>,
    /// Floating-point operations of one step.
    pub flops: Option<Flops>,
    /// The batch of one step.
    pub batch: Option<Batch>,
    /// Tokens of one update on all ranks, at the longest sequence; null for a model without one.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// What is copied between the devices and the host in one step, but for the batch.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// The rank that this is of, where ranks divide the work.
    #[serde(default)]
    pub ranks: Option<Ranks>,
    /// What lies on the devices outside the allocator, as far as it is known.
    #[serde(default)]
    pub outside: Vec<Outside>,
    /// What had to be assumed, a sentence each.
    #[serde(default)]
    pub assumptions: Vec<String>,
    /// What must not be read into the numbers.
    #[serde(default)]
    pub interpretation_limits: Vec<String>,
    /// What a reader could not read or make sense of.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// How many of the first events of its tape tell what was there before: see [`ledger::Tape::before`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub events_before: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What takes memory of a device outside the allocator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outside {
    /// The device.
    pub device: u16,
    /// What it is.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// What was assumed of it; null where it was measured.
    pub assumption: Option<String>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// Its name, as in the catalogue.
    pub name: String,
    /// GPU or host.
    pub kind: DeviceKind,
    /// All memory of the device.
    pub capacity_bytes: Option<u64>,
    /// What of it the allocator never sees.
    pub context_bytes: Option<u64>,
}

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// An accelerator.
    Gpu,
    /// Host memory.
    Cpu,
}

/// One phase of the timeline on one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseRow {
    /// The device.
    pub device: u16,
    /// The step, from 1; 0 is the load.
    pub step: u32,
    /// The micro-batch, from 1; null in load and update.
    pub micro_batch: Option<u32>,
    /// The name of the phase.
    pub phase: String,
    /// The largest totals in the phase; what is alive at its start is included.
    pub peak: Totals,
    /// The totals at the end of the phase.
    pub end: Totals,
    /// What is held at the end, in requested bytes (for a tape of blocks, in block bytes).
    pub end_by_category: BTreeMap<Category, u64>,
}

/// A total of each measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Totals {
    /// Bytes the program asked for.
    pub requested_bytes: Option<u64>,
    /// Bytes of the allocator's blocks.
    pub allocated_bytes: Option<u64>,
    /// Bytes of the allocator's segments.
    pub reserved_bytes: Option<u64>,
}

/// The measures at one instant, each at least the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ladder {
    /// Bytes the program asked for.
    pub requested_bytes: Option<u64>,
    /// Bytes of the allocator's blocks.
    pub allocated_bytes: Option<u64>,
    /// Block bytes and those that wait for other streams to be free.
    pub active_bytes: Option<u64>,
    /// Bytes of the allocator's segments.
    pub reserved_bytes: Option<u64>,
    /// Segment bytes and what the process holds outside the allocator.
    #[serde(default)]
    pub process_bytes: Option<u64>,
    /// All memory of the device.
    #[serde(default)]
    pub device_bytes: Option<u64>,
}

/// The peak of each measure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Peaks {
    /// Of the bytes asked for.
    pub requested: Option<Peak>,
    /// Of the allocator's blocks.
    pub allocated: Option<Peak>,
    /// Of the allocator's segments.
    pub reserved: Option<Peak>,
}

impl Peaks {
    /// The peak of `measure`.
    pub const fn get(&self, measure: ledger::Measure) -> Option<&Peak> {
        match measure {
            ledger::Measure::Requested => self.requested.as_ref(),
            ledger::Measure::Allocated => self.allocated.as_ref(),
            ledger::Measure::Reserved => self.reserved.as_ref(),
        }
    }
}

/// The largest total of one measure on any one GPU, at its earliest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Peak {
    /// The total.
    pub bytes: u64,
    /// The GPU.
    pub device: u16,
    /// The step; null before the first mark of the tape.
    pub step: Option<u32>,
    /// The micro-batch.
    pub micro_batch: Option<u32>,
    /// The name of the phase; null before the first mark of the tape.
    pub phase: Option<String>,
    /// The event of the tape that brought the total there.
    pub event: u64,
    /// All measures at that instant.
    pub at_peak: Ladder,
    /// The contributors by category; they sum to `bytes`.
    pub by_category: BTreeMap<Category, u64>,
    /// What makes the peak, largest first, then by name; they sum to `bytes`.
    pub contributors: Vec<Contributor>,
}

/// The objects of one name and category that make a total, or an explicit remainder of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Contributor {
    /// The name of the objects, the same for every layer.
    pub name: String,
    /// What they are for.
    pub category: Category,
    /// Their bytes in the measure of the total.
    pub bytes: u64,
    /// How many they are; 0 for a remainder that is no object.
    pub count: u64,
    /// How many of the bytes autograd keeps for the backward pass.
    pub saved: u64,
}

/// The parameters of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Parameters {
    /// All of them; tied ones once.
    pub total: u64,
    /// Those that require a gradient.
    pub trainable: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Floating-point operations of one step, all micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Flops {
    /// The forward pass.
    pub forward: u64,
    /// The backward pass, without recomputation.
    pub backward: u64,
    /// The forward pass run again by checkpointing.
    pub recompute: u64,
    /// The optimizer.
    pub update: u64,
}

/// The batch of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Batch {
    /// Samples in one forward pass on one rank.
    pub micro_batch: Option<u64>,
    /// Micro-batches before an update.
    pub accumulate: u64,
    /// Ranks that hold the model.
    pub world_size: u64,
    /// Samples in one update: the product of the three.
    pub effective_batch: Option<u64>,
    /// Forward and backward passes in one update on one rank.
    pub forward_backward_rounds: u64,
}

/// Bytes copied between the devices and the host in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Traffic {
    /// To the host, but for what the script reads back.
    pub to_host_bytes: u64,
    /// From the host, but for the batch.
    pub from_host_bytes: u64,
}

/// A request that found no room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Oom {
    /// The device.
    pub device: u16,
    /// The step; null before the first mark of the tape.
    pub step: Option<u32>,
    /// The micro-batch.
    pub micro_batch: Option<u32>,
    /// The name of the phase; null before the first mark of the tape.
    pub phase: Option<String>,
    /// The event of the tape.
    pub event: u64,
    /// The bytes the program asked for.
    pub requested_bytes: u64,
    /// The block that would have served it.
    #[serde(default)]
    pub rounded_bytes: Option<u64>,
    /// The bytes the allocator then asked of the device: the "Tried to allocate" of PyTorch's message.
    pub device_request_bytes: Option<u64>,
    /// The largest cached block that the request could have had; 0 where there was none.
    #[serde(default)]
    pub largest_free_block_bytes: Option<u64>,
    /// What was left on the device.
    #[serde(default)]
    pub device_free_bytes: Option<u64>,
    /// The object that was to be made.
    pub object: Option<String>,
    /// All measures at that instant, after the allocator gave back what it could.
    #[serde(default)]
    pub held: Ladder,
    /// What holds the device at that instant, largest first, then by name. They sum to the allocated
    /// bytes of `held`; empty where they are not known.
    #[serde(default)]
    pub holders: Vec<Contributor>,
}

impl Ledger {
    /// The format of this document.
    pub const FORMAT: &str = "vramledger/1";

    /// The document of `books`. Whether it fits, the headroom and the tape are left to the caller.
    pub fn new(about: About, books: &ledger::Ledger) -> Self {
        Self {
            format: Self::FORMAT.into(),
            provenance: about.provenance,
            subject: about.subject,
            devices: books.devices.iter().map(Device::from).collect(),
            outside: about.outside,
            phases: books.phases.iter().map(PhaseRow::from).collect(),
            peaks: Peaks {
                requested: books.peaks.requested.as_ref().map(Peak::from),
                allocated: books.peaks.allocated.as_ref().map(Peak::from),
                reserved: books.peaks.reserved.as_ref().map(Peak::from),
            },
            parameters: about.parameters,
            flops: about.flops,
            batch: about.batch,
            tokens: about.tokens,
            traffic: about.traffic,
            ranks: about.ranks,
            fits: None,
            headroom_bytes: None,
            oom: books.oom.as_ref().map(Oom::from),
            assumptions: about.assumptions,
            interpretation_limits: about.interpretation_limits,
            warnings: about.warnings,
            tape: None,
            reading: None,
            growth: None,
        }
    }

    /// The books in the document; an error names the first place that contradicts itself.
    pub fn books(&self) -> Result<ledger::Ledger, ReadError> {
        let devices = self.devices.len();
        let device = |place: &str, index: u16| {
            let known = usize::from(index) < devices;
            let error = || ReadError::Contradiction {
                place: place.into(),
                what: format!("`device` is {index}, of which the document has {devices}"),
            };
            known.then_some(DeviceId(index)).ok_or_else(error)
        };
        let peak = |measure: ledger::Measure| {
            let place = format!("`peaks.{measure}`");
            self.peaks.get(measure).map(|peak| peak.model(&place, device(&place, peak.device)?)).transpose()
        };
        let phases = self.phases.iter().enumerate().map(|(index, row)| {
            let place = format!("`phases` row {index}");
            row.model(&place, device(&place, row.device)?)
        });
        let oom = self.oom.as_ref().map(|oom| oom.model(device("`oom`", oom.device)?));
        Ok(ledger::Ledger {
            devices: self.devices.iter().map(Device::model).collect::<Result<_, _>>()?,
            phases: phases.collect::<Result<_, _>>()?,
            peaks: ledger::Peaks {
                requested: peak(ledger::Measure::Requested)?,
                allocated: peak(ledger::Measure::Allocated)?,
                reserved: peak(ledger::Measure::Reserved)?,
            },
            oom: oom.transpose()?,
        })
    }
}

impl About {
    /// A run of which only its provenance is known.
    pub fn new(provenance: ledger::Provenance) -> Self {
        Self {
            provenance: Provenance(provenance),
            subject: Map::new(),
            parameters: None,
            flops: None,
            batch: None,
            tokens: None,
            traffic: None,
            ranks: None,
            outside: Vec::new(),
            assumptions: Vec::new(),
            interpretation_limits: Vec::new(),
            warnings: Vec::new(),
            events_before: 0,
        }
    }
}

impl From<&ledger::Device> for Device {
    fn from(device: &ledger::Device) -> Self {
        let kind = match device.kind {
            ledger::DeviceKind::Gpu => DeviceKind::Gpu,
            ledger::DeviceKind::Cpu => DeviceKind::Cpu,
        };
        let (capacity_bytes, context_bytes) = (plain(device.capacity), plain(device.context));
        Self { name: device.name.clone(), kind, capacity_bytes, context_bytes }
    }
}

impl Device {
    fn model(&self) -> Result<ledger::Device, ReadError> {
        let place = format!("device `{}`", self.name);
        let kind = match self.kind {
            DeviceKind::Gpu => ledger::DeviceKind::Gpu,
            DeviceKind::Cpu => ledger::DeviceKind::Cpu,
        };
        let capacity = optional_bytes(&place, self.capacity_bytes)?;
        Ok(ledger::Device {
            name: self.name.clone(),
            kind,
            capacity,
            context: optional_bytes(&place, self.context_bytes)?,
        })
    }
}

impl From<&ledger::PhaseRow> for PhaseRow {
    fn from(row: &ledger::PhaseRow) -> Self {
        Self {
            device: row.device.0,
            step: row.at.step,
            micro_batch: row.at.micro_batch,
            phase: row.at.phase.clone(),
            peak: Totals::from(row.peak),
            end: Totals::from(row.end),
            end_by_category: plain_categories(&row.end_by_category),
        }
    }
}

impl PhaseRow {
    fn model(&self, place: &str, device: DeviceId) -> Result<ledger::PhaseRow, ReadError> {
        let at = Position { step: self.step, micro_batch: self.micro_batch, phase: self.phase.clone() };
        Ok(ledger::PhaseRow {
            device,
            at,
            peak: self.peak.model(place)?,
            end: self.end.model(place)?,
            end_by_category: categories(place, &self.end_by_category)?,
        })
    }
}

impl From<ledger::Totals> for Totals {
    fn from(totals: ledger::Totals) -> Self {
        Self {
            requested_bytes: plain(totals.requested),
            allocated_bytes: plain(totals.allocated),
            reserved_bytes: plain(totals.reserved),
        }
    }
}

impl Totals {
    fn model(self, place: &str) -> Result<ledger::Totals, ReadError> {
        Ok(ledger::Totals {
            requested: optional_bytes(place, self.requested_bytes)?,
            allocated: optional_bytes(place, self.allocated_bytes)?,
            reserved: optional_bytes(place, self.reserved_bytes)?,
        })
    }
}

impl From<ledger::Ladder> for Ladder {
    fn from(ladder: ledger::Ladder) -> Self {
        Self {
            requested_bytes: plain(ladder.requested),
            allocated_bytes: plain(ladder.allocated),
            active_bytes: plain(ladder.active),
            reserved_bytes: plain(ladder.reserved),
            process_bytes: plain(ladder.process),
            device_bytes: plain(ladder.device),
        }
    }
}

impl Ladder {
    fn model(self, place: &str) -> Result<ledger::Ladder, ReadError> {
        Ok(ledger::Ladder {
            requested: optional_bytes(place, self.requested_bytes)?,
            allocated: optional_bytes(place, self.allocated_bytes)?,
            active: optional_bytes(place, self.active_bytes)?,
            reserved: optional_bytes(place, self.reserved_bytes)?,
            process: optional_bytes(place, self.process_bytes)?,
            device: optional_bytes(place, self.device_bytes)?,
        })
    }
}

impl From<&ledger::Peak> for Peak {
    fn from(peak: &ledger::Peak) -> Self {
        Self {
            bytes: peak.bytes.get(),
            device: peak.device.0,
            step: peak.at.as_ref().map(|at| at.step),
            micro_batch: peak.at.as_ref().and_then(|at| at.micro_batch),
            phase: peak.at.as_ref().map(|at| at.phase.clone()),
            event: peak.event as u64,
            at_peak: Ladder::from(peak.at_peak),
            by_category: plain_categories(&peak.by_category),
            contributors: peak.contributors.iter().map(Contributor::from).collect(),
        }
    }
}

impl Peak {
    fn model(&self, place: &str, device: DeviceId) -> Result<ledger::Peak, ReadError> {
        let bytes = bytes(place, self.bytes)?;
        let contributors = self.contributors.iter().map(|row| row.model(place));
        let peak = ledger::Peak {
            device,
            bytes,
            at: position(self.step, self.micro_batch, self.phase.as_ref()),
            event: event(place, self.event)?,
            at_peak: self.at_peak.model(place)?,
            by_category: categories(place, &self.by_category)?,
            contributors: contributors.collect::<Result<_, _>>()?,
        };
        let sums = [
            ("by_category", sum(peak.by_category.values().copied())),
            ("contributors", sum(peak.contributors.iter().map(|row| row.bytes))),
        ];
        for (rows, sum) in sums {
            if sum != Some(bytes) {
                let what = format!("`{rows}` do not sum to `bytes`, which is {bytes}");
                return Err(ReadError::Contradiction { place: place.into(), what });
            }
        }
        Ok(peak)
    }
}

impl From<&ledger::Contributor> for Contributor {
    fn from(row: &ledger::Contributor) -> Self {
        Self {
            name: row.name.clone(),
            category: Category(row.category),
            bytes: row.bytes.get(),
            count: row.count,
            saved: row.saved.get(),
        }
    }
}

impl Contributor {
    fn model(&self, place: &str) -> Result<ledger::Contributor, ReadError> {
        Ok(ledger::Contributor {
            name: self.name.clone(),
            category: self.category.0,
            bytes: bytes(place, self.bytes)?,
            count: self.count,
            saved: bytes(place, self.saved)?,
        })
    }
}

impl From<&ledger::Failure> for Oom {
    fn from(failure: &ledger::Failure) -> Self {
        Self {
            device: failure.device.0,
            step: failure.at.as_ref().map(|at| at.step),
            micro_batch: failure.at.as_ref().and_then(|at| at.micro_batch),
            phase: failure.at.as_ref().map(|at| at.phase.clone()),
            event: failure.event as u64,
            requested_bytes: failure.requested.get(),
            rounded_bytes: None,
            device_request_bytes: plain(failure.device_request),
            largest_free_block_bytes: None,
            device_free_bytes: None,
            object: failure.object.clone(),
            held: Ladder::default(),
            holders: Vec::new(),
        }
    }
}

impl Oom {
    fn model(&self, device: DeviceId) -> Result<ledger::Failure, ReadError> {
        Ok(ledger::Failure {
            device,
            at: position(self.step, self.micro_batch, self.phase.as_ref()),
            event: event("`oom`", self.event)?,
            requested: bytes("`oom`", self.requested_bytes)?,
            device_request: optional_bytes("`oom`", self.device_request_bytes)?,
            object: self.object.clone(),
        })
    }
}

fn plain(amount: Option<Bytes>) -> Option<u64> {
    amount.map(Bytes::get)
}

fn plain_categories(amounts: &BTreeMap<ledger::Category, Bytes>) -> BTreeMap<Category, u64> {
    amounts.iter().map(|(category, bytes)| (Category(*category), bytes.get())).collect()
}

fn bytes(place: &str, amount: u64) -> Result<Bytes, ReadError> {
    let amount = Bytes::new(amount);
    if amount > Bytes::MAX {
        return Err(ReadError::Contradiction {
            place: place.into(),
            what: format!("{} bytes are more than 2^63", amount.get()),
        });
    }
    Ok(amount)
}

fn optional_bytes(place: &str, amount: Option<u64>) -> Result<Option<Bytes>, ReadError> {
    amount.map(|amount| bytes(place, amount)).transpose()
}

fn categories(
    place: &str,
    amounts: &BTreeMap<Category, u64>,
) -> Result<BTreeMap<ledger::Category, Bytes>, ReadError> {
    amounts.iter().map(|(category, amount)| Ok((category.0, bytes(place, *amount)?))).collect()
}

fn event(place: &str, index: u64) -> Result<usize, ReadError> {
    let error =
        |_| ReadError::Contradiction { place: place.into(), what: format!("no event has number {index}") };
    usize::try_from(index).map_err(error)
}

fn position(step: Option<u32>, micro_batch: Option<u32>, phase: Option<&String>) -> Option<Position> {
    Some(Position { step: step?, micro_batch, phase: phase?.clone() })
}

fn sum(mut amounts: impl Iterator<Item = Bytes>) -> Option<Bytes> {
    amounts.try_fold(Bytes::ZERO, Bytes::checked_add)
}
