//! A reading for programs: one table of sections.

use wire::Totals;

use super::{ReadReport, TOTALS};
use crate::Sheet;

const HEAD: [&str; 11] = [
    "section",
    "device",
    "step",
    "micro_batch",
    "phase",
    "event",
    "measure",
    "name",
    "category",
    "bytes",
    "count",
];

/// All of it in one table of sections.
pub(super) fn sheet(of: &ReadReport<'_>) -> Sheet {
    let mut sheet = Sheet { head: HEAD.to_vec(), rows: Vec::new() };
    let peaks = &of.ledger.peaks;
    let peaks =
        [("requested", &peaks.requested), ("allocated", &peaks.allocated), ("reserved", &peaks.reserved)];
    for (measure, peak) in peaks.iter().filter_map(|(measure, peak)| Some((measure, peak.as_ref()?))) {
        let at = Line { section: "peak", device: peak.device, ..Line::default() };
        let at = Line { step: peak.step, micro_batch: peak.micro_batch, phase: peak.phase.as_deref(), ..at };
        sheet
            .rows
            .push(Line { event: Some(peak.event), measure, bytes: Some(signed(peak.bytes)), ..at }.fields());
        for (category, bytes) in &peak.by_category {
            let category = Some(category.0.as_str());
            let line =
                Line { section: "peak_by_category", measure, category, bytes: Some(signed(*bytes)), ..at };
            sheet.rows.push(Line { event: Some(peak.event), ..line }.fields());
        }
    }
    if let Some(instant) = &of.reading.instant {
        for row in &instant.rows {
            let line = Line {
                section: "instant",
                device: instant.device,
                step: instant.step,
                micro_batch: instant.micro_batch,
                phase: instant.phase.as_deref(),
                event: Some(instant.event),
                measure: instant.measure.0.as_str(),
                name: &row.name,
                category: row.category.map(|category| category.0.as_str()),
                bytes: Some(signed(row.bytes)),
                count: Some(row.count),
            };
            sheet.rows.push(line.fields());
        }
    }
    for step in &of.reading.steps {
        let at = Line { device: step.device, step: Some(step.step), ..Line::default() };
        let mut totals = |section, totals: &Totals, phase| {
            for (measure, bytes) in measures(totals) {
                let line = Line { section, measure, phase, bytes: Some(signed(bytes)), ..at };
                sheet.rows.push(line.fields());
            }
        };
        totals("step_peak", &step.peak, Some(step.peak_phase.as_str()));
        totals("step_end", &step.end, None);
        if let Some(bytes) = step.grown_bytes {
            sheet.rows.push(
                Line { section: "step_growth", measure: "requested", bytes: Some(bytes), ..at }.fields(),
            );
        }
    }
    for row in &of.ledger.phases {
        let at = Line {
            device: row.device,
            step: Some(row.step),
            micro_batch: row.micro_batch,
            ..Line::default()
        };
        let at = Line { phase: Some(&row.phase), ..at };
        for (section, totals) in [("phase_peak", &row.peak), ("phase_end", &row.end)] {
            for (measure, bytes) in measures(totals) {
                sheet.rows.push(Line { section, measure, bytes: Some(signed(bytes)), ..at }.fields());
            }
        }
        for (category, bytes) in &row.end_by_category {
            let category = Some(category.0.as_str());
            let line = Line { section: "phase_end_by_category", measure: "requested", category, ..at };
            sheet.rows.push(Line { bytes: Some(signed(*bytes)), ..line }.fields());
        }
    }
    for row in &of.reading.growth.rows {
        let line = Line {
            section: "growth_per_step",
            step: Some(row.last_step),
            measure: "requested",
            name: &row.name,
            category: Some(row.category.0.as_str()),
            bytes: Some(signed(row.bytes_per_step)),
            count: Some(row.count),
            ..Line::default()
        };
        sheet.rows.push(line.fields());
    }
    for slope in of.reading.growth.allocated.iter().chain(&of.reading.growth.reserved) {
        let line = Line { section: "slope", step: u32::try_from(slope.to_step).ok(), ..Line::default() };
        let line = Line { measure: &slope.figure, bytes: Some(slope.bytes_per_step), ..line };
        sheet.rows.push(line.fields());
    }
    for stranding in &of.reading.stranding {
        for segment in &stranding.segments {
            let address = format!("{:#x}", segment.address);
            let at = Line { device: stranding.device, event: Some(stranding.event), ..Line::default() };
            let line = Line { section: "stranded", phase: Some(&stranding.at), name: &address, ..at };
            sheet.rows.push(Line { bytes: Some(signed(segment.free_bytes)), ..line }.fields());
            for pin in &segment.pins {
                let line = Line {
                    section: "pin",
                    phase: Some(&stranding.at),
                    name: &pin.name,
                    category: Some(pin.category.0.as_str()),
                    bytes: Some(signed(pin.bytes)),
                    count: Some(pin.count),
                    step: pin.since_step,
                    ..at
                };
                sheet.rows.push(line.fields());
            }
        }
    }
    let settings = of.reading.what_if.iter().flat_map(|what_if| &what_if.settings);
    for (settings, device) in settings.flat_map(|row| row.devices.iter().map(move |device| (row, device))) {
        let totals = [
            ("allocated", device.peak_allocated_bytes),
            ("reserved", device.peak_reserved_bytes),
            ("stranded", device.stranded_at_peak_bytes),
        ];
        for (measure, bytes) in totals {
            let line = Line { section: "what_if", device: device.device, measure, ..Line::default() };
            sheet.rows.push(Line { name: &settings.alloc_conf, bytes: Some(signed(bytes)), ..line }.fields());
        }
    }
    sheet
}

/// A row of the sheet.
#[derive(Clone, Copy, Default)]
struct Line<'a> {
    section: &'a str,
    device: u16,
    step: Option<u32>,
    micro_batch: Option<u32>,
    phase: Option<&'a str>,
    event: Option<u64>,
    measure: &'a str,
    name: &'a str,
    category: Option<&'a str>,
    bytes: Option<i64>,
    count: Option<u64>,
}

impl Line<'_> {
    fn fields(&self) -> Vec<String> {
        let number = |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
        vec![
            self.section.to_owned(),
            self.device.to_string(),
            number(self.step.map(u64::from)),
            number(self.micro_batch.map(u64::from)),
            self.phase.unwrap_or_default().to_owned(),
            number(self.event),
            self.measure.to_owned(),
            self.name.to_owned(),
            self.category.unwrap_or_default().to_owned(),
            self.bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
            number(self.count),
        ]
    }
}

/// An amount of a ledger, which is below 2^63.
const fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}

fn measures(totals: &Totals) -> impl Iterator<Item = (&'static str, u64)> {
    TOTALS.into_iter().filter_map(|(measure, total)| Some((measure, total(totals)?)))
}
