//! Shards of parameters while the whole is put together: the module's parameter is then the whole,
//! and the shard is the master copy that waits for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ledger::{Category, Event, Label, LabelId, ObjectId};

use super::role::Role;
use crate::snapshot::Taped;

/// Makes each shard of `taped` a master weight for as long as what it is gathered into lives.
pub(super) fn wait(taped: &mut Taped, roles: &[Role]) {
    let mut sizes: BTreeSet<u64> = BTreeSet::new();
    let mut shards: BTreeMap<u64, Vec<ObjectId>> = BTreeMap::new();
    for event in taped.tape.events() {
        let Event::Alloc { object, bytes, .. } = event else { continue };
        if gathers(taped, roles, object) {
            sizes.insert(bytes.get());
        } else if taped.tape.label(taped.tape.object(object).label).category == Category::Parameter {
            shards.entry(bytes.get()).or_default().push(object);
        }
    }
    let Some((whole, part)) = ratio(&sizes, &shards) else { return };
    let mut waiting: HashMap<ObjectId, (u64, ObjectId)> = HashMap::new();
    let mut changes = Vec::new();
    for index in 0..taped.tape.len() {
        match taped.tape.event(index) {
            Event::Alloc { object, bytes, .. } if gathers(taped, roles, object) => {
                let size = shard_bytes(bytes.get(), whole, part);
                // Which of several of one size is not told, and makes no difference to a sum.
                if let Some(shard) = size.and_then(|size| shards.get_mut(&size)?.pop()) {
                    let label = taped.tape.label(taped.tape.object(shard).label);
                    let label = Label { category: Category::MasterWeight, ..label };
                    changes.push((index + 1, Event::Relabel(shard, taped.tape.intern_label(label))));
                    waiting.insert(object, (size.unwrap_or_default(), shard));
                }
            }
            Event::FreeRequested(object) | Event::Free(object) => {
                if let Some((size, shard)) = waiting.remove(&object) {
                    shards.entry(size).or_default().push(shard);
                    let label: LabelId = taped.tape.object(shard).label;
                    changes.push((index + 1, Event::Relabel(shard, label)));
                }
            }
            _ => {}
        }
    }
    if !changes.is_empty() {
        taped.tape.insert(&changes);
    }
}

fn gathers(taped: &Taped, roles: &[Role], object: ObjectId) -> bool {
    roles[taped.origins[object.0 as usize].stack.0 as usize].gathers
}

/// How much larger a gathered parameter is than its shard, as two sizes: the same for all, by the
/// number of ranks and the two dtypes.
fn ratio(sizes: &BTreeSet<u64>, shards: &BTreeMap<u64, Vec<ObjectId>>) -> Option<(u64, u64)> {
    let whole = *sizes.last().filter(|whole| **whole > 0)?;
    let fits = |part: &u64| {
        *part > 0
            && sizes
                .iter()
                .all(|size| shard_bytes(*size, whole, *part).is_some_and(|bytes| shards.contains_key(&bytes)))
    };
    shards.keys().copied().find(fits).map(|part| (whole, part))
}

/// The bytes of the shard of a gathered parameter of `bytes`; none where it is not whole.
fn shard_bytes(bytes: u64, whole: u64, part: u64) -> Option<u64> {
    let product = u128::from(bytes) * u128::from(part);
    let whole = u128::from(whole);
    product.is_multiple_of(whole).then(|| u64::try_from(product / whole).ok())?
}
