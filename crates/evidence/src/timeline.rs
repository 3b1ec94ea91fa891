//! Memory timelines of PyTorch's profiler: `export_memory_timeline`, raw or as sums.

use std::collections::HashMap;

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Event, Label, LabelId, Object, ObjectId, Pool, Stream,
    Tape, TapeError, Unit,
};
use thiserror::Error;

use crate::Warning;
use crate::series::{Extra, Point, Series};

/// The categories of a timeline, in its order, and what they are here.
const CATEGORIES: [(&str, Category); 8] = [
    ("parameter", Category::Parameter),
    ("optimizer state", Category::OptimizerState),
    ("input", Category::Input),
    ("temporary", Category::Temporary),
    ("activation", Category::Activation),
    ("gradient", Category::Gradient),
    ("autograd detail", Category::Temporary),
    ("unknown", Category::Unattributed),
];

/// What a memory timeline is.
#[derive(Debug)]
pub enum Timeline {
    /// Of every object: `.raw.json.gz`.
    Raw(Box<RawTimeline>),
    /// Sums by category at each moment.
    Sums(Series),
}

/// A timeline of objects.
#[derive(Debug)]
pub struct RawTimeline {
    /// Its tape. Objects have the category that the profiler found and no owner.
    pub tape: Tape,
    /// Its entries.
    pub entries: u64,
    /// What could not be told.
    pub warnings: Vec<Warning>,
}

/// Why a timeline cannot be read.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum TimelineError {
    #[error("the memory timeline cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the memory timeline has {times} times and {sizes} rows of sizes")]
    Uneven { times: usize, sizes: usize },
    #[error(
        "row {row} of the memory timeline has {found} sizes, where 9 are expected: 0 and one for each category"
    )]
    Sizes { row: usize, found: usize },
    #[error("the memory timeline is empty")]
    Empty,
    #[error(transparent)]
    Tape(#[from] TapeError),
}

/// What an entry tells.
const PREEXISTING: u8 = 1;
const CREATE: u8 = 2;
const INCREMENT_VERSION: u8 = 3;
const DESTROY: u8 = 4;

impl Timeline {
    /// Reads a timeline from its JSON, unpacked.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(json: &[u8]) -> Result<Self, TimelineError> {
        // Sums are two lists of equal length, whose first has times.
        let sums = serde_json::from_slice::<(Vec<i64>, Vec<Vec<i64>>)>(json);
        if let Ok((times, sizes)) = sums {
            return Ok(Self::Sums(series(&times, &sizes)?));
        }
        let entries: Vec<(i64, u8, i64, u8)> = serde_json::from_slice(json)?;
        Ok(Self::Raw(Box::new(raw(&entries)?)))
    }
}

fn series(times: &[i64], sizes: &[Vec<i64>]) -> Result<Series, TimelineError> {
    if times.len() != sizes.len() {
        return Err(TimelineError::Uneven { times: times.len(), sizes: sizes.len() });
    }
    let first = *times.first().ok_or(TimelineError::Empty)?;
    let mut points = Vec::with_capacity(times.len());
    let named = CATEGORIES.iter().map(|(name, _)| (*name).to_owned());
    let mut extras: Vec<Extra> = ["microseconds".to_owned()]
        .into_iter()
        .chain(named)
        .map(|name| Extra { name, values: Vec::with_capacity(times.len()) })
        .collect();
    for (row, (time, sizes)) in times.iter().zip(sizes).enumerate() {
        if sizes.len() != CATEGORIES.len() + 1 {
            return Err(TimelineError::Sizes { row, found: sizes.len() });
        }
        let sum: i128 = sizes.iter().map(|size| i128::from(*size)).sum();
        let allocated = u64::try_from(sum).ok().filter(|sum| *sum < 1 << 63).map(Bytes::new);
        points.push(Point { step: row as u64, allocated, ..Point::default() });
        extras[0].values.push(Some(time.saturating_sub(first) as f64));
        for (extra, size) in extras[1..].iter_mut().zip(&sizes[1..]) {
            extra.values.push(Some(*size as f64));
        }
    }
    extras.retain(|extra| extra.values.iter().any(|value| *value != Some(0.0)));
    Ok(Series { of: None, points, extras })
}

/// The device, which a timeline does not name.
const DEVICE: &str = "the device";

fn raw(entries: &[(i64, u8, i64, u8)]) -> Result<RawTimeline, TimelineError> {
    let name = DEVICE.to_owned();
    let mut tape =
        Tape::new(Unit::Block, vec![Device { name, kind: DeviceKind::Gpu, capacity: None, context: None }]);
    let labels: Vec<LabelId> = CATEGORIES
        .iter()
        .map(|(name, category)| {
            let name = tape.intern(name);
            tape.intern_label(Label { name, owner: None, category: *category, saved: false })
        })
        .collect();
    let mut alive: HashMap<(u64, u8), Vec<ObjectId>> = HashMap::new();
    let start = entries.iter().map(|entry| entry.0).filter(|time| *time > 0).min().unwrap_or(0);
    // What an entry of one version hands to that of the next.
    let mut handed: Option<(ObjectId, u64)> = None;
    let (mut odd, mut pre, mut began) = (0, true, 0_u64);
    let mut before = Bytes::ZERO;
    for (time, action, bytes, category) in entries {
        let size = bytes.unsigned_abs();
        let Some(label) = labels.get(usize::from(*category)).copied() else {
            odd += 1;
            continue;
        };
        if size == 0 {
            continue;
        }
        let now = (time.saturating_sub(start).max(0) / 1000) as u64 + 1;
        let key = (size, *category);
        if pre && *action != PREEXISTING {
            (pre, tape.before) = (false, tape.len());
        }
        match *action {
            PREEXISTING | CREATE if *bytes > 0 => {
                let object = tape.new_object(Object { label, layout: None })?;
                let (device, stream, pool) = (DeviceId(0), Stream(0), Pool(0));
                tape.push_at(Event::Alloc { object, bytes: Bytes::new(size), device, stream, pool }, now);
                alive.entry(key).or_default().push(object);
                if *action == PREEXISTING {
                    began += 1;
                    before = before.checked_add(Bytes::new(size)).unwrap_or(before);
                }
            }
            INCREMENT_VERSION if *bytes < 0 => {
                let object = alive.get_mut(&key).and_then(Vec::pop);
                odd += u64::from(object.is_none());
                handed = object.map(|object| (object, size));
            }
            INCREMENT_VERSION => match handed.take() {
                Some((object, held)) if held == size => {
                    tape.push_at(Event::Relabel(object, label), now);
                    alive.entry(key).or_default().push(object);
                }
                _ => odd += 1,
            },
            DESTROY => match alive.get_mut(&key).and_then(Vec::pop) {
                Some(object) => tape.push_at(Event::Free(object), now),
                None => odd += 1,
            },
            _ => odd += 1,
        }
    }
    if pre {
        tape.before = tape.len();
    }
    if tape.is_empty() {
        return Err(TimelineError::Empty);
    }
    let mut warnings = Vec::new();
    if began > 0 {
        let device = DEVICE.to_owned();
        warnings.push(Warning::TraceBegunInTheMiddle { device, objects: began, bytes: before });
    }
    if odd > 0 {
        warnings.push(Warning::DamagedEvents { count: odd });
    }
    Ok(RawTimeline { tape, entries: entries.len() as u64, warnings })
}
