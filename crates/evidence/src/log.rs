//! Step logs, as tables, JSON lines or pairs of names and values in text: a series of totals.

mod names;
mod records;
mod rows;
pub(crate) mod table;

use std::collections::BTreeMap;

use ledger::Bytes;
use thiserror::Error;

use self::names::{Role, role};
pub(crate) use self::names::{Scale, amount};
use self::rows::Rows;
use crate::Warning;
use crate::series::{Extra, Figure, Point, Series};

/// The bytes of the unit that people write as `unit`.
pub(crate) fn scale_of(unit: &str) -> Option<u64> {
    names::scale(&unit.to_ascii_lowercase()).map(|scale| scale.bytes)
}

/// What a step log says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepLog {
    /// A series for each device or rank that the log tells apart.
    pub series: Vec<Series>,
    /// The columns that were read as memory, and how.
    pub columns: Vec<LogColumn>,
    /// What could not be told.
    pub warnings: Vec<Warning>,
}

/// A column of a log that was read as memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogColumn {
    /// Its name in the log.
    pub name: String,
    /// What it was read as.
    pub figure: Figure,
    /// The bytes of its unit.
    pub unit: Bytes,
    /// Whether the log says the unit.
    pub unit_is_said: bool,
}

/// Why a text is no step log.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message says it")]
pub enum LogError {
    #[error("the text has no rows of names and numbers")]
    NoRows,
    #[error("no column of the log is memory of a device by its name; the columns are {columns}")]
    NoMemory { columns: String },
    #[error("the log has more than {MOST_CELLS} cells, empty ones included")]
    TooLarge,
    #[error("the list of records cannot be read: {problem}")]
    Records { problem: String },
}

/// The most columns of a log.
const MOST_COLUMNS: usize = 1 << 12;
/// The most cells of a log.
const MOST_CELLS: usize = 1 << 24;
/// The longest line, and the longest record, that is looked at.
const LONGEST_LINE: usize = 1 << 20;
/// What no memory of a device is as large as: 2^50 bytes.
const TOO_LARGE: f64 = (1_u64 << 50) as f64;
/// How many names an error lists.
const MOST_NAMES: usize = 12;

impl StepLog {
    /// Reads a log from its text.
    ///
    /// # Errors
    /// A text without rows, or without a column of memory.
    pub fn read(text: &str) -> Result<Self, LogError> {
        let rows = Rows::read(text).ok_or(LogError::NoRows)?;
        Self::of(&rows)
    }

    /// Reads a log from JSON: a list of records, or the one under `log_history`, as trainers keep it.
    ///
    /// # Errors
    /// As [`StepLog::read`], and what is wrong with the JSON.
    pub fn of_records(json: &[u8]) -> Result<Self, LogError> {
        let json = json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json);
        let rows =
            records::read(json).map_err(|problem| LogError::Records { problem: problem.to_string() })?;
        Self::of(&rows)
    }

    fn of(rows: &Rows) -> Result<Self, LogError> {
        if rows.full {
            return Err(LogError::TooLarge);
        }
        let roles: Vec<Option<Role>> = rows.names.iter().map(|name| role(name)).collect();
        let mut figures: BTreeMap<Figure, usize> = BTreeMap::new();
        let mut warnings = Vec::new();
        for (column, role) in roles.iter().enumerate() {
            let Some(Role::Memory { figure, sure, .. }) = role else { continue };
            if !rows.has_numbers(column) {
                continue;
            }
            let taken = figures.get(figure).copied();
            let better = taken.is_some_and(|taken| *sure && !is_sure(roles[taken]));
            if taken.is_none() || better {
                figures.insert(*figure, column);
            }
        }
        if figures.is_empty() {
            let names: Vec<String> =
                rows.names.iter().take(MOST_NAMES).map(|name| format!("`{}`", ledger::clip(name))).collect();
            let more = if rows.names.len() > MOST_NAMES { " and more" } else { "" };
            return Err(LogError::NoMemory { columns: names.join(", ") + more });
        }
        let scales = scales(rows, &roles, &figures, &mut warnings);
        let mut columns = Vec::new();
        for (figure, column) in &figures {
            let (scale, said) = scales[column];
            let name = rows.names[*column].clone();
            if !is_sure(roles[*column]) {
                warnings.push(Warning::UnclearMeasure { column: name.clone(), figure: figure.as_str() });
            }
            columns.push(LogColumn { name, figure: *figure, unit: Bytes::new(scale), unit_is_said: said });
        }
        let step = rank_of(&roles, |role| match role {
            Role::Step { rank } => Some(rank),
            _ => None,
        });
        let of = rank_of(&roles, |role| match role {
            Role::Device { rank } => Some(rank),
            _ => None,
        });
        if step.is_none() {
            warnings.push(Warning::NoStepColumn);
        }
        let series = series(rows, &figures, &scales, step, of);
        let back = series.iter().flat_map(|series| series.points.windows(2));
        let back = back.filter(|pair| pair[1].step < pair[0].step).count() as u64;
        if back > 0 {
            warnings.push(Warning::StepsGoBack { count: back });
        }
        if rows.odd > 0 {
            warnings.push(Warning::OddRows { count: rows.odd });
        }
        Ok(Self { series, columns, warnings })
    }
}

const fn is_sure(role: Option<Role>) -> bool {
    matches!(role, Some(Role::Memory { sure: true, .. }))
}

/// The column whose role ranks best, on ties the first.
fn rank_of(roles: &[Option<Role>], rank: impl Fn(Role) -> Option<u8>) -> Option<usize> {
    let ranked = roles.iter().enumerate().filter_map(|(column, role)| Some((rank((*role)?)?, column)));
    ranked.min().map(|(_, column)| column)
}

/// The bytes of the unit of each memory column, and whether the log says them.
fn scales(
    rows: &Rows,
    roles: &[Option<Role>],
    figures: &BTreeMap<Figure, usize>,
    warnings: &mut Vec<Warning>,
) -> BTreeMap<usize, (u64, bool)> {
    let mut scales = BTreeMap::new();
    let mut silent = Vec::new();
    for column in figures.values() {
        let named = match roles[*column] {
            Some(Role::Memory { scale: Some(scale), .. }) => Some(scale),
            _ => rows.scale(*column),
        };
        match named {
            Some(scale) => {
                if scale.decimal_in_doubt {
                    let (column, unit) = (rows.names[*column].clone(), scale.name);
                    warnings.push(Warning::UnclearUnit { column, unit });
                }
                scales.insert(*column, (scale.bytes, true));
            }
            None => silent.push(*column),
        }
    }
    // Columns of one log that say no unit have one and the same.
    let numbers = || silent.iter().flat_map(|column| rows.numbers(*column));
    let most = numbers().fold(0.0, f64::max);
    let whole = numbers().all(|number| number.fract() == 0.0);
    let (scale, unit) = match most {
        _ if whole && most >= 16_777_216.0 => (1, "bytes"),
        _ if whole || most > 1024.0 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    for column in silent {
        warnings.push(Warning::NoUnit { column: rows.names[column].clone(), unit });
        scales.insert(column, (scale, false));
    }
    scales
}

fn series(
    rows: &Rows,
    figures: &BTreeMap<Figure, usize>,
    scales: &BTreeMap<usize, (u64, bool)>,
    step: Option<usize>,
    of: Option<usize>,
) -> Vec<Series> {
    let others: Vec<usize> = (0..rows.names.len())
        .filter(|column| !scales.contains_key(column) && Some(*column) != step && Some(*column) != of)
        .filter(|column| rows.has_numbers(*column))
        .collect();
    let mut found: BTreeMap<String, Series> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    let mut last: Option<u64> = None;
    for row in 0..rows.len() {
        let number = step.and_then(|step| rows.number(row, step)).filter(|step| (0.0..1e18).contains(step));
        let mut point = Point { step: row as u64, ..Point::default() };
        if step.is_some() {
            let Some(step) = number.map(|step| step as u64).or(last) else { continue };
            (point.step, last) = (step, Some(step));
        }
        for (figure, column) in figures {
            let bytes = rows.number(row, *column).map(|number| (number * scales[column].0 as f64).round());
            let bytes = bytes.filter(|bytes| (0.0..TOO_LARGE).contains(bytes));
            *point.get_mut(*figure) = bytes.map(|bytes| Bytes::new(bytes as u64));
        }
        if Figure::ALL.iter().all(|figure| point.get(*figure).is_none()) {
            continue;
        }
        let name = of.map(|of| rows.text(row, of)).unwrap_or_default();
        let series = found.entry(name.clone()).or_insert_with(|| {
            order.push(name.clone());
            let extra = |column: &usize| Extra { name: rows.names[*column].clone(), values: Vec::new() };
            let of = (!name.is_empty()).then_some(name);
            Series { of, points: Vec::new(), extras: others.iter().map(extra).collect() }
        });
        series.points.push(point);
        for (extra, column) in series.extras.iter_mut().zip(&others) {
            extra.values.push(rows.number(row, *column));
        }
    }
    let mut series: Vec<Series> = order.iter().filter_map(|name| found.remove(name)).collect();
    for series in &mut series {
        series.extras.retain(|extra| extra.values.iter().any(Option::is_some));
    }
    series
}

/// Whether a column called `name` is memory of a device.
pub(crate) fn is_memory(name: &str) -> bool {
    matches!(role(name), Some(Role::Memory { .. }))
}
