//! Device and host memory: addresses that are really mapped (lazily, zero) and counted against the capacity.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::arena::Arena;
use crate::device::device;
use crate::ffi::{Handle, new_handle};

/// Device memory comes in pages of this size.
pub const PAGE: usize = 2 << 20;
/// Host-to-device copies above this are dropped: nothing reads them, and they would cost host memory.
const HOST_TO_DEVICE_LIMIT: usize = 1 << 20;
/// Device-to-device copies and fills above this are dropped.
const ON_DEVICE_LIMIT: usize = 64 << 10;

/// Where a pointer points.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Memory of the emulated device of that number.
    Device(c_int),
    /// Host memory that CUDA allocated or registered.
    Pinned,
    /// Any other host memory.
    Host,
}

struct State {
    devices: Vec<Memory>,
    /// Pinned host ranges: start, length, and whether we mapped them.
    pinned: BTreeMap<usize, (usize, bool)>,
    /// Reserved virtual ranges: start, length.
    reserved: BTreeMap<usize, usize>,
    /// Physical allocations of `cuMemCreate`.
    physical: HashMap<Handle, Physical>,
    /// Mapped virtual ranges: start, (length, physical handle).
    mapped: BTreeMap<usize, (usize, Handle)>,
}

struct Memory {
    arena: Option<Arena>,
    used: usize,
}

struct Physical {
    bytes: usize,
    device: c_int,
    mappings: usize,
    released: bool,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    let state = STATE.get_or_init(|| {
        let memory = || Memory { arena: None, used: 0 };
        Mutex::new(State {
            devices: (0..device().count).map(|_| memory()).collect(),
            pinned: BTreeMap::new(),
            reserved: BTreeMap::new(),
            physical: HashMap::new(),
            mapped: BTreeMap::new(),
        })
    });
    // A panic while the lock is held cannot leave half a change that matters more than going on.
    state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

/// The device the calling thread works on.
pub fn current_device() -> c_int {
    CURRENT.get()
}

/// Chooses the device of the calling thread; false when there is no such device.
pub fn set_current_device(index: c_int) -> bool {
    let known = (0..device().count).contains(&index);
    if known {
        CURRENT.set(index);
    }
    known
}

/// Free and total bytes of a device.
pub fn info(index: c_int) -> (usize, usize) {
    let used = state().devices.get(index as usize).map_or(0, |memory| memory.used);
    let total = device().capacity;
    (total.saturating_sub(device().context).saturating_sub(used), total)
}

/// Allocates device memory in whole pages; None when the capacity does not hold it.
pub fn allocate(index: c_int, bytes: usize) -> Option<usize> {
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    let mut state = state();
    let memory = state.devices.get_mut(index as usize)?;
    if !fits(memory.used, bytes) {
        return None;
    }
    if memory.arena.is_none() {
        // Twice the capacity and a reserve: first fit then always finds room for what the capacity holds.
        let length = (2 * device().capacity + (64 << 30)).next_multiple_of(PAGE);
        memory.arena = Some(Arena::new(map(length)?, length, device().addresses_down));
    }
    let at = memory.arena.as_mut()?.take(bytes)?;
    memory.used += bytes;
    Some(at)
}

/// Frees what `allocate` gave; false when nothing was allocated there.
pub fn free(at: usize) -> bool {
    let mut state = state();
    for memory in &mut state.devices {
        if let Some(bytes) = memory.arena.as_mut().and_then(|arena| arena.give(at)) {
            memory.used -= bytes;
            forget(at, bytes);
            return true;
        }
    }
    false
}

fn fits(used: usize, bytes: usize) -> bool {
    used.checked_add(bytes).is_some_and(|sum| sum <= device().capacity.saturating_sub(device().context))
}

/// Allocates pinned host memory.
pub fn allocate_host(bytes: usize) -> Option<usize> {
    let length = bytes.max(1).checked_next_multiple_of(4096)?;
    let at = map(length)?;
    state().pinned.insert(at, (length, true));
    Some(at)
}

/// Frees pinned host memory; false when it is not ours.
pub fn free_host(at: usize) -> bool {
    let mut state = state();
    let Some(&(length, true)) = state.pinned.get(&at) else { return false };
    state.pinned.remove(&at);
    unmap(at, length);
    true
}

/// Remembers a range of the program's own memory as pinned.
pub fn register_host(at: usize, bytes: usize) {
    state().pinned.insert(at, (bytes, false));
}

/// Forgets a range that was registered.
pub fn unregister_host(at: usize) {
    state().pinned.remove(&at);
}

/// Where an address points, and the range around it.
pub fn place_of(address: usize) -> (Place, usize, usize) {
    let state = state();
    for (index, memory) in state.devices.iter().enumerate() {
        if let Some((start, length)) = memory.arena.as_ref().and_then(|arena| arena.block_of(address)) {
            return (Place::Device(index as c_int), start, length);
        }
    }
    if let Some((&start, &(length, handle))) = state.mapped.range(..=address).next_back()
        && address < start + length
    {
        let device = state.physical.get(&handle).map_or(0, |physical| physical.device);
        return (Place::Device(device), start, length);
    }
    if let Some((&start, &(length, _))) = state.pinned.range(..=address).next_back()
        && address < start + length
    {
        return (Place::Pinned, start, length);
    }
    (Place::Host, address, 0)
}

/// Copies bytes as far as somebody could read them: small ones to the device, all of them to the host.
pub fn copy(to: usize, from: usize, bytes: usize) {
    if bytes == 0 || to == 0 || from == 0 {
        return;
    }
    let on_device = |at| matches!(place_of(at).0, Place::Device(_));
    let limit = match (on_device(to), on_device(from)) {
        (false, _) => usize::MAX,
        (true, false) => HOST_TO_DEVICE_LIMIT,
        (true, true) => ON_DEVICE_LIMIT,
    };
    if bytes <= limit {
        // SAFETY: the program says both ranges hold `bytes`; device memory is mapped host memory, and
        // `memmove` semantics allow the ranges to overlap.
        unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) }
    }
}

/// Fills device memory, if it is little enough that somebody may read it.
pub fn fill(at: usize, value: u8, bytes: usize) {
    if at != 0 && bytes <= ON_DEVICE_LIMIT {
        // SAFETY: the program says the range holds `bytes`, and device memory is mapped host memory.
        unsafe { ptr::write_bytes(at as *mut u8, value, bytes) }
    }
}

/// Fills device memory with 32-bit words, if it is little enough that somebody may read it.
pub fn fill_words(at: usize, value: u32, count: usize) {
    if at != 0 && count <= ON_DEVICE_LIMIT / 4 {
        for index in 0..count {
            // SAFETY: the program says the range holds `count` words, and device memory is mapped host memory.
            unsafe { (at as *mut u32).add(index).write_unaligned(value) }
        }
    }
}

/// Reserves a range of device addresses with nothing behind it yet.
pub fn reserve(bytes: usize) -> Option<usize> {
    // One page more, so that the range can start on a page of the device.
    let at = map(bytes.checked_add(PAGE)?)?.next_multiple_of(PAGE);
    state().reserved.insert(at, bytes);
    Some(at)
}

/// Gives a reserved range back.
pub fn unreserve(at: usize) -> bool {
    let Some(bytes) = state().reserved.remove(&at) else { return false };
    unmap(at, bytes);
    true
}

/// Creates physical memory without an address; None when the capacity does not hold it.
pub fn create(index: c_int, bytes: usize) -> Option<Handle> {
    let mut state = state();
    let memory = state.devices.get_mut(index as usize)?;
    if !fits(memory.used, bytes) {
        return None;
    }
    memory.used += bytes;
    let handle = new_handle();
    state.physical.insert(handle, Physical { bytes, device: index, mappings: 0, released: false });
    Some(handle)
}

/// Maps physical memory at an address of a reserved range.
pub fn map_physical(at: usize, bytes: usize, handle: Handle) -> bool {
    let mut state = state();
    let Some(physical) = state.physical.get_mut(&handle) else { return false };
    physical.mappings += 1;
    state.mapped.insert(at, (bytes, handle));
    true
}

/// Unmaps every mapping inside a range.
pub fn unmap_physical(at: usize, bytes: usize) {
    let mut state = state();
    let inside: Vec<_> = state.mapped.range(at..at + bytes).map(|(&start, &entry)| (start, entry)).collect();
    for (start, (length, handle)) in inside {
        state.mapped.remove(&start);
        forget(start, length);
        if let Some(physical) = state.physical.get_mut(&handle) {
            physical.mappings -= 1;
        }
        drop_unused(&mut state, handle);
    }
}

/// Says that the program holds a physical handle no longer.
pub fn release(handle: Handle) {
    let mut state = state();
    if let Some(physical) = state.physical.get_mut(&handle) {
        physical.released = true;
    }
    drop_unused(&mut state, handle);
}

/// The physical handle mapped at an address, counted as held once more.
pub fn retain(at: usize) -> Option<Handle> {
    let state = state();
    let (_, &(_, handle)) = state.mapped.range(..=at).next_back()?;
    Some(handle)
}

/// Physical memory ends when it is released and mapped nowhere.
fn drop_unused(state: &mut State, handle: Handle) {
    if let Some(physical) = state.physical.get(&handle)
        && physical.released
        && physical.mappings == 0
    {
        let (bytes, index) = (physical.bytes, physical.device);
        state.physical.remove(&handle);
        if let Some(memory) = state.devices.get_mut(index as usize) {
            memory.used -= bytes;
        }
    }
}

/// Maps lazily backed zero pages; None when the address space has no room.
fn map(length: usize) -> Option<usize> {
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
    let at = unsafe {
        libc::mmap(
            ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range was mapped just now. One written word then costs 4 KiB of host memory, not 2 MiB.
    unsafe { libc::madvise(at, length, libc::MADV_NOHUGEPAGE) };
    Some(at as usize)
}

/// Returns pages to the kernel but keeps the addresses: the next reader sees zeros.
fn forget(at: usize, length: usize) {
    // SAFETY: the range was mapped by `map` and is no longer in the program's use.
    unsafe { libc::madvise(at as *mut libc::c_void, length, libc::MADV_DONTNEED) };
}

fn unmap(at: usize, length: usize) {
    // SAFETY: the range was mapped by `map` and is no longer in the program's use.
    unsafe { libc::munmap(at as *mut libc::c_void, length) };
}
