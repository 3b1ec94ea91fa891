//! Shards of parameters while the whole is put together: the module's parameter is then the whole,
//! and the shard is the master copy that waits for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ledger::{Category, Event, Label, ObjectId};

use super::role::Role;
use crate::snapshot::Taped;

/// Makes each shard of `taped` a master weight for as long as what it is gathered into lives, and the
/// gradient of a group of shards a communication buffer: it is of no parameter that the module has.
pub(super) fn wait(taped: &mut Taped, roles: &[Role]) {
    let mut sizes: BTreeSet<u64> = BTreeSet::new();
    let mut shards: BTreeMap<u64, Vec<ObjectId>> = BTreeMap::new();
    for event in taped.tape.events() {
        let Event::Alloc { object, bytes, .. } = event else { continue };
        if gathers(taped, roles, object) {
            sizes.insert(bytes.get());
        } else if category(taped, object) == Category::Parameter {
            shards.entry(bytes.get()).or_default().push(object);
        }
    }
    let Some((whole, part)) = ratio(&sizes, &shards) else { return };
    let mut waiting: HashMap<ObjectId, Waiting> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    let mut gradients: BTreeMap<u64, BTreeSet<ObjectId>> = BTreeMap::new();
    let mut reduced: HashMap<ObjectId, u64> = HashMap::new();
    let mut changes = Vec::new();
    for index in 0..taped.tape.len() {
        match taped.tape.event(index) {
            Event::Alloc { object, bytes, .. } if gathers(taped, roles, object) => {
                // A group is gathered at once.
                if groups.last().is_none_or(|group| group.complete) {
                    groups.push(Group::default());
                }
                let size = shard_bytes(bytes.get(), whole, part).unwrap_or_default();
                // Which of several of one size is not told, and makes no difference to a sum.
                if let (Some(shard), Some(group)) =
                    (shards.get_mut(&size).and_then(Vec::pop), groups.len().checked_sub(1))
                {
                    groups[group].bytes = groups[group].bytes.saturating_add(size);
                    waiting.insert(object, Waiting { size, shard, group });
                    changes.push((index + 1, relabel(taped, shard, Category::MasterWeight)));
                }
            }
            Event::Alloc { object, bytes, .. } => {
                if let Some(group) = groups.last_mut().filter(|group| !group.complete) {
                    group.complete = true;
                    group.gradient = gradients.get_mut(&group.bytes).and_then(BTreeSet::pop_first);
                    if let Some(gradient) = group.gradient {
                        changes.push((index, relabel(taped, gradient, Category::CommunicationBuffer)));
                    }
                }
                let role = roles[taped.origins[object.0 as usize].stack.0 as usize];
                if role.collective && category(taped, object) == Category::Gradient {
                    gradients.entry(bytes.get()).or_default().insert(object);
                    reduced.insert(object, bytes.get());
                }
            }
            Event::FreeRequested(object) | Event::Free(object) => {
                if let Some(Waiting { size, shard, group }) = waiting.remove(&object) {
                    shards.entry(size).or_default().push(shard);
                    changes.push((index + 1, Event::Relabel(shard, taped.tape.object(shard).label)));
                    if let Some(gradient) = groups[group].gradient.take() {
                        gradients.entry(groups[group].bytes).or_default().insert(gradient);
                        changes
                            .push((index + 1, Event::Relabel(gradient, taped.tape.object(gradient).label)));
                    }
                } else if let Some(gradients) =
                    reduced.remove(&object).and_then(|size| gradients.get_mut(&size))
                {
                    gradients.remove(&object);
                }
            }
            _ => {}
        }
    }
    if !changes.is_empty() {
        taped.tape.insert(&changes);
    }
}

/// A shard that waits.
struct Waiting {
    size: u64,
    shard: ObjectId,
    /// The group that it was gathered with.
    group: usize,
}

/// Shards that are gathered together.
#[derive(Default)]
struct Group {
    bytes: u64,
    complete: bool,
    /// What their gradients were reduced into, which waits too.
    gradient: Option<ObjectId>,
}

fn category(taped: &Taped, object: ObjectId) -> Category {
    taped.tape.label(taped.tape.object(object).label).category
}

/// The event that makes `object` one of `category`.
fn relabel(taped: &mut Taped, object: ObjectId, category: Category) -> Event {
    let label = taped.tape.label(taped.tape.object(object).label);
    Event::Relabel(object, taped.tape.intern_label(Label { category, ..label }))
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
