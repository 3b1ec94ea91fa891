//! The catalogue of GPUs.
//!
//! The driver's figure moves by a fraction of a percent with the driver's version and with ECC, so
//! every entry says where its own was seen.

use ledger::Bytes;

/// A kind of GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// The name used on the command line: `H100-80GB`.
    pub name: &'static str,
    /// All memory the driver reports (`cudaDeviceProp::totalGlobalMem`).
    pub capacity: Bytes,
    /// The card's nominal size in decimal bytes: 80 GB is 80 * 10^9.
    pub nominal: Bytes,
    /// Compute capability, major and minor.
    pub compute_capability: (u8, u8),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Where the figures come from.
    pub source: &'static str,
}

/// `gigabytes` times 10^9 bytes: how cards are sold.
const fn decimal(gigabytes: u64) -> Bytes {
    Bytes::new(gigabytes * 1_000_000_000)
}

/// Every GPU of the catalogue; the first is the default.
pub const GPUS: &[Gpu] = &[
    Gpu {
        name: "H100-80GB",
        capacity: Bytes::new(85_520_809_984),
        nominal: decimal(80),
        compute_capability: (9, 0),
        multiprocessors: 132,
        source: "cudaGetDeviceProperties of an H100 80GB HBM3 SXM5; drivers that count ECC against the card say 85_028_896_768",
    },
    Gpu {
        name: "H100-PCIe",
        capacity: Bytes::mib(81_008),
        nominal: decimal(80),
        compute_capability: (9, 0),
        multiprocessors: 114,
        source: "torch.cuda.get_device_properties of an H100 PCIe; known in whole MiB",
    },
    Gpu {
        name: "H200",
        capacity: Bytes::mib(143_156),
        nominal: decimal(141),
        compute_capability: (9, 0),
        multiprocessors: 132,
        source: "torch.cuda.get_device_properties of an H200; known in whole MiB",
    },
    Gpu {
        name: "GH200-96GB",
        capacity: Bytes::new(102_005_473_280),
        nominal: decimal(96),
        compute_capability: (9, 0),
        multiprocessors: 132,
        source: "deviceQuery of a GH200 480GB, CUDA driver 12.2",
    },
    Gpu {
        name: "B200",
        capacity: Bytes::mib(182_642),
        nominal: decimal(180),
        compute_capability: (10, 0),
        multiprocessors: 148,
        source: "torch.cuda.get_device_properties of a B200; known in whole MiB",
    },
    Gpu {
        name: "A100-80GB",
        capacity: Bytes::new(85_100_068_864),
        nominal: decimal(80),
        compute_capability: (8, 0),
        multiprocessors: 108,
        source: "deviceQuery of an A100-SXM4-80GB, CUDA driver 12.5",
    },
    Gpu {
        name: "A100-40GB",
        capacity: Bytes::new(42_298_834_944),
        nominal: decimal(40),
        compute_capability: (8, 0),
        multiprocessors: 108,
        source: "deviceQuery of an A100-SXM4-40GB, CUDA driver 12.2",
    },
    Gpu {
        name: "V100-32GB",
        capacity: Bytes::new(34_089_926_656),
        nominal: decimal(32),
        compute_capability: (7, 0),
        multiprocessors: 80,
        source: "deviceQuery of a Tesla V100-SXM2-32GB, CUDA driver 13.0",
    },
    Gpu {
        name: "V100-16GB",
        capacity: Bytes::new(16_911_433_728),
        nominal: decimal(16),
        compute_capability: (7, 0),
        multiprocessors: 80,
        source: "deviceQuery of a Tesla V100-SXM2-16GB, CUDA driver 11.0",
    },
    Gpu {
        name: "L40S",
        capacity: Bytes::new(47_576_711_168),
        nominal: decimal(48),
        compute_capability: (8, 9),
        multiprocessors: 142,
        source: "driver properties of an L40S, CUDA driver 12.4",
    },
    Gpu {
        name: "L4",
        capacity: Bytes::new(23_612_293_120),
        nominal: decimal(24),
        compute_capability: (8, 9),
        multiprocessors: 58,
        source: "deviceQuery of an L4, CUDA driver 12.0; multiprocessors from the data sheet (7424 cores of 128)",
    },
    Gpu {
        name: "A40",
        capacity: Bytes::new(47_608_692_736),
        nominal: decimal(48),
        compute_capability: (8, 6),
        multiprocessors: 84,
        source: "deviceQuery of an A40, CUDA driver 12.4",
    },
    Gpu {
        name: "A10",
        capacity: Bytes::new(23_696_375_808),
        nominal: decimal(24),
        compute_capability: (8, 6),
        multiprocessors: 72,
        source: "deviceQuery of an A10, CUDA driver 12.8",
    },
    Gpu {
        name: "T4",
        capacity: Bytes::new(15_642_329_088),
        nominal: decimal(16),
        compute_capability: (7, 5),
        multiprocessors: 40,
        source: "deviceQuery of a Tesla T4, CUDA driver 12.4",
    },
    Gpu {
        name: "RTX-A6000",
        capacity: Bytes::new(51_160_023_040),
        nominal: decimal(48),
        compute_capability: (8, 6),
        multiprocessors: 84,
        source: "deviceQuery of an RTX A6000 without ECC, CUDA driver 12.7",
    },
    Gpu {
        name: "RTX-5090",
        capacity: Bytes::new(33_660_534_784),
        nominal: decimal(32),
        compute_capability: (12, 0),
        multiprocessors: 170,
        source: "deviceQuery of a GeForce RTX 5090, CUDA driver 13.0",
    },
    Gpu {
        name: "RTX-4090",
        capacity: Bytes::new(25_386_352_640),
        nominal: decimal(24),
        compute_capability: (8, 9),
        multiprocessors: 128,
        source: "deviceQuery of a GeForce RTX 4090, CUDA driver 12.4",
    },
    Gpu {
        name: "RTX-4080",
        capacity: Bytes::mib(16_049),
        nominal: decimal(16),
        compute_capability: (8, 9),
        multiprocessors: 76,
        source: "torch.cuda.get_device_properties of a GeForce RTX 4080; known in whole MiB",
    },
    Gpu {
        name: "RTX-3090",
        capacity: Bytes::new(25_447_170_048),
        nominal: decimal(24),
        compute_capability: (8, 6),
        multiprocessors: 82,
        source: "deviceQuery of a GeForce RTX 3090, CUDA driver 11.8",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_named_once_and_has_about_its_nominal_size() {
        for (index, gpu) in GPUS.iter().enumerate() {
            assert!(GPUS[..index].iter().all(|other| other.name != gpu.name), "{}", gpu.name);
            let ratio = gpu.capacity.get() as f64 / gpu.nominal.get() as f64;
            assert!((0.95..1.1).contains(&ratio), "{}: {ratio}", gpu.name);
        }
    }
}
