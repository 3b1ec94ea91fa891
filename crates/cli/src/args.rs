//! The command line.

mod deepspeed;
mod parallel;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vramledger::ledger::{Bytes, Dtype};
use vramledger::models::{
    Attention, Checkpoint, Loss, Offload, Optimizer, OptimizerImpl, Quantize, SdpaKernel, Sharding, Torch,
    ZeroGrad,
};

use vramledger::{By, Grows};

use crate::input::NamedFile;
use crate::value;

pub use parallel::ParallelSettings;

/// The books of GPU training memory: what is on the device, when and why.
#[derive(Parser)]
#[command(name = "vramledger", version, arg_required_else_help = true, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 yes, 1 no (it does not fit, it does not agree), 2 the question could not be answered."
)]
pub struct Cli {
    /// The question.
    #[command(subcommand)]
    pub command: Command,
    /// What every command takes.
    #[command(flatten)]
    pub common: Common,
}

/// What every command takes.
#[derive(Args, Clone)]
pub struct Common {
    /// The form of the answer
    #[arg(long, value_enum, default_value_t = Format::Text, global = true, help_heading = "Output")]
    pub format: Format,
    /// Write the answer to FILE, whole or not at all
    #[arg(short, long, value_name = "FILE", global = true, help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// No warnings or hints
    #[arg(long, short, global = true, help_heading = "Output")]
    pub quiet: bool,
    /// Colours (NO_COLOR is heeded too)
    #[arg(long, value_enum, default_value_t = Color::Auto, global = true, help_heading = "Output")]
    pub color: Color,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A page for a terminal
    Text,
    /// The versioned document
    Json,
    /// A page for a report
    Markdown,
    /// One table, bytes exact
    Csv,
}

/// Whether to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl From<Color> for anstream::ColorChoice {
    fn from(color: Color) -> Self {
        match color {
            Color::Auto => Self::Auto,
            Color::Always => Self::Always,
            Color::Never => Self::Never,
        }
    }
}

/// The questions.
#[derive(Subcommand)]
pub enum Command {
    /// Predict a training step from a model config: what is on the card when, and who makes the peak
    Plan(Box<PlanArgs>),
    /// What a recording of a run says: peaks, owners, steps, growth, stranding, failures
    ///
    /// Of the files of several ranks: a row a rank, those unlike the others, and which objects make them so.
    Read(ReadArgs),
    /// One tape under several settings of the allocator: reserved, stranded, retries, whether it fits
    Simulate(SimulateArgs),
    /// Run an unmodified PyTorch program on an emulated GPU and keep its ledger
    ///
    /// The program runs as it is, with its own PyTorch (2.6 to 2.15, a CUDA build) on Linux x86-64; no
    /// GPU is needed, and no kernel does anything, so that its numbers mean nothing. What it prints
    /// passes through; the answer follows on standard output, or goes to a file with -o.
    Emulate(Box<EmulateArgs>),
    /// Ledgers side by side: peak, phase, owners, savings with their sign
    Compare(CompareArgs),
    /// A prediction beside what the allocator says, line by line
    ///
    /// Exits with 1 where the allocated bytes are more than a tenth above the prediction.
    Reconcile(ReconcileArgs),
    /// Bytes a parameter by recipe, the largest model that N cards hold, the cards that a size needs
    ///
    /// With --parallel: what one rank of a job holds by recipe and by how the states are divided.
    Budget(BudgetArgs),
    /// Which layers of a model to recompute under a budget, or what checkpointing every S of L layers keeps
    CheckpointPlan(Box<CheckpointPlanArgs>),
    /// What a smaller dtype and a smaller saved fraction do to one saved tensor
    Tradeoff(TradeoffArgs),
    /// The models that are known by name
    Models,
    /// The GPUs that are known by name
    Gpus,
}

/// Arguments of `read`.
#[derive(Args)]
pub struct ReadArgs {
    /// A memory snapshot or profiler trace of PyTorch, a memory timeline, an out-of-memory message or the log that has it,
    /// a step log, a document that has a ledger, or -; of several files, each is of one rank
    #[arg(value_name = "[NAME=]FILE", required = true)]
    pub files: Vec<NamedFile>,
    /// By what the objects at the peak are told apart
    #[arg(long, value_name = "WHAT", value_parser = value::choice(By::ALL, By::as_str), default_value = "stack")]
    pub by: By,
    /// Frames of a stack that count
    #[arg(long, value_name = "N", value_parser = value::depth, default_value_t = vramledger::DEPTH, allow_negative_numbers = true)]
    pub depth: usize,
    /// Look after this event, in place of the peak
    #[arg(long, value_name = "EVENT")]
    pub at: Option<u64>,
    /// Look at the peak of this step, in place of the run's; 0 is before the first
    #[arg(long, value_name = "N", conflicts_with = "at")]
    pub step: Option<u32>,
    /// Look at this GPU alone, by its number in the file
    #[arg(long, value_name = "N")]
    pub device: Option<u16>,
    /// Replay the requests under these settings too, as in PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING")]
    pub what_if: Vec<String>,
    /// What the device has, in place of what the file tells: what grows is held against it
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true)]
    pub capacity: Option<Bytes>,

    /// The model of the run, as `plan` takes it: its objects name what was asked for
    #[arg(long, value_name = "MODEL", help_heading = "Out of memory")]
    pub model: Option<String>,
    /// The settings of the run in a file, as of `plan`
    #[arg(long, value_name = "FILE.toml", requires = "model", help_heading = "Out of memory")]
    pub setup: Option<PathBuf>,
    /// A ledger or tape of the run, in place of its model
    #[arg(long, value_name = "FILE", conflicts_with = "model", help_heading = "Out of memory")]
    pub ledger: Option<NamedFile>,
    /// The number of its parameters, in place of its model: 7B, 6738415616
    #[arg(long, value_name = "N", value_parser = value::parameters, conflicts_with_all = ["model", "ledger"], help_heading = "Out of memory")]
    pub params: Option<u64>,
    /// The ranks that the parameters may be divided among [default: 1]
    #[arg(long, value_name = "N", value_parser = value::positive, requires = "params", help_heading = "Out of memory", allow_negative_numbers = true)]
    pub world_size: Option<u64>,
}

/// Arguments of `simulate`.
#[derive(Args)]
pub struct SimulateArgs {
    /// The tape that `plan -o run.vlt` keeps, or -
    #[arg(value_name = "[NAME=]TAPE")]
    pub tape: NamedFile,
    /// Settings as in PYTORCH_CUDA_ALLOC_CONF, once for each row (default: none beside expandable_segments:True)
    #[arg(long, value_name = "STRING")]
    pub alloc_conf: Vec<String>,
    /// The card [default: the tape's]
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<String>,
    /// All memory of the card [default: the tape's, or that of --gpu]
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true)]
    pub capacity: Option<Bytes>,
    /// What of it the allocator never sees [default: the tape's, or 550MiB]
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true)]
    pub context: Option<Bytes>,
    /// The release of torch that chooses among equal blocks [default: the tape's, or 2.15]
    #[arg(long, value_name = "VERSION", value_parser = value::choice(Torch::ALL, Torch::as_str))]
    pub torch: Option<Torch>,
}

/// Arguments of `emulate`.
#[derive(Args)]
pub struct EmulateArgs {
    /// The program: python train.py --its own arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,

    /// The card
    #[arg(long, value_name = "NAME", default_value = "H100-80GB", help_heading = "Card")]
    pub gpu: String,
    /// All memory of the card, in place of the catalogue's
    #[arg(long, value_name = "SIZE", value_parser = value::size, help_heading = "Card", allow_negative_numbers = true)]
    pub capacity: Option<Bytes>,
    /// What of it the allocator never sees [default: 550MiB]
    #[arg(long, value_name = "SIZE", value_parser = value::size, help_heading = "Card", allow_negative_numbers = true)]
    pub context: Option<Bytes>,
    /// The allocator's settings, in place of the environment's PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING", help_heading = "Card")]
    pub alloc_conf: Option<String>,

    /// Optimizer steps after which the program is stopped, or all
    #[arg(long, value_name = "N|all", value_parser = value::steps, default_value = "3", help_heading = "Run", allow_negative_numbers = true)]
    pub steps: Steps,
    /// Seconds after which the program is ended without an answer [default: none]
    #[arg(long, value_name = "SECONDS", value_parser = value::positive, help_heading = "Run", allow_negative_numbers = true)]
    pub timeout: Option<u64>,
    /// Keep PyTorch's own recording, which torch.cuda.memory's tools read, in FILE
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub snapshot: Option<PathBuf>,

    /// The program is one of N processes with a GPU each, as torchrun would start it
    #[arg(long, value_name = "N", value_parser = value::positive_u32, help_heading = "Job", allow_negative_numbers = true)]
    pub gpus: Option<u32>,
    /// Which of them, from 0 [default: 0]
    #[arg(long, value_name = "R", requires = "gpus", help_heading = "Job")]
    pub rank: Option<u32>,
    /// The machines over which they are spread [default: 1]
    #[arg(long, value_name = "M", requires = "gpus", value_parser = value::positive_u32, help_heading = "Job", allow_negative_numbers = true)]
    pub nodes: Option<u32>,
}

/// How many optimizer steps a program runs; none: to its end.
#[derive(Clone, Copy, Debug)]
pub struct Steps(pub Option<u32>);

/// Arguments of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// What the others are held against: a ledger, a tape, hand-written states, or -
    #[arg(value_name = "[NAME=]BASE")]
    pub base: NamedFile,
    /// The candidates
    #[arg(value_name = "[NAME=]OTHER", required = true)]
    pub others: Vec<NamedFile>,
}

/// Arguments of `reconcile`.
#[derive(Args)]
pub struct ReconcileArgs {
    /// The prediction: a ledger, a tape, a memory snapshot, hand-written states, or -
    #[arg(value_name = "[NAME=]PREDICTED")]
    pub predicted: NamedFile,
    /// What a run left behind: a ledger, a tape, a memory snapshot, hand-written states
    #[arg(value_name = "[NAME=]EVIDENCE", required_unless_present = "allocated", conflicts_with_all = ["allocated", "reserved", "capacity", "at"])]
    pub evidence: Option<NamedFile>,
    /// In place of evidence, bytes in blocks: torch.cuda.memory_allocated()
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true, requires_all = ["reserved", "capacity"])]
    pub allocated: Option<Bytes>,
    /// Bytes in segments, at the same instant: torch.cuda.memory_reserved()
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true, requires = "allocated")]
    pub reserved: Option<Bytes>,
    /// What the process may use
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true, requires = "allocated")]
    pub capacity: Option<Bytes>,
    /// The phase of the measurement [default: that of the predicted peak]
    #[arg(long, value_name = "PHASE", requires = "allocated")]
    pub at: Option<String>,
}

/// Arguments of `budget`.
#[derive(Args)]
pub struct BudgetArgs {
    /// A model, as `plan` takes it, in place of sizes: its parameters are divided to the byte
    #[arg(requires = "parallel", conflicts_with = "params")]
    pub model: Option<String>,
    /// Sizes of models: 7B,70B (default: 124M,1.5B,7B,70B,405B)
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = value::parameters)]
    pub params: Vec<u64>,
    /// The card
    #[arg(long, value_name = "NAME", default_value = "H100-80GB")]
    pub gpu: String,
    /// How many cards
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value::positive, allow_negative_numbers = true)]
    pub gpus: u64,
    /// How the states are divided over the ranks of a job
    #[arg(long, value_name = "KIND", value_parser = value::choice(Sharding::ALL, Sharding::as_str), requires = "world_size", conflicts_with_all = ["gpu", "gpus"])]
    pub parallel: Option<Sharding>,
    /// The ranks of the job
    #[arg(long, value_name = "N", value_parser = value::positive_u32, allow_negative_numbers = true, requires = "parallel")]
    pub world_size: Option<u32>,
    /// Which of them [default: 0]
    #[arg(long, value_name = "R", requires = "parallel", allow_negative_numbers = true)]
    pub rank: Option<u32>,
    /// Ranks that share one copy of the parameters in hsdp
    #[arg(long, value_name = "N", value_parser = value::positive_u32, allow_negative_numbers = true, requires = "parallel")]
    pub shard_size: Option<u32>,
}

/// Arguments of `checkpoint-plan`.
#[derive(Args)]
pub struct CheckpointPlanArgs {
    /// A model, as `plan` takes it: which of its layers to recompute under --budget
    #[arg(required_unless_present = "layers", conflicts_with_all = ["layers", "segment"], requires = "budget")]
    pub model: Option<String>,
    /// The most allocated bytes that the run may have
    #[arg(long, value_name = "SIZE", value_parser = value::size, allow_negative_numbers = true, requires = "model", conflicts_with = "layers")]
    pub budget: Option<Bytes>,
    /// Layers in units, without a model
    #[arg(long, value_name = "L", value_parser = value::positive, allow_negative_numbers = true)]
    pub layers: Option<u64>,
    /// Layers of a segment, 1 to L (default: all that divide L)
    #[arg(long, value_name = "S", value_parser = value::positive, allow_negative_numbers = true)]
    pub segment: Option<u64>,
    /// The settings of the run in a file, as of `plan`
    #[arg(long, value_name = "FILE.toml")]
    pub setup: Option<PathBuf>,
    /// What the setup is of.
    #[command(flatten)]
    pub settings: PlanSettings,
}

/// Arguments of `tradeoff`.
#[derive(Args)]
pub struct TradeoffArgs {
    /// Samples of one micro-batch
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub batch: u64,
    /// Tokens of one sample
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub seq: u64,
    /// Width of the tensor
    #[arg(long, value_name = "N", value_parser = value::positive, allow_negative_numbers = true)]
    pub hidden: u64,
    /// Element type (default: fp32 beside bf16)
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype())]
    pub dtype: Option<Dtype>,
    /// The fraction that is kept, in (0, 1] (default: 0.5)
    #[arg(long, value_name = "X", value_parser = value::finite, allow_negative_numbers = true)]
    pub saved_fraction: Option<f64>,
    /// The fraction of the forward pass that runs again, in [0, 1] (default: what is not kept)
    #[arg(long, value_name = "X", value_parser = value::finite, allow_negative_numbers = true)]
    pub extra_forward: Option<f64>,
}

/// Arguments of `plan`. What is not given is `None`, so that a setup file can give it.
#[derive(Args)]
pub struct PlanArgs {
    /// A name of `vramledger models`, a config.json, a directory that holds one, mlp:LAYERSxWIDTH, or -
    pub model: String,
    /// The same settings in a file, a key for each flag (`batch = 4`); a flag wins
    #[arg(long, value_name = "FILE.toml")]
    pub setup: Option<PathBuf>,
    /// A table in place of one plan: this setting with each of these values, with those of every other `--vary`;
    /// `;` stands between values that have commas themselves
    #[arg(long, value_name = "KEY=VALUE,…", conflicts_with = "largest")]
    pub vary: Vec<String>,
    /// The largest value of this setting with which the plan fits, in place of one plan
    #[arg(long, value_name = "SETTING", value_parser = value::choice(Grows::ALL, Grows::as_str))]
    pub largest: Option<Grows>,
    /// What the setup is of.
    #[command(flatten)]
    pub settings: PlanSettings,
}

/// The settings of `plan`: a flag and a key of a setup file each.
#[derive(Args, Clone, Default, PartialEq)]
pub struct PlanSettings {
    /// The card [default: H100-80GB]
    #[arg(long, value_name = "NAME", help_heading = "Card")]
    pub gpu: Option<String>,
    /// All memory of the card, in place of the catalogue's
    #[arg(long, value_name = "SIZE", value_parser = value::size, help_heading = "Card", allow_negative_numbers = true)]
    pub capacity: Option<Bytes>,
    /// What of it the allocator never sees [default: 550MiB]
    #[arg(long, value_name = "SIZE", value_parser = value::size, help_heading = "Card", allow_negative_numbers = true)]
    pub context: Option<Bytes>,
    /// The allocator's settings, as in PYTORCH_CUDA_ALLOC_CONF
    #[arg(long, value_name = "STRING", help_heading = "Card")]
    pub alloc_conf: Option<String>,

    /// Samples of one micro-batch [default: 1]
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Batch", allow_negative_numbers = true)]
    pub batch: Option<u64>,
    /// Tokens of one sample [default: the longest the model takes, up to 4096]
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Batch", allow_negative_numbers = true, conflicts_with = "seqs")]
    pub seq: Option<u64>,
    /// A length for each step, cycled: 128,384
    #[arg(long, value_name = "N,…", value_parser = value::positive, value_delimiter = ',', help_heading = "Batch", allow_negative_numbers = true)]
    pub seqs: Vec<u64>,
    /// Micro-batches of one update [default: 1]
    #[arg(long, value_name = "N", value_parser = value::positive_u32, help_heading = "Batch", allow_negative_numbers = true)]
    pub accumulate: Option<u32>,
    /// Steps to run [default: 3]
    #[arg(long, value_name = "N", value_parser = value::positive_u32, help_heading = "Batch", allow_negative_numbers = true)]
    pub steps: Option<u32>,

    /// Dtype of the weights [default: the config's]
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype(), help_heading = "Model")]
    pub dtype: Option<Dtype>,
    /// Dtype of the autocast region around the forward pass [default: none]
    #[arg(long, value_name = "DTYPE", value_parser = value::autocast(), help_heading = "Model")]
    pub autocast: Option<Autocast>,
    /// Implementation of attention [default: sdpa]
    #[arg(long, value_name = "KIND", value_parser = value::choice(Attention::ALL, Attention::as_str), help_heading = "Model")]
    pub attention: Option<Attention>,
    /// The kernel that sdpa runs [default: the one PyTorch chooses]
    #[arg(long, value_name = "KERNEL", value_parser = value::choice(SdpaKernel::ALL, SdpaKernel::as_str), help_heading = "Model")]
    pub sdpa_kernel: Option<SdpaKernel>,
    /// Layers that backward computes again: none, full (every one), every:K (one of K, the first included), layers:0,2,5
    /// (these), segments:2x4,3 (so many from the first on, each segment as one), selective:mm,… (every one, but for the results of these
    /// operators of torch) [default: none]
    #[arg(long, value_name = "FORM", value_parser = value::checkpoint, help_heading = "Model")]
    pub checkpoint: Option<Checkpoint>,
    /// A layer that is computed again runs backward within the backward of one node (use_reentrant=True)
    #[arg(long, help_heading = "Model")]
    pub checkpoint_reentrant: bool,
    /// What is kept in host memory: activations (save_on_cpu), activations-pinned, checkpoints (what checkpointed
    /// layers begin from, pinned), optimizer (torchao's CPUOffloadOptimizer), parameters
    /// (copied to the device wherever a module uses them) [default: nothing]
    #[arg(long, value_name = "WHAT,…", value_delimiter = ',', value_parser = value::choice(Offload::ALL, Offload::as_str), hide_possible_values = true, help_heading = "Model")]
    pub offload: Vec<Offload>,
    /// The output object stays bound until the next forward
    #[arg(long, help_heading = "Model")]
    pub keep_outputs: bool,
    /// The loss: default (as transformers computes it), fp32-logits (the head gives fp32), chunked:N (over N parts of
    /// the sequence, as torchtune does), fused-linear (with the head, as Liger-Kernel does); of an mlp mean-square or
    /// sum [default: default; mean-square]
    #[arg(long, value_name = "FORM", value_parser = str::parse::<Loss>, help_heading = "Model")]
    pub loss: Option<Loss>,

    /// The optimizer [default: adamw]
    #[arg(long, value_name = "NAME", value_parser = value::choice(Optimizer::ALL, Optimizer::as_str), help_heading = "Optimizer")]
    pub optimizer: Option<Optimizer>,
    /// Its implementation [default: what torch picks on CUDA]
    #[arg(long, value_name = "KIND", value_parser = value::choice(OptimizerImpl::ALL, OptimizerImpl::as_str), help_heading = "Optimizer")]
    pub optimizer_impl: Option<OptimizerImpl>,
    /// Momentum of sgd and rmsprop [default: 0]
    #[arg(long, value_name = "X", value_parser = value::finite, help_heading = "Optimizer", allow_negative_numbers = true)]
    pub momentum: Option<f64>,
    /// Sgd looks ahead along its momentum
    #[arg(long, help_heading = "Optimizer")]
    pub nesterov: bool,
    /// Weight decay [default: the optimizer's own]
    #[arg(long, value_name = "X", value_parser = value::finite, help_heading = "Optimizer", allow_negative_numbers = true)]
    pub weight_decay: Option<f64>,
    /// Adam and adamw keep the largest second moments as well
    #[arg(long, help_heading = "Optimizer")]
    pub amsgrad: bool,
    /// The step can be captured in a CUDA graph: its counters are on the device
    #[arg(long, help_heading = "Optimizer")]
    pub capturable: bool,
    /// An optimizer for each parameter, which steps in backward and lets go of the gradient at once
    #[arg(long, help_heading = "Optimizer")]
    pub optimizer_in_backward: bool,
    /// The state of adam and adamw in fp32 beside 16-bit weights, as bitsandbytes keeps it
    #[arg(long, help_heading = "Optimizer")]
    pub fp32_state: bool,
    /// The optimizer steps fp32 copies of 16-bit weights, with fp32 copies of their gradients in the update
    #[arg(long, help_heading = "Optimizer")]
    pub master_weights: bool,
    /// The largest norm of the gradients (clip_grad_norm_) [default: no clipping]
    #[arg(long, value_name = "X", value_parser = value::finite, help_heading = "Optimizer", allow_negative_numbers = true)]
    pub clip_grad_norm: Option<f64>,
    /// What zero_grad does [default: set-to-none]
    #[arg(long, value_name = "KIND", value_parser = value::choice(ZeroGrad::ALL, ZeroGrad::as_str), help_heading = "Optimizer")]
    pub zero_grad: Option<ZeroGrad>,

    /// Freeze the model and train low-rank adapters of inner width N beside its layers, as peft does
    #[arg(long, value_name = "N", value_parser = value::positive, help_heading = "Adapters", allow_negative_numbers = true)]
    pub lora_rank: Option<u64>,
    /// The scale of the adapters times their rank, which moves no memory [default: 16]
    #[arg(long, value_name = "X", value_parser = value::finite, help_heading = "Adapters", allow_negative_numbers = true)]
    pub lora_alpha: Option<f64>,
    /// Which layers have one: names of modules, or all-linear for all but the head [default: queries and values]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Adapters")]
    pub lora_targets: Vec<String>,
    /// The probability with which an adapter's input is dropped [default: 0]
    #[arg(long, value_name = "P", value_parser = value::finite, help_heading = "Adapters", allow_negative_numbers = true)]
    pub lora_dropout: Option<f64>,
    /// Dtype of the adapters [default: fp32]
    #[arg(long, value_name = "DTYPE", value_parser = value::float_dtype(), help_heading = "Adapters")]
    pub lora_dtype: Option<Dtype>,
    /// The frozen weights of the linear layers but the head in 4 bits, as bitsandbytes holds them; --dtype is what
    /// they compute in [default: --dtype]
    #[arg(long, value_name = "FORM", value_parser = value::choice(Quantize::ALL, Quantize::as_str), help_heading = "Adapters")]
    pub quantize: Option<Quantize>,
    /// What is not in 4 bits is cast to fp32, as prepare_model_for_kbit_training does
    #[arg(long, help_heading = "Adapters")]
    pub prepare_kbit: bool,
    /// Parameters that are not trained: modules by whole parts of their path, as in embed_tokens,layers.0
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Adapters")]
    pub freeze: Vec<String>,

    /// The release of torch that is modelled [default: 2.15]
    #[arg(long, value_name = "VERSION", value_parser = value::choice(Torch::ALL, Torch::as_str), help_heading = "Software")]
    pub torch: Option<Torch>,

    /// How ranks divide the work.
    #[command(flatten)]
    pub ranks: ParallelSettings,
}

/// The dtype of an autocast region, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Autocast(pub Option<Dtype>);

impl PlanSettings {
    /// These settings, and those of `file` where there are none. `seq` and `seqs` are one setting.
    pub fn over(&self, file: Self) -> Self {
        let lengths = self.seq.is_some() || !self.seqs.is_empty();
        let (seq, seqs) = if lengths { (self.seq, self.seqs.clone()) } else { (file.seq, file.seqs) };
        Self {
            seq,
            seqs,
            gpu: self.gpu.clone().or(file.gpu),
            capacity: self.capacity.or(file.capacity),
            context: self.context.or(file.context),
            alloc_conf: self.alloc_conf.clone().or(file.alloc_conf),
            batch: self.batch.or(file.batch),
            accumulate: self.accumulate.or(file.accumulate),
            steps: self.steps.or(file.steps),
            dtype: self.dtype.or(file.dtype),
            autocast: self.autocast.or(file.autocast),
            attention: self.attention.or(file.attention),
            sdpa_kernel: self.sdpa_kernel.or(file.sdpa_kernel),
            checkpoint: self.checkpoint.clone().or(file.checkpoint),
            checkpoint_reentrant: self.checkpoint_reentrant || file.checkpoint_reentrant,
            offload: if self.offload.is_empty() { file.offload } else { self.offload.clone() },
            keep_outputs: self.keep_outputs || file.keep_outputs,
            loss: self.loss.or(file.loss),
            optimizer: self.optimizer.or(file.optimizer),
            optimizer_impl: self.optimizer_impl.or(file.optimizer_impl),
            momentum: self.momentum.or(file.momentum),
            nesterov: self.nesterov || file.nesterov,
            weight_decay: self.weight_decay.or(file.weight_decay),
            amsgrad: self.amsgrad || file.amsgrad,
            capturable: self.capturable || file.capturable,
            optimizer_in_backward: self.optimizer_in_backward || file.optimizer_in_backward,
            fp32_state: self.fp32_state || file.fp32_state,
            master_weights: self.master_weights || file.master_weights,
            clip_grad_norm: self.clip_grad_norm.or(file.clip_grad_norm),
            zero_grad: self.zero_grad.or(file.zero_grad),
            lora_rank: self.lora_rank.or(file.lora_rank),
            lora_alpha: self.lora_alpha.or(file.lora_alpha),
            lora_targets: if self.lora_targets.is_empty() {
                file.lora_targets
            } else {
                self.lora_targets.clone()
            },
            lora_dropout: self.lora_dropout.or(file.lora_dropout),
            lora_dtype: self.lora_dtype.or(file.lora_dtype),
            quantize: self.quantize.or(file.quantize),
            prepare_kbit: self.prepare_kbit || file.prepare_kbit,
            freeze: if self.freeze.is_empty() { file.freeze } else { self.freeze.clone() },
            torch: self.torch.or(file.torch),
            ranks: self.ranks.over(file.ranks),
        }
    }
}
