//! `torchao.optim`'s Adam and AdamW of 8 and 4 bits: codes, a scale for each block of them, a table of values.
//! Parameters that are small, or no whole number of blocks, have their state in their own dtype.
//!
//! A step is compiled for each parameter; what its kernels hand on is what torch 2.15 compiles on an H100.

use engine::{Dims, Tensor};
use ledger::{Category, Dtype};

use super::{Form, Kind, Slot};

/// Parameters of fewer elements are not quantized.
const LEAST: u64 = 4096;

/// How a state is quantized.
#[derive(Clone, Copy)]
struct Code {
    bits: u64,
    /// Elements that share a scale.
    block: u64,
}

impl Code {
    const fn of(kind: Kind) -> Self {
        match kind {
            Kind::Adam4bit | Kind::AdamW4bit => Self { bits: 4, block: 128 },
            _ => Self { bits: 8, block: 256 },
        }
    }

    const fn holds(self, elements: u64) -> bool {
        elements >= LEAST && elements.is_multiple_of(self.block)
    }
}

pub(super) fn step(form: Form, slots: &mut [Slot]) {
    let code = Code::of(form.kind);
    for slot in slots {
        let elements = slot.parameter.numel();
        let quantized = code.holds(elements);
        if slot.state.is_empty() {
            for moment in ["exp_avg", "exp_avg_sq"] {
                if quantized {
                    slot.keep(moment, &[elements * code.bits / 8], Dtype::Uint8);
                    slot.keep(&format!("{moment}.scale"), &[elements / code.block], Dtype::Fp32);
                    slot.keep(&format!("{moment}.values"), &[1 << code.bits], Dtype::Fp32);
                } else {
                    slot.keep_like(moment);
                }
            }
        }
        if quantized {
            compiled(form.kind, code, &slot.parameter);
        }
    }
}

/// How the rows of a parameter lie in its blocks, which decides how its step is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// A row is a block.
    Block,
    /// A row is a whole number of blocks, or a block of rows.
    Aligned,
    /// Blocks begin and end within rows.
    Across,
}

impl Rows {
    fn of(parameter: &Tensor, block: u64) -> Self {
        match parameter.size(-1) {
            row if row == block => Self::Block,
            row if row.is_multiple_of(block) || block.is_multiple_of(row) => Self::Aligned,
            _ => Self::Across,
        }
    }
}

/// What a compiled step does to memory.
#[derive(Clone, Copy)]
enum Move {
    /// An fp32 value for each block.
    Scale,
    /// An fp32 value for each element.
    Moment,
    /// An int64 value for each element.
    Code,
    /// A byte for each element.
    Byte,
    /// The buffer made at this place is let go.
    Free(usize),
}

/// What the compiled step of a parameter does.
const fn moves(kind: Kind, rows: Rows) -> &'static [Move] {
    use Move::{Byte, Code, Free, Moment, Scale};
    match (kind, rows) {
        (Kind::AdamW8bit, Rows::Across) => {
            &[Scale, Scale, Moment, Moment, Free(2), Free(3), Free(0), Free(1)]
        }
        (Kind::Adam8bit, Rows::Aligned) => &[Moment, Moment, Free(0), Free(1)],
        (Kind::Adam8bit, Rows::Across) => &[Moment, Moment, Scale, Free(0), Free(1), Free(2)],
        (Kind::AdamW4bit, Rows::Block) => &[Moment, Moment, Code, Code, Free(0), Free(2), Free(1), Free(3)],
        (Kind::AdamW4bit, Rows::Across) => {
            &[Scale, Scale, Moment, Moment, Code, Code, Free(0), Free(1), Free(2), Free(4), Free(3), Free(5)]
        }
        (Kind::AdamW4bit, _) => {
            &[Scale, Scale, Moment, Moment, Code, Code, Free(2), Free(4), Free(0), Free(3), Free(5), Free(1)]
        }
        (Kind::Adam4bit, Rows::Block) => &[Byte, Byte, Free(1), Free(0)],
        (Kind::Adam4bit, _) => &[Moment, Moment, Byte, Free(0), Byte, Free(1), Free(2), Free(3)],
        _ => &[],
    }
}

/// The compiled step of a quantized parameter.
fn compiled(kind: Kind, code: Code, parameter: &Tensor) {
    let elements = parameter.numel();
    let buffer = |what, elements: u64, dtype| {
        Some(parameter.beside(what, Category::Temporary, Dims::new(&[elements]), dtype))
    };
    let mut made: Vec<Option<Tensor>> = Vec::new();
    for step in moves(kind, Rows::of(parameter, code.block)) {
        match step {
            Move::Scale => made.push(buffer("optimizer.scale", elements / code.block, Dtype::Fp32)),
            Move::Moment => made.push(buffer("optimizer.moment", elements, Dtype::Fp32)),
            Move::Code => made.push(buffer("optimizer.code", elements, Dtype::Int64)),
            Move::Byte => made.push(buffer("optimizer.byte", elements, Dtype::Uint8)),
            Move::Free(place) => drop(made[*place].take()),
        }
    }
}
