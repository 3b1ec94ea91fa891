//! The report of many ranks: which are unlike the others, what makes them so, a row a rank.

use wire::{Alike, Difference, RankOutlier, RankReading, RankReadings, RankStage};

use crate::units::{Unit, difference, size, spelled, thousands};
use crate::{Block, Column, Page, Report, Sheet};

/// The most ranks that all have a row; of more, those that are worth a look.
const MOST_RANKS: usize = 64;
/// The most outliers that are explained.
const MOST_OUTLIERS: usize = 8;
/// The most differences that are shown of one.
const MOST_DIFFERENCES: usize = 8;
/// The most files whose failure is told.
const MOST_UNREAD: usize = 8;

impl Report for RankReadings {
    fn page(&self) -> Page {
        let mut blocks = vec![verdict(self), stages(self)];
        for outlier in self.outliers.iter().take(MOST_OUTLIERS) {
            blocks.extend(explained(self, outlier));
        }
        if self.outliers.len() > MOST_OUTLIERS {
            let more = self.outliers.len() - MOST_OUTLIERS;
            blocks.push(Block::Line(format!("{more} more are unlike the others of their stage.")));
        }
        blocks.push(ranks(self));
        let mut unread: Vec<String> =
            self.unread.iter().take(MOST_UNREAD).map(|unread| unread.reason.clone()).collect();
        if self.unread.len() > MOST_UNREAD {
            unread.push(format!("{} more", self.unread.len() - MOST_UNREAD));
        }
        blocks.push(Block::List { title: "Not read".into(), items: unread });
        blocks.push(Block::List {
            title: "What the files do not tell".into(),
            items: self.warnings.iter().map(|warning| spelled(warning)).collect(),
        });
        blocks.push(Block::List {
            title: "How to read this".into(),
            items: self.interpretation_limits.clone(),
        });
        Page::of(blocks)
    }

    /// A row for each rank, then one for each object in which an outlier is unlike its stage.
    fn sheet(&self) -> Sheet {
        let number = |number: Option<u64>| number.map(|number| number.to_string()).unwrap_or_default();
        let rank = |row: &RankReading| {
            vec![
                "rank".into(),
                row.name.clone(),
                number(row.rank),
                row.stage.to_string(),
                self.measure.0.as_str().into(),
                row.peak_bytes.to_string(),
                number(row.step.map(u64::from)),
                number(row.micro_batch.map(u64::from)),
                row.phase.clone().unwrap_or_default(),
                row.difference_bytes.to_string(),
                row.outlier.to_string(),
                number(row.reserved_bytes),
                number(row.stranded_bytes),
                number(row.end_bytes),
                number(row.oom.as_ref().map(|oom| oom.requested_bytes)),
                String::new(),
                String::new(),
            ]
        };
        let object = |outlier: &RankOutlier, row: &Difference| {
            let mut fields = vec![String::new(); HEAD.len()];
            fields[0] = "difference".into();
            fields[1].clone_from(&outlier.name);
            fields[4] = self.measure.0.as_str().into();
            fields[5] = row.bytes.to_string();
            fields[9] = row.difference_bytes.to_string();
            fields[15].clone_from(&row.name);
            fields[16] = row.category.0.as_str().into();
            fields
        };
        let objects = self
            .outliers
            .iter()
            .flat_map(|outlier| outlier.differences.iter().map(move |row| object(outlier, row)));
        Sheet { head: HEAD.to_vec(), rows: self.ranks.iter().map(rank).chain(objects).collect() }
    }
}

const HEAD: [&str; 17] = [
    "section",
    "name",
    "rank",
    "stage",
    "measure",
    "bytes",
    "step",
    "micro_batch",
    "phase",
    "difference_bytes",
    "outlier",
    "reserved_bytes",
    "stranded_bytes",
    "end_bytes",
    "oom_requested_bytes",
    "object",
    "category",
];

fn verdict(of: &RankReadings) -> Block {
    let least = of.ranks.iter().map(|rank| rank.peak_bytes).min().unwrap_or_default();
    let most = of.ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or_default();
    let measure = of.measure.0.as_str();
    let peaks = if least == most {
        format!("all peak at {} {measure}", size(most))
    } else {
        format!("peaks from {} to {} {measure}", size(least), size(most))
    };
    let stages = match of.stages.len() {
        1 => String::new(),
        several => format!(" in {several} stages"),
    };
    let whom = match of.outliers.as_slice() {
        [] if least == most => String::new(),
        [] => "; none is unlike the others of its stage".into(),
        [one] => format!("; {} is unlike the others, {}", one.name, difference(one.difference_bytes)),
        [first, rest @ ..] => format!(
            "; {} and {} more are unlike the others, {} at most",
            first.name,
            rest.len(),
            difference(first.difference_bytes)
        ),
    };
    let failed = of.ranks.iter().filter(|rank| rank.oom.is_some()).count();
    let failed = match failed {
        0 => String::new(),
        failed => format!("; {failed} ran out of memory"),
    };
    Block::Verdict { good: None, text: format!("{} ranks{stages}: {peaks}{whom}{failed}", of.ranks.len()) }
}

/// The ranks of a stage: `0-3, 8-11` where they have numbers, else their names.
fn members(of: &RankReadings, stage: &RankStage) -> String {
    const MOST: usize = 6;
    let number = |name: &String| of.ranks.iter().find(|rank| rank.name == *name)?.rank;
    let Some(mut numbers) = stage.ranks.iter().map(number).collect::<Option<Vec<u64>>>() else {
        let shown: Vec<&str> = stage.ranks.iter().take(MOST).map(String::as_str).collect();
        let more = match stage.ranks.len() - shown.len() {
            0 => String::new(),
            more => format!(", {more} more"),
        };
        return shown.join(", ") + &more;
    };
    numbers.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let range = |(first, last): &(u64, u64)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    let mut shown: Vec<String> = ranges.iter().take(MOST).map(range).collect();
    if ranges.len() > MOST {
        shown.push("…".into());
    }
    shown.join(", ")
}

fn stages(of: &RankReadings) -> Block {
    let unit = Unit::of_largest(of.stages.iter().map(|stage| stage.most_bytes));
    let row = |(index, stage): (usize, &RankStage)| {
        let parameters = match (stage.parameter_bytes, stage.parameter_objects) {
            (Some(bytes), Some(objects)) => {
                format!("{} in {}", unit.number(bytes), thousands(objects))
            }
            _ => "?".into(),
        };
        vec![
            index.to_string(),
            members(of, stage),
            stage.ranks.len().to_string(),
            parameters,
            unit.number(stage.median_bytes),
            unit.number(stage.least_bytes),
            unit.number(stage.most_bytes),
            unit.number(stage.tolerance_bytes),
        ]
    };
    let apart = match of.stages.iter().any(|stage| stage.alike == Alike::Peaks) {
        true => "parameters and by peaks that lie apart",
        false => "parameters",
    };
    let title = match of.stages.len() {
        1 => format!("Peaks of all ranks, {}", unit.name()),
        _ => format!("Stages, told apart by their {apart}; peaks, {}", unit.name()),
    };
    Block::Table {
        title: Some(title),
        columns: vec![
            Column::numbers("stage"),
            Column::words("ranks"),
            Column::numbers("count"),
            Column::numbers("parameters"),
            Column::numbers("median"),
            Column::numbers("least"),
            Column::numbers("most"),
            Column::numbers("alike within"),
        ],
        rows: of.stages.iter().enumerate().map(row).collect(),
    }
}

/// What makes a rank unlike its stage.
fn explained(of: &RankReadings, outlier: &RankOutlier) -> [Block; 2] {
    let amount = outlier.difference_bytes.unsigned_abs();
    let word = if outlier.difference_bytes < 0 { "less" } else { "more" };
    let row = of.ranks.iter().find(|rank| rank.name == outlier.name);
    let stage = row.and_then(|row| of.stages.get(usize::try_from(row.stage).ok()?));
    let among = match (of.stages.len(), stage) {
        (1, Some(stage)) if stage.ranks.len() == 2 => String::new(),
        (_, Some(stage)) if stage.ranks.len() == 2 => ", the other of its stage".into(),
        (1, _) => ", the median of all".into(),
        _ => ", the median of its stage".into(),
    };
    let mut line = format!(
        "{} holds {} {word} at its peak than {}{among}.",
        outlier.name,
        size(amount),
        outlier.reference
    );
    if let (Some(other), Some(phase)) = (&outlier.other_phase, row.and_then(|row| row.phase.as_ref())) {
        line.push_str(&format!(" It peaks in {phase}, and the other in {other}."));
    }
    let unit =
        Unit::of_largest(outlier.differences.iter().flat_map(|row| [row.bytes, row.baseline_bytes, amount]));
    let cells = |row: &Difference| {
        vec![
            row.name.clone(),
            row.category.0.as_str().into(),
            unit.number(row.baseline_bytes),
            unit.number(row.bytes),
            unit.difference(row.difference_bytes),
        ]
    };
    let mut rows: Vec<Vec<String>> = outlier.differences.iter().take(MOST_DIFFERENCES).map(cells).collect();
    let sum = |name: String, bytes: i64| {
        vec![name, String::new(), String::new(), String::new(), unit.difference(bytes)]
    };
    let rest = outlier.differences.get(MOST_DIFFERENCES..).unwrap_or_default();
    if !rest.is_empty() {
        rows.push(sum(format!("{} more", rest.len()), rest.iter().map(|row| row.difference_bytes).sum()));
    }
    rows.push(sum("all".into(), outlier.difference_bytes));
    let table = Block::Table {
        title: Some(format!("What makes {} unlike {}, {}", outlier.name, outlier.reference, unit.name())),
        columns: vec![
            Column::words("object"),
            Column::words("category"),
            Column::numbers(outlier.reference.clone()),
            Column::numbers(outlier.name.clone()),
            Column::numbers("difference"),
        ],
        rows,
    };
    [Block::Line(line), table]
}

/// A figure of a rank.
type Figure = fn(&RankReading) -> Option<u64>;

/// The rows of the ranks: of many, of those that are unlike the others, failed, or are the median.
fn ranks(of: &RankReadings) -> Block {
    let all = of.ranks.len() <= MOST_RANKS;
    let told = |rank: &&RankReading| {
        let is_reference = of.stages.iter().any(|stage| stage.reference == rank.name);
        all || rank.outlier || rank.oom.is_some() || is_reference
    };
    let shown: Vec<&RankReading> = of.ranks.iter().filter(told).collect();
    let unit = Unit::of_largest(
        shown.iter().flat_map(|rank| [Some(rank.peak_bytes), rank.reserved_bytes]).flatten(),
    );
    let known = |cell: Figure| shown.iter().any(|rank| cell(rank).is_some());
    let columns: [(&str, Figure); 3] = [
        ("reserved", |rank| rank.reserved_bytes),
        ("stranded", |rank| rank.stranded_bytes),
        ("at the end", |rank| rank.end_bytes),
    ];
    let columns: Vec<_> = columns.into_iter().filter(|(_, cell)| known(*cell)).collect();
    let several = of.stages.len() > 1;
    let oom = shown.iter().any(|rank| rank.oom.is_some());
    let row = |rank: &&RankReading| {
        let mut row = vec![rank.name.clone()];
        if several {
            row.push(rank.stage.to_string());
        }
        row.push(unit.number(rank.peak_bytes));
        row.push(match rank.difference_bytes {
            0 => "0".into(),
            bytes => unit.difference(bytes) + if rank.outlier { " !" } else { "" },
        });
        row.push(place(rank.step, rank.phase.as_deref()));
        row.extend(columns.iter().map(|(_, cell)| cell(rank).map_or("?".into(), |bytes| unit.number(bytes))));
        if oom {
            let failed = |oom: &wire::RankOom| {
                format!("{} in {}", size(oom.requested_bytes), place(oom.step, oom.phase.as_deref()))
            };
            row.push(rank.oom.as_ref().map(failed).unwrap_or_default());
        }
        row
    };
    let mut heads = vec![Column::words("rank")];
    if several {
        heads.push(Column::numbers("stage"));
    }
    heads.extend([Column::numbers(of.measure.0.as_str()), Column::numbers("to median"), Column::words("in")]);
    heads.extend(columns.iter().map(|(name, _)| Column::numbers(*name)));
    if oom {
        heads.push(Column::words("found no room for"));
    }
    let left_out = match of.ranks.len() - shown.len() {
        0 => String::new(),
        left_out => format!("; {} like the others are not shown", thousands(left_out as u64)),
    };
    Block::Table {
        title: Some(format!("Ranks, each at its own peak, {}{left_out}", unit.name())),
        columns: heads,
        rows: shown.iter().map(row).collect(),
    }
}

/// `step 2, backward`.
fn place(step: Option<u32>, phase: Option<&str>) -> String {
    match (step, phase) {
        (Some(0), Some(phase)) => phase.into(),
        (Some(step), Some(phase)) => format!("step {step}, {phase}"),
        (None, Some(phase)) => phase.into(),
        _ => "?".into(),
    }
}
