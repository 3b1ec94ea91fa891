//! `cargo xtask gen-snapshot N`: memory snapshots of any length, to measure readers with.
//!
//! A made-up training run is played against the allocator, twice: once for the state at its end,
//! which the file tells first, and once for its entries. The file is of the shape that torch 2.15
//! writes: which objects are memoized and which lists are shared was seen in its own files. One
//! tensor a step is never let go: a leak of known size and stack.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use allocator::{Action, CachingAllocator, DeviceMemory, SegmentLayout, Settings, State, TieRule};
use anyhow::{Context as _, Result, ensure};
use clap::Args;
use ledger::{Bytes, DeviceId, Event, Meter as _, ObjectId, Pool, Stream};

/// Arguments of `gen-snapshot`.
#[derive(Args)]
pub struct GenSnapshot {
    /// The number of trace entries
    entries: usize,
    /// Where the file goes
    #[arg(short, long, default_value = "snapshot.pickle")]
    output: PathBuf,
}

/// What the file holds that a reader is to find.
#[derive(Debug, PartialEq, Eq)]
pub struct Planted {
    /// Complete steps.
    pub steps: u64,
    /// Bytes that each of them leaves behind.
    pub leak_bytes: u64,
}

/// Bytes that each step leaves behind.
const LEAK: u64 = 3_000_000;
/// The stack of what is left behind.
const LEAKING: usize = 7;
/// How many stacks there are.
const STACKS: usize = 400;
/// How many frames they are made of.
const FRAMES: usize = 600;
const LAYERS: usize = 32;
/// Where the device's addresses begin, and the clock.
const BASE: u64 = 0x7f00_0000_0000;
const EPOCH: u64 = 1_790_000_000_000_000;

#[allow(clippy::print_stderr, reason = "a command of developers tells what it planted")]
pub fn run(args: &GenSnapshot) -> Result<()> {
    let file = File::create(&args.output);
    let file = file.with_context(|| format!("failed to create `{}`", args.output.display()))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let planted = write(args.entries, &mut out)?;
    out.flush()?;
    let Planted { steps, leak_bytes } = planted;
    eprintln!("{steps} steps, each of which leaves {leak_bytes} bytes behind at `train.py:41 log_step`");
    Ok(())
}

/// Writes a snapshot of `entries` entries.
pub fn write(entries: usize, out: &mut impl Write) -> Result<Planted> {
    ensure!(entries >= 2000, "a snapshot that shows a leak takes 2000 entries or more");
    // The state at the end, and the stack of every object there.
    let mut stacks: Vec<Option<usize>> = Vec::new();
    let mut run = Run::new(entries);
    run.play(&mut |entry| {
        if entry.action == "alloc" {
            stacks.push(entry.stack);
        }
        Ok(())
    })?;
    let mut pickle = Pickle { out, memo: 0, program: Program::new(), keys: HashMap::new(), last_frames: 0 };
    pickle.begin(&run.allocator.layout(DeviceId(0)), &stacks)?;
    let mut run = Run::new(entries);
    let mut batch = 0;
    run.play(&mut |entry| {
        // Python's pickler appends by the thousand.
        if batch % 1000 == 0 {
            pickle.op(if batch == 0 { b"(" } else { b"e(" })?;
        }
        batch += 1;
        pickle.entry(entry)
    })?;
    pickle.op(b"e")?;
    pickle.finish(&run.optimizer_steps)?;
    Ok(Planted { steps: run.optimizer_steps.len() as u64, leak_bytes: LEAK })
}

/// One entry of the trace.
struct Entry {
    action: &'static str,
    address: u64,
    size: u64,
    time: u64,
    /// None for what autograd does.
    stack: Option<usize>,
    /// Whether it is the second of two entries with one list of frames.
    shares: bool,
}

/// An object of the made-up run.
#[derive(Clone, Copy)]
struct Tensor {
    object: ObjectId,
    address: u64,
    size: u64,
}

/// The made-up run.
struct Run {
    allocator: CachingAllocator,
    left: usize,
    objects: u32,
    events: usize,
    clock: u64,
    random: u64,
    /// When each optimizer step began and ended.
    optimizer_steps: Vec<(u64, u64)>,
}

type Sink<'a> = dyn FnMut(&Entry) -> Result<()> + 'a;

impl Run {
    fn new(entries: usize) -> Self {
        let memory = DeviceMemory { total: None, outside: Bytes::ZERO };
        Self {
            allocator: CachingAllocator::new(&Settings::default(), TieRule::SegmentCounter, &[Some(memory)]),
            left: entries,
            objects: 0,
            events: 0,
            clock: EPOCH,
            random: 0x9e37_79b9_7f4a_7c15,
            optimizer_steps: Vec::new(),
        }
    }

    /// A number below `bound`, the same in every run (xorshift).
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    fn emit(&mut self, sink: &mut Sink<'_>, mut entry: Entry) -> Result<()> {
        if self.left > 0 {
            self.left -= 1;
            self.clock += 1 + u64::from(!entry.shares);
            entry.time = self.clock;
            sink(&entry)?;
        }
        Ok(())
    }

    fn alloc(&mut self, sink: &mut Sink<'_>, size: u64, stack: Option<usize>) -> Result<Option<Tensor>> {
        // A segment and its first block, or neither.
        if self.left < 2 {
            while self.left > 0 {
                let entry =
                    Entry { action: "snapshot", address: 0, size: 0, time: 0, stack: None, shares: false };
                self.emit(sink, entry)?;
            }
            return Ok(None);
        }
        let object = ObjectId(self.objects);
        let (device, stream, pool) = (DeviceId(0), Stream(0), Pool(0));
        let event = Event::Alloc { object, bytes: Bytes::new(size), device, stream, pool };
        self.allocator.apply(self.events, event)?;
        self.objects += 1;
        self.events += 1;
        let address = self.allocator.block_address(object).context("an object has a block")? + BASE;
        let taken: Vec<u64> = (self.allocator.actions().iter())
            .filter_map(|action| match action {
                Action::SegmentAlloc(bytes) => Some(bytes.get()),
                _ => None,
            })
            .collect();
        for size in taken {
            self.emit(sink, Entry { action: "segment_alloc", address, size, time: 0, stack, shares: false })?;
        }
        self.emit(sink, Entry { action: "alloc", address, size, time: 0, stack, shares: false })?;
        Ok(Some(Tensor { object, address, size }))
    }

    fn free(&mut self, sink: &mut Sink<'_>, tensor: Option<Tensor>, stack: Option<usize>) -> Result<()> {
        let Some(Tensor { object, address, size }) = tensor.filter(|_| self.left >= 2) else { return Ok(()) };
        self.allocator.apply(self.events, Event::Free(object))?;
        self.events += 1;
        self.emit(sink, Entry { action: "free_requested", address, size, time: 0, stack, shares: false })?;
        self.emit(sink, Entry { action: "free_completed", address, size, time: 0, stack, shares: true })
    }

    fn play(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        for layer in 0..LAYERS {
            self.alloc(sink, 4 << 20, Some(8 + layer % 4))?;
        }
        while self.left > 0 {
            self.step(sink)?;
        }
        Ok(())
    }

    fn step(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        let batch = 1 + self.below(4);
        let mut saved = Vec::new();
        for layer in 0..LAYERS {
            for operator in 0..6 {
                let stack = 16 + (layer * 6 + operator) % (STACKS - 100);
                let size = batch * (64 << 10) * (1 + operator as u64);
                let scratch = self.alloc(sink, size / 3 + 1000, Some(stack))?;
                saved.push((self.alloc(sink, size, Some(stack))?, stack));
                self.free(sink, scratch, Some(stack))?;
            }
        }
        self.alloc(sink, LEAK, Some(LEAKING))?;
        // Backward; a third of what it does is seen from Python, in hooks.
        let mut gradients = Vec::new();
        while let Some((tensor, stack)) = saved.pop() {
            let stack = (self.below(3) == 0).then_some(stack + 90);
            if saved.len().is_multiple_of(6) {
                gradients.push(self.alloc(sink, 4 << 20, None)?);
            }
            self.free(sink, tensor, stack)?;
        }
        let begun = self.clock + 1;
        for (layer, gradient) in gradients.into_iter().enumerate() {
            let stack = Some(12 + layer % 4);
            let update = self.alloc(sink, 4 << 20, stack)?;
            self.free(sink, update, stack)?;
            self.free(sink, gradient, Some(15))?;
        }
        if self.left > 0 {
            self.clock += 2;
            self.optimizer_steps.push((begun, self.clock));
        }
        Ok(())
    }
}

/// The stacks of the made-up program: which frames each has, innermost first.
struct Program {
    stacks: Vec<Vec<usize>>,
    /// The memo of each frame that was written.
    frames: Vec<Option<u32>>,
}

impl Program {
    fn new() -> Self {
        let mut run = Run::new(0);
        let stack = |stack: usize| {
            let depth = 10 + run.below(81).max(run.below(81)).max(run.below(81)) as usize;
            let mut frames = vec![stack];
            frames.extend((1..depth).map(|_| STACKS + run.below((FRAMES - STACKS) as u64) as usize));
            frames
        };
        Self { stacks: (0..STACKS).map(stack).collect(), frames: vec![None; FRAMES] }
    }

    /// File, line and function of a frame.
    fn frame(frame: usize) -> (String, u32, String) {
        match frame {
            LEAKING => ("/app/train.py".into(), 41, "log_step".into()),
            0..STACKS => {
                (format!("/app/model_{}.py", frame / 20), 10 + frame as u32, format!("forward_{frame}"))
            }
            _ => {
                let file = format!("/app/lib/framework_{}.py", frame / 40);
                (file, 100 + 3 * frame as u32, format!("call_{frame}"))
            }
        }
    }
}

/// Writes what Python's pickler writes for a snapshot.
struct Pickle<'a, W> {
    out: &'a mut W,
    /// How many objects were memoized.
    memo: u32,
    program: Program,
    /// Texts that were written, and their memo.
    keys: HashMap<String, u32>,
    /// The memo of the last list of frames: the two entries of a free share theirs.
    last_frames: u32,
}

impl<W: Write> Pickle<'_, W> {
    fn op(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.out.write_all(bytes)?)
    }

    fn memoize(&mut self) -> Result<u32> {
        self.op(b"\x94")?;
        self.memo += 1;
        Ok(self.memo - 1)
    }

    fn get(&mut self, memo: u32) -> Result<()> {
        match u8::try_from(memo) {
            Ok(short) => self.op(&[b'h', short]),
            Err(_) => self.op(&[b"j".as_slice(), &memo.to_le_bytes()].concat()),
        }
    }

    /// A text object of its own.
    fn new_text(&mut self, text: &str) -> Result<u32> {
        self.op(&[0x8c, text.len() as u8])?;
        self.op(text.as_bytes())?;
        self.memoize()
    }

    /// A text that is one object wherever it stands.
    fn text(&mut self, text: &str) -> Result<()> {
        if let Some(memo) = self.keys.get(text) {
            return self.get(*memo);
        }
        let memo = self.new_text(text)?;
        self.keys.insert(text.to_owned(), memo);
        Ok(())
    }

    fn int(&mut self, value: u64) -> Result<()> {
        if let Ok(value) = u8::try_from(value) {
            self.op(&[b'K', value])
        } else if let Ok(value) = u16::try_from(value) {
            self.op(&[b"M".as_slice(), &value.to_le_bytes()].concat())
        } else if let Ok(value) = i32::try_from(value) {
            self.op(&[b"J".as_slice(), &value.to_le_bytes()].concat())
        } else {
            let bytes = value.to_le_bytes();
            let length = (u64::BITS - value.leading_zeros()) as usize / 8 + 1;
            self.op(&[&[0x8a, length as u8], &bytes[..length.min(8)]].concat())
        }
    }

    fn numbers(&mut self, pairs: &[(&str, u64)]) -> Result<()> {
        for (key, value) in pairs {
            self.text(key)?;
            self.int(*value)?;
        }
        Ok(())
    }

    fn texts(&mut self, pairs: &[(&str, &str)]) -> Result<()> {
        for (key, value) in pairs {
            self.text(key)?;
            self.text(value)?;
        }
        Ok(())
    }

    fn open(&mut self, container: u8) -> Result<u32> {
        self.op(&[container])?;
        let memo = self.memoize()?;
        self.op(b"(")?;
        Ok(memo)
    }

    fn empty_list(&mut self) -> Result<()> {
        self.op(b"]")?;
        self.memoize().map(drop)
    }

    fn common_pool(&mut self) -> Result<()> {
        self.op(b"K\x00K\x00\x86")?;
        self.memoize().map(drop)
    }

    /// The list of frames of a stack; its memo.
    fn frames(&mut self, stack: Option<usize>) -> Result<u32> {
        self.text("frames")?;
        self.op(b"]")?;
        let memo = self.memoize()?;
        let Some(stack) = stack else { return Ok(memo) };
        self.op(b"(")?;
        let frames = self.program.stacks[stack].clone();
        for frame in frames {
            if let Some(memo) = self.program.frames[frame] {
                self.get(memo)?;
                continue;
            }
            let memo = self.open(b'}')?;
            let (file, line, name) = Program::frame(frame);
            self.texts(&[("name", &name), ("filename", &file)])?;
            self.numbers(&[("line", u64::from(line))])?;
            self.op(b"u")?;
            self.program.frames[frame] = Some(memo);
        }
        self.op(b"e")?;
        Ok(memo)
    }

    /// Everything before the entries.
    fn begin(&mut self, segments: &[SegmentLayout], stacks: &[Option<usize>]) -> Result<()> {
        self.op(b"\x80\x04")?;
        self.open(b'}')?;
        self.text("segments")?;
        self.open(b']')?;
        for segment in segments {
            self.segment(segment, stacks)?;
        }
        self.op(b"e")?;
        self.text("device_traces")?;
        self.open(b']')?;
        self.op(b"]")?;
        self.memoize().map(drop)
    }

    fn segment(&mut self, segment: &SegmentLayout, stacks: &[Option<usize>]) -> Result<()> {
        let of = |states: &[State]| -> u64 {
            let blocks = segment.blocks.iter().filter(|block| states.contains(&block.state));
            blocks.map(|block| block.size.get()).sum()
        };
        let requested = segment.blocks.iter().filter_map(|block| block.object);
        self.open(b'}')?;
        self.numbers(&[
            ("device", 0),
            ("address", BASE + segment.address),
            ("total_size", segment.reserved().get()),
            ("allocated_size", of(&[State::Allocated])),
            ("active_size", of(&[State::Allocated, State::Pending])),
            ("requested_size", requested.map(|(_, bytes)| bytes.get()).sum()),
            ("stream", 0),
        ])?;
        self.texts(&[("segment_type", if segment.small { "small" } else { "large" })])?;
        self.text("segment_pool_id")?;
        self.common_pool()?;
        self.text("is_expandable")?;
        self.op(b"\x89")?;
        self.frames(None)?;
        self.text("blocks")?;
        self.open(b']')?;
        let mut address = BASE + segment.address;
        for block in &segment.blocks {
            let (state, requested, stack) = match block.object {
                Some((object, bytes)) => ("active_allocated", bytes.get(), stacks[object.0 as usize]),
                None => ("inactive", 0, None),
            };
            self.open(b'}')?;
            self.numbers(&[("address", address), ("size", block.size.get()), ("requested_size", requested)])?;
            self.texts(&[("state", state)])?;
            self.frames(stack)?;
            self.op(b"u")?;
            address += block.size.get();
        }
        self.op(b"eu")
    }

    fn entry(&mut self, entry: &Entry) -> Result<()> {
        self.open(b'}')?;
        self.texts(&[("action", entry.action)])?;
        self.numbers(&[
            ("addr", entry.address),
            ("size", entry.size),
            ("stream", 0),
            ("time_us", entry.time),
        ])?;
        self.text("compile_context")?;
        self.new_text("N/A")?;
        self.texts(&[("user_metadata", "")])?;
        self.text("pool_id")?;
        self.common_pool()?;
        if entry.shares {
            self.text("frames")?;
            self.get(self.last_frames)?;
        } else {
            self.last_frames = self.frames(entry.stack)?;
        }
        self.op(b"u")
    }

    /// Everything after the entries.
    fn finish(&mut self, optimizer_steps: &[(u64, u64)]) -> Result<()> {
        self.op(b"e")?;
        self.text("allocator_settings")?;
        self.open(b'}')?;
        self.texts(&[("PYTORCH_CUDA_ALLOC_CONF", "")])?;
        self.text("max_split_size")?;
        self.op(b"J\xff\xff\xff\xff")?;
        self.text("garbage_collection_threshold")?;
        self.op(b"G\x00\x00\x00\x00\x00\x00\x00\x00")?;
        self.text("expandable_segments")?;
        self.op(b"\x89u")?;
        self.text("external_annotations")?;
        self.open(b']')?;
        for (begun, ended) in optimizer_steps {
            for (stage, time) in [("START", begun), ("END", ended)] {
                self.open(b'}')?;
                self.texts(&[("stage", stage), ("name", "Optimizer.step#AdamW.step")])?;
                self.numbers(&[("device", 0), ("time_us", *time)])?;
                self.op(b"u")?;
            }
        }
        self.op(b"e")?;
        for name in ["host_segments", "host_traces"] {
            self.text(name)?;
            self.empty_list()?;
        }
        self.op(b"u.")
    }
}

#[cfg(test)]
mod tests {
    use evidence::Snapshot;
    use evidence::snapshot::Plain;
    use ledger::{Category, holders};

    use super::*;

    #[test]
    fn the_planted_leak_is_what_grows() {
        let mut file = Vec::new();
        let planted = write(20_000, &mut file).unwrap();
        let snapshot = Snapshot::read(&file).unwrap();
        assert_eq!(snapshot.warnings, []);
        assert_eq!(snapshot.traces[0].len(), 20_000);
        assert_eq!(snapshot.annotations.len() as u64, 2 * planted.steps);
        let taped = snapshot.tape(&mut Plain).unwrap();
        // The state at the end and the entries agree: nothing was there before, nothing is missing.
        assert_eq!(taped.warnings, []);
        let rows = holders(&taped.tape, taped.tape.len() - 1, DeviceId(0));
        let leak = rows.iter().find(|row| row.name.starts_with("train.py:41 log_step")).unwrap();
        assert_eq!(leak.category, Category::Unattributed);
        assert_eq!(leak.bytes.get(), leak.count * planted.leak_bytes);
        // The last step may be cut before its optimizer.
        assert!(leak.count.abs_diff(planted.steps) <= 1, "{} of {}", leak.count, planted.steps);
    }

    #[test]
    fn every_length_is_met_exactly() {
        for entries in [2000, 2001, 2002, 3000, 4999] {
            let mut file = Vec::new();
            write(entries, &mut file).unwrap();
            let snapshot = Snapshot::read(&file).unwrap();
            assert_eq!(snapshot.traces[0].len(), entries);
            assert_eq!(snapshot.tape(&mut Plain).unwrap().warnings, []);
        }
    }
}
