//! `cargo xtask gen-trace MEGABYTES`: profiler traces of any length, to measure readers with.
//!
//! A made-up training run is written in the shape that the profiler of torch 2.15 writes: steps, operators in
//! operators, calls of Python, kernels, and a memory instant for each block that comes or goes. One block a step is
//! never let go: a leak of known size and operator.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;

/// Arguments of `gen-trace`.
#[derive(Args)]
pub struct GenTrace {
    /// The least size of the trace, in 10^6 bytes
    megabytes: u64,
    /// The file
    #[arg(short, long, default_value = "trace.json")]
    output: PathBuf,
}

/// Writes the trace.
pub fn run(args: &GenTrace) -> Result<()> {
    let path = args.output.display();
    let file = File::create(&args.output).with_context(|| format!("failed to write `{path}`"))?;
    write(args.megabytes * 1_000_000, BufWriter::new(file))
        .with_context(|| format!("failed to write `{path}`"))?;
    Ok(())
}

/// What was put into a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planted {
    /// Steps.
    pub steps: u64,
    /// The most bytes in blocks.
    pub peak: u64,
}

/// The layers of the made-up model.
const LAYERS: u64 = 32;
/// What each step keeps.
const LEAK: u64 = 1 << 20;
/// When the trace begins.
const BASE: u64 = 5_166_372_142_000_000;
/// What is there before the first step.
const BEFORE: u64 = 3 << 30;

/// Writes a trace of at least `least` bytes.
fn write(least: u64, out: impl Write) -> std::io::Result<Planted> {
    let mut trace =
        Trace { out: Counted { out, bytes: 0 }, time: 0, index: 0, allocated: BEFORE, peak: 0, next: 1 };
    trace.out.write_all(
        b"{\n  \"schemaVersion\": 1,\n  \"deviceProperties\": [\n    {\n      \"id\": 0, \"name\": \"made up\"\n    }\n  ],\n  \"traceEvents\": [\n",
    )?;
    let mut steps = 0;
    while trace.out.bytes < least {
        trace.step(steps + 1)?;
        steps += 1;
    }
    trace.out.write_all(b"  {\n    \"ph\": \"i\", \"s\": \"g\", \"name\": \"Record Window End\", \"pid\": \"\", \"tid\": \"\", \"ts\": 0\n  }\n  ],\n  \"traceName\": \"trace.json\"\n}\n")?;
    trace.out.flush()?;
    Ok(Planted { steps, peak: trace.peak })
}

/// Counts what is written.
struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, buffer: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// A trace in the making.
struct Trace<W> {
    out: Counted<W>,
    /// Nanoseconds.
    time: u64,
    index: u64,
    allocated: u64,
    peak: u64,
    /// The next address, in blocks of 512 bytes.
    next: u64,
}

impl<W: Write> Trace<W> {
    fn step(&mut self, step: u64) -> std::io::Result<()> {
        let start = self.time;
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            kept.push(self.operators(&["aten::linear", "aten::addmm"], (8 + layer % 3) << 20)?);
            kept.push(self.operators(&["aten::gelu"], 4 << 20)?);
            let norm = self.operators(&["aten::layer_norm", "aten::native_layer_norm"], 1 << 20)?;
            self.memory(norm, -(1 << 20))?;
        }
        self.operators(&["aten::mean"], LEAK)?;
        self.span("user_annotation", "forward", start, "")?;
        for (address, bytes) in kept.into_iter().rev() {
            let begun = self.time;
            let gradient = self.operators(&["MmBackward0", "aten::mm"], bytes)?;
            self.memory((address, bytes), -bytes.cast_signed())?;
            self.memory(gradient, -bytes.cast_signed())?;
            self.span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begun, DIMS)?;
        }
        let begun = self.time;
        let scratch = self.operators(&["aten::_foreach_sqrt"], 64 << 20)?;
        self.memory(scratch, -(64 << 20))?;
        self.span("user_annotation", "Optimizer.step#AdamW.step", begun, "")?;
        self.span("user_annotation", &format!("ProfilerStep#{step}"), start, "")
    }

    /// Operators in operators, the innermost of which makes a block of `bytes`: its address and size.
    fn operators(&mut self, names: &[&str], bytes: u64) -> std::io::Result<(u64, u64)> {
        let begun = self.time;
        self.time += 700;
        let address = self.next * 512;
        self.next += bytes / 512;
        self.memory((address, bytes), bytes.cast_signed())?;
        self.time += 1900;
        for (depth, name) in names.iter().rev().zip(1..).map(|(name, depth)| (depth, name)) {
            self.span("cpu_op", name, begun + 100 * (names.len() as u64 - depth), DIMS)?;
            self.span("python_function", "torch/nn/modules/module.py(1775): _call_impl", begun, CALL)?;
        }
        self.span("kernel", "void at::native::vectorized_elementwise_kernel<4>", begun, KERNEL)?;
        Ok((address, bytes))
    }

    /// A span from `begun` until now.
    fn span(&mut self, category: &str, name: &str, begun: u64, arguments: &str) -> std::io::Result<()> {
        self.time += 50;
        self.index += 1;
        let (ts, index, lasts) = (micros(BASE + begun), self.index, self.time - begun);
        let dur = micros(lasts);
        let thread = if category == "kernel" { 7 } else { 4242 };
        write!(
            self.out,
            "  {{\n    \"ph\": \"X\", \"cat\": \"{category}\", \"name\": \"{name}\", \"pid\": 4242, \"tid\": {thread},\n    \
             \"ts\": {ts}, \"dur\": {dur},\n    \"args\": {{\n      \"External id\": {index},{arguments} \"Ev Idx\": {index}\n    }}\n  }},\n"
        )
    }

    /// A memory instant of `block`.
    fn memory(&mut self, (address, size): (u64, u64), bytes: i64) -> std::io::Result<()> {
        debug_assert_eq!(size, bytes.unsigned_abs());
        self.time += 30;
        self.index += 1;
        self.allocated = self.allocated.saturating_add_signed(bytes);
        self.peak = self.peak.max(self.allocated);
        // Segments come in two mebibytes and stay.
        let reserved = self.peak.next_multiple_of(2 << 20);
        let (ts, index, allocated) = (micros(BASE + self.time), self.index, self.allocated);
        write!(
            self.out,
            "  {{\n    \"ph\": \"i\",\n    \"cat\": \"cpu_instant_event\",\n    \"s\": \"t\",\n    \"name\": \"[memory]\",\n    \
             \"pid\": 4242,\n    \"tid\": 4242,\n    \"ts\": {ts}\n    ,\n    \"args\": {{\n      \"Total Reserved\": {reserved}, \
             \"Total Allocated\": {allocated}, \"Bytes\": {bytes}, \"Device Id\": 0, \"Device Type\": 1, \"Addr\": {address}, \
             \"finished\": false, \"Ev Idx\": {index}\n    }}\n  }},\n"
        )
    }
}

/// What operators tell of their inputs.
const DIMS: &str = " \"Record function id\": 0, \"Concrete Inputs\": [\"\", \"\", \"\"], \"Input type\": [\"c10::BFloat16\", \"c10::BFloat16\", \"c10::BFloat16\"], \"Input Strides\": [[1], [4096, 1], [1, 4096]], \"Input Dims\": [[4096], [2048, 4096], [4096, 4096]],";
/// What calls of Python tell.
const CALL: &str = " \"Python parent id\": 17, \"Python id\": 18,";
/// What kernels tell.
const KERNEL: &str = " \"queued\": 0, \"device\": 0, \"context\": 1, \"stream\": 7, \"correlation\": 99, \"registers per thread\": 32, \"blocks per SM\": 9.7, \"grid\": [1280, 1, 1], \"block\": [128, 1, 1],";

/// Nanoseconds, as the profiler writes them.
fn micros(nanoseconds: u64) -> String {
    format!("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000)
}

#[cfg(test)]
mod tests {
    use ledger::Measure;

    use super::*;

    #[test]
    fn the_planted_leak_and_the_peak_are_found() {
        let mut text = Vec::new();
        let planted = write(2_000_000, &mut text).unwrap();
        assert!(planted.steps > 2);
        let trace = evidence::Trace::read(text.as_slice(), None).unwrap();
        let books = ledger::replay(&trace.tape, None);
        let peak = books.peaks.get(Measure::Allocated).unwrap();
        assert_eq!(peak.bytes.get(), planted.peak);
        let leak = peak.contributors.iter().find(|row| row.name == "aten::mean").unwrap();
        assert_eq!(leak.bytes.get(), planted.steps * LEAK);
        assert_eq!(trace.warnings.len(), 1, "{:?}", trace.warnings);
        assert_eq!((trace.without_operator, trace.updates), (0, planted.steps));
    }
}
