//! The pointers C hands over, wrapped once so that the functions themselves are safe code.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What every function here answers when all is well.
pub const SUCCESS: c_int = 0;
/// `cudaErrorInvalidValue` and its driver twin.
pub const INVALID_VALUE: c_int = 1;
/// `cudaErrorMemoryAllocation` and its driver twin.
pub const OUT_OF_MEMORY: c_int = 2;

/// An address or an opaque handle: never followed as a pointer, only passed on.
pub type Handle = usize;

/// A place the caller gives for one answer; null when the answer is not wanted.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the answer, if it is wanted.
    pub fn set(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the C interface obliges the caller to pass null or a pointer to a writable T.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes the answer where the caller left a value, and gives that value.
    pub fn replace(self, value: T) -> Option<T> {
        // SAFETY: as in `set`; the callers of this use it only where the interface says in and out.
        (!self.0.is_null()).then(|| unsafe { std::mem::replace(&mut *self.0, value) })
    }

    /// Writes the answer at an index of the caller's array.
    pub fn set_at(self, index: usize, value: T) {
        if !self.0.is_null() {
            // SAFETY: the callers pass arrays and their length; `index` is below that length.
            unsafe { self.0.add(index).write_unaligned(value) }
        }
    }
}

impl<T> Out<T> {
    /// The same place, seen as bytes.
    pub fn bytes(self) -> Out<u8> {
        Out(self.0.cast())
    }
}

impl Out<u8> {
    /// Writes a block of bytes at an offset of the caller's structure.
    pub fn fill(self, offset: usize, bytes: &[u8]) {
        if !self.0.is_null() {
            // SAFETY: the caller's structure has the size its C declaration has, which the offsets respect.
            unsafe { self.0.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
        }
    }
}

/// A value the caller lends; null when there is none.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value, if the caller gave one.
    pub fn get(self) -> Option<T> {
        // SAFETY: the C interface obliges the caller to pass null or a pointer to a readable T.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }
}

impl In<c_char> {
    /// The C string the caller gave.
    pub fn text(self) -> String {
        if self.0.is_null() {
            return String::new();
        }
        // SAFETY: the C interface obliges the caller to pass a zero-terminated string.
        unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned()
    }
}

/// A fresh handle: unique, not null, never an address that can be followed.
pub fn new_handle() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// The address of a function of this process by its name, or null.
pub fn function_named(name: &str) -> *mut c_void {
    let Ok(name) = std::ffi::CString::new(name) else { return std::ptr::null_mut() };
    // SAFETY: the name is a valid C string, and RTLD_DEFAULT is always a valid handle.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Defines functions whose first argument is a place for a fresh handle and which ignore the rest.
macro_rules! create {
    ($(fn $name:ident;)*) => { $(
        // SAFETY: the name is the C library's own and is exported once.
        #[unsafe(no_mangle)]
        extern "C" fn $name(out: $crate::ffi::Out<$crate::ffi::Handle>) -> std::ffi::c_int {
            out.set($crate::ffi::new_handle());
            $crate::ffi::SUCCESS
        }
    )* };
}
pub(crate) use create;

/// Defines functions that answer with a text of ours, whatever they are asked.
macro_rules! text {
    ($(fn $name:ident => $text:literal;)*) => { $(
        // SAFETY: the name is the C library's own and is exported once.
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> *const std::ffi::c_char {
            $text.as_ptr()
        }
    )* };
}
pub(crate) use text;

/// Defines functions that ask for the size of a workspace and answer 0: `_` for each argument before the answer.
///
/// What the real libraries would ask for is not public. Every argument here is an integer or a pointer, which
/// the x86-64 calling convention passes in slots of one size. Two answers are for the device and for the host.
macro_rules! no_bytes {
    ($(fn $name:ident($($before:tt)*) -> $kind:ty $(, $host:ty)?;)*) => { $(
        // SAFETY: the name is the C library's own and is exported once.
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            $($before: usize,)*
            bytes: $crate::ffi::Out<$kind>,
            $(host: $crate::ffi::Out<$host>,)?
        ) -> std::ffi::c_int {
            bytes.set(0);
            $(host.set(0 as $host);)?
            $crate::ffi::SUCCESS
        }
    )* };
}
pub(crate) use no_bytes;
