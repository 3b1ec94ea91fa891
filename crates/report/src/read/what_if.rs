//! The recorded requests under other settings.

use wire::WhatIf;

use crate::units::{Unit, thousands};
use crate::{Block, Column};

/// The recorded requests under other settings.
pub(super) fn what_if(of: &WhatIf) -> Vec<Block> {
    let all = || std::iter::once(&of.recorded).chain(&of.settings);
    let unit =
        Unit::of_largest(all().flat_map(|row| row.devices.iter().map(|device| device.peak_reserved_bytes)));
    let several = of.recorded.devices.len() > 1;
    let rows = all().enumerate().flat_map(|(index, row)| {
        row.devices.iter().map(move |device| {
            let name = match (index, row.alloc_conf.is_empty()) {
                (0, true) => "(as recorded)".to_owned(),
                (0, false) => format!("{} (as recorded)", row.alloc_conf),
                _ => row.alloc_conf.clone(),
            };
            let mut cells = vec![name];
            if several {
                cells.push(device.device.to_string());
            }
            cells.extend([
                unit.number(device.peak_allocated_bytes),
                unit.number(device.peak_reserved_bytes),
                unit.number(device.stranded_at_peak_bytes),
                match (&row.oom, of.capacity_bytes) {
                    (Some(oom), _) => format!("yes, at event {}", thousands(oom.event)),
                    (None, Some(_)) => "no".into(),
                    (None, None) => "no (on a card without end)".into(),
                },
            ]);
            cells
        })
    });
    let mut columns = vec![Column::words("settings")];
    if several {
        columns.push(Column::numbers("device"));
    }
    columns.extend(["allocated", "reserved", "stranded"].map(Column::numbers));
    columns.push(Column::words("out of memory"));
    let how = match of.differs_from {
        None => {
            "The replay under the recorded settings takes and gives back the recorded segments.".to_owned()
        }
        Some(event) => format!(
            "The replay under the recorded settings takes other segments than recorded from event {} on: these figures are near and not exact.",
            thousands(event)
        ),
    };
    let title = Some(format!("The same requests under other settings, {}", unit.name()));
    vec![Block::Table { title, columns, rows: rows.collect() }, Block::Line(how)]
}
