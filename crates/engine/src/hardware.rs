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
    /// How long the cuBLAS workspace of a product lives.
    pub cublas_workspace: Lifetime,
    /// How long the workspace of a product with a fused bias (cublasLt) lives.
    pub cublaslt_workspace: Lifetime,
    /// Whether PyTorch prefers cuDNN's attention on compute capability 9 and 10.
    pub cudnn_attention_first: bool,
    /// Whether it does so with dropout too.
    pub cudnn_attention_drops: bool,
    /// Whether flash attention keeps its random state on the device.
    pub flash_attention_seeds: bool,
    /// Whether memory-efficient attention without dropout keeps its seed and offset on the device.
    pub efficient_attention_seeds: bool,
    /// Whether memory-efficient attention takes fewer key-value heads than query heads.
    pub efficient_attention_groups: bool,
    /// Whether the embedding's backward sorts by the bits that indices can have, or by all 64.
    pub sorts_used_bits: bool,
    /// Whether the backward of layer_norm sums tall and narrow inputs in two passes.
    pub two_pass_layer_norm: bool,
    /// Fixed bytes of CUB's passes with decoupled look-back.
    pub look_back_base: u64,
    /// Bytes of a block's state in CUB's unique-by-key.
    pub unique_state: u64,
    /// Items that a block of it takes on compute capability 9 and later.
    pub unique_tile: u64,
    /// Whether a norm over a list of tensors brings their addresses to the device, with a partial result for
    /// each chunk; otherwise each tensor has as many partial results as the largest needs.
    pub listed_norms: bool,
    /// Whether batches of outer products have a kernel of their own, without cuBLAS.
    pub outer_product_kernel: bool,
    /// Whether a product of halves can be added to an fp32 matrix (`out_dtype`).
    pub widening_products: bool,
}

/// How long a workspace of cuBLAS lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// It is allocated around each product and freed.
    Product,
    /// It is kept from the first product on, for each thread that multiplies: the program's and
    /// autograd's.
    Handle,
}

impl Profile {
    /// torch 2.15.
    pub const TORCH_2_15: Self = Self {
        cublas_workspace: Lifetime::Product,
        cublaslt_workspace: Lifetime::Product,
        cudnn_attention_first: true,
        cudnn_attention_drops: false,
        flash_attention_seeds: true,
        two_pass_layer_norm: true,
        look_back_base: 511,
        unique_state: 16,
        unique_tile: 4928,
        efficient_attention_seeds: true,
        efficient_attention_groups: true,
        sorts_used_bits: true,
        listed_norms: true,
        outer_product_kernel: true,
        widening_products: true,
    };
    /// torch 2.11.
    pub const TORCH_2_11: Self = Self {
        cublas_workspace: Lifetime::Handle,
        cublaslt_workspace: Lifetime::Handle,
        cudnn_attention_first: true,
        cudnn_attention_drops: true,
        flash_attention_seeds: true,
        two_pass_layer_norm: true,
        look_back_base: 511,
        unique_state: 16,
        unique_tile: 4480,
        efficient_attention_seeds: false,
        efficient_attention_groups: false,
        sorts_used_bits: false,
        listed_norms: false,
        outer_product_kernel: false,
        widening_products: true,
    };
    /// torch 2.6.
    pub const TORCH_2_6: Self = Self {
        cublaslt_workspace: Lifetime::Product,
        widening_products: false,
        cudnn_attention_first: false,
        flash_attention_seeds: false,
        two_pass_layer_norm: false,
        look_back_base: 255,
        unique_state: 8,
        ..Self::TORCH_2_11
    };
}

/// The workspace of a product with a fused bias, in bytes.
pub(crate) const CUBLASLT_WORKSPACE: u64 = 1 << 20;

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
    pub(crate) const fn unique_tile(&self, profile: &Profile) -> u64 {
        match self.compute_capability {
            (8, 0) => 1344,
            (..9, _) => 320,
            _ => profile.unique_tile,
        }
    }

    /// Whether a block may have more than 100 KiB of shared memory, as the larger kernels of
    /// memory-efficient attention need.
    pub(crate) const fn large_shared_memory(&self) -> bool {
        matches!(self.compute_capability, (8, 0 | 7) | (9..=11, _))
    }

    /// Whether it is one of the cards with less shared memory that train fewer head sizes with FlashAttention.
    pub(crate) const fn small_shared_memory(&self) -> bool {
        matches!(self.compute_capability, (8, 6 | 9) | (12, _))
    }

    /// Whether the card multiplies bf16 without emulation.
    pub const fn native_bf16(&self) -> bool {
        self.compute_capability.0 >= 8
    }
}
