//! How a model is trained: everything about a run but the model and the card.

use engine::{Kernel, Pinning};
use ledger::Dtype;

use crate::causal_lm::AttentionSetup;
use crate::checkpoint::Checkpoint;
use crate::lora::Lora;
use crate::loss::Loss;
use crate::parallel::Parallel;

macro_rules! choices {
    ($($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// Every choice.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The word used on the command line and in documents.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::str::FromStr for $name {
            type Err = ();
            fn from_str(word: &str) -> Result<Self, ()> {
                match word { $($text => Ok(Self::$variant),)+ _ => Err(()) }
            }
        }
    )+};
}

choices! {
    /// The attention implementation of the model (`attn_implementation`).
    Attention {
        /// Matrix products and a softmax, written out.
        Eager = "eager",
        /// `torch.nn.functional.scaled_dot_product_attention`.
        Sdpa = "sdpa",
    }

    /// The kernel that sdpa runs.
    SdpaKernel {
        /// The one PyTorch would choose by device, dtype, dropout and mask.
        Default = "default",
        /// FlashAttention.
        Flash = "flash",
        /// Memory-efficient attention.
        Efficient = "efficient",
        /// Matrix products and a softmax.
        Math = "math",
        /// cuDNN's fused attention.
        Cudnn = "cudnn",
    }

    /// The optimizer, under its name in `torch.optim`.
    Optimizer {
        /// Stochastic gradient descent.
        Sgd = "sgd",
        /// Adam.
        Adam = "adam",
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
        /// RMSprop.
        RmsProp = "rmsprop",
        /// Adagrad.
        Adagrad = "adagrad",
        /// Adafactor.
        Adafactor = "adafactor",
        /// Adam with a state of 8 bits and block scales, as torchao has it.
        Adam8bit = "adam8bit",
        /// The same with decoupled weight decay.
        AdamW8bit = "adamw8bit",
        /// Adam with a state of 4 bits and block scales, as torchao has it.
        Adam4bit = "adam4bit",
        /// The same with decoupled weight decay.
        AdamW4bit = "adamw4bit",
        /// Lion, as the package lion-pytorch has it.
        Lion = "lion",
        /// Muon for the matrices of hidden layers, AdamW for everything else.
        Muon = "muon",
    }

    /// The implementation of the optimizer's step.
    OptimizerImpl {
        /// Lists of tensors at a time.
        Foreach = "foreach",
        /// One kernel for everything.
        Fused = "fused",
        /// One parameter after the other.
        ForLoop = "for-loop",
    }

    /// What zero_grad does.
    ZeroGrad {
        /// Gradients are let go.
        SetToNone = "set-to-none",
        /// Gradients are filled with zeros.
        Keep = "keep",
    }

    /// What is kept in host memory.
    Offload {
        /// What operators save for backward (`save_on_cpu`).
        Activations = "activations",
        /// The same in page-locked memory (`save_on_cpu(pin_memory=True)`).
        ActivationsPinned = "activations-pinned",
        /// What checkpointed layers begin from, in page-locked memory (`offload=True` of transformers).
        Checkpoints = "checkpoints",
        /// The state of the optimizer, which steps there (`torchao.optim.CPUOffloadOptimizer`).
        Optimizer = "optimizer",
        /// The parameters, copied to the device wherever a module uses them, with the optimizer.
        Parameters = "parameters",
    }

    /// 4-bit weights of the linear layers but the head, as bitsandbytes holds them.
    Quantize {
        /// NormalFloat with a scale in fp32 for 64 elements.
        Nf4 = "nf4",
        /// The same, its scales in 8 bits (double quantization).
        Nf4Double = "nf4-double",
    }

    /// The release of torch whose behaviour is modelled.
    Torch {
        /// 2.6
        V2_6 = "2.6",
        /// 2.11
        V2_11 = "2.11",
        /// 2.15
        V2_15 = "2.15",
    }
}

/// How a model is trained.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Samples of one micro-batch.
    pub batch: u64,
    /// Tokens of one sample: a length a step, cycled. Empty for an mlp.
    pub seqs: Vec<u64>,
    /// Dtype of the weights; none: the config's.
    pub dtype: Option<Dtype>,
    /// Dtype of the autocast region around the forward pass.
    pub autocast: Option<Dtype>,
    /// The attention implementation.
    pub attention: Attention,
    /// The kernel that sdpa runs.
    pub sdpa_kernel: SdpaKernel,
    /// Activation checkpointing.
    pub checkpoint: Checkpoint,
    /// A recomputed layer runs backward within the backward of one node (`use_reentrant=True`).
    pub checkpoint_reentrant: bool,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Its implementation; none: what torch picks on CUDA.
    pub optimizer_impl: Option<OptimizerImpl>,
    /// Momentum of SGD and RMSprop.
    pub momentum: f64,
    /// SGD looks ahead along its momentum.
    pub nesterov: bool,
    /// Weight decay; none: what the optimizer takes by itself.
    pub weight_decay: Option<f64>,
    /// Adam keeps the largest second moments as well.
    pub amsgrad: bool,
    /// The optimizer's step can be captured in a CUDA graph: its counters are on the device.
    pub capturable: bool,
    /// Each parameter has an optimizer of its own, which steps in backward as soon as the gradient is
    /// there and lets go of it (`register_post_accumulate_grad_hook`).
    pub optimizer_in_backward: bool,
    /// The optimizer's state is fp32 beside 16-bit parameters.
    pub fp32_state: bool,
    /// The optimizer steps fp32 copies of 16-bit parameters, from which these are written.
    pub master_weights: bool,
    /// Micro-batches of one step.
    pub accumulate: u32,
    /// Data-parallel ranks: enters the effective batch.
    pub world_size: u32,
    /// The rank that is looked at, from 0.
    pub rank: u32,
    /// How ranks divide the work; none: each holds all.
    pub parallel: Option<Parallel>,
    /// What zero_grad does.
    pub zero_grad: ZeroGrad,
    /// The largest norm of the gradients (`clip_grad_norm_`).
    pub clip_grad_norm: Option<f64>,
    /// What is kept in host memory.
    pub offload: Vec<Offload>,
    /// The output object stays bound until the next forward.
    pub keep_outputs: bool,
    /// The loss; none: the mean of squares of an mlp, that of transformers for a language model.
    pub loss: Option<Loss>,
    /// Modules or parameters that are frozen, by whole parts of their paths.
    pub freeze: Vec<String>,
    /// The form of frozen weights; none: their dtype.
    pub quantize: Option<Quantize>,
    /// What stays in 16 bits beside quantized weights is cast to fp32 (`prepare_model_for_kbit_training`).
    pub prepare_kbit: bool,
    /// Low-rank adapters; none: every parameter is trained.
    pub lora: Option<Lora>,
    /// Steps to run.
    pub steps: u32,
    /// The release of torch.
    pub torch: Torch,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            batch: 1,
            seqs: Vec::new(),
            dtype: None,
            autocast: None,
            attention: Attention::Sdpa,
            sdpa_kernel: SdpaKernel::Default,
            checkpoint: Checkpoint::None,
            checkpoint_reentrant: false,
            optimizer: Optimizer::AdamW,
            optimizer_impl: None,
            momentum: 0.0,
            nesterov: false,
            weight_decay: None,
            amsgrad: false,
            capturable: false,
            optimizer_in_backward: false,
            fp32_state: false,
            master_weights: false,
            accumulate: 1,
            world_size: 1,
            rank: 0,
            parallel: None,
            zero_grad: ZeroGrad::SetToNone,
            clip_grad_norm: None,
            offload: Vec::new(),
            keep_outputs: false,
            loss: None,
            freeze: Vec::new(),
            quantize: None,
            prepare_kbit: false,
            lora: None,
            steps: 3,
            torch: Torch::V2_15,
        }
    }
}

impl Setup {
    /// The sequence length of `step`, which counts from 1; 0 where there is none.
    pub(crate) fn seq_of_step(&self, step: u32) -> u64 {
        match self.seqs.len() {
            0 => 0,
            count => self.seqs[(step as usize - 1) % count],
        }
    }

    /// Weight decay, the optimizer's own where none is set.
    pub(crate) fn weight_decay(&self) -> f64 {
        self.weight_decay.unwrap_or(match self.optimizer {
            Optimizer::AdamW | Optimizer::AdamW8bit | Optimizer::AdamW4bit => 0.01,
            Optimizer::Muon => 0.1,
            _ => 0.0,
        })
    }

    /// Whether `what` is kept in host memory.
    pub(crate) fn offloads(&self, what: Offload) -> bool {
        self.offload.contains(&what)
    }

    /// How saved values are kept in host memory, where they are.
    pub(crate) fn saved_on_host(&self) -> Option<Pinning> {
        let pageable = self.offloads(Offload::Activations).then_some(Pinning::Pageable);
        pageable.or(self.offloads(Offload::ActivationsPinned).then_some(Pinning::Pinned))
    }

    /// The kernel sdpa is held to; none: PyTorch's choice.
    pub(crate) const fn kernel(&self) -> Option<Kernel> {
        match self.sdpa_kernel {
            SdpaKernel::Default => None,
            SdpaKernel::Flash => Some(Kernel::Flash),
            SdpaKernel::Efficient => Some(Kernel::Efficient),
            SdpaKernel::Math => Some(Kernel::Math),
            SdpaKernel::Cudnn => Some(Kernel::Cudnn),
        }
    }

    /// What the models read of the attention's setup.
    pub(crate) fn attention_setup(&self, dropout: f64) -> AttentionSetup {
        AttentionSetup { eager: self.attention == Attention::Eager, kernel: self.kernel(), dropout }
    }
}
