//! NVML: the management library's view of the emulated device.

use std::ffi::{c_char, c_int, c_uint};

use crate::device::device;
use crate::ffi::{Handle, In, Out, SUCCESS, text};
use crate::{driver, memory, runtime};

/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 3;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: c_int = 7;
/// Device handles are an index above this.
const BASE: Handle = 0x100;

fn index_of(handle: Handle) -> c_int {
    handle.saturating_sub(BASE) as c_int
}

text! {
    fn nvmlErrorString => c"not supported by the emulated device";
}

// SAFETY of every `no_mangle` below: each name is NVML's own, is exported once, and has the parameters of
// its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) -> c_int {
    version.set(runtime::DRIVER_VERSION);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: Out<c_uint>) -> c_int {
    count.set(device().count as c_uint);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Handle>) -> c_int {
    out.set(BASE + index as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus: In<c_char>, out: Out<Handle>) -> c_int {
    let asked = bus.text();
    let index = (0..device().count).find(|&i| driver::bus_id(i).trim_end_matches('\0') == asked);
    out.set(BASE + index.unwrap_or(0) as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(handle: Handle, out: Out<u8>, length: c_uint) -> c_int {
    let hex: String = driver::uuid(index_of(handle)).iter().map(|byte| format!("{byte:02x}")).collect();
    let name =
        format!("GPU-{}-{}-{}-{}-{}\0", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    if (length as usize) < name.len() {
        return INSUFFICIENT_SIZE;
    }
    out.fill(0, name.as_bytes());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(_: Handle, out: Out<u8>, length: c_uint) -> c_int {
    let name = format!("{}\0", device().name);
    if (length as usize) < name.len() {
        return INSUFFICIENT_SIZE;
    }
    out.fill(0, name.as_bytes());
    SUCCESS
}

/// `nvmlMemory_t`.
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo(handle: Handle, out: Out<Memory>) -> c_int {
    let (free, total) = memory::info(index_of(handle));
    out.set(Memory { total: total as u64, free: free as u64, used: (total - free) as u64 });
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCudaComputeCapability(_: Handle, major: Out<c_int>, minor: Out<c_int>) -> c_int {
    major.set(device().major);
    minor.set(device().minor);
    SUCCESS
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
struct Process {
    pid: c_uint,
    bytes: u64,
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    handle: Handle,
    count: Out<c_uint>,
    out: Out<Process>,
) -> c_int {
    let (free, total) = memory::info(index_of(handle));
    if count.replace(1) == Some(0) {
        return INSUFFICIENT_SIZE;
    }
    out.set(Process { pid: std::process::id(), bytes: (total - free) as u64 });
    SUCCESS
}

/// The caller has set the state to `NVML_GPU_FABRIC_STATE_NOT_SUPPORTED`, which is what a card without a fabric leaves there.
#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetGpuFabricInfoV() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType() -> c_int {
    NOT_SUPPORTED
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2() -> c_int {
    NOT_SUPPORTED
}
