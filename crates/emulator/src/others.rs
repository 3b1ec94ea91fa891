//! cuFFT, cuSPARSE, cuSOLVER, CUPTI and the like: handles, and sizes of zero.

use std::ffi::{c_char, c_int};

use crate::ffi::{Handle, Out, SUCCESS, create, text};

create! {
    fn cusolverDnCreate;
    fn cusolverDnCreateGesvdjInfo;
    fn cusolverDnCreateParams;
    fn cusparseCreate;
    fn cusparseCreateBsrsm2Info;
    fn cusparseCreateBsrsv2Info;
    fn cusparseCreateCoo;
    fn cusparseCreateCsr;
    fn cusparseCreateDnMat;
    fn cusparseCreateDnVec;
    fn cusparseCreateMatDescr;
    fn cusparseSpGEMM_createDescr;
    fn cusparseSpSM_createDescr;
    fn cusparseSpSV_createDescr;
    fn cuptiSubscribe;
}

text! {
    fn cusparseGetErrorString => c"success";
}

// SAFETY of every `no_mangle` below: each name is its library's own, is exported once, and has the
// parameters of its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cufftCreate(plan: Out<c_int>) -> c_int {
    plan.set(1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuptiGetResultString(_: c_int, text: Out<*const c_char>) -> c_int {
    text.set(c"success".as_ptr());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNextRecord() -> c_int {
    // `CUPTI_ERROR_MAX_LIMIT_REACHED`: the buffer holds no record.
    12
}

#[unsafe(no_mangle)]
extern "C" fn cuptiActivityGetNumDroppedRecords(_: Handle, _: u32, dropped: Out<usize>) -> c_int {
    dropped.set(0);
    SUCCESS
}
