//! A run on a real device that noted where it was: its snapshot in, its ledger with owners out.

use ledger::{Bytes, DeviceKind, Provenance, Tape};
use serde_json::{Value, json};
use wire::{About, Ledger};

use crate::Error;
use crate::emulate::{EmulationQuestion, emulation};

/// The device of a recorded run.
#[derive(Clone, Debug)]
pub struct RecordedDevice {
    /// Its name, as the driver says it.
    pub name: String,
    /// All its memory.
    pub capacity: Bytes,
}

/// The ledger of a run of `name`, from PyTorch's `snapshot` and the notes of form `vramledger-recording/1`.
///
/// # Errors
/// A recording that cannot be read.
pub fn recorded(
    name: &str,
    device: &RecordedDevice,
    snapshot: &[u8],
    notes: &[u8],
) -> Result<(Ledger, About, Tape), Error> {
    let mut gpu = models::GPUS[0].clone();
    gpu.capacity = device.capacity;
    let question = EmulationQuestion {
        program: Vec::new(),
        gpu,
        context: Bytes::ZERO,
        alloc_conf: None,
        steps: None,
        rank: None,
    };
    let read = emulation(&question, None, snapshot, notes)?;
    let (mut ledger, mut about, mut tape) = (read.ledger, read.about, read.tape);
    for it in tape.devices.iter_mut().filter(|it| it.kind == DeviceKind::Gpu) {
        (it.name, it.context) = (device.name.clone(), None);
    }
    let torch = about.subject.get("software").and_then(|software| software.get("torch")).cloned();
    let subject = json!({ "model": { "name": name }, "software": { "torch": torch } });
    if let Value::Object(subject) = subject {
        about.subject = subject;
    }
    about.provenance = wire::Provenance(Provenance::Measured);
    // What is outside the allocator, and what of the card is free, nobody noted.
    about.outside.clear();
    about.interpretation_limits =
        vec!["what CUDA and its libraries take outside the allocator is in no figure".into()];
    ledger.devices = tape.devices.iter().map(wire::Device::from).collect();
    ledger.subject.clone_from(&about.subject);
    ledger.provenance = about.provenance;
    ledger.outside.clear();
    ledger.interpretation_limits.clone_from(&about.interpretation_limits);
    ledger.headroom_bytes = None;
    Ok((ledger, about, tape))
}
