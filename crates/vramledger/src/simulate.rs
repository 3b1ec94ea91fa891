//! One tape under several settings of the allocator, side by side.

use allocator::{Settings, memory_of};
use ledger::{ByteDelta, Bytes, DeviceKind, Tape};
use models::{Gpu, Torch};
use wire::{About, Outside, Simulated, SimulatedDevice, Simulation};

use crate::plan::{CONTEXT, outside};
use crate::{Error, failure, fit};

/// What `simulate` is asked of a tape.
#[derive(Clone, Debug, Default)]
pub struct SimulateQuestion<'a> {
    /// The settings strings, as in `PYTORCH_CUDA_ALLOC_CONF`.
    pub alloc_confs: &'a [String],
    /// The card that takes the place of the tape's.
    pub gpu: Option<&'a Gpu>,
    /// All memory of the card.
    pub capacity: Option<Bytes>,
    /// What of it the allocator never sees.
    pub context: Option<Bytes>,
    /// The release of torch by whose rule equal blocks are chosen; none: the one that the tape names,
    /// and else 2.15.
    pub torch: Option<Torch>,
}

/// What the requests of the tape in `bytes` take of the card under each of the settings. The document
/// calls it `name`, and an error `path`.
///
/// # Errors
/// No tape of requested bytes, settings that PyTorch refuses, a context that leaves nothing.
pub fn simulate(
    name: &str,
    path: &str,
    bytes: &[u8],
    question: &SimulateQuestion<'_>,
) -> Result<Simulation, Error> {
    if name.is_empty() {
        return Err(Error::Setup { what: format!("the tape `{path}` has an empty name") });
    }
    let parsed = question.alloc_confs.iter().map(|conf| fit::settings(conf));
    let (settings, found): (Vec<Settings>, Vec<_>) =
        parsed.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let (mut about, mut tape) = crate::evidence::read_tape(path, bytes)?;
    place(&mut tape, &mut about.outside, question)?;
    let torch = question.torch.or_else(|| known_torch(&about)).unwrap_or(Torch::V2_15);
    if question.torch.is_none() && known_torch(&about).is_none() {
        let sentence =
            "the tape does not tell its release of torch: equal blocks are chosen as torch 2.15 does";
        about.assumptions.push(sentence.into());
    }
    let reports = allocator::simulate(&tape, &settings, fit::tie_rule(torch), &memory_of(&tape));
    for (conf, warnings) in question.alloc_confs.iter().zip(found) {
        let named = |warning| format!("`{}`: {warning}", ledger::clip(conf));
        about.warnings.extend(warnings.into_iter().map(named));
    }
    about.interpretation_limits.push(
        "the requests are those of the tape: on another card or release of torch a run may ask for other workspaces and run other kernels"
            .into(),
    );
    let rows = question.alloc_confs.iter().zip(&reports);
    Ok(Simulation {
        format: Simulation::FORMAT.into(),
        name: name.into(),
        provenance: about.provenance,
        subject: about.subject,
        torch: torch.as_str().into(),
        devices: tape.devices.iter().map(wire::Device::from).collect(),
        outside: about.outside,
        settings: rows.map(|(conf, report)| simulated(&tape, conf, report)).collect(),
        assumptions: about.assumptions,
        interpretation_limits: about.interpretation_limits,
        warnings: about.warnings,
    })
}

/// Puts the tape on the card of `question`, and takes what is outside the allocator from there.
fn place(tape: &mut Tape, rows: &mut Vec<Outside>, question: &SimulateQuestion<'_>) -> Result<(), Error> {
    for (index, device) in tape.devices.iter_mut().enumerate() {
        if device.kind != DeviceKind::Gpu {
            continue;
        }
        if let Some(gpu) = question.gpu {
            device.name = gpu.name.into();
        }
        device.capacity = question.capacity.or(question.gpu.map(|gpu| gpu.capacity)).or(device.capacity);
        if question.context.is_some() || device.context.is_none() && device.capacity.is_some() {
            let context = question.context.unwrap_or(CONTEXT);
            device.context = Some(context);
            rows.retain(|row| usize::from(row.device) != index);
            rows.push(outside(index as u16, context));
        }
        if let Some((capacity, context)) = device.capacity.zip(device.context)
            && context >= capacity
        {
            let range = format!("less than the capacity, {capacity}");
            return Err(Error::out_of_range("--context", range, context));
        }
    }
    Ok(())
}

/// The release of torch that the tape names, or the last modelled one before it.
pub(crate) fn known_torch(about: &About) -> Option<Torch> {
    fit::torch(about.subject.get("software")?.get("torch")?.as_str()?)
}

pub(crate) fn simulated(tape: &Tape, conf: &str, report: &allocator::Report) -> Simulated {
    let device = |device: &allocator::DeviceReport| SimulatedDevice {
        device: device.device.0,
        peak_allocated_bytes: device.peak_allocated.get(),
        peak_reserved_bytes: device.peak_reserved.get(),
        stranded_at_peak_bytes: device.stranded_at_peak.get(),
        headroom_bytes: device.headroom.map(ByteDelta::get),
        retries: device.retries,
        memory_stats: device.stats.entries().into_iter().collect(),
    };
    Simulated {
        alloc_conf: conf.into(),
        fits: report.fits,
        oom: report.failure.as_ref().map(|failure| failure::oom(tape, failure)),
        recorded_ooms_avoided: report.recorded_ooms_avoided as u64,
        devices: report.devices.iter().map(device).collect(),
    }
}
