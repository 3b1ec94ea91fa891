//! Who is there at one instant, told apart by stack, line, module, size or category.

use std::collections::{BTreeMap, HashMap};

use evidence::snapshot::{Snapshot, Stack};
use ledger::{Bytes, Category, Contributor, DeviceId, Ladder, Measure, Unit};
use wire::{Instant, InstantRow};

use super::ReadQuestion;
use super::recorded::Run;
use super::shots::Shot;

/// By what objects are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// The place in the program with its callers.
    #[default]
    Stack,
    /// The place in the program.
    Line,
    /// The module that was at work.
    Module,
    /// The bytes that were asked for.
    Size,
    /// What they are for.
    Category,
}

impl By {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Stack, Self::Line, Self::Module, Self::Size, Self::Category];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stack => "stack",
            Self::Line => "line",
            Self::Module => "module",
            Self::Size => "size",
            Self::Category => "category",
        }
    }
}

/// The instant that is looked at.
pub(super) struct LookedAt {
    pub(super) measure: Measure,
    pub(super) device: DeviceId,
    pub(super) event: usize,
}

/// What is there, by name and by what it is for.
pub(super) type Rows = BTreeMap<(String, Option<Category>), InstantRow>;

/// Counts one object called `name` in `rows`, which are told apart by `by`.
pub(super) fn add(rows: &mut Rows, by: By, name: String, category: Category, bytes: u64) {
    // Objects of one size are for anything; those of one place are told apart.
    let category = Some(category).filter(|_| by != By::Size);
    let row = rows.entry((name, category)).or_insert_with_key(|(name, category)| {
        let category = category.map(wire::Category);
        InstantRow { name: name.clone(), category, bytes: 0, count: 0 }
    });
    row.bytes += bytes;
    row.count += 1;
}

/// Who is there in `shot`.
pub(super) fn instant(run: &Run, shot: &Shot, at: &LookedAt, question: &ReadQuestion) -> Instant {
    let tape = &run.taped.tape;
    debug_assert_eq!(tape.unit, Unit::Requested, "snapshots tell what was asked for");
    let mut rows = Rows::new();
    let mut names: HashMap<Stack, Option<String>> = HashMap::new();
    let mut by_category: BTreeMap<wire::Category, u64> = BTreeMap::new();
    let (mut requested_bytes, mut bytes) = (0_u64, 0_u64);
    for (object, requested, block) in shot.held(at.device) {
        requested_bytes += requested;
        let amount = if at.measure == Measure::Allocated { block } else { requested };
        bytes += amount;
        let label = tape.label(tape.object(object).label);
        *by_category.entry(wire::Category(label.category)).or_default() += amount;
        let stack = run.taped.origins[object.0 as usize].stack;
        let name = match question.by {
            By::Category => label.category.as_str().to_owned(),
            By::Size => requested.to_string(),
            By::Stack | By::Line | By::Module => {
                let name = names.entry(stack).or_insert_with(|| name(run, stack, question)).clone();
                name.unwrap_or_else(|| tape.name(label.name).to_owned())
            }
        };
        add(&mut rows, question.by, name, label.category, amount);
    }
    let mut rows: Vec<InstantRow> = rows.into_values().collect();
    let reading = shot.readings[usize::from(at.device.0)].unwrap_or_default();
    let total = if at.measure == Measure::Allocated { reading.allocated.get() } else { requested_bytes };
    if total > bytes {
        // A recording with gaps may not know all of it.
        let name = Contributor::UNATTRIBUTED.to_owned();
        let category = wire::Category(Category::Unattributed);
        *by_category.entry(category).or_default() += total - bytes;
        rows.push(InstantRow { name, category: Some(category), bytes: total - bytes, count: 0 });
    }
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let held = Ladder {
        requested: Some(Bytes::new(requested_bytes)),
        allocated: Some(reading.allocated),
        active: Some(reading.active),
        reserved: Some(reading.reserved),
        ..Ladder::default()
    };
    let mark = shot.mark.map(|mark| tape.mark_of(mark));
    let first = (0..tape.len()).filter_map(|event| tape.time_us(event)).find(|time| *time > 0);
    let now = tape.time_us(at.event).filter(|time| *time > 0);
    Instant {
        measure: wire::Measure(at.measure),
        device: at.device.0,
        event: at.event as u64,
        microseconds: now.zip(first).map(|(now, first)| now.saturating_sub(first)),
        step: mark.map(|mark| mark.step),
        micro_batch: mark.and_then(|mark| mark.micro_batch),
        phase: mark.map(|mark| tape.phase_name(mark.phase).to_owned()),
        bytes: total,
        held: held.into(),
        by_category,
        by: question.by.as_str().into(),
        depth: question.depth as u64,
        rows,
    }
}

/// The name of the row of what `stack` made; none where no stack tells it.
fn name(run: &Run, stack: Stack, question: &ReadQuestion) -> Option<String> {
    match question.by {
        By::Stack => run.snapshot.site(stack, question.depth.max(1)),
        By::Line => run.snapshot.site(stack, 1),
        By::Module => module(&run.snapshot, stack),
        By::Size | By::Category => None,
    }
}

/// The module that was at work: the file of the innermost one and where it was called.
fn module(snapshot: &Snapshot, stack: Stack) -> Option<String> {
    let frames: Vec<_> = snapshot.stack(stack).collect();
    let of_module =
        |index: &usize| snapshot.text(frames[*index].file).ends_with("torch/nn/modules/module.py");
    let call = (0..frames.len()).find(of_module).filter(|call| *call > 0)?;
    let last = |file: &str| file.rsplit(['/', '\\']).next().unwrap_or(file).to_owned();
    let inner = frames[call - 1];
    let outer = frames[call..]
        .iter()
        .find(|frame| !snapshot.text(frame.file).ends_with("torch/nn/modules/module.py"));
    let mut name = format!("{} {}", last(snapshot.text(inner.file)), snapshot.text(inner.name));
    if let Some(outer) = outer {
        let place =
            format!(" < {}:{} {}", last(snapshot.text(outer.file)), outer.line, snapshot.text(outer.name));
        name.push_str(&place);
    }
    Some(name)
}
