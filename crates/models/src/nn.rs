//! The modules that architectures are made of, as `torch.nn` and transformers run them.

use std::rc::Rc;

use engine::{Session, Tensor, release};
use ledger::{Category, Dtype};

use crate::checkpoint::Checkpoint;
use crate::lora::{Adapter, Lora};
use crate::loss::Loss;
use crate::network::{Built, Network};
use crate::norm::{Norm, RmsNorm};
use crate::parallel::{self, Job, Owner, Parallel, Parts, Passage, Ranks, Shard, Unit, run_gathered};
use crate::run::Parameters;
use crate::setup::{Offload, Quantize, Setup};

/// Makes parameters and buffers in the order in which a module's `_apply` visits them.
pub(crate) struct Builder {
    pub(crate) session: Rc<Session>,
    /// The dtype of the weights.
    pub(crate) dtype: Dtype,
    /// The form of the linear layers but the head, and the dtype in which they compute.
    pub(crate) quantize: Option<Quantize>,
    pub(crate) compute: Dtype,
    /// Whether the head gives fp32 logits.
    pub(crate) fp32_logits: bool,
    lora: Option<Lora>,
    freeze: Vec<String>,
    /// Names of the setup that name nothing made so far, after their setting.
    unmet: Vec<(&'static str, String)>,
    /// Whether the embeddings of the input want a gradient even where their weight is frozen, as transformers
    /// has it with checkpointing (`enable_input_require_grads`).
    input_requires_grad: bool,
    /// Parameters are made in host memory.
    on_host: bool,
    /// Where ranks share the parameters: the training, and the unit of what is being made.
    shared: Option<(Rc<Job>, Rc<Unit>)>,
    compute_dtype: Option<Dtype>,
    /// Where each rank holds a part of every parameter: ZeRO's stage 3.
    parts: Option<Rc<Parts>>,
    path: Vec<String>,
    trainable: Vec<Tensor>,
    parameters: Parameters,
    states: Vec<(Dtype, u64)>,
    buffers: Vec<Tensor>,
    vocabulary: Vec<Tensor>,
}

impl Builder {
    pub(crate) fn new(session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Self {
        let (lora, freeze) = (setup.lora.clone(), setup.freeze.clone());
        let targets = lora.iter().flat_map(|lora| &lora.targets).map(|name| ("lora-targets", name.clone()));
        let frozen = freeze.iter().map(|name| ("freeze", name.clone()));
        let parts = Parts::new(session, setup, dtype);
        Self {
            session: Rc::clone(session),
            dtype: if setup.prepare_kbit { Dtype::Fp32 } else { dtype },
            quantize: setup.quantize,
            compute: dtype,
            fp32_logits: setup.loss == Some(Loss::Fp32Logits),
            unmet: targets.chain(frozen).collect(),
            input_requires_grad: setup.checkpoint != Checkpoint::None,
            on_host: setup.offloads(Offload::Parameters) && parts.is_none(),
            shared: parallel::share(session, setup),
            compute_dtype: setup.parallel.as_ref().and_then(Parallel::compute_dtype),
            parts,
            lora,
            freeze,
            path: Vec::new(),
            trainable: Vec::new(),
            parameters: Parameters::default(),
            states: Vec::new(),
            buffers: Vec::new(),
            vocabulary: Vec::new(),
        }
    }

    /// Runs `build` inside the module `name`.
    pub(crate) fn module<R>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> R) -> R {
        let session = Rc::clone(&self.session);
        self.path.push(name.to_owned());
        let result = session.scoped(name, || build(self));
        self.path.pop();
        result
    }

    /// Runs `build` inside the module `name`, whose parameters ranks that share them bring together at once.
    pub(crate) fn block<R>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> R) -> Block<R> {
        self.module(name, |this| {
            let outer = this.shared.clone();
            let unit = outer.as_ref().map(|(job, _)| job.unit(false));
            this.shared = outer.clone().zip(unit.clone()).map(|((job, _), unit)| (job, unit));
            let module = Rc::new(build(this));
            this.shared = outer;
            Block { module, unit, passage: Rc::new(this.passage()) }
        })
    }

    /// The unit of the whole model, where ranks share its parameters.
    pub(crate) fn root(&self) -> Option<Rc<Unit>> {
        self.shared.as_ref().map(|(job, _)| job.root())
    }

    /// A parameter of the model itself: frozen where adapters are trained instead, or where the setup says so.
    pub(crate) fn parameter(&mut self, name: &'static str, shape: &[u64]) -> Tensor {
        let path = format!(".{}.{name}.", self.path.join("."));
        let of_path = |frozen: &String| path.contains(&format!(".{frozen}."));
        let frozen = self.freeze.iter().any(of_path);
        self.unmet.retain(|(setting, unmet)| *setting != "freeze" || !of_path(unmet));
        if frozen || self.lora.is_some() {
            return self.frozen(name, shape, self.dtype);
        }
        self.trainable(name, shape, self.dtype)
    }

    /// A weight with a row for each token or position.
    pub(crate) fn vocabulary(&mut self, shape: &[u64]) -> Tensor {
        let weight = self.parameter("weight", shape);
        self.vocabulary.push(weight.clone());
        weight
    }

    /// A parameter that wants a gradient.
    pub(crate) fn trainable(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        let (tensor, shard) = self.made(name, shape, dtype);
        self.parameters.trainable += tensor.numel();
        match shard {
            Some(shard) => {
                shard.set_requires_grad();
                self.trainable.push(shard.sharded.clone());
            }
            None => {
                tensor.set_requires_grad();
                self.trainable.push(tensor.clone());
            }
        }
        tensor
    }

    fn frozen(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        self.made(name, shape, dtype).0
    }

    /// A parameter as the modules hold it, and the shard of it that this rank has where ranks share it.
    fn made(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> (Tensor, Option<Rc<Shard>>) {
        let shape = engine::Dims::new(shape);
        self.count(shape.numel(), dtype, shape.numel() * dtype.size());
        if let Some((_, unit)) = &self.shared
            && let Some(shard) = unit.add(name, shape, (dtype, self.compute_dtype))
        {
            return (shard.whole.clone(), Some(shard));
        }
        let place = if self.on_host { Tensor::of_host } else { Tensor::of_category };
        let made = place(&self.session, name, Category::Parameter, shape, dtype);
        if let Some(parts) = &self.parts {
            parts.add(&made);
        }
        (made, None)
    }

    /// A module without parameters of its own.
    pub(crate) fn passage(&self) -> Passage {
        Passage(self.owner(&[]))
    }

    /// The module with these parameters of its own, where ranks hold parts of them.
    pub(crate) fn owner(&self, parameters: &[&Tensor]) -> Option<Owner> {
        self.parts.as_ref().map(|parts| parts.owner(parameters))
    }

    /// Counts a parameter of so many elements, which lies in so many bytes of `dtype`.
    pub(crate) fn count(&mut self, elements: u64, dtype: Dtype, bytes: u64) {
        self.parameters.total += elements;
        self.parameters.bytes += bytes;
        self.states.push((dtype, bytes));
    }

    /// The adapter of the linear layer that is being made, where it has one.
    pub(crate) fn adapter(&mut self, inputs: u64, outputs: u64, head: bool) -> Option<Adapter> {
        let lora = self.lora.clone()?;
        let target = lora.target_of(&self.path.join("."), head)?;
        self.unmet.retain(|(setting, unmet)| *setting != "lora-targets" || unmet != target);
        Some(Adapter::new(self, &lora, inputs, outputs))
    }

    /// A buffer of the module, not a parameter.
    pub(crate) fn buffer(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        let shape = engine::Dims::new(shape);
        let buffer = Tensor::of_category(&self.session, name, Category::Buffer, shape, dtype);
        self.buffers.push(buffer.clone());
        buffer
    }

    pub(crate) fn embedding(&mut self, name: &'static str, rows: u64, width: u64) -> Embedding {
        self.module(name, |build| {
            let weight = build.vocabulary(&[rows, width]);
            let owner = build.owner(&[&weight]);
            Embedding { name, weight, owner, requires_grad: false, scale: None }
        })
    }

    /// The embedding of the input tokens.
    pub(crate) fn input_embedding(&mut self, name: &'static str, rows: u64, width: u64) -> Embedding {
        let requires_grad = self.input_requires_grad;
        Embedding { requires_grad, ..self.embedding(name, rows, width) }
    }

    /// The embedding of the input tokens, whose rows are multiplied by a number that lies on the device.
    pub(crate) fn scaled_embedding(&mut self, name: &'static str, rows: u64, width: u64) -> Embedding {
        let embedding = self.input_embedding(name, rows, width);
        let scale = self.module(name, |build| build.buffer("embed_scale", &[], build.dtype));
        Embedding { scale: Some(scale), ..embedding }
    }

    pub(crate) fn layer_norm(&mut self, name: &'static str, width: u64) -> LayerNorm {
        self.module(name, |build| {
            let weight = build.parameter("weight", &[width]);
            let bias = build.parameter("bias", &[width]);
            let owner = build.owner(&[&weight, &bias]);
            LayerNorm { name, weight, bias, owner }
        })
    }

    pub(crate) fn rms_norm(&mut self, name: &'static str, width: u64, norm: Norm) -> RmsNorm {
        self.module(name, |build| {
            let weight = build.parameter("weight", &[width]);
            let owner = build.owner(&[&weight]);
            RmsNorm { name, weight, norm, owner }
        })
    }

    /// The model whose parts were made here.
    pub(crate) fn finish(self, network: impl Network + 'static) -> Built {
        Built {
            network: Box::new(network),
            trainable: self.trainable,
            parameters: self.parameters,
            states: self.states,
            buffers: self.buffers,
            vocabulary: self.vocabulary,
            unmet: self.unmet,
            ranks: self.shared.map(|(job, _)| -> Rc<dyn Ranks> { job }),
            parts: self.parts,
        }
    }
}

/// A repeated layer, and its unit where ranks share its parameters.
pub(crate) struct Block<M> {
    module: Rc<M>,
    unit: Option<Rc<Unit>>,
    passage: Rc<Passage>,
}

impl<M> Clone for Block<M> {
    fn clone(&self) -> Self {
        let passage = Rc::clone(&self.passage);
        Self { module: Rc::clone(&self.module), unit: self.unit.clone(), passage }
    }
}

impl<M> Block<M> {
    /// The forward pass over `inputs`: the floating-point ones that may have another dtype than the module.
    pub(crate) fn run<const N: usize>(
        &self,
        inputs: [&Tensor; N],
        forward: impl FnOnce(&M, [&Tensor; N]) -> Tensor,
    ) -> Tensor {
        self.passage.run(|| parallel::run(self.unit.as_ref(), inputs, |inputs| forward(&self.module, inputs)))
    }
}

/// `torch.nn.Embedding`: weight (rows, width).
pub(crate) struct Embedding {
    name: &'static str,
    weight: Tensor,
    owner: Option<Owner>,
    /// Whether its result is made to want a gradient where the weight is frozen.
    requires_grad: bool,
    scale: Option<Tensor>,
}

impl Embedding {
    pub(crate) const fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub(crate) fn forward(&self, indices: &Tensor) -> Tensor {
        let out = indices.session().scoped(self.name, || {
            run_gathered(self.owner.as_ref(), indices, |indices| {
                let rows = self.weight.on_device().embedding(indices);
                self.scale.as_ref().map_or_else(
                    || rows.clone(),
                    |scale| {
                        // The weight is asked for its dtype, which makes one more copy of one in host memory.
                        drop(self.weight.on_device());
                        rows.mul(scale)
                    },
                )
            })
        });
        if self.requires_grad {
            out.set_requires_grad();
        }
        out
    }
}

/// `torch.nn.LayerNorm` over the last dimension.
pub(crate) struct LayerNorm {
    name: &'static str,
    weight: Tensor,
    bias: Tensor,
    owner: Option<Owner>,
}

impl LayerNorm {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            run_gathered(self.owner.as_ref(), input, |input| {
                let (weight, bias) = (self.weight.on_device(), self.bias.on_device());
                let out = input.layer_norm(&weight, &bias);
                release!(weight, bias);
                out
            })
        })
    }
}

/// The activation between two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// One kernel that keeps its input: silu, gelu, gelu by tanh in C++.
    Silu,
    /// `gelu`, exact or by tanh, in one kernel.
    Gelu,
    /// The composite of GPT-2: eight elementwise operators.
    GeluNew,
    /// `relu`, which keeps its result.
    Relu,
}

impl Activation {
    /// The activation behind the name that configs use, where it is known.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "silu" | "swish" => Self::Silu,
            "gelu" | "gelu_pytorch_tanh" => Self::Gelu,
            "gelu_new" => Self::GeluNew,
            "relu" => Self::Relu,
            _ => return None,
        })
    }

    pub(crate) fn forward(self, input: &Tensor) -> Tensor {
        match self {
            Self::Silu => input.silu(),
            Self::Gelu => input.gelu(),
            Self::Relu => input.relu(),
            Self::GeluNew => {
                let half = input.mul_scalar();
                let cube = input.pow_scalar();
                let scaled = cube.mul_scalar();
                release!(cube);
                let inner = input.add(&scaled);
                release!(scaled);
                let argument = inner.mul_scalar();
                release!(inner);
                let tanh = argument.tanh();
                release!(argument);
                let shifted = tanh.add_scalar();
                release!(tanh);
                let out = half.mul(&shifted);
                release!(half, shifted);
                out
            }
        }
    }
}
