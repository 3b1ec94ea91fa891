//! The objects of two peaks side by side: paired by name, by module, by size, and by category.

use ledger::Category;
use wire::{Contributor, Row};

/// The names under which a model stands in what it is wrapped in: DDP, PEFT, torch.compile, FSDP.
const WRAPPERS: [&str; 4] = ["module.", "base_model.model.", "_orig_mod.", "_fsdp_wrapped_module."];

/// What is left to pair of the objects of one name.
struct Item<'a> {
    of: &'a Contributor,
    bytes: u64,
}

impl<'a> Item<'a> {
    const fn new(of: &'a Contributor) -> Self {
        Self { of, bytes: of.bytes }
    }

    /// The name, without those of what a model is wrapped in.
    fn name(&self) -> &'a str {
        let mut name = self.of.name.as_str();
        while let Some(inner) = WRAPPERS.iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
            name = inner;
        }
        name
    }

    /// The module, of objects that a recording found: it names a module and a place in a file.
    fn module(&self) -> &'a str {
        let module = self.name().split(' ').next().unwrap_or("");
        // PEFT's layers are by the names of adapters.
        let adapters = [".lora_A.", ".lora_B."].into_iter().find_map(|layers| module.split_once(layers));
        adapters.map_or(module, |(before, _)| &module[..before.len() + ".lora_A".len()])
    }
}

/// Lines of predicted and found objects, whose differences sum to that of the totals.
pub(super) fn lines(predicted: &[Contributor], found: &[Contributor]) -> Vec<Row> {
    let mut ours: Vec<Item<'_>> = predicted.iter().map(Item::new).collect();
    let mut theirs: Vec<Item<'_>> = found.iter().map(Item::new).collect();
    let mut rows = Vec::new();
    let same = |a: &Item<'_>, b: &Item<'_>| a.of.category == b.of.category;
    // A recording does not tell a cast that lasts until the backward pass from what autograd saves.
    let near = |a: &Item<'_>, b: &Item<'_>| passes(a.of.category) && passes(b.of.category);
    // One name; then the innermost module that both name; then as many bytes of as many objects; then as
    // many bytes; then a category; then bytes alone.
    pair(&mut ours, &mut theirs, &mut rows, |a, b| same(a, b) && a.name() == b.name());
    let modules: Vec<(wire::Category, String)> =
        theirs.iter().map(|item| (item.of.category, item.module().to_owned())).collect();
    let inside = |a: &Item<'_>, b: &Item<'_>, kinds: &dyn Fn(wire::Category) -> bool| {
        let modules = modules.iter().filter(|(category, _)| kinds(*category));
        innermost(modules.map(|(_, module)| module.as_str()), a.name()) == Some(b.module())
    };
    pair(&mut ours, &mut theirs, &mut rows, |a, b| {
        same(a, b) && inside(a, b, &|category| category == a.of.category)
    });
    pair(&mut ours, &mut theirs, &mut rows, |a, b| near(a, b) && inside(a, b, &passes));
    pair(&mut ours, &mut theirs, &mut rows, |a, b| {
        same(a, b) && a.bytes == b.bytes && a.of.count == b.of.count
    });
    pair(&mut ours, &mut theirs, &mut rows, |a, b| same(a, b) && a.bytes == b.bytes);
    pair(&mut ours, &mut theirs, &mut rows, same);
    // While a shard is gathered, the whole is a buffer to one side and the parameter to the other.
    pair(&mut ours, &mut theirs, &mut rows, |a, b| a.name().ends_with(".gathered") && shards(b.of.category));
    pair(&mut ours, &mut theirs, &mut rows, |a, b| a.bytes == b.bytes);
    rows.extend(ours.iter().filter(|item| item.bytes > 0).map(|item| row(item.of, item.bytes, 0)));
    rows.extend(theirs.iter().filter(|item| item.bytes > 0).map(|item| row(item.of, 0, item.bytes)));
    merge(rows)
}

/// Whether objects of `category` come and go in a step.
const fn passes(category: wire::Category) -> bool {
    matches!(category.0, Category::Activation | Category::Temporary)
}

/// Whether objects of `category` can be parameters, shards of them or what shards are gathered into.
const fn shards(category: wire::Category) -> bool {
    matches!(category.0, Category::Parameter | Category::MasterWeight | Category::CommunicationBuffer)
}

/// The longest of `modules` that `name` lies in.
fn innermost<'a>(modules: impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    let holds = |module: &str| {
        !module.is_empty()
            && name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ' ']))
    };
    modules.filter(|module| holds(module)).max_by_key(|module| module.len())
}

/// Pairs what `alike` lets be paired, byte by byte.
fn pair(
    ours: &mut [Item<'_>],
    theirs: &mut [Item<'_>],
    rows: &mut Vec<Row>,
    alike: impl Fn(&Item<'_>, &Item<'_>) -> bool,
) {
    for mine in ours.iter_mut() {
        for other in theirs.iter_mut() {
            if mine.bytes == 0 {
                break;
            }
            if other.bytes == 0 || !alike(mine, other) {
                continue;
            }
            let bytes = mine.bytes.min(other.bytes);
            rows.push(row(mine.of, bytes, bytes));
            mine.bytes -= bytes;
            other.bytes -= bytes;
        }
    }
}

fn row(of: &Contributor, predicted: u64, found: u64) -> Row {
    Row {
        name: of.name.clone(),
        category: of.category,
        predicted_bytes: Some(predicted),
        found_bytes: Some(found),
        difference_bytes: Some(found.cast_signed() - predicted.cast_signed()),
        reason: None,
    }
}

/// One row for each name and category, what differs most first.
fn merge(rows: Vec<Row>) -> Vec<Row> {
    let mut merged: Vec<Row> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for row in rows {
        let place = *places.entry((row.name.clone(), row.category)).or_insert_with(|| {
            merged.push(Row {
                predicted_bytes: Some(0),
                found_bytes: Some(0),
                difference_bytes: Some(0),
                ..row.clone()
            });
            merged.len() - 1
        });
        let into = &mut merged[place];
        let add = |a: Option<u64>, b: Option<u64>| Some(a.unwrap_or(0) + b.unwrap_or(0));
        into.predicted_bytes = add(into.predicted_bytes, row.predicted_bytes);
        into.found_bytes = add(into.found_bytes, row.found_bytes);
        into.difference_bytes = Some(into.difference_bytes.unwrap_or(0) + row.difference_bytes.unwrap_or(0));
    }
    merged.sort_by(|a, b| {
        let (off, size) = (
            |row: &Row| row.difference_bytes.unwrap_or(0).unsigned_abs(),
            |row: &Row| row.predicted_bytes.max(row.found_bytes),
        );
        off(b).cmp(&off(a)).then_with(|| size(b).cmp(&size(a))).then_with(|| a.name.cmp(&b.name))
    });
    merged
}
