//! What is reserved and in no block, and what keeps it.

use wire::{Pin, Stranded, Stranding};

use super::{ReadReport, plural};
use crate::units::{Unit, size, thousands};
use crate::{Block, Column};

/// The most segments that are shown.
const MOST_SEGMENTS: usize = 5;

impl ReadReport<'_> {
    pub(super) fn stranding(&self, stranding: &Stranding) -> Vec<Block> {
        let unit = self.unit();
        let when = if stranding.at == "end" { "at the end" } else { "when most is reserved" };
        let device =
            if self.several() { format!(" on {}", self.device(stranding.device)) } else { String::new() };
        let mut text = format!(
            "Reserved and in no block {when}{device}: {} of {}",
            unit.size(stranding.stranded_bytes),
            unit.size(stranding.reserved_bytes),
        );
        let pinned: Vec<&Stranded> = stranding.segments.iter().filter(|row| !row.pins.is_empty()).collect();
        if stranding.whole_bytes > 0 {
            let what = ", of which {} are whole segments that the allocator can give back";
            text.push_str(&what.replace("{}", &unit.size(stranding.whole_bytes)));
        }
        if !pinned.is_empty() {
            text.push_str(&format!(
                ", and {} lie beside blocks in use in {}",
                unit.size(stranding.pinned_bytes),
                plural(pinned.len() as u64, "segment", "segments")
            ));
        }
        text.push_str(&format!(
            ". The largest free block has {}.",
            unit.size(stranding.largest_free_block_bytes)
        ));
        let mut blocks = vec![Block::Verdict { good: None, text }];
        let unit = Unit::of_largest(pinned.iter().map(|segment| segment.bytes));
        let row = |segment: &&Stranded| {
            let others: u64 = segment.pins.iter().skip(1).map(|pin| pin.count).sum();
            let others = (others > 0).then(|| plural(others, "other block", "other blocks"));
            let pins: Vec<String> = segment.pins.first().map(pin).into_iter().chain(others).collect();
            vec![
                unit.number(segment.bytes),
                unit.number(segment.free_bytes),
                unit.number(segment.largest_free_block_bytes),
                pins.join("; "),
            ]
        };
        if !pinned.is_empty() {
            let more = match pinned.len().saturating_sub(MOST_SEGMENTS) {
                0 => String::new(),
                rows => format!("; {} more not shown", thousands(rows as u64)),
            };
            blocks.push(Block::Table {
                title: Some(format!("Segments that are kept, {}{more}", unit.name())),
                columns: vec![
                    Column::numbers("segment"),
                    Column::numbers("free"),
                    Column::numbers("largest"),
                    Column::words("kept by"),
                ],
                rows: pinned.iter().take(MOST_SEGMENTS).map(row).collect(),
            });
        }
        blocks
    }
}

/// `512.00 KiB optimizer_state from step 1, adam.py:179 _init_group`.
fn pin(pin: &Pin) -> String {
    let since = match pin.since_step {
        None => String::new(),
        Some(0) => " from before the steps".into(),
        Some(step) => format!(" from step {step}"),
    };
    let place = pin.name.split(" < ").next().unwrap_or_default();
    format!("{} {}{since}, {place}", size(pin.bytes), pin.category.0.as_str())
}
