//! The objects of two peaks side by side: paired by name, by module, by size, and by category.

use wire::{Contributor, Row};

/// What is left to pair of the objects of one name.
struct Item<'a> {
    of: &'a Contributor,
    bytes: u64,
}

impl<'a> Item<'a> {
    const fn new(of: &'a Contributor) -> Self {
        Self { of, bytes: of.bytes }
    }

    /// The module, of objects that a recording found: it names a module and a place in a file.
    fn module(&self) -> &'a str {
        self.of.name.split(' ').next().unwrap_or("")
    }
}

/// Lines of predicted and found objects, whose differences sum to that of the totals.
pub(super) fn lines(predicted: &[Contributor], found: &[Contributor]) -> Vec<Row> {
    let mut ours: Vec<Item<'_>> = predicted.iter().map(Item::new).collect();
    let mut theirs: Vec<Item<'_>> = found.iter().map(Item::new).collect();
    let mut rows = Vec::new();
    let same = |a: &Item<'_>, b: &Item<'_>| a.of.category == b.of.category;
    // One name; then the innermost module that both name; then as many bytes; then a category; then bytes alone.
    pair(&mut ours, &mut theirs, &mut rows, |a, b| same(a, b) && a.of.name == b.of.name);
    let modules: Vec<(wire::Category, String)> =
        theirs.iter().map(|item| (item.of.category, item.module().to_owned())).collect();
    pair(&mut ours, &mut theirs, &mut rows, |a, b| {
        same(a, b) && innermost(&modules, a.of) == Some(b.module())
    });
    pair(&mut ours, &mut theirs, &mut rows, |a, b| same(a, b) && a.bytes == b.bytes);
    pair(&mut ours, &mut theirs, &mut rows, same);
    pair(&mut ours, &mut theirs, &mut rows, |a, b| a.bytes == b.bytes);
    rows.extend(ours.iter().filter(|item| item.bytes > 0).map(|item| row(item.of, item.bytes, 0)));
    rows.extend(theirs.iter().filter(|item| item.bytes > 0).map(|item| row(item.of, 0, item.bytes)));
    merge(rows)
}

/// The longest of the found modules of its category that `of` lies in.
fn innermost<'a>(modules: &'a [(wire::Category, String)], of: &Contributor) -> Option<&'a str> {
    let holds = |module: &str| {
        !module.is_empty()
            && of
                .name
                .strip_prefix(module)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ' ']))
    };
    let held = modules.iter().filter(|(category, module)| *category == of.category && holds(module));
    held.map(|(_, module)| module.as_str()).max_by_key(|module| module.len())
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
