//! What `nvidia-smi` prints: query tables of GPUs or processes, and its own table.

use std::collections::BTreeMap;

use ledger::Bytes;

use crate::log::table::{fields, separator};
use crate::log::{Scale, amount};
use crate::series::{Extra, Point, Series};
use crate::{Instant, Process, Source, Warning};

/// What a print of `nvidia-smi` says: cards at one moment, or each card over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Smi {
    /// The cards, where each is told once.
    pub instants: Vec<Instant>,
    /// The cards over time, where they are told again and again.
    pub series: Vec<Series>,
    /// What could not be told.
    pub warnings: Vec<Warning>,
}

/// What a column of a query is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Field {
    Index,
    Uuid,
    Name,
    Used,
    Total,
    Free,
    Reserved,
    Pid,
    Process,
    ProcessUsed,
}

impl Field {
    fn of(name: &str) -> Option<Self> {
        let name = name.split('[').next().unwrap_or("").trim().to_ascii_lowercase();
        Some(match name.as_str() {
            "index" => Self::Index,
            "uuid" | "gpu_uuid" | "gpu_bus_id" | "pci.bus_id" | "gpu_serial" | "serial" => Self::Uuid,
            "name" | "gpu_name" => Self::Name,
            "memory.used" => Self::Used,
            "memory.total" => Self::Total,
            "memory.free" => Self::Free,
            "memory.reserved" => Self::Reserved,
            "pid" => Self::Pid,
            "process_name" => Self::Process,
            "used_gpu_memory" | "used_memory" => Self::ProcessUsed,
            _ => return None,
        })
    }
}

/// How the cards of NVIDIA are called.
const CARDS: [&str; 6] = ["NVIDIA", "Tesla", "GeForce", "Quadro", "TITAN", "GRID"];
/// The most cells that are read.
const MOST_CELLS: usize = 1 << 22;

/// What `nvidia-smi` says in `text`; none where it does not speak.
pub fn smi(text: &str) -> Option<Smi> {
    if text.contains("NVIDIA-SMI") {
        return own_table(text);
    }
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next()?;
    let comma = separator(first).unwrap_or(',');
    let head = fields(first, comma);
    let mut columns: Vec<Option<Field>> = head.iter().map(|name| Field::of(name)).collect();
    let named = columns
        .iter()
        .flatten()
        .any(|field| matches!(field, Field::Used | Field::Total | Field::Free | Field::ProcessUsed));
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut odd = 0;
    if !named {
        rows.push(head.clone());
    }
    for line in lines.by_ref().take(MOST_CELLS / head.len()) {
        let row = fields(line, comma);
        if row.len() == head.len() && !(named && row == head) {
            rows.push(row);
        } else if row != head {
            odd += 1;
        }
    }
    let left_out = lines.count() as u64;
    let mut warnings = Vec::new();
    if left_out > 0 {
        warnings.push(Warning::RowsLeftOut { count: left_out });
    }
    if !named {
        columns = guess(&rows)?;
        warnings.push(Warning::NoHeading);
    }
    if odd > 0 {
        warnings.push(Warning::OddRows { count: odd });
    }
    let units: Vec<u64> = head.iter().map(|name| heading_unit(name)).collect();
    let mut smi = match columns.contains(&Some(Field::ProcessUsed)) {
        true => processes(&rows, &columns, &units),
        false => cards(&rows, &columns, &units, &head, named)?,
    };
    smi.warnings.extend(warnings);
    Some(smi)
}

/// The unit in a heading: `memory.used [MiB]`; without units, `nvidia-smi` means MiB.
fn heading_unit(name: &str) -> u64 {
    let unit = name.split(['[', ']']).nth(1).map(|unit| unit.trim().to_ascii_lowercase());
    unit.and_then(|unit| amount(&format!("1{unit}"))?.1).map_or(1 << 20, |scale| scale.bytes)
}

fn bytes(cell: &str, unit: u64) -> Option<Bytes> {
    let (number, scale) = amount(cell)?;
    let bytes = number * scale.map_or(unit, |scale: Scale| scale.bytes) as f64;
    (0.0..1e15).contains(&bytes).then(|| Bytes::new(bytes.round() as u64))
}

/// What columns without a heading are, by their units and words.
fn guess(rows: &[Vec<String>]) -> Option<Vec<Option<Field>>> {
    let width = rows.first()?.len();
    let all = |column: usize, test: &dyn Fn(&str) -> bool| rows.iter().all(|row| test(&row[column]));
    let in_unit = |cell: &str| {
        cell.starts_with("[N/A]")
            || cell.ends_with("MiB") && amount(cell).is_some_and(|(_, unit)| unit.is_some())
    };
    let memory: Vec<usize> = (0..width)
        .filter(|column| all(*column, &in_unit) && rows.iter().any(|row| row[*column].ends_with("MiB")))
        .collect();
    if memory.is_empty() {
        return None;
    }
    let mut columns = vec![None; width];
    let card = |cell: &str| CARDS.iter().any(|name| cell.starts_with(name));
    let whole = |cell: &str| cell.parse::<u64>().is_ok();
    let texts = |cell: &str| !whole(cell) && !card(cell) && !cell.starts_with("GPU-") && !in_unit(cell);
    let pid = (0..width).find(|column| all(*column, &whole));
    let process =
        (0..width).find(|column| all(*column, &texts) && !rows.iter().any(|row| row[*column].contains('%')));
    for (column, field) in columns.iter_mut().enumerate() {
        if all(column, &card) {
            *field = Some(Field::Name);
        } else if all(column, &|cell: &str| cell.starts_with("GPU-")) {
            *field = Some(Field::Uuid);
        }
    }
    if let (Some(pid), Some(process), [used]) = (pid, process, memory.as_slice()) {
        columns[pid] = Some(Field::Pid);
        columns[process] = Some(Field::Process);
        columns[*used] = Some(Field::ProcessUsed);
        return Some(columns);
    }
    if let Some(pid) = pid {
        columns[pid] = Some(Field::Index);
    }
    // The largest of several is all of the card.
    let most = |column: &usize| rows.iter().filter_map(|row| bytes(&row[*column], 1)).max();
    let total = memory.iter().copied().max_by_key(most).filter(|_| memory.len() > 1);
    if let Some(total) = total {
        columns[total] = Some(Field::Total);
    }
    let used = memory.iter().find(|column| Some(**column) != total)?;
    columns[*used] = Some(Field::Used);
    Some(columns)
}

/// The cells of a row by what they are.
struct Cells<'a> {
    row: &'a [String],
    columns: &'a [Option<Field>],
    units: &'a [u64],
}

impl<'a> Cells<'a> {
    fn text(&self, field: Field) -> Option<&'a str> {
        let column = self.columns.iter().position(|column| *column == Some(field))?;
        self.row.get(column).map(String::as_str).filter(|cell| !cell.is_empty() && !cell.starts_with("[N"))
    }

    fn bytes(&self, field: Field) -> Option<Bytes> {
        let column = self.columns.iter().position(|column| *column == Some(field))?;
        bytes(self.row.get(column)?, self.units[column])
    }
}

fn cards(
    rows: &[Vec<String>],
    columns: &[Option<Field>],
    units: &[u64],
    head: &[String],
    named: bool,
) -> Option<Smi> {
    let mut cards: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = Cells { row, columns, units };
        let key = [Field::Index, Field::Uuid, Field::Name].into_iter().find_map(|field| cells.text(field));
        let key = key.unwrap_or_default().to_owned();
        if !cards.contains_key(&key) {
            order.push(key.clone());
        }
        cards.entry(key).or_default().push(index);
    }
    let point = |row: usize, step: u64| {
        let cells = Cells { row: &rows[row], columns, units };
        let capacity = cells.bytes(Field::Total);
        let used = cells.bytes(Field::Used).or_else(|| capacity?.checked_sub(cells.bytes(Field::Free)?));
        Point { step, used, capacity, ..Point::default() }
    };
    // Cards that nothing tells apart are several at one moment.
    let single = cards.values().all(|rows| rows.len() == 1) || order == [String::new()];
    let mut smi = Smi::default();
    if single {
        for (number, row) in rows.iter().enumerate() {
            let cells = Cells { row, columns, units };
            let Point { used, capacity, .. } = point(number, 0);
            let index = cells.text(Field::Index).and_then(|index| index.parse().ok());
            let free = cells.bytes(Field::Free).map(|free| free.get().cast_signed());
            smi.instants.push(Instant {
                device: index,
                device_name: cells.text(Field::Name).map(Into::into),
                capacity,
                used,
                free,
                ..card()
            });
        }
        smi.instants.retain(|instant| instant.used.is_some() || instant.capacity.is_some());
        return (!smi.instants.is_empty()).then_some(smi);
    }
    for key in order {
        let Some(members) = cards.get(&key) else { continue };
        let points = members.iter().zip(0..).map(|(row, step)| point(*row, step)).collect();
        let mut extras = Vec::new();
        for (column, name) in
            head.iter().enumerate().filter(|(column, _)| named && columns[*column].is_none())
        {
            let value = |row: &usize| {
                let cell = rows[*row][column].trim_end_matches([' ', '%', 'W', 'C']);
                amount(cell).map(|(number, _)| number)
            };
            let values: Vec<Option<f64>> = members.iter().map(value).collect();
            if values.iter().any(Option::is_some) {
                extras.push(Extra { name: name.clone(), values });
            }
        }
        smi.series.push(Series { of: Some(key), points, extras });
    }
    smi.warnings.push(Warning::NoStepColumn);
    Some(smi)
}

fn processes(rows: &[Vec<String>], columns: &[Option<Field>], units: &[u64]) -> Smi {
    let mut cards: Vec<(String, Instant)> = Vec::new();
    for row in rows {
        let cells = Cells { row, columns, units };
        let Some(pid) = cells.text(Field::Pid).and_then(|pid| pid.parse().ok()) else { continue };
        let key = cells.text(Field::Uuid).unwrap_or_default().to_owned();
        let index = cards.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            let device_name = cells.text(Field::Name).map(Into::into);
            cards.push((key, Instant { device_name, ..card() }));
            cards.len() - 1
        });
        let name = cells.text(Field::Process).map(Into::into);
        cards[index].1.processes.push(Process { pid, name, bytes: cells.bytes(Field::ProcessUsed) });
    }
    Smi { instants: cards.into_iter().map(|(_, instant)| instant).collect(), ..Smi::default() }
}

fn card() -> Instant {
    let (backend, unit) = (Some("cuda".into()), Some(Bytes::new(1 << 20)));
    Instant { source: Source::Smi, backend, unit, ..Instant::default() }
}

/// The table that `nvidia-smi` prints without a query.
fn own_table(text: &str) -> Option<Smi> {
    let mut cards: Vec<Instant> = Vec::new();
    let mut named: Option<(u32, String)> = None;
    let mut in_processes = false;
    for line in text.lines() {
        let words: Vec<&str> = line.split(['|', ' ']).filter(|word| !word.is_empty()).collect();
        in_processes |= words.first() == Some(&"Processes:");
        let mib = |word: &str| word.strip_suffix("MiB")?.parse::<u64>().ok()?.checked_mul(1 << 20);
        if in_processes {
            let index = words.first().and_then(|word| word.parse::<u32>().ok());
            let kind = words.iter().position(|word| matches!(*word, "C" | "G" | "C+G" | "M+C"));
            let (Some(index), Some(kind)) = (index, kind) else { continue };
            let pid = kind.checked_sub(1).and_then(|pid| words[pid].parse().ok());
            let bytes = words.last().and_then(|word| mib(word)).map(Bytes::new);
            let card = cards.iter_mut().find(|card| card.device == Some(index));
            if let (Some(pid), Some(card)) = (pid, card) {
                let name = words.get(kind + 1).map(|name| (*name).to_owned());
                card.processes.push(Process { pid, name, bytes });
            }
            continue;
        }
        let pair = words.windows(3).find_map(|at| Some((mib(at[0])?, mib(at[2])?)).filter(|_| at[1] == "/"));
        if let Some((used, total)) = pair {
            let (device, name) = named.take().unzip();
            let (used, capacity) = (Some(Bytes::new(used)), Some(Bytes::new(total)));
            cards.push(Instant { device, device_name: name, used, capacity, ..card() });
        } else if let Some(index) = words.first().and_then(|word| word.parse().ok()) {
            let name = words[1..].iter().take_while(|word| !matches!(**word, "On" | "Off" | "N/A"));
            named = Some((index, name.copied().collect::<Vec<_>>().join(" ")));
        }
    }
    (!cards.is_empty()).then(|| Smi { instants: cards, ..Smi::default() })
}
