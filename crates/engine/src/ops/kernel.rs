//! The kernels behind scaled dot-product attention, and which of them can run.

use ledger::Dtype;

use crate::hardware::{Hardware, Profile};

/// The kernel behind `scaled_dot_product_attention`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// FlashAttention.
    Flash,
    /// Memory-efficient attention.
    Efficient,
    /// cuDNN's fused attention.
    Cudnn,
    /// Matrix products and a softmax.
    Math,
}

impl Kernel {
    /// The kernel PyTorch chooses: cuDNN first on compute capability 9 and 10
    /// (half precision), then flash (8.0 on, half precision, no mask), then memory-efficient, then math.
    pub fn choose(hardware: &Hardware, profile: &Profile, of: Problem) -> Self {
        let order = if matches!(hardware.compute_capability.0, 9 | 10)
            && (!of.dropout || profile.cudnn_attention_drops)
        {
            &[Self::Cudnn, Self::Flash, Self::Efficient][..]
        } else {
            &[Self::Flash, Self::Efficient][..]
        };
        let runs = |kernel: &&Self| kernel.refusal(hardware, profile, of).is_none();
        order.iter().find(runs).copied().unwrap_or(Self::Math)
    }

    /// Why this kernel cannot run `of`, as the end of a sentence; none where it can.
    pub fn refusal(self, hardware: &Hardware, profile: &Profile, of: Problem) -> Option<String> {
        let major = hardware.compute_capability.0;
        let half = matches!(of.dtype, Dtype::Fp16 | Dtype::Bf16);
        // Rows of the memory-efficient kernel's operands are loaded 16 bytes at a time.
        let alignment = match major {
            _ if half => 8,
            8.. => 4,
            _ => 1,
        };
        match self {
            Self::Flash | Self::Cudnn if !half => {
                Some(format!("takes fp16 or bf16, not {}", of.dtype.as_str()))
            }
            Self::Flash | Self::Cudnn if major < 8 => Some("needs compute capability 8.0 or more".into()),
            Self::Flash if of.mask => Some("takes no mask".into()),
            Self::Flash if of.head > 256 => Some(format!("takes heads of at most 256, not {}", of.head)),
            Self::Flash if hardware.small_shared_memory() && flash_spills(of) => {
                Some(format!("cannot train heads of {} on this card", of.head))
            }
            Self::Efficient if !of.head.is_multiple_of(alignment) => {
                Some(format!("takes heads of a multiple of {alignment}, not {}", of.head))
            }
            Self::Efficient if of.dtype == Dtype::Bf16 && major < 8 => {
                Some("takes bf16 from compute capability 8.0 on".into())
            }
            Self::Efficient if of.grouped && !profile.efficient_attention_groups => {
                Some("takes as many key-value heads as query heads in this release of torch".into())
            }
            Self::Cudnn if of.dropout && !profile.cudnn_attention_drops => {
                Some("is not modelled with dropout in this release of torch".into())
            }
            Self::Cudnn if of.tokens == 1 => Some("takes more than one token".into()),
            Self::Cudnn
                if !of.head.is_multiple_of(8) || of.head > 256 || (of.trains && untrained_by_cudnn(of)) =>
            {
                Some(format!("trains heads of a multiple of 8 up to 128, or of 256, not of {}", of.head))
            }
            _ => None,
        }
    }
}

/// Heads whose backward in FlashAttention needs more shared memory than the smaller cards have.
const fn flash_spills(of: Problem) -> bool {
    of.trains && of.head > 192 && (of.head <= 224 || of.dropout)
}

/// Heads beyond those that cuDNN trains, but for the last.
const fn untrained_by_cudnn(of: Problem) -> bool {
    of.head > 128 && of.head != 256
}

/// What decides which kernel can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The dtype of queries, keys and values.
    pub dtype: Dtype,
    /// The head size.
    pub head: u64,
    /// Whether there are fewer key-value heads than query heads.
    pub grouped: bool,
    /// Whether there is a mask.
    pub mask: bool,
    /// Whether weights are dropped.
    pub dropout: bool,
    /// Tokens of a sample.
    pub tokens: u64,
    /// Whether a backward pass will follow, which fewer heads have a kernel for.
    pub trains: bool,
}
