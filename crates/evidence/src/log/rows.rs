//! The rows of a log, whatever they are written as: records of JSON, a table with a heading, or names with values in text.

use indexmap::IndexMap;
use serde_json::{Map, Value};

use super::names::{Role, Scale, amount, role};
use super::table::{fields, separator};
use super::{LONGEST_LINE, MOST_CELLS, MOST_COLUMNS, is_memory};

/// How deep records may lie in records.
const DEEPEST: usize = 4;

/// Rows of cells.
pub(super) struct Rows {
    /// The names of the columns.
    pub(super) names: Vec<String>,
    /// A row of cells for each; a row may be short.
    cells: Vec<Vec<Cell>>,
    /// Lines that are no rows.
    pub(super) odd: u64,
    /// Whether there is more than a log holds.
    pub(super) full: bool,
}

/// One cell.
#[derive(Clone, Debug, PartialEq)]
enum Cell {
    Empty,
    Number(f64),
    /// A number and its unit.
    Amount(f64, Scale),
    Text(String),
}

impl Cell {
    fn of(text: &str) -> Self {
        match amount(text) {
            Some((number, None)) => Self::Number(number),
            Some((number, Some(scale))) => Self::Amount(number, scale),
            None if text.is_empty() => Self::Empty,
            None => Self::Text(text.into()),
        }
    }
}

/// A table in the making, whose columns are learnt row by row.
#[derive(Default)]
pub(super) struct Growing {
    columns: IndexMap<String, ()>,
    cells: Vec<Vec<Cell>>,
    count: usize,
}

impl Growing {
    /// Adds a row for `record`.
    pub(super) fn record(&mut self, record: &Map<String, Value>) {
        self.row(flat(record));
    }

    /// Adds a row of names and cells; more than a log holds is left out.
    fn row(&mut self, pairs: impl IntoIterator<Item = (String, Cell)>) {
        if self.count > MOST_CELLS {
            return;
        }
        let mut row = Vec::new();
        for (name, cell) in pairs {
            let known = self.columns.get_index_of(&name);
            let Some(column) = known.or_else(|| {
                (self.columns.len() < MOST_COLUMNS).then(|| self.columns.insert_full(name, ()).0)
            }) else {
                continue;
            };
            if row.len() <= column {
                row.resize(column + 1, Cell::Empty);
            }
            row[column] = cell;
        }
        self.count += row.len();
        if !row.is_empty() {
            self.cells.push(row);
        }
    }

    pub(super) fn rows(self, odd: u64) -> Rows {
        let full = self.count > MOST_CELLS;
        Rows { names: self.columns.into_keys().collect(), cells: self.cells, odd, full }
    }
}

impl Rows {
    /// The rows in `text`; none where it has none.
    pub(super) fn read(text: &str) -> Option<Self> {
        let rows = json_lines(text).or_else(|| table(text)).or_else(|| pairs(text))?;
        (!rows.cells.is_empty()).then_some(rows)
    }

    pub(super) fn len(&self) -> usize {
        self.cells.len()
    }

    pub(super) fn number(&self, row: usize, column: usize) -> Option<f64> {
        match self.cells[row].get(column) {
            Some(Cell::Number(number) | Cell::Amount(number, _)) => Some(*number),
            _ => None,
        }
    }

    pub(super) fn text(&self, row: usize, column: usize) -> String {
        match self.cells[row].get(column) {
            Some(Cell::Number(number)) => number.to_string(),
            Some(Cell::Text(text)) => text.clone(),
            _ => String::new(),
        }
    }

    pub(super) fn numbers(&self, column: usize) -> impl Iterator<Item = f64> + '_ {
        (0..self.len()).filter_map(move |row| self.number(row, column))
    }

    pub(super) fn has_numbers(&self, column: usize) -> bool {
        self.numbers(column).next().is_some()
    }

    /// The unit that every cell of `column` has; none where they have none or several.
    pub(super) fn scale(&self, column: usize) -> Option<Scale> {
        let mut found = None;
        for row in &self.cells {
            match (row.get(column), found) {
                (Some(Cell::Amount(_, scale)), None) => found = Some(*scale),
                (Some(Cell::Amount(_, scale)), Some(other)) if *scale == other => {}
                (Some(Cell::Amount(..) | Cell::Number(_)), _) => return None,
                _ => {}
            }
        }
        found
    }
}

/// The names and cells of a record; those of records in it have both names.
fn flat(record: &Map<String, Value>) -> Vec<(String, Cell)> {
    let mut pairs = Vec::new();
    let mut open: Vec<(String, &Map<String, Value>, usize)> = vec![(String::new(), record, 0)];
    while let Some((prefix, record, depth)) = open.pop() {
        for (name, value) in record {
            let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
            match value {
                Value::Number(number) => {
                    pairs.push((name, number.as_f64().map_or(Cell::Empty, Cell::Number)));
                }
                Value::String(text) => pairs.push((name, Cell::of(text))),
                Value::Object(inner) if depth < DEEPEST => open.push((name, inner, depth + 1)),
                _ => {}
            }
        }
    }
    pairs
}

/// Records of JSON, one a line, with or without a prefix of a logger.
fn json_lines(text: &str) -> Option<Rows> {
    let (mut growing, mut odd) = (Growing::default(), 0);
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let record = line.find("{\"").map(|start| &line[start..]);
        let record = record.map(|record| record.trim_end().trim_end_matches(','));
        let record = record.filter(|record| record.len() <= LONGEST_LINE);
        match record.and_then(|record| serde_json::from_str::<Map<String, Value>>(record).ok()) {
            Some(record) => growing.record(&record),
            None => odd += 1,
        }
    }
    let rows = growing.rows(odd);
    (!rows.cells.is_empty() && rows.names.iter().any(|name| is_memory(name))).then_some(rows)
}

/// A table with a heading; what stands before the heading is passed over.
fn table(text: &str) -> Option<Rows> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let mut odd = 0;
    let (names, separator) = loop {
        let line = lines.next()?;
        if let Some(separator) = separator(line) {
            let names = fields(line, separator);
            // A heading has names alone.
            if names.iter().any(|name| is_memory(name)) && line_pairs(line).is_empty() {
                break (names, separator);
            }
        }
        odd += 1;
    };
    if names.len() > MOST_COLUMNS {
        return None;
    }
    let (mut cells, mut count): (Vec<Vec<Cell>>, usize) = (Vec::new(), 0);
    let mut full = false;
    for line in lines {
        let row = fields(line, separator);
        // A heading may come again where a run was begun anew.
        if row == names {
            continue;
        }
        if row.len() != names.len() {
            odd += 1;
            continue;
        }
        count += row.len();
        if count > MOST_CELLS {
            full = true;
            break;
        }
        cells.push(row.iter().map(|cell| Cell::of(cell)).collect());
    }
    (!cells.is_empty()).then_some(Rows { names, cells, odd, full })
}

/// Names and values in the lines of a text: `step 20 | allocated=106 MiB, reserved: 2980 MiB`.
fn pairs(text: &str) -> Option<Rows> {
    let mut growing = Growing::default();
    for line in text.lines() {
        let pairs = line_pairs(line);
        if pairs.iter().any(|(name, _)| is_memory(name)) {
            growing.row(pairs);
        }
    }
    let rows = growing.rows(0);
    (!rows.cells.is_empty()).then_some(rows)
}

/// The names and values of one line.
fn line_pairs(line: &str) -> Vec<(String, Cell)> {
    let mut pairs = Vec::new();
    if line.len() > LONGEST_LINE {
        return pairs;
    }
    let bytes = line.as_bytes();
    let in_name = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'/' | b'.' | b'-' | b'(' | b')' | b'%')
    };
    let mut at = 0;
    while at < bytes.len() {
        if !(bytes[at].is_ascii_alphabetic() || bytes[at] == b'_') {
            at += 1;
            continue;
        }
        let start = at;
        while at < bytes.len() && in_name(bytes[at]) {
            at += 1;
        }
        let name = &line[start..at];
        let rest = line[at..].trim_start_matches(['"', '\'', ' ', '\t', ']']);
        let value = match rest.strip_prefix([':', '=']) {
            Some(value) => value,
            // `step 20` has nothing between.
            None if matches!(role(name), Some(Role::Step { .. } | Role::Memory { .. })) => rest,
            None => continue,
        };
        let value = value.trim_start_matches([' ', '\t', '[', '"', '\'']);
        let end = value
            .find(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+' | 'e' | 'E'))
            .unwrap_or(value.len());
        let after = value[end..].trim_start_matches(' ');
        let unit_end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let unit = super::names::scale(&after[..unit_end].to_ascii_lowercase());
        let number = value[..end].trim_end_matches(['.', 'e', 'E', '-', '+']).parse::<f64>();
        if let Some(number) = number.ok().filter(|number| number.is_finite()) {
            let cell = unit.map_or(Cell::Number(number), |unit| Cell::Amount(number, unit));
            pairs.push((name.to_owned(), cell));
            at = (line.len() - value.len() + end).max(at);
        }
    }
    pairs
}
