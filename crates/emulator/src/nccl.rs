//! NCCL: communicators of the asked size, in which every rank has what this one has.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::ffi::{Handle, INVALID_VALUE, Out, SUCCESS, create, new_handle, text};
use crate::memory;

/// What a communicator can be asked.
#[derive(Clone, Copy)]
struct Communicator {
    ranks: c_int,
    rank: c_int,
    device: c_int,
}

fn communicators() -> MutexGuard<'static, HashMap<Handle, Communicator>> {
    static ALL: OnceLock<Mutex<HashMap<Handle, Communicator>>> = OnceLock::new();
    ALL.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn open(out: Out<Handle>, ranks: c_int, rank: c_int) -> c_int {
    let handle = new_handle();
    communicators().insert(handle, Communicator { ranks, rank, device: memory::current_device() });
    out.set(handle);
    SUCCESS
}

fn ask(communicator: Handle, out: Out<c_int>, question: impl Fn(Communicator) -> c_int) -> c_int {
    match communicators().get(&communicator) {
        Some(&known) => {
            out.set(question(known));
            SUCCESS
        }
        // `ncclInvalidArgument` is 4, `INVALID_VALUE` is only another library's 1.
        None => INVALID_VALUE + 3,
    }
}

/// `ncclUniqueId`, which C passes by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

text! {
    fn ncclGetErrorString => c"no error";
    fn ncclGetLastError => c"";
}

create! {
    fn ncclRedOpCreatePreMulSum;
}

// SAFETY of every `no_mangle` below: each name is NCCL's own, is exported once, and has the parameters of
// its C declaration as far as it looks at them.

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(out: Out<UniqueId>) -> c_int {
    out.set(UniqueId([1; 128]));
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRank(out: Out<Handle>, ranks: c_int, _id: UniqueId, rank: c_int) -> c_int {
    open(out, ranks, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(out: Out<Handle>, ranks: c_int, _id: UniqueId, rank: c_int) -> c_int {
    open(out, ranks, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankScalable(out: Out<Handle>, ranks: c_int, rank: c_int) -> c_int {
    open(out, ranks, rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitAll(out: Out<Handle>, devices: c_int) -> c_int {
    for index in 0..devices {
        let handle = new_handle();
        communicators().insert(handle, Communicator { ranks: devices, rank: index, device: index });
        out.set_at(index as usize, handle);
    }
    SUCCESS
}

/// The members of a split are not known to one process: the new communicator is as large as the old.
#[unsafe(no_mangle)]
extern "C" fn ncclCommSplit(parent: Handle, _color: c_int, _key: c_int, out: Out<Handle>) -> c_int {
    let known = communicators().get(&parent).copied();
    known.map_or(INVALID_VALUE + 3, |old| open(out, old.ranks, old.rank))
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(communicator: Handle) -> c_int {
    communicators().remove(&communicator);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(communicator: Handle) -> c_int {
    ncclCommDestroy(communicator)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCount(communicator: Handle, out: Out<c_int>) -> c_int {
    ask(communicator, out, |known| known.ranks)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommUserRank(communicator: Handle, out: Out<c_int>) -> c_int {
    ask(communicator, out, |known| known.rank)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommCuDevice(communicator: Handle, out: Out<c_int>) -> c_int {
    ask(communicator, out, |known| known.device)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(_: Handle, error: Out<c_int>) -> c_int {
    error.set(SUCCESS);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommRegister(_: Handle, _: Handle, _: usize, out: Out<Handle>) -> c_int {
    out.set(new_handle());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommWindowRegister(_: Handle, _: Handle, _: usize, out: Out<Handle>) -> c_int {
    out.set(new_handle());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemAlloc(out: Out<Handle>, bytes: usize) -> c_int {
    match memory::allocate(memory::current_device(), bytes) {
        Some(at) => {
            out.set(at);
            SUCCESS
        }
        // `ncclUnhandledCudaError`.
        None => 1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclMemFree(at: Handle) -> c_int {
    if memory::free(at) { SUCCESS } else { INVALID_VALUE + 3 }
}

/// Bytes of an element of `ncclDataType_t`.
fn element(kind: c_int) -> usize {
    match kind {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}

/// Gives the receiver what the sender has, if the two are not the same place.
fn pass(from: Handle, to: Handle, bytes: usize) -> c_int {
    if from != to {
        memory::copy(to, from, bytes);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(from: Handle, to: Handle, count: usize, kind: c_int) -> c_int {
    pass(from, to, count * element(kind))
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduce(from: Handle, to: Handle, count: usize, kind: c_int) -> c_int {
    pass(from, to, count * element(kind))
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    from: Handle,
    to: Handle,
    count: usize,
    kind: c_int,
    root: c_int,
    communicator: Handle,
) -> c_int {
    let bytes = count * element(kind);
    let is_own = communicators().get(&communicator).is_some_and(|known| known.rank == root);
    GROUP.with_borrow_mut(|group| {
        if let Some(broadcasts) = group {
            broadcasts.push(Broadcast { to, bytes, is_own });
        }
    });
    pass(from, to, bytes)
}

/// A broadcast inside a group.
struct Broadcast {
    to: Handle,
    bytes: usize,
    is_own: bool,
}

thread_local! {
    static GROUP: RefCell<Option<Vec<Broadcast>>> = const { RefCell::new(None) };
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| {
        group.get_or_insert_default();
    });
    SUCCESS
}

/// PyTorch gathers into a list by one broadcast from each rank: the absent ranks send what this one does.
#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    let broadcasts = GROUP.take().unwrap_or_default();
    if let Some(own) = broadcasts.iter().find(|broadcast| broadcast.is_own) {
        for other in broadcasts.iter().filter(|other| other.bytes == own.bytes) {
            pass(own.to, other.to, own.bytes);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(from: Handle, to: Handle, count: usize, kind: c_int) -> c_int {
    pass(from, to, count * element(kind))
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    from: Handle,
    to: Handle,
    count: usize,
    kind: c_int,
    communicator: Handle,
) -> c_int {
    let bytes = count * element(kind);
    let known = communicators().get(&communicator).copied();
    for rank in 0..known.map_or(1, |known| known.ranks as usize) {
        pass(from, to + rank * bytes, bytes);
    }
    SUCCESS
}
