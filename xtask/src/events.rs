//! The recorded event lists of `tests/truth/events`, as tapes.
//!
//! A list has a line for each entry of PyTorch's own recording: event, action, object (a number for
//! each allocation, `sN` for a segment), bytes (requested; segment bytes for segments), stream, step,
//! micro-batch, phase and site (the two innermost frames that say something; empty in backward).

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use ledger::{
    Bytes, Category, Device, DeviceId, Event, Label, Mark, Object, ObjectId, Phase, Pool, Segment, SegmentId,
    Stream, Tape, Unit,
};

/// Reads the list at `path`, recorded on `device`.
///
/// A free that was complete as soon as it was requested is one [`Event::Free`]. The site of an
/// allocation is the owner of its object; nothing is known of categories.
pub fn read(path: &Path, device: Device) -> Result<Tape> {
    let file = File::open(path).with_context(|| format!("failed to open `{}`", path.display()))?;
    let mut reader = Reader::new(device);
    for (number, line) in BufReader::new(GzDecoder::new(file)).lines().enumerate().skip(1) {
        let place = || format!("line {} of `{}`", number + 1, path.display());
        reader.line(&line.with_context(place)?).with_context(place)?;
    }
    reader.finish()
}

struct Reader {
    tape: Tape,
    objects: HashMap<u32, ObjectId>,
    mark: Option<Mark>,
    /// A free that was requested by the line before.
    requested: Option<ObjectId>,
}

impl Reader {
    fn new(device: Device) -> Self {
        let tape = Tape::new(Unit::Requested, vec![device]);
        Self { tape, objects: HashMap::new(), mark: None, requested: None }
    }

    fn line(&mut self, line: &str) -> Result<()> {
        let columns: Vec<&str> = line.splitn(9, ',').collect();
        let [_, action, object, bytes, stream, step, micro_batch, phase, site] = columns[..] else {
            bail!("an event has 9 columns, and this line has {}", columns.len());
        };
        let bytes = Bytes::new(bytes.parse()?);
        let stream = Stream(stream.parse()?);
        if action == "free_completed" && self.requested == Some(self.object(object)?) {
            self.requested = None;
            self.tape.push(Event::Free(self.object(object)?));
            return Ok(());
        }
        self.flush();
        self.mark(step.parse()?, micro_batch, phase)?;
        let (device, pool) = (DeviceId(0), Pool(0));
        // Expandable segments are not numbered.
        let segment = || -> Result<Segment> {
            let number = object.strip_prefix('s').map_or(Ok(0), str::parse)?;
            Ok(Segment { segment: SegmentId(number), bytes, device, stream, pool })
        };
        let event = match action {
            "alloc" => {
                let object = self.new_object(object.parse()?, site)?;
                Event::Alloc { object, bytes, device, stream, pool }
            }
            "free_requested" => {
                self.requested = Some(self.object(object)?);
                return Ok(());
            }
            "free_completed" => Event::Free(self.object(object)?),
            "segment_alloc" => Event::SegmentAlloc(segment()?),
            "segment_free" => Event::SegmentFree(segment()?),
            "segment_map" => Event::SegmentMap(segment()?),
            "segment_unmap" => Event::SegmentUnmap(segment()?),
            "oom" => Event::Oom { bytes, device, stream },
            _ => bail!("`{action}` is no action of the allocator"),
        };
        self.tape.push(event);
        Ok(())
    }

    fn finish(mut self) -> Result<Tape> {
        self.flush();
        ensure!(!self.tape.is_empty(), "the list holds no event");
        Ok(self.tape)
    }

    /// Records a requested free whose completion did not follow at once.
    fn flush(&mut self) {
        if let Some(object) = self.requested.take() {
            self.tape.push(Event::FreeRequested(object));
        }
    }

    fn mark(&mut self, step: u32, micro_batch: &str, phase: &str) -> Result<()> {
        let micro_batch = if micro_batch.is_empty() { None } else { Some(micro_batch.parse()?) };
        let index = Phase::NAMES.iter().position(|name| *name == phase);
        let phase = Phase(index.with_context(|| format!("`{phase}` is no phase"))? as u16);
        let mark = Mark { step, micro_batch, phase, text: None };
        if self.mark != Some(mark) {
            self.mark = Some(mark);
            self.tape.mark(mark);
        }
        Ok(())
    }

    fn new_object(&mut self, number: u32, site: &str) -> Result<ObjectId> {
        let name = self.tape.intern("unattributed");
        let owner = (!site.is_empty()).then(|| self.tape.intern(site));
        let label = Label { name, owner, category: Category::Unattributed, saved: false };
        let label = self.tape.intern_label(label);
        let object = self.tape.new_object(Object { label, layout: None })?;
        ensure!(self.objects.insert(number, object).is_none(), "object {number} is allocated twice");
        Ok(object)
    }

    fn object(&self, number: &str) -> Result<ObjectId> {
        let object = self.objects.get(&number.parse()?);
        object.copied().with_context(|| format!("object {number} was never allocated"))
    }
}
