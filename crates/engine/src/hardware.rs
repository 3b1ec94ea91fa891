//! What the card and the release of torch decide: data in one place.

/// What operators ask of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Compute capability, major and minor.
    pub compute_capability: (u8, u8),
    /// Streaming multiprocessors.
    pub multiprocessors: u64,
    /// Resident threads of one multiprocessor.
    pub threads_per_multiprocessor: u64,
}

/// What differs between releases of torch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Whether the cuBLAS workspace is allocated around each product and freed, or kept for the
    /// life of the handle from the first product on.
    pub cublas_workspace_kept: bool,
    /// The workspace of a product with a fused bias (cublasLt), in bytes: allocated around it.
    pub cublaslt_workspace: u64,
}

impl Profile {
    /// torch 2.15.
    pub const TORCH_2_15: Self = Self { cublas_workspace_kept: false, cublaslt_workspace: 1 << 20 };
    /// torch 2.11, as far as public snapshots tell.
    pub const TORCH_2_11: Self = Self { cublas_workspace_kept: true, cublaslt_workspace: 1 << 20 };
    /// torch 2.6, as far as public snapshots tell.
    pub const TORCH_2_6: Self = Self { cublas_workspace_kept: true, cublaslt_workspace: 1 << 20 };
}

impl Hardware {
    /// The default cuBLAS workspace: 32 MiB on compute capability 9, 10 and 12, else
    /// 2 * 4096 KiB + 8 * 16 KiB (`:4096:2:16:8`).
    pub fn cublas_workspace(&self) -> u64 {
        if matches!(self.compute_capability.0, 9 | 10 | 12) { 32 << 20 } else { 8_519_680 }
    }

    /// Pairs that one block of CUB's radix sort takes, 8-byte keys and values.
    pub(crate) const fn sort_tile(&self) -> u64 {
        match self.compute_capability {
            (..8, _) => 2816,
            (8, _) => 3840,
            _ => 4608,
        }
    }

    /// Items that one block of CUB's unique-by-key takes.
    pub(crate) const fn unique_tile(&self) -> u64 {
        match self.compute_capability {
            (8, 0) => 1344,
            (..9, _) => 320,
            _ => 4928,
        }
    }

    /// Whether a block may have more than 100 KiB of shared memory, as the larger kernels of
    /// memory-efficient attention need.
    pub(crate) const fn large_shared_memory(&self) -> bool {
        matches!(self.compute_capability, (8, 0 | 7) | (9..=11, _))
    }

    /// Whether the card multiplies bf16 without emulation.
    pub const fn native_bf16(&self) -> bool {
        self.compute_capability.0 >= 8
    }
}
