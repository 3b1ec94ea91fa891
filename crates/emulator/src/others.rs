//! cuFFT, cuSPARSE, cuSOLVER, CUPTI and the like: handles, and sizes of zero.

use std::ffi::{c_char, c_int};

use crate::ffi::{Handle, Out, SUCCESS, create, no_bytes, text};

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

no_bytes! {
    fn cusolverDnSpotrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnDpotrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnCpotrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnZpotrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnSgetrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnDgetrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnCgetrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnZgetrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnSgeqrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnDgeqrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnCgeqrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnZgeqrf_bufferSize(_ _ _ _ _) -> c_int;
    fn cusolverDnSgesvd_bufferSize(_ _ _) -> c_int;
    fn cusolverDnDgesvd_bufferSize(_ _ _) -> c_int;
    fn cusolverDnCgesvd_bufferSize(_ _ _) -> c_int;
    fn cusolverDnZgesvd_bufferSize(_ _ _) -> c_int;
    fn cusolverDnSgesvdj_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDgesvdj_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCgesvdj_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZgesvdj_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSgesvdjBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDgesvdjBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCgesvdjBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZgesvdjBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSgesvdaStridedBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDgesvdaStridedBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCgesvdaStridedBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZgesvdaStridedBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSsytrf_bufferSize(_ _ _ _) -> c_int;
    fn cusolverDnDsytrf_bufferSize(_ _ _ _) -> c_int;
    fn cusolverDnCsytrf_bufferSize(_ _ _ _) -> c_int;
    fn cusolverDnZsytrf_bufferSize(_ _ _ _) -> c_int;
    fn cusolverDnSsyevd_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDsyevd_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCheevd_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZheevd_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSsyevjBatched_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDsyevjBatched_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCheevjBatched_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZheevjBatched_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSsyevj_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDsyevj_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCheevj_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZheevj_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSorgqr_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDorgqr_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCungqr_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZungqr_bufferSize(_ _ _ _ _ _ _) -> c_int;
    fn cusolverDnSormqr_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnDormqr_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnCunmqr_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnZunmqr_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusolverDnXpotrf_bufferSize(_ _ _ _ _ _ _ _) -> usize, usize;
    fn cusolverDnXgeqrf_bufferSize(_ _ _ _ _ _ _ _ _ _) -> usize, usize;
    fn cusolverDnXsyevd_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> usize, usize;
    fn cusolverDnXsyevBatched_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> usize, usize;
    fn cusolverDnXsytrs_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> usize, usize;
    fn cusolverDnXgeev_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> usize, usize;
    fn cufftXtMakePlanMany(_ _ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpMM_bufferSize(_ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpMV_bufferSize(_ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSDDMM_bufferSize(_ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpSM_bufferSize(_ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpSV_bufferSize(_ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpGEMM_workEstimation(_ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseSpGEMM_compute(_ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseXcoosort_bufferSizeExt(_ _ _ _ _ _) -> usize;
    fn cusparseXcsrsort_bufferSizeExt(_ _ _ _ _ _) -> usize;
    fn cusparseScsrgeam2_bufferSizeExt(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseDcsrgeam2_bufferSizeExt(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseCcsrgeam2_bufferSizeExt(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseZcsrgeam2_bufferSizeExt(_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _) -> usize;
    fn cusparseXcsrgeam2Nnz(_ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseSbsrsv2_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseDbsrsv2_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseCbsrsv2_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseZbsrsv2_bufferSize(_ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseSbsrsm2_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseDbsrsm2_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseCbsrsm2_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseZbsrsm2_bufferSize(_ _ _ _ _ _ _ _ _ _ _ _ _) -> c_int;
    fn cusparseLtMatmulGetWorkspace(_ _) -> usize;
    fn cusparseLtSpMMACompressedSize2(_ _) -> usize, usize;
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

/// The size of a sparse matrix: rows, columns and non-zero elements are not known here.
#[unsafe(no_mangle)]
extern "C" fn cusparseSpMatGetSize(_: Handle, rows: Out<i64>, columns: Out<i64>, filled: Out<i64>) -> c_int {
    rows.set(0);
    columns.set(0);
    filled.set(0);
    SUCCESS
}
