//! A tape of requests in, the ledger that the allocator makes of it out.

use ledger::{ByteDelta, DeviceKind, Tape, Unit};
use models::Torch;
use wire::{About, Ledger};

use crate::plan::outside;
use crate::{Error, fit};

/// The ledger of `tape`, replayed through the allocator of torch 2.15 under the settings `alloc_conf`, as in
/// `PYTORCH_CUDA_ALLOC_CONF`; of a tape of the host alone what was asked for. An error calls the tape `name`.
///
/// # Errors
/// A tape that contradicts itself or counts blocks, or settings that PyTorch refuses.
pub fn account(name: &str, mut about: About, tape: &Tape, alloc_conf: &str) -> Result<Ledger, Error> {
    tape.validate().map_err(|problem| Error::Tape { name: name.into(), problem })?;
    if tape.unit != Unit::Requested {
        return Err(Error::NoTape { name: name.into(), what: "is a tape of blocks", tape: None });
    }
    if tape.devices.iter().all(|device| device.kind != DeviceKind::Gpu) {
        return Ok(Ledger::new(about, &ledger::replay(tape, None)));
    }
    let (settings, warnings) = fit::settings(alloc_conf)?;
    about.warnings.extend(warnings.iter().map(ToString::to_string));
    for (index, device) in tape.devices.iter().enumerate() {
        if let Some(context) = device.context.filter(|_| device.kind == DeviceKind::Gpu) {
            about.outside.push(outside(index as u16, context));
        }
    }
    let fit = fit::fit(tape, &settings, fit::tie_rule(Torch::V2_15));
    about.warnings.extend(fit::retried(fit.retries));
    let mut ledger = Ledger::new(about, &fit.books);
    ledger.oom = fit.oom;
    ledger.fits = Some(fit.fits);
    ledger.headroom_bytes = fit.headroom.map(ByteDelta::get);
    Ok(ledger)
}
