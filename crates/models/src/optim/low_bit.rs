//! `torchao.optim`'s Adam and AdamW of 8 and 4 bits: codes, a scale for each block of them, a table of values.
//! Parameters that are small, or no whole number of blocks, have their state in their own dtype.
//!
//! A step is compiled for each parameter; what its kernels hand on is what torch 2.15 compiles on an H100.

use engine::{Dims, Tensor, release};
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

/// What the compiled step of a quantized parameter allocates.
fn compiled(kind: Kind, code: Code, parameter: &Tensor) {
    let elements = parameter.numel();
    let buffer = |what, elements: u64, dtype| {
        parameter.beside(what, Category::Temporary, Dims::new(&[elements]), dtype)
    };
    let pair = |what, elements, dtype| (buffer(what, elements, dtype), buffer(what, elements, dtype));
    match kind {
        Kind::AdamW4bit => {
            let (scale, scale_sq) = pair("optimizer.scale", elements / code.block, Dtype::Fp32);
            let (scaled, scaled_sq) = pair("optimizer.scaled", elements, Dtype::Fp32);
            let (codes, codes_sq) = pair("optimizer.codes", elements, Dtype::Int64);
            release!(scaled, codes, scale, scaled_sq, codes_sq, scale_sq);
        }
        Kind::Adam8bit if parameter.size(-1) != code.block => {
            let (moment, moment_sq) = pair("optimizer.moment", elements, Dtype::Fp32);
            release!(moment, moment_sq);
        }
        _ => {}
    }
}
