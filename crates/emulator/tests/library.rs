//! The built library, seen as PyTorch sees it: by name, through C.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::sync::Mutex;
use std::{env, fs, mem};

/// The device is one for the whole process: tests that count its memory take turns.
static DEVICE: Mutex<()> = Mutex::new(());

/// The library that Cargo built for this test.
struct Library(*mut c_void);

impl Library {
    fn open() -> Self {
        let test = env::current_exe().unwrap();
        let file = test.parent().unwrap().join("libvramledger_emulator.so");
        let path = CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string; loading runs no code of ours that could go wrong.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{} is missing", file.display());
        Self(handle)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open and the name is a C string.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }

    /// A function of the library under the type that its C declaration has.
    fn function<F: Copy>(&self, name: &str) -> F {
        let symbol = self.symbol(name);
        assert!(!symbol.is_null(), "`{name}` is not exported");
        assert_eq!(mem::size_of::<F>(), mem::size_of::<*mut c_void>());
        // SAFETY: the callers give function pointer types that match the C declarations.
        unsafe { mem::transmute_copy(&symbol) }
    }
}

#[test]
fn every_name_of_the_lists_is_exported() {
    let library = Library::open();
    let lists = Path::new(env!("CARGO_MANIFEST_DIR")).join("symbols");
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(lists).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        names.extend(text.lines().map(str::to_owned));
    }
    assert!(names.len() > 800);
    let missing: Vec<_> = names.iter().filter(|name| library.symbol(name).is_null()).collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
}

/// `cudaError_t cudaMalloc(void **, size_t)`.
type Malloc = extern "C" fn(*mut usize, usize) -> c_int;
/// `cudaError_t cudaFree(void *)`.
type Free = extern "C" fn(usize) -> c_int;
/// `cudaError_t cudaMemGetInfo(size_t *, size_t *)`.
type MemGetInfo = extern "C" fn(*mut usize, *mut usize) -> c_int;
/// `cudaError_t cudaMemcpy(void *, const void *, size_t, enum cudaMemcpyKind)`.
type Memcpy = extern "C" fn(usize, usize, usize, c_int) -> c_int;
/// `cudaError_t cudaGetLastError(void)`.
type GetLastError = extern "C" fn() -> c_int;

#[test]
fn memory_is_counted_against_the_capacity_and_addresses_are_used_again() {
    let _turn = DEVICE.lock();
    let library = Library::open();
    let malloc: Malloc = library.function("cudaMalloc");
    let free: Free = library.function("cudaFree");
    let info: MemGetInfo = library.function("cudaMemGetInfo");
    let last_error: GetLastError = library.function("cudaGetLastError");
    let unused = || {
        let (mut unused, mut total) = (0, 0);
        assert_eq!(info(&mut unused, &mut total), 0);
        assert_eq!(total, 85_520_809_984);
        unused
    };
    let before = unused();
    assert_eq!(before, 85_520_809_984 - (550 << 20));

    let mut at = [0_usize; 3];
    for place in &mut at {
        assert_eq!(malloc(place, 3 << 20), 0);
    }
    assert!(at[0] < at[1] && at[1] < at[2], "addresses ascend");
    assert_eq!(before - unused(), 3 * (4 << 20), "whole pages of 2 MiB are taken");
    assert_eq!(free(at[1]), 0);
    let mut again = 0;
    assert_eq!(malloc(&mut again, 1 << 20), 0);
    assert_eq!(again, at[1], "the lowest gap is taken first");

    let mut none = 0;
    assert_eq!(malloc(&mut none, before), 2, "out of memory");
    assert_eq!((last_error(), last_error()), (2, 0));
    for place in [at[0], again, at[2]] {
        assert_eq!(free(place), 0);
    }
    assert_eq!(free(at[0]), 17, "freed twice");
    assert_eq!(unused(), before);

    // What is small comes back as it went in; what is large is dropped and reads as zero.
    let copy: Memcpy = library.function("cudaMemcpy");
    let round_trip = |bytes: usize| {
        let (mut device, out) = (0, vec![7_u8; bytes]);
        let mut back = vec![1_u8; bytes];
        assert_eq!(malloc(&mut device, bytes), 0);
        assert_eq!(copy(device, out.as_ptr() as usize, bytes, 1), 0);
        assert_eq!(copy(back.as_mut_ptr() as usize, device, bytes, 2), 0);
        assert_eq!(free(device), 0);
        (back[0], back[bytes - 1])
    };
    assert_eq!(round_trip(1 << 20), (7, 7));
    assert_eq!(round_trip((1 << 20) + 1), (0, 0));
}

/// `CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)`.
type Reserve = extern "C" fn(*mut usize, usize, usize, usize, u64) -> c_int;
/// `CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)`.
type Create = extern "C" fn(*mut usize, usize, *const c_int, u64) -> c_int;
/// `CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)`.
type Map = extern "C" fn(usize, usize, usize, usize, u64) -> c_int;
/// `CUresult cuMemUnmap(CUdeviceptr, size_t)`.
type Unmap = extern "C" fn(usize, usize) -> c_int;
/// `CUresult cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)`.
type PointerAttribute = extern "C" fn(*mut u32, c_int, usize) -> c_int;

#[test]
fn virtual_memory_holds_what_is_mapped_until_it_is_unmapped_and_released() {
    let _turn = DEVICE.lock();
    let library = Library::open();
    let reserve: Reserve = library.function("cuMemAddressReserve");
    let create: Create = library.function("cuMemCreate");
    let map: Map = library.function("cuMemMap");
    let unmap: Unmap = library.function("cuMemUnmap");
    let release: Free = library.function("cuMemRelease");
    let kind: PointerAttribute = library.function("cuPointerGetAttribute");
    let page = 20 << 20;
    let (mut range, mut handle) = (0, 0);
    assert_eq!(reserve(&mut range, 90 << 30, 0, 0, 0), 0);
    assert_eq!(range % (2 << 20), 0);
    let mut answer = 0;
    assert_ne!(kind(&mut answer, 2, range + 100), 0, "nothing is mapped there");
    assert_eq!(create(&mut handle, page, [1, 0, 1, 0].as_ptr(), 0), 0);
    assert_eq!(map(range, page, 0, handle, 0), 0);
    assert_eq!(release(handle), 0);
    assert_eq!(kind(&mut answer, 2, range + 100), 0, "a mapping keeps its memory");
    assert_eq!(answer, 2);
    assert_eq!(unmap(range, page), 0);
    assert_ne!(kind(&mut answer, 2, range + 100), 0);
    assert_ne!(map(range, page, 0, handle, 0), 0, "released memory is gone");
}
