//! The CUDA driver (`cu*`): entry points by name, contexts, virtual memory and modules.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::device::device;
use crate::ffi::{
    Handle, INVALID_VALUE, In, OUT_OF_MEMORY, Out, SUCCESS, create, function_named, new_handle,
};
use crate::memory::{self, PAGE, Place};
use crate::{graphs, log, runtime};

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;
/// The one context: never followed, only compared.
const CONTEXT: Handle = 0x10;

/// The driver's function of that name, in the version that CUDA 12 and 13 programs ask for.
pub fn entry_point(name: &str) -> *mut c_void {
    let newest = function_named(&format!("{name}_v2"));
    let found = if newest.is_null() { function_named(name) } else { newest };
    if found.is_null() {
        log::line("no entry point", name);
    }
    found
}

/// The PCI address of a device, zero-terminated.
pub fn bus_id(index: c_int) -> String {
    format!("0000:{:02X}:00.0\0", index + 1)
}

/// The identity of a device.
pub fn uuid(index: c_int) -> [u8; 16] {
    let mut bytes = *b"vramledger-gpu-0";
    bytes[15] = b'0' + index as u8;
    bytes
}

/// Blocks of a kernel that fit on one multiprocessor, at least 1; registers are taken to suffice.
pub fn occupancy(threads: c_int, shared: usize) -> c_int {
    let limits = device().limits;
    let by_threads = limits.threads / threads.max(32);
    let by_shared = limits.shared as usize / (shared + device().shared_reserved() as usize).max(1);
    by_threads.min(limits.blocks).min(by_shared as c_int).max(1)
}

// SAFETY of every `no_mangle` below: each name is the CUDA driver's own, is exported once, and has the
// parameters of its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cuInit() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    version.set(runtime::DRIVER_VERSION);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(code: c_int, text: Out<*const c_char>) -> c_int {
    text.set(match code {
        SUCCESS => c"no error".as_ptr(),
        OUT_OF_MEMORY => c"out of memory".as_ptr(),
        _ => c"unknown error".as_ptr(),
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(code: c_int, text: Out<*const c_char>) -> c_int {
    text.set(match code {
        SUCCESS => c"CUDA_SUCCESS".as_ptr(),
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY".as_ptr(),
        _ => c"CUDA_ERROR_UNKNOWN".as_ptr(),
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    _version: c_int,
    _flags: u64,
) -> c_int {
    let found = entry_point(&symbol.text());
    function.set(found);
    if found.is_null() { NOT_FOUND } else { SUCCESS }
}

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress_v2(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    let code = cuGetProcAddress(symbol, function, version, flags);
    status.set(c_int::from(code != SUCCESS));
    code
}

// Devices and contexts.

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    count.set(device().count);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(out: Out<c_int>, index: c_int) -> c_int {
    out.set(index);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, index: c_int) -> c_int {
    value.set(device().attribute(attribute, index));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: Out<u8>, length: c_int, _: c_int) -> c_int {
    let mut bytes = device().name.clone().into_bytes();
    bytes.truncate((length as usize).saturating_sub(1));
    bytes.push(0);
    name.fill(0, &bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid(out: Out<[u8; 16]>, index: c_int) -> c_int {
    out.set(uuid(index));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, index: c_int) -> c_int {
    cuDeviceGetUuid(out, index)
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, _: c_int) -> c_int {
    bytes.set(device().capacity);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    let (unused, all) = memory::info(memory::current_device());
    free.set(unused);
    total.set(all);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxGetState(_: c_int, flags: Out<c_uint>, active: Out<c_int>) -> c_int {
    flags.set(0);
    active.set(1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Handle>, index: c_int) -> c_int {
    context.set(CONTEXT + index as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<Handle>) -> c_int {
    context.set(CONTEXT + memory::current_device() as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetDevice(index: Out<c_int>) -> c_int {
    index.set(memory::current_device());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Handle) -> c_int {
    if context >= CONTEXT {
        memory::set_current_device((context - CONTEXT) as c_int);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<Handle>) -> c_int {
    cuCtxGetCurrent(context)
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(_: Handle, context: Out<Handle>) -> c_int {
    cuCtxGetCurrent(context)
}

// Memory.

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(out: Out<Handle>, bytes: usize) -> c_int {
    match memory::allocate(memory::current_device(), bytes) {
        Some(at) => {
            out.set(at);
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(at: Handle) -> c_int {
    if memory::free(at) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAddressRange_v2(base: Out<Handle>, length: Out<usize>, at: Handle) -> c_int {
    let (place, start, bytes) = memory::place_of(at);
    if place == Place::Host {
        return INVALID_VALUE;
    }
    base.set(start);
    length.set(bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(at: Handle, value: c_uint, count: usize) -> c_int {
    memory::fill_words(at, value, count);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoH_v2(to: Handle, from: Handle, bytes: usize) -> c_int {
    memory::copy(to, from, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoD_v2(to: Handle, from: Handle, bytes: usize) -> c_int {
    memory::copy(to, from, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(out: Out<u64>, attribute: c_int, at: Handle) -> c_int {
    let (place, start, bytes) = memory::place_of(at);
    let Place::Device(index) = place else { return INVALID_VALUE };
    // The answers have different widths: a pointer, an int or an unsigned int. Little-endian halves agree.
    let words = out.bytes();
    match attribute {
        1 => words.fill(0, &(CONTEXT + index as usize).to_le_bytes()), // context
        2 => words.fill(0, &2_u32.to_le_bytes()),                      // memory type: device
        3 => words.fill(0, &at.to_le_bytes()),                         // device pointer
        7 => words.fill(0, &(start as u64).to_le_bytes()),             // buffer id
        8 => words.fill(0, &0_u32.to_le_bytes()),                      // managed
        9 => words.fill(0, &index.to_le_bytes()),                      // device ordinal
        11 => words.fill(0, &start.to_le_bytes()),                     // range start
        12 => words.fill(0, &bytes.to_le_bytes()),                     // range size
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

// Virtual memory, which expandable segments are made of.

/// The head of `CUmemAllocationProp`: what is allocated, and on which device.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(bytes: Out<usize>) -> c_int {
    bytes.set(PAGE);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(out: Out<Handle>, bytes: usize) -> c_int {
    match memory::reserve(bytes) {
        Some(at) => {
            out.set(at);
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(at: Handle) -> c_int {
    if memory::unreserve(at) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(out: Out<Handle>, bytes: usize, properties: In<AllocationProperties>) -> c_int {
    let index = properties.get().map_or(0, |p| p.location);
    match memory::create(index, bytes) {
        Some(handle) => {
            out.set(handle);
            SUCCESS
        }
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: Handle) -> c_int {
    memory::release(handle);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(at: Handle, bytes: usize, _offset: usize, handle: Handle) -> c_int {
    if memory::map_physical(at, bytes, handle) { SUCCESS } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(at: Handle, bytes: usize) -> c_int {
    memory::unmap_physical(at, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRetainAllocationHandle(out: Out<Handle>, at: Handle) -> c_int {
    match memory::retain(at) {
        Some(handle) => {
            out.set(handle);
            SUCCESS
        }
        None => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationPropertiesFromHandle(out: Out<AllocationProperties>) -> c_int {
    let location = memory::current_device();
    out.set(AllocationProperties { kind: 1, handle_types: 0, location_kind: 1, location });
    SUCCESS
}

// Modules, kernels, streams and events.

create! {
    fn cuGraphCreate;
    fn cuModuleLoad;
    fn cuModuleLoadData;
    fn cuModuleLoadDataEx;
    fn cuModuleGetFunction;
    fn cuLibraryLoadData;
    fn cuLibraryGetKernel;
    fn cuLibraryGetModule;
    fn cuKernelGetFunction;
    fn cuEventCreate;
    fn cuStreamCreate;
    fn cuStreamCreateWithPriority;
    fn cuGreenCtxCreate;
    fn cuCtxFromGreenCtx;
    fn cuGreenCtxStreamCreate;
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) -> c_int {
    status.set(c_int::from(graphs::capture_of(stream).is_some()));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphInstantiateWithFlags(out: Out<Handle>) -> c_int {
    out.set(new_handle());
    SUCCESS
}

/// Stack, heap and the like: what a device of this kind has by default.
#[unsafe(no_mangle)]
extern "C" fn cuCtxGetLimit(bytes: Out<usize>, _limit: c_int) -> c_int {
    bytes.set(1024);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuLinkCreate_v2(_: c_uint, _: Handle, _: Handle, state: Out<Handle>) -> c_int {
    state.set(new_handle());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuLinkComplete(_: Handle, cubin: Out<Handle>, size: Out<usize>) -> c_int {
    cubin.set(new_handle());
    size.set(0);
    SUCCESS
}

/// The answer to a question about a kernel, by `CUfunction_attribute`.
fn kernel_attribute(attribute: c_int) -> c_int {
    match attribute {
        0 => 1024,                        // threads per block
        4 => 32,                          // registers
        5 | 6 => device().compiled_for(), // PTX and binary version
        8 => device().shared_optin(),     // dynamic shared memory
        _ => 0,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int) -> c_int {
    value.set(kernel_attribute(attribute));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuKernelGetAttribute(value: Out<c_int>, attribute: c_int) -> c_int {
    value.set(kernel_attribute(attribute));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    _: Handle,
    threads: c_int,
    shared: usize,
) -> c_int {
    blocks.set(occupancy(threads, shared));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuOccupancyMaxActiveClusters(clusters: Out<c_int>) -> c_int {
    clusters.set(1);
    SUCCESS
}
