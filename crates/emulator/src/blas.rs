//! cuBLAS and cuBLASLt: handles, and one algorithm for every product.

use std::ffi::c_int;

use crate::ffi::{Handle, Out, SUCCESS, create, text};

create! {
    fn cublasCreate_v2;
    fn cublasLtCreate;
    fn cublasLtMatmulDescCreate;
    fn cublasLtMatmulPreferenceCreate;
    fn cublasLtMatrixLayoutCreate;
}

text! {
    fn cublasGetStatusString => c"success";
    fn cublasGetStatusName => c"CUBLAS_STATUS_SUCCESS";
}

// SAFETY of every `no_mangle` below: each name is cuBLAS's own, is exported once, and has the parameters
// of its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cublasGetPointerMode_v2(_: Handle, mode: Out<c_int>) -> c_int {
    mode.set(0);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasGetMathMode(_: Handle, mode: Out<c_int>) -> c_int {
    mode.set(0);
    SUCCESS
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _lt: Handle,
    _operation: Handle,
    _a: Handle,
    _b: Handle,
    _c: Handle,
    _d: Handle,
    _preference: Handle,
    _asked: c_int,
    results: Out<Heuristic>,
    found: Out<c_int>,
) -> c_int {
    results.set(Heuristic { algorithm: [0; 8], workspace: 0, state: SUCCESS, waves: 1.0, reserved: [0; 4] });
    found.set(1);
    SUCCESS
}
