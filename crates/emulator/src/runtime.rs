//! The CUDA runtime (`cuda*`): devices, memory, streams, events and launches.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::device::{Device, device};
use crate::ffi::{Handle, INVALID_VALUE, In, OUT_OF_MEMORY, Out, SUCCESS, create, new_handle};
use crate::memory::{self, Place};
use crate::{driver, graphs};

/// The version of CUDA that the emulated driver supports.
pub const DRIVER_VERSION: c_int = 13_020;
/// `cudaErrorInvalidDevice`.
const INVALID_DEVICE: c_int = 101;
/// `cudaErrorInvalidDevicePointer`, which `cudaFree` answers for what it did not allocate.
const INVALID_POINTER: c_int = 17;

thread_local! {
    static LAST_ERROR: Cell<c_int> = const { Cell::new(SUCCESS) };
}

/// Remembers an error for `cudaGetLastError`, as every call of the runtime does, and passes it on.
fn answer(code: c_int) -> c_int {
    if code != SUCCESS {
        LAST_ERROR.set(code);
    }
    code
}

// SAFETY of every `no_mangle` below: each name is the CUDA runtime's own, is exported once, and has the
// parameters of its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> c_int {
    LAST_ERROR.replace(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> c_int {
    LAST_ERROR.get()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"cudaSuccess",
        OUT_OF_MEMORY => c"cudaErrorMemoryAllocation",
        INVALID_VALUE => c"cudaErrorInvalidValue",
        INVALID_DEVICE => c"cudaErrorInvalidDevice",
        _ => c"cudaErrorUnknown",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    match code {
        SUCCESS => c"no error",
        OUT_OF_MEMORY => c"out of memory",
        INVALID_VALUE => c"invalid argument",
        INVALID_DEVICE => c"invalid device ordinal",
        _ => c"unknown error",
    }
    .as_ptr()
}

// Devices.

#[unsafe(no_mangle)]
extern "C" fn cudaDriverGetVersion(version: Out<c_int>) -> c_int {
    version.set(DRIVER_VERSION);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceCount(count: Out<c_int>) -> c_int {
    count.set(device().count);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDevice(index: Out<c_int>) -> c_int {
    index.set(memory::current_device());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(index: c_int) -> c_int {
    answer(if memory::set_current_device(index) { SUCCESS } else { INVALID_DEVICE })
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetAttribute(value: Out<c_int>, attribute: c_int, index: c_int) -> c_int {
    value.set(device().attribute(attribute, index));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetPCIBusId(bus: Out<u8>, length: c_int, index: c_int) -> c_int {
    let name = driver::bus_id(index);
    if (length as usize) < name.len() {
        return answer(INVALID_VALUE);
    }
    bus.fill(0, name.as_bytes());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceCanAccessPeer(can: Out<c_int>, one: c_int, other: c_int) -> c_int {
    can.set(c_int::from(one != other));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) -> c_int {
    least.set(0);
    greatest.set(-5);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceProperties(properties: Out<u8>, index: c_int) -> c_int {
    write_properties(properties, index, Layout::Cuda13)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDeviceProperties_v2(properties: Out<u8>, index: c_int) -> c_int {
    write_properties(properties, index, Layout::Cuda12)
}

/// CUDA 12 and 13 give `cudaDeviceProp` different layouts, and its getter different names.
#[derive(Clone, Copy)]
enum Layout {
    Cuda12,
    Cuda13,
}

fn write_properties(out: Out<u8>, index: c_int, layout: Layout) -> c_int {
    let d: &Device = device();
    if !(0..d.count).contains(&index) {
        return answer(INVALID_DEVICE);
    }
    let size = match layout {
        Layout::Cuda12 => 1032,
        Layout::Cuda13 => 1008,
    };
    let mut bytes = vec![0_u8; size];
    let name = d.name.as_bytes();
    let length = name.len().min(255);
    bytes[..length].copy_from_slice(&name[..length]);
    bytes[256..272].copy_from_slice(&driver::uuid(index));
    // Offsets of driver_types.h: the same up to `textureAlignment`, then one for each layout.
    let mut put = |offsets: (usize, usize), value: i64, width: usize| {
        let at = match layout {
            Layout::Cuda12 => offsets.0,
            Layout::Cuda13 => offsets.1,
        };
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    };
    let attribute = |number| i64::from(d.attribute(number, index));
    put((288, 288), d.capacity as i64, 8); // totalGlobalMem
    put((296, 296), attribute(8), 8); // sharedMemPerBlock
    put((304, 304), attribute(12), 4); // regsPerBlock
    put((308, 308), attribute(10), 4); // warpSize
    put((312, 312), attribute(11), 8); // memPitch
    put((320, 320), attribute(1), 4); // maxThreadsPerBlock
    put((324, 324), 1024, 4); // maxThreadsDim
    put((328, 328), 1024, 4);
    put((332, 332), 64, 4);
    put((336, 336), attribute(5), 4); // maxGridSize
    put((340, 340), attribute(6), 4);
    put((344, 344), attribute(7), 4);
    put((352, 352), attribute(9), 8); // totalConstMem
    put((360, 360), attribute(75), 4); // major
    put((364, 364), attribute(76), 4); // minor
    put((368, 368), attribute(14), 8); // textureAlignment
    put((388, 384), attribute(16), 4); // multiProcessorCount
    put((400, 392), 1, 4); // canMapHostMemory
    put((576, 560), 1, 4); // concurrentKernels
    put((580, 564), 1, 4); // ECCEnabled
    put((584, 568), attribute(33), 4); // pciBusID
    put((600, 584), attribute(40), 4); // asyncEngineCount
    put((604, 588), 1, 4); // unifiedAddressing
    put((612, 592), attribute(37), 4); // memoryBusWidth
    put((616, 596), attribute(38), 4); // l2CacheSize
    put((620, 600), attribute(108), 4); // persistingL2CacheMaxSize
    put((624, 604), attribute(39), 4); // maxThreadsPerMultiProcessor
    put((628, 608), 1, 4); // streamPrioritiesSupported
    put((632, 612), 1, 4); // globalL1CacheSupported
    put((636, 616), 1, 4); // localL1CacheSupported
    put((640, 624), attribute(81), 8); // sharedMemPerMultiprocessor
    put((648, 632), attribute(82), 4); // regsPerMultiprocessor
    put((652, 636), 1, 4); // managedMemory
    put((660, 644), attribute(85), 4); // multiGpuBoardGroupID
    put((676, 656), 1, 4); // concurrentManagedAccess
    put((680, 660), 1, 4); // computePreemptionSupported
    put((684, 664), 1, 4); // canUseHostPointerForRegisteredMem
    put((688, 668), 1, 4); // cooperativeLaunch
    put((696, 672), attribute(97), 8); // sharedMemPerBlockOptin
    put((712, 688), attribute(106), 4); // maxBlocksPerMultiProcessor
    put((716, 692), attribute(109), 4); // accessPolicyMaxWindowSize
    put((720, 696), attribute(111), 8); // reservedSharedMemPerBlock
    put((744, 720), 1, 4); // memoryPoolsSupported
    put((772, 748), attribute(120), 4); // clusterLaunch
    out.fill(0, &bytes);
    SUCCESS
}

// Memory.

#[unsafe(no_mangle)]
extern "C" fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) -> c_int {
    let (unused, all) = memory::info(memory::current_device());
    free.set(unused);
    total.set(all);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMalloc(out: Out<Handle>, bytes: usize) -> c_int {
    if bytes == 0 {
        out.set(0);
        return SUCCESS;
    }
    match memory::allocate(memory::current_device(), bytes) {
        Some(at) => {
            out.set(at);
            SUCCESS
        }
        None => answer(OUT_OF_MEMORY),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocManaged(out: Out<Handle>, bytes: usize) -> c_int {
    cudaMalloc(out, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocAsync(out: Out<Handle>, bytes: usize) -> c_int {
    cudaMalloc(out, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaFree(at: Handle) -> c_int {
    answer(if at == 0 || memory::free(at) { SUCCESS } else { INVALID_POINTER })
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeAsync(at: Handle) -> c_int {
    cudaFree(at)
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostAlloc(out: Out<Handle>, bytes: usize) -> c_int {
    match memory::allocate_host(bytes) {
        Some(at) => {
            out.set(at);
            SUCCESS
        }
        None => answer(OUT_OF_MEMORY),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudaMallocHost(out: Out<Handle>, bytes: usize) -> c_int {
    cudaHostAlloc(out, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaFreeHost(at: Handle) -> c_int {
    answer(if at == 0 || memory::free_host(at) { SUCCESS } else { INVALID_VALUE })
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostRegister(at: Handle, bytes: usize) -> c_int {
    memory::register_host(at, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostUnregister(at: Handle) -> c_int {
    memory::unregister_host(at);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaHostGetDevicePointer(out: Out<Handle>, at: Handle) -> c_int {
    out.set(at);
    SUCCESS
}

/// `cudaPointerAttributes` without its reserved words.
#[repr(C)]
struct PointerAttributes {
    kind: c_int,
    device: c_int,
    device_pointer: Handle,
    host_pointer: Handle,
}

#[unsafe(no_mangle)]
extern "C" fn cudaPointerGetAttributes(out: Out<PointerAttributes>, at: Handle) -> c_int {
    out.set(match memory::place_of(at).0 {
        Place::Host => PointerAttributes { kind: 0, device: -2, device_pointer: 0, host_pointer: at },
        Place::Pinned => PointerAttributes { kind: 1, device: 0, device_pointer: at, host_pointer: at },
        Place::Device(device) => PointerAttributes { kind: 2, device, device_pointer: at, host_pointer: 0 },
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpy(to: Handle, from: Handle, bytes: usize) -> c_int {
    memory::copy(to, from, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpyAsync(to: Handle, from: Handle, bytes: usize) -> c_int {
    cudaMemcpy(to, from, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpyPeerAsync(to: Handle, _: c_int, from: Handle, _: c_int, bytes: usize) -> c_int {
    cudaMemcpy(to, from, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemcpy2DAsync(
    to: Handle,
    to_pitch: usize,
    from: Handle,
    from_pitch: usize,
    width: usize,
    height: usize,
) -> c_int {
    for row in 0..height {
        memory::copy(to + row * to_pitch, from + row * from_pitch, width);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemset(at: Handle, value: c_int, bytes: usize) -> c_int {
    memory::fill(at, value as u8, bytes);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemsetAsync(at: Handle, value: c_int, bytes: usize) -> c_int {
    cudaMemset(at, value, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetSymbolAddress(out: Out<Handle>) -> c_int {
    // A variable of the device: 64 KiB of zeros serve for all of them.
    static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
    out.set(ZEROS.as_ptr() as Handle);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaMemPoolGetAttribute(_: Handle, _: c_int, value: Out<u64>) -> c_int {
    value.set(0);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaDeviceGetGraphMemAttribute(_: c_int, _: c_int, value: Out<u64>) -> c_int {
    value.set(0);
    SUCCESS
}

// Streams and events: handles that are complete at once.

create! {
    fn cudaDeviceGetDefaultMemPool;
    fn cudaEventCreate;
    fn cudaEventCreateWithFlags;
    fn cudaGraphAddNode;
    fn cudaGraphConditionalHandleCreate;
    fn cudaGraphInstantiate;
    fn cudaGraphInstantiateWithFlags;
    fn cudaIpcOpenEventHandle;
    fn cudaLibraryGetKernel;
    fn cudaLibraryLoadData;
    fn cudaLibraryLoadFromFile;
    fn cudaStreamCreate;
    fn cudaStreamCreateWithFlags;
    fn cudaStreamCreateWithPriority;
    fn cudaUserObjectCreate;
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetPriority(_: Handle, priority: Out<c_int>) -> c_int {
    priority.set(0);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaEventElapsedTime(milliseconds: Out<f32>) -> c_int {
    milliseconds.set(1.0);
    SUCCESS
}

/// `cudaHostFn_t`.
type HostFunction = extern "C" fn(*mut c_void);
/// `cudaStreamCallback_t`.
type StreamCallback = extern "C" fn(Handle, c_int, *mut c_void);

#[unsafe(no_mangle)]
extern "C" fn cudaLaunchHostFunc(_: Handle, function: Option<HostFunction>, data: *mut c_void) -> c_int {
    if let Some(function) = function {
        function(data);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamAddCallback(
    stream: Handle,
    callback: Option<StreamCallback>,
    data: *mut c_void,
) -> c_int {
    if let Some(callback) = callback {
        callback(stream, SUCCESS, data);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamBeginCapture(stream: Handle) -> c_int {
    graphs::begin(stream);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamEndCapture(stream: Handle, graph: Out<Handle>) -> c_int {
    graphs::end(stream);
    graph.set(new_handle());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamIsCapturing(stream: Handle, status: Out<c_int>) -> c_int {
    status.set(c_int::from(graphs::capture_of(stream).is_some()));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetCaptureInfo(stream: Handle, status: Out<c_int>, id: Out<u64>) -> c_int {
    let capture = graphs::capture_of(stream);
    status.set(c_int::from(capture.is_some()));
    if let Some(number) = capture {
        id.set(number);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaStreamGetCaptureInfo_v2(stream: Handle, status: Out<c_int>, id: Out<u64>) -> c_int {
    cudaStreamGetCaptureInfo(stream, status, id)
}

#[unsafe(no_mangle)]
extern "C" fn cudaGraphGetNodes(_: Handle, nodes: Out<Handle>, count: Out<usize>) -> c_int {
    // A captured graph has done something: one node keeps PyTorch from warning that it is empty.
    nodes.set(new_handle());
    count.set(1);
    SUCCESS
}

// Kernels.

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary() -> Handle {
    new_handle()
}

/// A kernel launch written as `kernel<<<…>>>(…)` asks this first and does nothing when it fails.
#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration() -> c_uint {
    1
}

/// `cudaFuncAttributes` up to the fields that anybody reads.
#[repr(C)]
struct FunctionAttributes {
    shared_bytes: usize,
    constant_bytes: usize,
    local_bytes: usize,
    threads_per_block: c_int,
    registers: c_int,
    ptx_version: c_int,
    binary_version: c_int,
    cache_mode: c_int,
    dynamic_shared_bytes: c_int,
    carveout: c_int,
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncGetAttributes(out: Out<FunctionAttributes>) -> c_int {
    let d = device();
    let version = d.compiled_for();
    out.set(FunctionAttributes {
        shared_bytes: 0,
        constant_bytes: 0,
        local_bytes: 0,
        threads_per_block: 1024,
        registers: 32,
        ptx_version: version,
        binary_version: version,
        cache_mode: 0,
        dynamic_shared_bytes: d.shared_optin(),
        carveout: -1,
    });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    _: Handle,
    threads: c_int,
    shared: usize,
) -> c_int {
    blocks.set(driver::occupancy(threads, shared));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: Out<c_int>,
    function: Handle,
    threads: c_int,
    shared: usize,
) -> c_int {
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared)
}

#[unsafe(no_mangle)]
extern "C" fn cudaLibraryGetKernelCount(count: Out<c_uint>) -> c_int {
    count.set(1);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDriverEntryPoint(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    _flags: u64,
    status: Out<c_int>,
) -> c_int {
    let found = driver::entry_point(&symbol.text());
    function.set(found);
    status.set(c_int::from(found.is_null()));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetDriverEntryPointByVersion(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    _version: c_uint,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    cudaGetDriverEntryPoint(symbol, function, flags, status)
}
