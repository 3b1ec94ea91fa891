//! Which streams are capturing a graph; the captured work itself is nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use crate::ffi::Handle;

fn captures() -> MutexGuard<'static, HashMap<Handle, u64>> {
    static CAPTURES: OnceLock<Mutex<HashMap<Handle, u64>>> = OnceLock::new();
    CAPTURES.get_or_init(Mutex::default).lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Says that a stream captures from now on.
pub fn begin(stream: Handle) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    captures().insert(stream, NEXT.fetch_add(1, Ordering::Relaxed));
}

/// Says that a stream captures no longer.
pub fn end(stream: Handle) {
    captures().remove(&stream);
}

/// The number of the capture a stream takes part in.
pub fn capture_of(stream: Handle) -> Option<u64> {
    captures().get(&stream).copied()
}
