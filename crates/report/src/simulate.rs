//! The report of a simulation: one tape under several settings of the allocator.

use wire::{Device, DeviceKind, Simulated, SimulatedDevice, Simulation};

use crate::plan::request;
use crate::units::{Unit, size};
use crate::{Block, Column, Page, Report, Sheet};

/// What stands for an empty settings string.
const DEFAULTS: &str = "(the defaults)";

impl Report for Simulation {
    fn page(&self) -> Page {
        let gpus = self.devices.iter().filter(|device| device.kind == DeviceKind::Gpu);
        let mut blocks = vec![verdict(self)];
        blocks.extend(gpus.map(|gpu| Block::Line(card(self, gpu))));
        blocks.push(side_by_side(self));
        let failed = self.settings.iter().filter_map(|settings| {
            let oom = settings.oom.as_ref()?;
            let device = settings.devices.iter().find(|row| row.device == oom.device)?;
            let place = match (&oom.phase, oom.step) {
                (Some(phase), Some(step)) => format!("{phase} of step {step}"),
                _ => "the run".into(),
            };
            Some(format!("{}: {place} {}", name(settings), request(oom, device.headroom_bytes)))
        });
        blocks.push(Block::List { title: "Out of memory".into(), items: failed.collect() });
        blocks.push(Block::List { title: "Assumed".into(), items: self.assumptions.clone() });
        blocks.push(Block::List {
            title: "Not in these figures".into(),
            items: self.interpretation_limits.clone(),
        });
        Page::of(blocks)
    }

    /// A row for each settings string and GPU.
    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let row = |settings: &Simulated, device: &SimulatedDevice| {
            let oom = settings.oom.as_ref().filter(|oom| oom.device == device.device);
            vec![
                settings.alloc_conf.clone(),
                device.device.to_string(),
                settings.fits.map(|fits| fits.to_string()).unwrap_or_default(),
                device.peak_allocated_bytes.to_string(),
                device.peak_reserved_bytes.to_string(),
                device.stranded_at_peak_bytes.to_string(),
                device.retries.to_string(),
                device.headroom_bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
                number(oom.map(|oom| oom.event)),
                number(oom.and_then(|oom| oom.step).map(u64::from)),
                oom.and_then(|oom| oom.phase.clone()).unwrap_or_default(),
                oom.and_then(|oom| oom.object.clone()).unwrap_or_default(),
                number(oom.map(|oom| oom.requested_bytes)),
            ]
        };
        let rows = self
            .settings
            .iter()
            .flat_map(|settings| settings.devices.iter().map(move |device| row(settings, device)));
        Sheet {
            head: vec![
                "alloc_conf",
                "device",
                "fits",
                "peak_allocated_bytes",
                "peak_reserved_bytes",
                "stranded_at_peak_bytes",
                "retries",
                "headroom_bytes",
                "oom_event",
                "oom_step",
                "oom_phase",
                "oom_object",
                "oom_requested_bytes",
            ],
            rows: rows.collect(),
        }
    }
}

/// What to call a settings string.
fn name(settings: &Simulated) -> &str {
    if settings.alloc_conf.trim().is_empty() { DEFAULTS } else { &settings.alloc_conf }
}

/// With how many of the settings it fits.
fn verdict(of: &Simulation) -> Block {
    let fits: Vec<Option<bool>> = of.settings.iter().map(|settings| settings.fits).collect();
    let every = |wanted| fits.iter().all(|fits| *fits == wanted);
    let (good, how) = if every(Some(true)) {
        (Some(true), "fits with each of the settings")
    } else if every(Some(false)) {
        (Some(false), "fits with none of the settings")
    } else if every(None) {
        (None, "on a device of unknown capacity")
    } else {
        (None, "fits with some of the settings")
    };
    Block::Verdict { good, text: format!("{} {how}", of.name) }
}

/// A GPU, and what the allocator never sees of it.
fn card(of: &Simulation, gpu: &Device) -> String {
    let known = |bytes: Option<u64>| bytes.map_or_else(|| "an unknown amount".into(), size);
    let mut text = format!("{} of {}", gpu.name, known(gpu.capacity_bytes));
    let outside = of.outside.iter().filter(|row| of.devices.get(usize::from(row.device)) == Some(gpu));
    for row in outside {
        text.push_str(&format!(", {} for the {}", size(row.bytes), row.name));
        if let Some(assumption) = &row.assumption {
            text.push_str(&format!(" ({assumption})"));
        }
    }
    format!("{text}; equal blocks are chosen as torch {} does", of.torch)
}

/// A row for each settings string and GPU.
fn side_by_side(of: &Simulation) -> Block {
    let rows = || {
        of.settings.iter().flat_map(|settings| settings.devices.iter().map(move |device| (settings, device)))
    };
    let unit = Unit::of_largest(rows().map(|(_, device)| device.peak_reserved_bytes));
    let several = of.settings.iter().any(|settings| settings.devices.len() > 1);
    let row = |(settings, device): (&Simulated, &SimulatedDevice)| {
        let mut cells = vec![name(settings).to_owned()];
        if several {
            cells.push(device.device.to_string());
        }
        cells.extend([
            unit.number(device.peak_allocated_bytes),
            unit.number(device.peak_reserved_bytes),
            unit.number(device.stranded_at_peak_bytes),
            device.retries.to_string(),
            device.headroom_bytes.map_or_else(|| "?".into(), |bytes| unit.difference(bytes)),
            match settings.fits {
                Some(true) => "yes".into(),
                Some(false) => "no".into(),
                None => "?".into(),
            },
        ]);
        cells
    };
    let mut columns = vec![Column::words("settings")];
    if several {
        columns.push(Column::numbers("device"));
    }
    columns.extend(["allocated", "reserved", "stranded", "retries", "headroom"].map(Column::numbers));
    columns.push(Column::words("fits"));
    Block::Table {
        title: Some(format!(
            "The peaks of the tape, {}; stranded is what of the reserved peak was in no block in use",
            unit.name()
        )),
        columns,
        rows: rows().map(row).collect(),
    }
}
