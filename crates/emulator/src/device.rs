//! The device that is emulated: its name, size and limits, from the environment of the process.

use std::env;
use std::ffi::c_int;
use std::sync::OnceLock;

/// What a program can ask about the emulated device.
pub struct Device {
    /// How many such devices the process sees.
    pub count: c_int,
    /// The product's name.
    pub name: String,
    /// Compute capability, major.
    pub major: c_int,
    /// Compute capability, minor.
    pub minor: c_int,
    /// Streaming multiprocessors.
    pub multiprocessors: c_int,
    /// Total memory of the card in bytes.
    pub capacity: usize,
    /// Bytes the allocator never sees: the CUDA context and what the driver keeps.
    pub context: usize,
    /// Whether new addresses are handed out from the top downwards.
    pub addresses_down: bool,
    /// Limits that follow from the compute capability.
    pub limits: Limits,
}

/// Limits of one multiprocessor, by compute capability (CUDA programming guide, table of technical specifications).
#[derive(Clone, Copy)]
pub struct Limits {
    /// Threads resident on a multiprocessor.
    pub threads: c_int,
    /// Blocks resident on a multiprocessor.
    pub blocks: c_int,
    /// Bytes of shared memory of a multiprocessor.
    pub shared: c_int,
    /// Bytes of second-level cache of the device.
    pub l2_cache: c_int,
}

impl Limits {
    fn of(major: c_int, minor: c_int) -> Self {
        let (threads, blocks, shared_kib, l2_mib) = match (major, minor) {
            (..=6, _) => (2048, 32, 64, 4),
            (7, 5) => (1024, 16, 64, 4),
            (7, _) => (2048, 32, 96, 6),
            (8, 0) => (2048, 32, 164, 40),
            (8, 9) => (1536, 24, 100, 72),
            (8, _) => (1536, 16, 100, 6),
            (9, _) => (2048, 32, 228, 50),
            (10 | 11, _) => (2048, 32, 228, 126),
            _ => (1536, 24, 100, 96),
        };
        Self { threads, blocks, shared: shared_kib * 1024, l2_cache: l2_mib << 20 }
    }
}

/// The architectures PyTorch's builds carry code for; others run that of the nearest before in their family.
const COMPILED: [c_int; 9] = [50, 60, 70, 75, 80, 86, 90, 100, 120];

/// The architecture, as 10 * major + minor, of the code that a device of this capability runs.
fn compiled_for(major: c_int, minor: c_int) -> c_int {
    let own = 10 * major + minor;
    let nearest = COMPILED.into_iter().rfind(|&known| known <= own && known / 10 == major);
    nearest.unwrap_or(own)
}

impl Device {
    /// The architecture of the code this device runs, which libraries choose their kernels by: CUB refuses one that it
    /// was not built for.
    pub fn compiled_for(&self) -> c_int {
        compiled_for(self.major, self.minor)
    }

    /// Bytes of shared memory one block can opt in to.
    pub fn shared_optin(&self) -> c_int {
        if self.major >= 8 { self.limits.shared - 1024 } else { self.limits.shared }
    }

    /// Bytes of shared memory the system takes of each block.
    pub fn shared_reserved(&self) -> c_int {
        if self.major >= 8 { 1024 } else { 0 }
    }

    /// The answer to an attribute query, by the number that `cudaDeviceAttr` and `CUdevice_attribute` share.
    pub fn attribute(&self, attribute: c_int, index: c_int) -> c_int {
        match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => c_int::MAX,
            6 | 7 => 65_535,
            8 => 49_152,
            9 => 65_536,
            10 => 32,
            11 => c_int::MAX,
            12 | 82 => 65_536,
            13 => 1_980_000,
            14 => 512,
            16 => self.multiprocessors,
            19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 => 1,
            33 => index + 1,
            36 => 2_619_000,
            37 => 5120,
            38 => self.limits.l2_cache,
            39 => self.limits.threads,
            40 => 3,
            51 => 32,
            75 => self.major,
            76 => self.minor,
            81 => self.limits.shared,
            85 => index,
            87 => 2,
            97 => self.shared_optin(),
            // cuMem* virtual memory and its file-descriptor handles.
            102 | 103 => 1,
            106 => self.limits.blocks,
            108 => self.limits.l2_cache * 5 / 8,
            109 => 134_217_728,
            111 => self.shared_reserved(),
            115 => 1,
            120 => c_int::from(self.major >= 9),
            126 => 4,
            _ => 0,
        }
    }
}

/// The emulated device, read from the environment once: an H100 of 80 GB where nothing is said.
pub fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let capability = text("VRAMLEDGER_GPU_CAPABILITY").unwrap_or_else(|| "9.0".to_owned());
        let (major, minor) = capability.split_once('.').unwrap_or((&capability, "0"));
        let (major, minor) = (major.parse().unwrap_or(9), minor.parse().unwrap_or(0));
        Device {
            count: number("VRAMLEDGER_GPU_COUNT", 1).min(visible()) as c_int,
            name: text("VRAMLEDGER_GPU_NAME").unwrap_or_else(|| "NVIDIA H100 80GB HBM3".to_owned()),
            major,
            minor,
            multiprocessors: number("VRAMLEDGER_GPU_SMS", 132) as c_int,
            capacity: number("VRAMLEDGER_GPU_CAPACITY", 85_520_809_984),
            context: number("VRAMLEDGER_GPU_CONTEXT", 550 << 20),
            addresses_down: text("VRAMLEDGER_GPU_ADDRESSES").is_some_and(|order| order == "down"),
            limits: Limits::of(major, minor),
        }
    })
}

/// How many devices `CUDA_VISIBLE_DEVICES` lets the process see.
fn visible() -> usize {
    env::var("CUDA_VISIBLE_DEVICES").map_or(usize::MAX, |list| {
        list.split(',').take_while(|entry| !entry.trim().is_empty() && entry.trim() != "-1").count()
    })
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(name: &str, default: usize) -> usize {
    text(name).and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_runs_the_nearest_code_of_its_family() {
        let capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 1), (11, 0)];
        assert_eq!(capabilities.map(|(a, b)| compiled_for(a, b)), [80, 86, 86, 90, 100, 120, 110]);
    }
}
