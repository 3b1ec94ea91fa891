//! What summaries of the allocator and `nvidia-smi` say: one moment of each device.

use evidence::{Instant, Source};
use ledger::Bytes;
use wire::{DeviceInstant, OtherProcess};

/// The instant of the document that says what `said` does.
pub(super) fn account(said: &Instant) -> DeviceInstant {
    let bytes = |bytes: Option<Bytes>| bytes.map(Bytes::get);
    let process = |process: &evidence::Process| OtherProcess {
        pid: process.pid,
        name: process.name.clone(),
        bytes: bytes(process.bytes),
        role: "other".into(),
    };
    DeviceInstant {
        source: said.source.as_str().into(),
        backend: said.backend.clone(),
        device: said.device,
        device_name: said.device_name.clone(),
        capacity_bytes: bytes(said.capacity),
        free_bytes: said.free,
        used_bytes: bytes(said.used),
        held_bytes: bytes(said.held),
        allocated_bytes: bytes(said.allocated),
        active_bytes: bytes(said.active),
        reserved_bytes: bytes(said.reserved),
        unallocated_bytes: bytes(said.unallocated),
        peak_allocated_bytes: bytes(said.peak_allocated),
        peak_reserved_bytes: bytes(said.peak_reserved),
        inactive_split_bytes: bytes(said.inactive_split),
        out_of_memory_count: said.out_of_memory,
        retries: said.retries,
        unit_bytes: bytes(said.unit).filter(|unit| *unit > 1),
        other_processes: said.processes.iter().map(process).collect(),
        explanation: explanation(said),
        ..DeviceInstant::default()
    }
}

/// What the figures mean, and what they leave open.
fn explanation(said: &Instant) -> String {
    let mut sentences = Vec::new();
    if said.source == Source::Smi {
        sentences.push(
            "What a card has in use is of all its processes: of each its context, its libraries, and what its allocator has reserved, in use or not.",
        );
        return sentences.join(" ");
    }
    if let (Some(unallocated), Some(split)) = (said.unallocated, said.inactive_split)
        && unallocated > Bytes::ZERO
    {
        // Blocks that share their segment with others stay until those go.
        sentences.push(match (split.get(), unallocated.get()) {
            (0, _) => "What is reserved and in no block is whole segments, which the allocator can give back.",
            (split, all) if split >= all => {
                "What is reserved and in no block shares its segments with blocks in use: the allocator cannot give it back."
            }
            _ => "Of what is reserved and in no block, a part shares its segments with blocks in use: the allocator cannot give that back.",
        });
    }
    match said.out_of_memory {
        Some(0) => sentences.push("Every request so far found room."),
        Some(_) => sentences.push("Requests found no room so far."),
        None => {}
    }
    sentences.push("Who holds the memory is not in an account of the allocator.");
    sentences.join(" ")
}
