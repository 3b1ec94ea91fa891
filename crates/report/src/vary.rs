//! The reports of a plan under other settings, and of the largest value that fits.

use std::collections::BTreeSet;

use wire::{Category, Largest, Try, Variation, VariationOutcome, Variations};

use crate::plan::request;
use crate::units::{Unit, flops, size, thousands};
use crate::{Block, Column, Page, Report, Sheet};

impl Report for Variations {
    fn page(&self) -> Page {
        let mut blocks = vec![verdict(self), peaks(self)];
        blocks.extend(savings(self));
        blocks.push(costs(self));
        let sentences = |told: fn(&Variation) -> Option<String>| {
            let rows = self.rows.iter().filter_map(|row| Some(format!("{}: {}", name(row), told(row)?)));
            rows.collect::<Vec<_>>()
        };
        let no_gain = sentences(|row| row.outcome.as_ref()?.no_gain.clone());
        blocks.push(Block::List { title: "More recomputation that lowers no peak".into(), items: no_gain });
        let failed = sentences(|row| {
            let outcome = row.outcome.as_ref()?;
            let oom = outcome.oom.as_ref()?;
            let place = oom.phase.as_deref().map(|phase| format!("in {phase} it ")).unwrap_or_default();
            Some(format!("{place}{}", request(oom, outcome.headroom_bytes)))
        });
        blocks.push(Block::List { title: "Out of memory".into(), items: failed });
        let refused = sentences(|row| row.refused.clone());
        blocks.push(Block::List { title: "Cannot be planned".into(), items: refused });
        blocks.push(Block::List {
            title: "Not in these figures".into(),
            items: self.interpretation_limits.clone(),
        });
        Page::of(blocks)
    }

    /// A row for each combination.
    fn sheet(&self) -> Sheet {
        let number = |bytes: Option<u64>| bytes.map(|bytes| bytes.to_string()).unwrap_or_default();
        let row = |row: &Variation| {
            let mut cells = vec![name(row), row.refused.clone().unwrap_or_default()];
            let Some(outcome) = &row.outcome else {
                cells.resize(HEAD.len(), String::new());
                return cells;
            };
            let costs = &outcome.costs;
            cells.extend([
                outcome.fits.to_string(),
                outcome.headroom_bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
                outcome.peak.bytes.to_string(),
                number(outcome.peak_allocated_bytes),
                number(outcome.peak_reserved_bytes),
                outcome.peak.phase.clone().unwrap_or_default(),
                outcome.saving_bytes.to_string(),
                number(costs.flops.map(|flops| flops.forward + flops.backward + flops.update)),
                number(costs.flops.map(|flops| flops.recompute)),
                costs.to_host_bytes.to_string(),
                costs.from_host_bytes.to_string(),
                costs.collective_bytes.to_string(),
                costs.forward_backward_rounds.to_string(),
                number(costs.tokens),
            ]);
            cells
        };
        Sheet { head: HEAD.to_vec(), rows: self.rows.iter().map(row).collect() }
    }
}

const HEAD: [&str; 16] = [
    "settings",
    "refused",
    "fits",
    "headroom_bytes",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "phase",
    "saving_bytes",
    "flops",
    "recompute_flops",
    "to_host_bytes",
    "from_host_bytes",
    "collective_bytes",
    "forward_backward_rounds",
    "tokens",
];

/// `checkpoint=full batch=2`.
fn name(row: &Variation) -> String {
    let parts: Vec<String> = row.settings.iter().map(|set| format!("{}={}", set.key, set.value)).collect();
    parts.join(" ")
}

fn planned(of: &Variations) -> impl Iterator<Item = (&Variation, &VariationOutcome)> {
    of.rows.iter().filter_map(|row| Some((row, row.outcome.as_ref()?)))
}

fn verdict(of: &Variations) -> Block {
    let fitting = planned(of).filter(|(_, outcome)| outcome.fits).count();
    let least = planned(of).min_by_key(|(_, outcome)| outcome.peak.bytes);
    let least = least.map(|(row, outcome)| {
        format!("; the lowest peak is {} requested, with {}", size(outcome.peak.bytes), name(row))
    });
    let text =
        format!("{}: {fitting} of {} combinations fit{}", of.model, of.rows.len(), least.unwrap_or_default());
    Block::Verdict { good: Some(fitting > 0), text }
}

/// A column for each key that is varied.
fn keys(of: &Variations) -> Vec<Column> {
    let keys = of.rows.first().map(|row| row.settings.as_slice()).unwrap_or_default();
    keys.iter().map(|setting| Column::words(setting.key.clone())).collect()
}

fn values(row: &Variation) -> Vec<String> {
    row.settings.iter().map(|setting| setting.value.clone()).collect()
}

fn peaks(of: &Variations) -> Block {
    let unit = Unit::of_largest(planned(of).map(|(_, outcome)| outcome.peak.bytes));
    let rows = of.rows.iter().map(|row| {
        let mut cells = values(row);
        let Some(outcome) = &row.outcome else {
            cells.push("cannot be planned".into());
            return cells;
        };
        let owner = outcome.peak.contributors.first();
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), |bytes| unit.number(bytes));
        cells.extend([
            if outcome.fits { "yes" } else { "no" }.to_owned(),
            known(outcome.peak_reserved_bytes),
            known(outcome.peak_allocated_bytes),
            unit.number(outcome.peak.bytes),
            unit.difference(-outcome.saving_bytes),
            outcome.peak.phase.clone().unwrap_or_default(),
            owner.map(|owner| format!("{} {}", owner.name, unit.number(owner.bytes))).unwrap_or_default(),
        ]);
        cells
    });
    let mut columns = keys(of);
    columns.push(Column::words("fits"));
    columns.extend(["reserved", "allocated", "requested", "change"].map(Column::numbers));
    columns.extend([Column::words("in"), Column::words("largest object there")]);
    let width = columns.len();
    let rows = rows.map(|mut cells| {
        cells.resize(width, String::new());
        cells
    });
    Block::Table { title: Some(format!("Peaks, {}", unit.name())), columns, rows: rows.collect() }
}

/// What each saves against the first row, by the categories that change; and those that never do.
fn savings(of: &Variations) -> Vec<Block> {
    let unit = Unit::of_largest(planned(of).map(|(_, outcome)| outcome.peak.bytes));
    let outcomes = || planned(of).map(|(_, outcome)| outcome);
    let all: BTreeSet<Category> =
        outcomes().flat_map(|outcome| outcome.saving_by_category.keys().copied()).collect();
    let moves = |category: &Category| {
        let saving = |outcome: &VariationOutcome| outcome.saving_by_category.get(category).copied();
        outcomes().any(|outcome| saving(outcome).unwrap_or(0) != 0)
    };
    let (moving, same): (Vec<Category>, Vec<Category>) = all.into_iter().partition(moves);
    let rows = planned(of).map(|(row, outcome)| {
        let mut cells = values(row);
        cells.extend(moving.iter().map(|category| {
            match outcome.saving_by_category.get(category).copied().unwrap_or(0) {
                0 => "unchanged".to_owned(),
                saving => unit.difference(saving),
            }
        }));
        cells.push(unit.difference(outcome.saving_bytes));
        cells
    });
    let mut columns = keys(of);
    columns.extend(moving.iter().map(|category| Column::numbers(category.0.as_str())));
    columns.push(Column::numbers("all"));
    let title = format!("Saved at the peak against the first row, {}", unit.name());
    let table = Block::Table { title: Some(title), columns, rows: rows.collect() };
    let same: Vec<&str> = same.iter().map(|category| category.0.as_str()).collect();
    let stays =
        (!same.is_empty()).then(|| Block::Line(format!("The same at every peak: {}.", same.join(", "))));
    std::iter::once(table).chain(stays).collect()
}

fn costs(of: &Variations) -> Block {
    let between = planned(of).any(|(_, outcome)| outcome.costs.collective_bytes > 0);
    let rows = planned(of).map(|(row, outcome)| {
        let costs = &outcome.costs;
        let counted = costs.flops.map(|counted| {
            let usual = counted.forward + counted.backward + counted.update;
            (flops(usual), if counted.recompute == 0 { "-".into() } else { flops(counted.recompute) })
        });
        let (usual, again) = counted.unwrap_or_default();
        let copied = |bytes: u64| if bytes == 0 { "-".into() } else { size(bytes) };
        let mut cells = values(row);
        cells.extend([usual, again, copied(costs.to_host_bytes), copied(costs.from_host_bytes)]);
        cells.extend(between.then(|| copied(costs.collective_bytes)));
        cells.extend([
            thousands(costs.forward_backward_rounds),
            costs.tokens.map_or_else(|| "-".into(), thousands),
        ]);
        cells
    });
    let mut columns = keys(of);
    columns.extend(["computed", "computed again", "to the host", "from the host"].map(Column::numbers));
    columns.extend(between.then(|| Column::numbers("between ranks")));
    columns.extend(["rounds", "tokens"].map(Column::numbers));
    Block::Table { title: Some("Costs of a step, counted".into()), columns, rows: rows.collect() }
}

impl Report for Largest {
    fn page(&self) -> Page {
        let next = self.tries.iter().find(|tried| !tried.fits && Some(tried.value) > self.value);
        let mut text = match self.value {
            Some(value) => {
                format!("{} {} is the largest that fits on {}", self.key, thousands(value), self.gpu)
            }
            None => format!("{} does not fit on {} with {} 1", self.model, self.gpu, self.key),
        };
        match (next.and_then(|tried| Some((tried, tried.oom.as_ref()?))), &self.bound) {
            (_, Some(bound)) => text.push_str(&format!(": beyond it, {bound}")),
            (Some((tried, oom)), None) => {
                let phase = oom.phase.as_deref().unwrap_or("the run");
                text.push_str(&format!("; with {} it runs out of memory in {phase}", thousands(tried.value)));
            }
            (None, None) => {}
        }
        let row = |tried: &Try| {
            vec![
                thousands(tried.value),
                if tried.fits { "yes" } else { "no" }.to_owned(),
                tried.peak_reserved_bytes.map_or_else(|| "-".into(), size),
                tried.headroom_bytes.map(crate::units::difference).unwrap_or_default(),
                tried.oom.as_ref().and_then(|oom| oom.phase.clone()).unwrap_or_default(),
            ]
        };
        Page {
            blocks: vec![
                Block::Verdict { good: Some(self.value.is_some()), text },
                Block::Table {
                    title: Some(format!("{}, tried", self.model)),
                    columns: vec![
                        Column::numbers(self.key.clone()),
                        Column::words("fits"),
                        Column::numbers("reserved"),
                        Column::numbers("to spare"),
                        Column::words("out of memory in"),
                    ],
                    rows: self.tries.iter().map(row).collect(),
                },
                Block::List {
                    title: "Not in these figures".into(),
                    items: self.interpretation_limits.clone(),
                },
            ],
        }
    }

    fn sheet(&self) -> Sheet {
        let row = |tried: &Try| {
            vec![
                tried.value.to_string(),
                tried.fits.to_string(),
                tried.peak_reserved_bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
                tried.headroom_bytes.map(|bytes| bytes.to_string()).unwrap_or_default(),
                tried.oom.as_ref().and_then(|oom| oom.phase.clone()).unwrap_or_default(),
            ]
        };
        Sheet {
            head: vec!["value", "fits", "peak_reserved_bytes", "headroom_bytes", "oom_phase"],
            rows: self.tries.iter().map(row).collect(),
        }
    }
}
