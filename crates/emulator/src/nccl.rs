//! NCCL: communicators of the asked size whose collectives do nothing.

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
