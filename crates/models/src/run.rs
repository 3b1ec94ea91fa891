//! A planned run: the tape of some training steps and what is known besides.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::{Collective, Kernel, Messages, Pinning, Problem, Traffic};
use ledger::{Dtype, Tape};

use crate::architecture::Architecture;
use crate::config;
use crate::contradiction::Contradiction;
use crate::families::FAMILIES;
use crate::gpus::{GPUS, Gpu};
use crate::loss::Loss;
use crate::mlp::MlpConfig;
use crate::parallel::Parallel;
use crate::setup::{Attention, Offload, Optimizer, Setup, Torch};
use crate::train;

/// What a planned run gives.
#[derive(Clone, Debug)]
pub struct Run {
    /// What happened to memory, in requested bytes.
    pub tape: Tape,
    /// The parameters of the model.
    pub parameters: Parameters,
    /// Floating-point operations of the matrix products and attention, of one step.
    pub flops: Flops,
    /// Bytes copied between the device and the host in one step, but for the batch.
    pub traffic: Traffic,
    /// What ranks did together in the last step.
    pub collectives: BTreeMap<Collective, Messages>,
    /// What had to be assumed, a sentence each.
    pub assumptions: Vec<String>,
}

/// The parameters of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// All of them; tied ones once.
    pub total: u64,
    /// Those that require a gradient.
    pub trainable: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Floating-point operations of the matrix products and attention, of one step (all micro-batches).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flops {
    /// The forward pass.
    pub forward: u64,
    /// The backward pass, without recomputation.
    pub backward: u64,
    /// The forward pass run again by checkpointing.
    pub recompute: u64,
    /// The optimizer.
    pub update: u64,
}

/// Why a model cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlanError(pub String);

/// The length of a sample where nothing else is said and the model takes it.
const USUAL_SEQ: u64 = 4096;

/// The work that is done for one answer, about two seconds: layers of an mlp, of which each step and
/// micro-batch runs every one.
const MOST_WORK: u64 = 1 << 17;

/// The family of `mlp:` names.
const MLP: &str = "mlp";

/// A model: what a config.json, a preset or an `mlp:` name says.
#[derive(Clone, Debug)]
pub struct Model {
    family: &'static str,
    architecture: Arc<dyn Architecture>,
    dtype: Option<Dtype>,
    /// The config.json it was read from.
    config: Option<Arc<str>>,
}

impl Model {
    /// Reads a Hugging Face config.json.
    pub fn from_config(json: &str) -> Result<Self, PlanError> {
        let config::Config { family, architecture, dtype } = config::read(json)?;
        Ok(Self { family, architecture, dtype, config: Some(json.into()) })
    }

    /// Reads `mlp:LAYERSxWIDTH`; none where `name` has another form.
    pub fn from_mlp_name(name: &str) -> Option<Result<Self, PlanError>> {
        let extents = name.strip_prefix("mlp:")?;
        let parsed = extents.split_once('x').and_then(|(layers, width)| {
            let positive = |text: &str| text.parse::<u64>().ok().filter(|n| (1..=1 << 20).contains(n));
            Some(MlpConfig { layers: positive(layers)?, width: positive(width)? })
        });
        Some(match parsed {
            Some(config) => {
                Ok(Self { family: MLP, architecture: Arc::new(config), dtype: None, config: None })
            }
            None => Err(PlanError(format!(
                "`{name}` must be mlp:LAYERSxWIDTH with whole numbers from 1 to 2^20, as in mlp:4x1024"
            ))),
        })
    }

    /// The config.json that it was read from; none for an mlp, whose name says all.
    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// The family: `llama`, `gpt2`, `mlp`.
    pub fn family(&self) -> &'static str {
        self.family
    }

    /// The families that can be planned, by their names.
    pub fn families() -> Vec<&'static str> {
        FAMILIES.iter().map(|family| family.name).chain([MLP]).collect()
    }

    /// The attention that runs where `asked` is asked for: some families have eager attention alone.
    pub fn attention_of(&self, asked: Attention) -> Attention {
        if self.architecture.runs_sdpa() { asked } else { Attention::Eager }
    }

    /// How many layers it has.
    pub fn layers(&self) -> u64 {
        self.architecture.extents().layers
    }

    /// The longest sequence the config allows; none for an mlp.
    pub fn max_seq(&self) -> Option<u64> {
        self.architecture.extents().positions
    }

    /// Tokens of a sample where nothing else is said: the longest that the config allows, up to 4096;
    /// none for an mlp.
    pub fn usual_seq(&self) -> Option<u64> {
        self.max_seq().map(|longest| longest.min(USUAL_SEQ))
    }

    /// Runs the steps of `setup` on shapes. Without lengths it takes [`Model::usual_seq`].
    ///
    /// # Errors
    /// A setup that the model cannot run, or that no device holds, or more steps than a few seconds
    /// of work.
    pub fn train(&self, setup: &Setup, gpu: &Gpu) -> Result<Run, PlanError> {
        let mut setup = setup.clone();
        if setup.seqs.is_empty() {
            setup.seqs.extend(self.usual_seq());
        }
        self.check(&setup, gpu)?;
        setup.attention = self.attention_of(setup.attention);
        let dtype = setup.dtype.or(self.dtype).unwrap_or(Dtype::Fp32);
        setup.dtype = Some(dtype);
        let session = train::session(gpu, &setup);
        let build = || self.architecture.build(&session, &setup, dtype);
        train::train(&session, &setup, build, self.assumptions(&setup, gpu))
    }

    /// The shapes of its parameters in their order, tied ones once.
    ///
    /// # Errors
    /// A model that no device holds.
    pub fn shapes(&self) -> Result<Vec<Vec<u64>>, PlanError> {
        let (setup, gpu) = (Setup { steps: 1, ..Setup::default() }, &GPUS[0]);
        self.check(&setup, gpu)?;
        let session = train::session(gpu, &setup);
        let built = session.with_grad(false, || self.architecture.build(&session, &setup, Dtype::Fp32));
        let shapes = built.trainable.iter().map(|parameter| parameter.shape().to_vec()).collect();
        drop(built);
        session.release();
        Ok(shapes)
    }

    /// Refuses what no run could hold, before anything is multiplied.
    fn check(&self, setup: &Setup, gpu: &Gpu) -> Result<(), PlanError> {
        let refuse = |sentence: String| Err(PlanError(sentence));
        if setup.batch == 0 || setup.accumulate == 0 || setup.steps == 0 || setup.world_size == 0 {
            return refuse("batch, accumulate, steps and world-size must be at least 1".into());
        }
        if let Some(contradiction) = self.contradiction(setup) {
            return refuse(contradiction.sentence);
        }
        if setup.seqs.contains(&0) {
            return refuse("a sequence has at least one token".into());
        }
        let longest = setup.seqs.iter().copied().max().unwrap_or(1);
        let extents = self.architecture.extents();
        if let Some(positions) = extents.positions.filter(|_| extents.learnt_positions)
            && longest > positions
        {
            return refuse(format!(
                "the model has {positions} learnt positions, and a sequence of {longest} was asked for"
            ));
        }
        if let Some(sentence) = setup.lora.as_ref().and_then(|lora| self.architecture.adapter_problem(lora)) {
            return refuse(sentence);
        }
        if let Some(sentence) = self.kernel_problem(setup, gpu, longest) {
            return refuse(sentence);
        }
        let [batch, seq, layers] = [setup.batch, longest, extents.layers].map(u128::from);
        let rank = setup.lora.as_ref().map_or(0, |lora| lora.rank);
        let [widest, heads] = [extents.widest.max(rank), extents.heads].map(u128::from);
        // A layer makes fewer than two hundred tensors of at most 8 bytes an element; a total of 2^62
        // bytes leaves every sum inside a tape's range.
        let largest = batch.saturating_mul(seq).saturating_mul(widest.max(seq * heads));
        if largest.saturating_mul(8 * 200).saturating_mul(layers) >= 1 << 62 {
            return refuse(format!(
                "batch {} of {longest} tokens makes tensors beyond any device; use a smaller batch or sequence",
                setup.batch
            ));
        }
        // Weights, their gradients and what an optimizer keeps are fewer than sixteen matrices a layer, of at most
        // 8 bytes an element, eight times over.
        let largest_weight = extents.largest_weight.max(u128::from(rank) * widest);
        if largest_weight.saturating_mul(16 * 8 * 8).saturating_mul(layers + 2) >= 1 << 62 {
            return refuse("the config has weights beyond any device; its extents must be smaller".into());
        }
        let parts =
            setup.loss.zip(extents.head).map_or(1, |(loss, head)| loss.parts(setup.batch, longest, head));
        let passes = u128::from(setup.steps) * u128::from(setup.accumulate);
        if passes * u128::from(parts) > u128::from(MOST_WORK) {
            return refuse(format!(
                "`--loss` makes {parts} parts in each of {passes} passes, more than the {MOST_WORK} that are run for one answer"
            ));
        }
        let (most, steps, accumulate) = (MOST_WORK / extents.work, setup.steps, setup.accumulate);
        if u128::from(steps) * u128::from(accumulate) * layers > u128::from(most) {
            return refuse(format!(
                "{steps} steps x {accumulate} micro-batches x {layers} layers are more than the {most} layers that are run for one answer; ask for fewer: from the third on, steps and micro-batches repeat each other"
            ));
        }
        Ok(())
    }

    /// The first settings that rule each other out, or that this model cannot have, where there are any.
    pub fn contradiction(&self, setup: &Setup) -> Option<Contradiction> {
        setup.contradiction_of(self.family == MLP, self.dtype, self.layers())
    }

    /// What sdpa is asked to run in a pass over `seq` tokens; nothing where attention is written out.
    fn attention(&self, setup: &Setup, seq: u64) -> Vec<Problem> {
        let upcast = setup.prepare_kbit.then_some(Dtype::Fp32);
        let compute = setup.parallel.as_ref().and_then(Parallel::compute_dtype);
        let dtype =
            setup.autocast.or(upcast).or(compute).or(setup.dtype).or(self.dtype).unwrap_or(Dtype::Fp32);
        match setup.attention {
            Attention::Eager => Vec::new(),
            Attention::Sdpa => self.architecture.attention(dtype, seq),
        }
    }

    /// Why the kernel that the setup asks for cannot run, where it cannot.
    fn kernel_problem(&self, setup: &Setup, gpu: &Gpu, longest: u64) -> Option<String> {
        let kernel = setup.kernel()?;
        let family = self.family;
        if self.attention_of(Attention::Sdpa) == Attention::Eager {
            return Some(format!(
                "transformers runs {family} with eager attention alone; use --sdpa-kernel default"
            ));
        }
        let (hardware, profile) = (train::hardware(gpu), train::profile(setup.torch));
        let mut problems = self.attention(setup, longest).into_iter();
        let refusal = problems.find_map(|problem| kernel.refusal(&hardware, &profile, problem))?;
        Some(format!("the {} kernel {refusal}; use --sdpa-kernel default", setup.sdpa_kernel.as_str()))
    }

    /// What had to be assumed, a sentence each.
    fn assumptions(&self, setup: &Setup, gpu: &Gpu) -> Vec<String> {
        let mut sentences = Vec::new();
        if self.family != MLP {
            sentences.push(
                "modelling code of transformers 5.24 in eager mode; no padding, labels are the input ids"
                    .to_owned(),
            );
        }
        if setup.fp32_state {
            sentences.push(
                "Adam is bitsandbytes' with 32 bits of state (0.50), which makes no temporaries".to_owned(),
            );
        }
        if setup.master_weights {
            sentences
                .push("fp32 copies of 16-bit gradients are made in the update and die with them".to_owned());
        }
        if setup.lora.is_some() {
            sentences.push("adapters as peft 0.21 puts them beside the frozen weights".to_owned());
        }
        if setup.quantize.is_some() {
            sentences.push(
                "4-bit weights as bitsandbytes 0.50 holds them, which compute in the dtype of the model; below 1537 tokens its own kernel is taken to run on compute capability 9 alone"
                    .to_owned(),
            );
        }
        sentences.extend(setup.parallel.iter().flat_map(|parallel| parallel.assumptions(setup)));
        sentences.extend(setup.loss.and_then(Loss::assumption).map(str::to_owned));
        let kept = match setup.torch {
            Torch::V2_15 => "allocated around each product and freed",
            _ => "kept from the first product on",
        };
        sentences.push(format!(
            "cuBLAS workspace of the default size for the card, {kept} (torch {})",
            setup.torch.as_str()
        ));
        sentences.extend(self.architecture.assumptions());
        if self.attention_of(Attention::Sdpa) == Attention::Eager {
            sentences
                .push(format!("attention is eager, the only one that transformers has for {}", self.family));
        }
        match setup.optimizer {
            Optimizer::Lion => sentences.push("lion is that of lion-pytorch 0.2, without Triton".to_owned()),
            Optimizer::Adam8bit | Optimizer::AdamW8bit | Optimizer::Adam4bit | Optimizer::AdamW4bit => {
                sentences.push(format!(
                    "{} is that of torchao 0.18, its steps compiled as torch 2.15 does for an H100; what the compiler itself allocates is left out",
                    setup.optimizer.as_str()
                ));
            }
            _ => {}
        }
        if setup.offloads(Offload::Parameters) {
            sentences.push(
                "a parameter on the host is copied to the device wherever a module uses it, and what autograd saves of the copy stays there until backward"
                    .to_owned(),
            );
        }
        if setup.offloads(Offload::Optimizer) {
            sentences.push("the optimizer on the host is torchao 0.18's CPUOffloadOptimizer".to_owned());
        }
        if setup.saved_on_host().is_some() {
            sentences.push(
                "save_on_cpu copies what each operator saves, weights too, once for each operator".to_owned(),
            );
        }
        if setup.saved_on_host() == Some(Pinning::Pinned) || setup.offloads(Offload::Checkpoints) {
            sentences.push(
                "page-locked memory is counted as asked for: torch rounds each piece up to a power of two and keeps it"
                    .to_owned(),
            );
        }
        let longest = setup.seqs.iter().copied().max().unwrap_or(1);
        let runs = |problem: Problem| {
            let choose = || Kernel::choose(&train::hardware(gpu), &train::profile(setup.torch), problem);
            match setup.kernel().unwrap_or_else(choose) {
                Kernel::Flash => "the flash kernel",
                Kernel::Efficient => "the memory-efficient kernel",
                Kernel::Math => "the math kernel",
                Kernel::Cudnn => {
                    "cuDNN, whose backward workspace is assumed to be batch x heads x sequence x (head size + 1) fp32 values"
                }
            }
        };
        let mut told = "";
        for problem in self.attention(setup, longest) {
            let kernel = runs(problem);
            if kernel != told {
                let within = if problem.mask { " with a sliding window" } else { "" };
                sentences.push(format!("attention{within} runs {kernel}"));
            }
            told = kernel;
        }
        sentences
    }
}
