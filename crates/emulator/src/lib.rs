//! Stands in for the CUDA libraries, so that an unmodified PyTorch program runs with no GPU.
//!
//! Loaded with `LD_PRELOAD` and found as `libcuda.so.1` and `libnvidia-ml.so.1`. Memory, devices, streams
//! and handles are real enough for PyTorch's allocator and autograd to do exactly what they do on the
//! device; kernels do nothing. Every function that is not written by hand is a stub that says success.
//!
//! The device is described by the environment: `VRAMLEDGER_GPU_NAME`, `_CAPABILITY` (9.0), `_SMS` (132),
//! `_CAPACITY` and `_CONTEXT` in bytes, `_COUNT` (1), `_ADDRESSES` (`up` or `down`); without it, an H100 of
//! 80 GB. `VRAMLEDGER_EMULATOR_LOG` names a file for the calls that nobody wrote for real.
//!
//! What it cannot know, and the ledger of a run has to say where it matters: workspaces that cuDNN, cuSOLVER,
//! cuSPARSE and cuFFT would ask for (0 here); memory those libraries, cuBLAS and NCCL take for themselves; when
//! work on a side stream ends (at once here); values, so which experts a router chooses or whether a loss is
//! finite (small results are computed by the recorder, the others are zero).
#![allow(non_snake_case, reason = "the names are those of the CUDA libraries")]

mod arena;
mod blas;
mod device;
mod dnn;
mod driver;
mod ffi;
mod graphs;
mod log;
mod memory;
mod nccl;
mod nvml;
mod others;
mod rnn;
mod runtime;

/// Defines one exported function a name that answers success (0) and is logged at its first call.
macro_rules! stubs {
    ($($name:ident)*) => { $(
        // SAFETY: the name is the C library's own and is exported once; a call passes arguments in
        // registers or on the caller's stack, so ignoring them is sound.
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> usize {
            static SEEN: std::sync::Once = std::sync::Once::new();
            SEEN.call_once(|| log::line("stub", stringify!($name)));
            0
        }
    )* };
}

/// Tells a program, the recorder for one, that the device is emulated and its memory is the process's own.
// SAFETY: the name is this library's own and is exported once.
#[unsafe(no_mangle)]
extern "C" fn vramledger_emulator() -> std::ffi::c_int {
    1
}

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
