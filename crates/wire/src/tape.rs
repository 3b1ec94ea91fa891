//! `vramledger-tape/1`: the file form of a tape, `.vlt`.
//!
//! A line that names the format, then one zstd frame. `docs/tape-format.md` says what is in it. The
//! reader trusts nothing: no count makes it take more memory than there are bytes behind it, the
//! frame may hold [`MAX_BODY`] bytes, and what was read is validated before anybody sees it.

use std::io::{self, BufRead, BufReader, Read, Write};

use ledger::{
    Bytes, Category, Device, DeviceId, DeviceKind, Dtype, Event, Label, LabelId, Layout, LayoutId, Mark,
    MarkId, Name, Object, ObjectId, Phase, Pool, Segment, SegmentId, Stream, Tape, Unit,
};

use crate::{About, ReadError, WriteError};

/// How the file of every version begins.
pub(crate) const FAMILY: &[u8] = b"vramledger-tape/";
const FORMAT: &str = "vramledger-tape/1";
const FORMAT_LINE: &[u8] = b"vramledger-tape/1\n";

/// The most bytes behind the compression: about 27 million events.
const MAX_BODY: u64 = 1 << 29;
/// The most names, layouts or labels: each takes more memory than bytes in the file.
const MAX_TABLE: usize = 1 << 22;
/// The most marks times devices: a ledger may have a row for each.
const MAX_ROWS: usize = 1 << 20;
/// The most bytes of what is known of the run besides.
const MAX_ABOUT: usize = 1 << 26;
/// The most bytes of a name.
const MAX_TEXT: usize = 1 << 24;
/// The most dimensions of a shape.
const MAX_RANK: usize = u8::MAX as usize;
/// The events whose columns lie together.
const BLOCK: usize = 1 << 16;
/// The bytes of an event in all columns, without its time.
const EVENT_BYTES: u64 = 19;
/// What stands for an amount that is not known.
const UNKNOWN: u64 = u64::MAX;

const LEVEL: i32 = 3;

const UNITS: [Unit; 2] = [Unit::Requested, Unit::Block];
const KINDS_OF_DEVICE: [DeviceKind; 2] = [DeviceKind::Gpu, DeviceKind::Cpu];

/// The codes of the categories: their places here.
const CATEGORIES: [Category; 11] = [
    Category::Parameter,
    Category::MasterWeight,
    Category::Gradient,
    Category::OptimizerState,
    Category::Activation,
    Category::Workspace,
    Category::CommunicationBuffer,
    Category::Buffer,
    Category::Input,
    Category::Temporary,
    Category::Unattributed,
];

/// The file of `tape`, with what is known of its run besides.
///
/// # Errors
/// A tape that is not consistent or beyond the limits of the form.
pub fn write_tape(about: &About, tape: &Tape) -> Result<Vec<u8>, WriteError> {
    tape.validate().map_err(WriteError::Inconsistent)?;
    let head = head(about, tape)?;
    let times = (0..tape.len()).take_while(|index| tape.time_us(*index).is_some()).count();
    let body = head.len() as u64 + tape.len() as u64 * EVENT_BYTES + times as u64 * 8;
    if body > MAX_BODY {
        let (limit, count) = (MAX_BODY as usize, body as usize);
        return Err(WriteError::TooMany { what: "bytes before compression", limit, count });
    }
    let mut encoder = zstd::Encoder::new(FORMAT_LINE.to_vec(), LEVEL).map_err(WriteError::Compression)?;
    let written = encoder.include_checksum(true).and_then(|()| encoder.write_all(&head));
    let written = written.and_then(|()| write_events(tape, times, &mut encoder));
    written.and_then(|()| encoder.finish()).map_err(WriteError::Compression)
}

/// All that comes before the events.
fn head(about: &About, tape: &Tape) -> Result<Vec<u8>, WriteError> {
    let within = |what, limit, count| {
        if count <= limit { Ok(()) } else { Err(WriteError::TooMany { what, limit, count }) }
    };
    within("devices", usize::from(u16::MAX), tape.devices.len())?;
    within("phases", usize::from(u16::MAX), tape.phases.len())?;
    let marks = tape.events().filter(|event| matches!(event, Event::Mark(_))).count();
    within("marks times devices", MAX_ROWS, marks * tape.devices.len())?;
    within("names", MAX_TABLE, tape.names().len())?;
    within("layouts", MAX_TABLE, tape.layouts().len())?;
    within("labels", MAX_TABLE, tape.labels().len())?;
    let texts = tape.devices.iter().map(|device| &device.name).chain(&tape.phases).chain(tape.names());
    within("bytes in a name", MAX_TEXT, texts.map(String::len).max().unwrap_or(0))?;
    let about = About { events_before: tape.before as u64, ..about.clone() };
    let about = serde_json::to_string(&about).map_err(|error| WriteError::Compression(error.into()))?;
    within("bytes of what is known besides", MAX_ABOUT, about.len())?;

    let mut head = Out(Vec::new());
    head.text(&about);
    head.u8(code(&UNITS, tape.unit));
    head.u16(tape.devices.len() as u16);
    for device in &tape.devices {
        head.text(&device.name);
        head.u8(code(&KINDS_OF_DEVICE, device.kind));
        head.u64(device.capacity.map_or(UNKNOWN, Bytes::get));
        head.u64(device.context.map_or(UNKNOWN, Bytes::get));
    }
    head.u16(tape.phases.len() as u16);
    tape.phases.iter().for_each(|phase| head.text(phase));
    head.u32(tape.names().len() as u32);
    tape.names().iter().for_each(|name| head.text(name));
    head.u32(tape.layouts().len() as u32);
    for layout in tape.layouts() {
        within("dimensions in a shape", MAX_RANK, layout.shape.len())?;
        head.u8(code(&Dtype::ALL, layout.dtype));
        head.u8(layout.shape.len() as u8);
        layout.shape.iter().for_each(|extent| head.u64(*extent));
    }
    head.u32(tape.labels().len() as u32);
    for label in tape.labels() {
        head.handle(Some(label.name.index()));
        head.handle(label.owner.map(Name::index));
        head.u8(code(&CATEGORIES, label.category));
        head.u8(u8::from(label.saved));
    }
    head.u64(tape.objects().len() as u64);
    for object in tape.objects() {
        head.u32(object.label.0);
        head.handle(object.layout.map(LayoutId::index));
    }
    Ok(head.0)
}

/// The events: their number, how many of them have a time, and blocks of columns.
///
/// A mark is written out where its block ends, not in a table, so that a reader meets marks in the
/// order of the events.
fn write_events(tape: &Tape, times: usize, out: &mut impl Write) -> io::Result<()> {
    let mut counts = Out(Vec::new());
    counts.u64(tape.len() as u64);
    counts.u64(times as u64);
    out.write_all(&counts.0)?;
    for start in (0..tape.len()).step_by(BLOCK) {
        let range = start..tape.len().min(start + BLOCK);
        let rows: Vec<Row> = range.clone().map(|index| Row::of(tape.event(index))).collect();
        let mut block = Out(Vec::with_capacity(rows.len() * (EVENT_BYTES as usize + 8)));
        rows.iter().for_each(|row| block.u8(row.kind));
        rows.iter().for_each(|row| block.u32(row.subject));
        rows.iter().for_each(|row| block.u64(row.bytes));
        rows.iter().for_each(|row| block.u16(row.device));
        rows.iter().for_each(|row| block.u16(row.stream));
        rows.iter().for_each(|row| block.u16(row.pool));
        range.clone().filter_map(|index| tape.time_us(index)).for_each(|time| block.u64(time));
        for index in range {
            if let Event::Mark(mark) = tape.event(index) {
                let mark = tape.mark_of(mark);
                block.u32(mark.step);
                block.u32(mark.micro_batch.unwrap_or(0));
                block.u16(mark.phase.0);
                block.handle(mark.text.map(Name::index));
            }
        }
        out.write_all(&block.0)?;
    }
    Ok(())
}

/// Reads a tape file.
///
/// # Errors
/// What is wrong with it. No input makes it panic, or take more memory than the limits of the form.
pub fn read_tape(bytes: &[u8]) -> Result<(About, Tape), ReadError> {
    read_within(MAX_BODY, bytes)
}

/// Reads a tape file whose body has at most `limit` bytes.
fn read_within(limit: u64, bytes: &[u8]) -> Result<(About, Tape), ReadError> {
    let Some(frame) = bytes.strip_prefix(FORMAT_LINE) else {
        let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let format = ledger::clip(&String::from_utf8_lossy(&line[..line.len().min(200)]));
        return Err(match line.starts_with(FAMILY) {
            true => ReadError::UnknownVersion { format, known: FORMAT },
            false => ReadError::Unrecognised,
        });
    };
    let decoder = zstd::Decoder::with_buffer(frame).map_err(ReadError::Damaged)?.single_frame();
    let mut body = In(BufReader::with_capacity(1 << 16, decoder.take(limit)));
    let about = body.text(MAX_ABOUT)?;
    let about: About = serde_json::from_str(&about).map_err(|error| ReadError::json("tape", &error))?;
    let mut tape = read_head(&mut body)?;
    read_events(&mut body, &mut tape)?;
    tape.before = usize::try_from(about.events_before)
        .ok()
        .filter(|before| *before <= tape.len())
        .ok_or_else(|| bad("fewer events than it says tell what was there before"))?;
    if !body.0.fill_buf().map_err(ReadError::Damaged)?.is_empty() {
        return Err(bad("more after its last event"));
    }
    let mut frame = body.0.into_inner().into_inner().finish();
    if !frame.fill_buf().map_err(ReadError::Damaged)?.is_empty() {
        return Err(bad("more after its compressed part"));
    }
    tape.validate().map_err(ReadError::Inconsistent)?;
    Ok((about, tape))
}

fn read_head(body: &mut In<impl Read>) -> Result<Tape, ReadError> {
    let unit = decode(&UNITS, body.u8()?, "unit")?;
    let mut devices = Vec::new();
    for _ in 0..body.u16()? {
        let name = body.text(MAX_TEXT)?;
        let kind = decode(&KINDS_OF_DEVICE, body.u8()?, "kind of device")?;
        let mut amount = || match body.u64()? {
            UNKNOWN => Ok(None),
            bytes if Bytes::new(bytes) > Bytes::MAX => Err(bad("a device of more than 2^63 bytes")),
            bytes => Ok(Some(Bytes::new(bytes))),
        };
        devices.push(Device { name, kind, capacity: amount()?, context: amount()? });
    }
    let mut tape = Tape::new(unit, devices);
    tape.phases.clear();
    for _ in 0..body.u16()? {
        let phase = body.text(MAX_TEXT)?;
        tape.phases.push(phase);
    }
    for index in 0..table(body.u32()?, "names")? {
        let text = body.text(MAX_TEXT)?;
        new(tape.intern(&text).index(), index, "name")?;
    }
    for index in 0..table(body.u32()?, "layouts")? {
        let dtype = decode(&Dtype::ALL, body.u8()?, "element type")?;
        let shape = (0..body.u8()?).map(|_| body.u64()).collect::<Result<_, _>>()?;
        new(tape.intern_layout(&Layout { dtype, shape }).index(), index, "layout")?;
    }
    let layouts: Vec<LayoutId> = tape.layout_ids().collect();
    let names: Vec<Name> = tape.name_ids().collect();
    for index in 0..table(body.u32()?, "labels")? {
        let name = body.handle(&names, "name")?.ok_or_else(|| bad("a label without a name"))?;
        let owner = body.handle(&names, "name")?;
        let category = decode(&CATEGORIES, body.u8()?, "category")?;
        let saved = decode(&[false, true], body.u8()?, "saved flag")?;
        let label = tape.intern_label(Label { name, owner, category, saved });
        new(label.0 as usize, index, "label")?;
    }
    for _ in 0..body.u64()? {
        let label = LabelId(body.u32()?);
        let layout = body.handle(&layouts, "layout")?;
        tape.new_object(Object { label, layout }).map_err(ReadError::Inconsistent)?;
    }
    Ok(tape)
}

fn read_events(body: &mut In<impl Read>, tape: &mut Tape) -> Result<(), ReadError> {
    let names: Vec<Name> = tape.name_ids().collect();
    let (count, times) = (body.u64()?, body.u64()?);
    if times > count {
        return Err(bad("more times than events"));
    }
    let mut done = 0;
    while done < count {
        let rows = (count - done).min(BLOCK as u64) as usize;
        let timed = times.saturating_sub(done).min(rows as u64) as usize;
        let kinds = body.column::<1>(rows)?;
        let subjects = body.column::<4>(rows)?;
        let bytes = body.column::<8>(rows)?;
        let devices = body.column::<2>(rows)?;
        let streams = body.column::<2>(rows)?;
        let pools = body.column::<2>(rows)?;
        let stamps = body.column::<8>(timed)?;
        for row in 0..rows {
            let [kind] = kinds[row];
            let row_of = Row {
                kind,
                subject: u32::from_le_bytes(subjects[row]),
                bytes: u64::from_le_bytes(bytes[row]),
                device: u16::from_le_bytes(devices[row]),
                stream: u16::from_le_bytes(streams[row]),
                pool: u16::from_le_bytes(pools[row]),
            };
            let event = match row_of.event() {
                Some(Event::Mark(_)) => {
                    let (step, micro_batch) = (body.u32()?, Some(body.u32()?).filter(|number| *number > 0));
                    let phase = Phase(body.u16()?);
                    let text = body.handle(&names, "name")?;
                    if (tape.marks().len() + 1) * tape.devices.len() > MAX_ROWS {
                        return Err(bad(format!(
                            "more marks times devices than {MAX_ROWS}, which are allowed"
                        )));
                    }
                    Event::Mark(tape.new_mark(Mark { step, micro_batch, phase, text }))
                }
                Some(event) => event,
                None => return Err(bad(format!("an event {} that cannot be", done + row as u64))),
            };
            match stamps.get(row) {
                Some(time) => tape.push_at(event, u64::from_le_bytes(*time)),
                None => tape.push(event),
            }
        }
        done += rows as u64;
    }
    Ok(())
}

/// An event as its columns have it.
struct Row {
    kind: u8,
    subject: u32,
    bytes: u64,
    device: u16,
    stream: u16,
    pool: u16,
}

impl Row {
    fn of(event: Event) -> Self {
        let row = |kind, subject, bytes, (device, stream, pool): (DeviceId, Stream, Pool)| Self {
            kind,
            subject,
            bytes,
            device: device.0,
            stream: stream.0,
            pool: pool.0,
        };
        let nowhere = (DeviceId(0), Stream(0), Pool(0));
        let segment = |kind, s: Segment| row(kind, s.segment.0, s.bytes.get(), (s.device, s.stream, s.pool));
        match event {
            Event::Alloc { object, bytes, device, stream, pool } => {
                row(0, object.0, bytes.get(), (device, stream, pool))
            }
            Event::FreeRequested(object) => row(1, object.0, 0, nowhere),
            Event::Free(object) => row(2, object.0, 0, nowhere),
            Event::Relabel(object, label) => row(3, object.0, u64::from(label.0), nowhere),
            Event::SegmentAlloc(s) => segment(4, s),
            Event::SegmentFree(s) => segment(5, s),
            Event::SegmentMap(s) => segment(6, s),
            Event::SegmentUnmap(s) => segment(7, s),
            Event::Oom { bytes, device, stream } => row(8, 0, bytes.get(), (device, stream, Pool(0))),
            Event::Mark(_) => row(9, 0, 0, nowhere),
        }
    }

    /// The event; for a mark, one of no table yet.
    fn event(&self) -> Option<Event> {
        let object = ObjectId(self.subject);
        let bytes = Bytes::new(self.bytes);
        let (device, stream, pool) = (DeviceId(self.device), Stream(self.stream), Pool(self.pool));
        let segment = Segment { segment: SegmentId(self.subject), bytes, device, stream, pool };
        Some(match self.kind {
            0 => Event::Alloc { object, bytes, device, stream, pool },
            1 => Event::FreeRequested(object),
            2 => Event::Free(object),
            3 => Event::Relabel(object, LabelId(u32::try_from(self.bytes).ok()?)),
            4 => Event::SegmentAlloc(segment),
            5 => Event::SegmentFree(segment),
            6 => Event::SegmentMap(segment),
            7 => Event::SegmentUnmap(segment),
            8 => Event::Oom { bytes, device, stream },
            9 => Event::Mark(MarkId(self.subject)),
            _ => return None,
        })
    }
}

/// What is written, little-endian.
struct Out(Vec<u8>);

impl Out {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.0.extend(text.as_bytes());
    }

    /// A place in a table, from 1; 0 is none.
    fn handle(&mut self, index: Option<usize>) {
        self.u32(index.map_or(0, |index| index as u32 + 1));
    }
}

/// What is read, little-endian.
struct In<R>(BufReader<R>);

impl<R: Read> In<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).map_err(ReadError::Damaged)?;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8, ReadError> {
        self.bytes().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, ReadError> {
        self.bytes().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, ReadError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, ReadError> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// `rows` values of `N` bytes, at most a block of them.
    fn column<const N: usize>(&mut self, rows: usize) -> Result<Vec<[u8; N]>, ReadError> {
        let mut column = vec![[0; N]; rows];
        self.0.read_exact(column.as_flattened_mut()).map_err(ReadError::Damaged)?;
        Ok(column)
    }

    /// A text. It grows with what is there, not with what its length promises.
    fn text(&mut self, limit: usize) -> Result<String, ReadError> {
        let length = self.u32()?;
        if length as usize > limit {
            return Err(bad(format!("a text of {length} bytes, where {limit} are allowed")));
        }
        let mut text = Vec::new();
        let found =
            self.0.by_ref().take(u64::from(length)).read_to_end(&mut text).map_err(ReadError::Damaged)?;
        if found < length as usize {
            return Err(ReadError::Damaged(io::ErrorKind::UnexpectedEof.into()));
        }
        String::from_utf8(text).map_err(|_| bad("a text that is not UTF-8"))
    }

    /// The value a handle names, or none.
    fn handle<T: Copy>(&mut self, table: &[T], what: &str) -> Result<Option<T>, ReadError> {
        match self.u32()? {
            0 => Ok(None),
            place => match table.get(place as usize - 1) {
                Some(value) => Ok(Some(*value)),
                None => Err(bad(format!("the {what} {place}, of which it has {}", table.len()))),
            },
        }
    }
}

fn bad(what: impl Into<String>) -> ReadError {
    ReadError::BadTape { what: what.into() }
}

/// The place of `value` in its table of codes, which holds every value.
fn code<T: PartialEq>(codes: &[T], value: T) -> u8 {
    codes.iter().position(|other| *other == value).map_or(u8::MAX, |place| place as u8)
}

fn decode<T: Copy>(codes: &[T], code: u8, what: &str) -> Result<T, ReadError> {
    codes.get(usize::from(code)).copied().ok_or_else(|| bad(format!("the unknown {what} {code}")))
}

/// The size of a table of interned values, within its limit.
fn table(count: u32, what: &str) -> Result<usize, ReadError> {
    let count = count as usize;
    if count <= MAX_TABLE {
        Ok(count)
    } else {
        Err(bad(format!("{count} {what}, where {MAX_TABLE} are allowed")))
    }
}

/// That an interned value was not there before: else the handles behind it would shift.
fn new(found: usize, index: usize, what: &str) -> Result<(), ReadError> {
    if found == index { Ok(()) } else { Err(bad(format!("the same {what} at {found} and {index}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bomb_is_stopped_at_the_limit_of_the_form() {
        let about = About::new(ledger::Provenance::Estimated);
        let mut tape = Tape::new(Unit::Block, vec![]);
        let name = tape.intern("n");
        let (owner, category, saved) = (None, Category::Buffer, false);
        let label = tape.intern_label(Label { name, owner, category, saved });
        for _ in 0..100_000 {
            tape.new_object(Object { label, layout: None }).unwrap();
        }
        let bomb = write_tape(&about, &tape).unwrap();
        assert!(bomb.len() < 1000);
        assert!(read_within(1 << 20, &bomb).is_ok());
        assert!(matches!(read_within(1 << 19, &bomb), Err(ReadError::Damaged(_))));
    }
}
