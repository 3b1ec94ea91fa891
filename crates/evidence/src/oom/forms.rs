//! The forms of out-of-memory messages, by how they begin.
//!
//! They are looked for in a text without white space, so that none has any.

use std::sync::LazyLock;

use regex::Regex;

use super::size::SIZE;

/// How a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// The caching allocators of PyTorch.
    Caching,
    MallocAsync,
    WarningLine,
    Mps,
    MpsBuffer,
    Mlx,
    /// XLA, with what was asked for.
    Xla,
    /// XLA for TPU, with what is used of what there is.
    XlaUsed,
    Bfc,
    TensorFlow,
    TensorFlowDriver,
    Nccl,
    NcclFailure,
    Cpu,
    Masked,
    Bare,
}

/// Where a message begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) form: Form,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The forms; what stands first wins where two begin in one place.
pub(super) static FORMS: LazyLock<Vec<(Form, Regex)>> = LazyLock::new(|| {
    let device = "(CUDA|HIP|XPU|NPU|MUSA|MLU|GCU|HPU|MTIA)";
    let forms = [
        (Form::Caching, format!(r"{device}outofmemory\.?[0-9A-Za-z_]{{0,40}}?[tT]riedtoallocate{SIZE}")),
        (Form::MallocAsync, r"Allocationondevice([0-9]{0,5})wouldexceedallowedmemory\.?(?:\(outofmemory\))?".into()),
        (
            Form::WarningLine,
            r"memoryallocationfailedwithOOMondevice([0-9]{1,5})whiletryingtoallocate([0-9]{1,20})bytes".into(),
        ),
        (Form::Mps, "MPSbackendoutofmemory".into()),
        (Form::MpsBuffer, format!("Invalidbuffersize:{SIZE}")),
        (
            Form::Mlx,
            r"(?:\[metal::malloc\]Attemptingtoallocate|\[malloc(?:_or_wait)?\]Unabletoallocate)([0-9]{1,20})bytes|\[METAL\]Commandbufferexecutionfailed:InsufficientMemory"
                .into(),
        ),
        (
            Form::Xla,
            format!(r"(?:RESOURCE_EXHAUSTED:)?[Oo]utofmemory(?:while(?:trying)?(?:to)?)?allocat(?:e|ing){SIZE}"),
        ),
        (
            Form::XlaUsed,
            format!(r"Ranoutofmemoryinmemoryspace([0-9A-Za-z_]{{1,20}}?)(?-u:\b)[!-~]{{0,40}}?Used{SIZE}of{SIZE}"),
        ),
        (Form::Bfc, format!(r"Allocator\(([0-9A-Za-z_]{{1,40}})\)ranoutofmemorytryingtoallocate{SIZE}(?:\(roundedto([0-9]{{1,20}})\))?")),
        (
            Form::TensorFlowDriver,
            r"failedtoallocate[0-9A-Za-z_.]{1,40}\(([0-9]{1,20})bytes\)fromdevice:[!-~]{0,40}?CUDA_ERROR_OUT_OF_MEMORY(?::outofmemory)?".into(),
        ),
        (
            Form::TensorFlow,
            r"OOMwhenallocatingtensorwithshape\[([0-9,]{0,200})\]andtype([0-9A-Za-z_]{1,20}?)on([!-~]{0,120}?device:(?:GPU|CPU):[0-9]{1,5})".into(),
        ),
        (Form::Nccl, r"FailedtoCUDA(?:host)?(?:c|m)?alloc(?:async)?([0-9]{1,20})(?:bytes)?".into()),
        (Form::NcclFailure, r"NCCLWARNCudafailure(?:[0-9]{1,3})?'outofmemory'".into()),
        (
            Form::Cpu,
            format!(r"(?:DefaultCPUAllocator:)?(?:notenough|can'tallocate)memory:youtriedtoallocate{SIZE}"),
        ),
        (
            Form::Masked,
            r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT|CUTENSOR|HIPBLAS|HIPFFT|MIOPEN)_(?:STATUS_|STATUS)?(?:ALLOC_FAILED|AllocFailed|ALLOCATION_FAILED)|NVML_SUCCESS==rINTERNALASSERTFAILED[!-~]{0,80}?CUDACachingAllocator"
                .into(),
        ),
        (
            Form::Bare,
            r"cudaruntimeerror\(2\):outofmemory|(CUDA|HIP|XPU|NPU|MUSA|MLU)(?:driver|runtime)?(?:error)?:?outofmemory|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)"
                .into(),
        ),
    ];
    let build = |(form, text): (Form, String)| {
        (form, Regex::new(&text).expect("the form of a message is a regular expression"))
    };
    forms.into_iter().map(build).collect()
});

/// What every message has somewhere, also where a line is broken; in bytes, so that nothing is decoded for it.
pub(super) static HINT: LazyLock<regex::bytes::Regex> = LazyLock::new(|| {
    let words = [
        "outofmemory",
        "triedtoallocate",
        "tryingtoallocate",
        "wouldexceedallowedmemory",
        "notenoughmemory",
        "ALLOC_FAILED",
        "AllocFailed",
        "RESOURCE_EXHAUSTED",
        "FailedtoCUDA",
        "Attemptingtoallocate",
        "Unabletoallocate",
        "cudaErrorMemoryAllocation",
        "OUT_OF_MEMORY",
        "OutOfMemory",
        "OUT_OF_RESOURCES",
        "OUT_OF_DEVICE_MEMORY",
        "OOMwhenallocating",
        "Invalidbuffersize:",
        "InsufficientMemory",
        "NVML_SUCCESS==r",
        "can'tallocatememory",
    ];
    let loose = |word: &str| {
        let letters: Vec<String> = word.chars().map(|letter| regex::escape(&letter.to_string())).collect();
        letters.join(r"\s*")
    };
    // The words are ours: they are a regular expression on every run or on none.
    regex::bytes::Regex::new(&format!("(?-u:{})", words.map(loose).join("|")))
        .expect("the words of messages are a regular expression")
});

/// The longest message, white space aside.
const LONGEST: usize = 1 << 14;

/// Where messages begin in `text`, which has no white space.
pub(super) fn heads(text: &str) -> Vec<Head> {
    let mut heads: Vec<Head> = Vec::new();
    for (form, regex) in FORMS.iter() {
        let more =
            regex.find_iter(text).map(|found| Head { form: *form, start: found.start(), end: found.end() });
        let known = heads.len();
        let more: Vec<Head> = more
            .filter(|head| {
                let before = heads[..known].partition_point(|other| other.start < head.end);
                let overlaps = heads[..before].last().is_some_and(|other| other.end > head.start);
                let quoted = *form == Form::Bare && is_quoted(text, head.start);
                !overlaps && !quoted
            })
            .collect();
        heads.extend(more);
        heads.sort_by_key(|head| head.start);
    }
    heads
}

/// Whether what begins at `start` is a text within a program: `if "out of memory" in str(error)`.
fn is_quoted(text: &str, start: usize) -> bool {
    text[..start].ends_with(['"', '\''])
}

/// Where the message of `head` ends at the latest; the next one begins at `next`.
pub(super) fn end(text: &str, head: &Head, next: usize) -> usize {
    let mut end = next.min(head.end.saturating_add(LONGEST)).max(head.end);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let tail = &text[head.end..end];
    tail.find("Traceback(mostrecentcalllast)").map_or(end, |stop| head.end + stop)
}

/// Whether `bytes` are UTF-16, as some shells write what they redirect.
pub(super) fn is_wide(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff])
}

/// A wide text in UTF-8.
pub(super) fn narrowed(bytes: &[u8]) -> Vec<u8> {
    let little = bytes.starts_with(&[0xff, 0xfe]);
    let unit = |pair: &[u8]| {
        let pair = [pair[0], pair[1]];
        if little { u16::from_le_bytes(pair) } else { u16::from_be_bytes(pair) }
    };
    let units: Vec<u16> = bytes[2..].chunks_exact(2).map(unit).collect();
    String::from_utf16_lossy(&units).into_bytes()
}
