//! What a page says of one rank of several.

use wire::{Ledger, RankState, Ranks};

use crate::Block;
use crate::plan::plural;
use crate::units::{Unit, size, thousands};

/// What one rank holds of each state, what its collectives need, and what ranks do together in a step.
pub(crate) fn rank_of(ranks: &Ranks, ledger: &Ledger, unit: Unit) -> Block {
    let amount = |bytes: u64| unit.size(bytes);
    let of_host = |row: &RankState| {
        let device = ledger.devices.get(usize::from(row.device));
        device.is_some_and(|device| device.kind == wire::DeviceKind::Cpu)
    };
    let held = ranks.states.iter().map(|row| {
        let part = match row.divided_among {
            0 | 1 => "all".to_owned(),
            parts => format!("1/{}", thousands(parts)),
        };
        let place = if of_host(row) { " on the host" } else { "" };
        let name = match row.category.0 {
            ledger::Category::Parameter => "weights",
            ledger::Category::MasterWeight => "master weights",
            ledger::Category::Gradient => "gradients",
            ledger::Category::OptimizerState => "optimizer state",
            other => other.as_str(),
        };
        format!("{} of {name}{place} ({part})", amount(row.bytes))
    });
    let mut text = format!(
        "Rank {} of {} ({}) holds {}.",
        ranks.rank,
        thousands(ranks.world_size),
        ranks.parallel,
        listed(held.collect())
    );
    if let Some(phase) = &ranks.buffers.phase {
        let buffers = &ranks.buffers;
        let place = place_of_micro_batch(phase, buffers.micro_batch);
        let always = match buffers.least_bytes {
            0 => "none of them all the time".to_owned(),
            bytes if bytes == buffers.most_bytes => "all of them all the time".to_owned(),
            bytes => format!("{} of them all the time", amount(bytes)),
        };
        text.push_str(&format!(
            " Communication buffers and gathered weights hold {} at most ({place}), {always}.",
            amount(buffers.most_bytes)
        ));
    }
    let collectives = ranks
        .collectives
        .iter()
        .map(|messages| format!("{} over {}", plural(messages.count, &messages.kind), size(messages.bytes)));
    let mut step: Vec<String> = collectives.collect();
    if let Some(traffic) = ledger.traffic.filter(|copied| copied.to_host_bytes + copied.from_host_bytes > 0) {
        step.push(format!("{} to the host", size(traffic.to_host_bytes)));
        step.push(format!("{} from it", size(traffic.from_host_bytes)));
    }
    step.extend(ledger.tokens.map(|tokens| plural(tokens, "token")));
    if !step.is_empty() {
        text.push_str(&format!(" A step: {}.", listed(step)));
    }
    Block::Line(text)
}

/// `a, b and c`.
fn listed(mut items: Vec<String>) -> String {
    let last = items.pop().unwrap_or_else(|| "nothing".into());
    if items.is_empty() { last } else { format!("{} and {last}", items.join(", ")) }
}

fn place_of_micro_batch(phase: &str, micro_batch: Option<u32>) -> String {
    match micro_batch.filter(|at| *at > 1) {
        Some(at) => format!("{phase}, micro-batch {at}"),
        None => phase.to_owned(),
    }
}
