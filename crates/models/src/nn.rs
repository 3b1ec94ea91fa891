//! The modules that architectures are made of, as `torch.nn` and transformers run them.

use std::rc::Rc;

use engine::{Session, Tensor, release};
use ledger::{Category, Dtype};

use crate::checkpoint::Checkpoint;
use crate::lora::{Adapter, Lora};
use crate::network::{Built, Network};
use crate::norm::{Norm, RmsNorm};
use crate::setup::Setup;

/// Makes parameters and buffers in the order in which a module's `_apply` visits them.
pub(crate) struct Builder {
    pub(crate) session: Rc<Session>,
    /// The dtype of the weights.
    pub(crate) dtype: Dtype,
    lora: Option<Lora>,
    /// The targets of the adapters that name no layer made so far.
    unmet: Vec<String>,
    /// Whether the embeddings of the input want a gradient without one of their own, so that checkpointed
    /// layers of a frozen model have one to compute (`enable_input_require_grads`).
    input_requires_grad: bool,
    path: Vec<String>,
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
    vocabulary: Vec<Tensor>,
}

impl Builder {
    pub(crate) fn new(session: &Rc<Session>, setup: &Setup, dtype: Dtype) -> Self {
        let lora = setup.lora.clone();
        Self {
            session: Rc::clone(session),
            dtype,
            unmet: lora.iter().flat_map(|lora| lora.targets.clone()).collect(),
            input_requires_grad: lora.is_some() && setup.checkpoint != Checkpoint::None,
            lora,
            path: Vec::new(),
            parameters: Vec::new(),
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

    /// A parameter of the model itself: frozen where adapters are trained instead.
    pub(crate) fn parameter(&mut self, name: &'static str, shape: &[u64]) -> Tensor {
        if self.lora.is_none() {
            return self.trainable(name, shape, self.dtype);
        }
        self.frozen(name, shape, self.dtype)
    }

    /// A weight with a row for each token or position.
    fn vocabulary(&mut self, shape: &[u64]) -> Tensor {
        let weight = self.parameter("weight", shape);
        self.vocabulary.push(weight.clone());
        weight
    }

    /// A parameter that wants a gradient.
    pub(crate) fn trainable(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        let tensor = self.frozen(name, shape, dtype);
        tensor.set_requires_grad();
        tensor
    }

    fn frozen(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        let shape = engine::Dims::new(shape);
        let tensor = Tensor::of_category(&self.session, name, Category::Parameter, shape, dtype);
        self.parameters.push(tensor.clone());
        tensor
    }

    /// The adapter of the linear layer that is being made, where it has one.
    fn adapter(&mut self, inputs: u64, outputs: u64, head: bool) -> Option<Adapter> {
        let lora = self.lora.clone()?;
        let target = lora.target_of(&self.path.join("."), head)?;
        self.unmet.retain(|unmet| unmet != target);
        Some(Adapter::new(self, &lora, inputs, outputs))
    }

    /// A buffer of the module, not a parameter.
    pub(crate) fn buffer(&mut self, name: &'static str, shape: &[u64], dtype: Dtype) -> Tensor {
        let shape = engine::Dims::new(shape);
        let buffer = Tensor::of_category(&self.session, name, Category::Buffer, shape, dtype);
        self.buffers.push(buffer.clone());
        buffer
    }

    pub(crate) fn linear(&mut self, name: &'static str, inputs: u64, outputs: u64, bias: bool) -> Linear {
        self.module(name, |build| Linear {
            name,
            weight: build.parameter("weight", &[outputs, inputs]),
            bias: bias.then(|| build.parameter("bias", &[outputs])),
            adapter: build.adapter(inputs, outputs, false),
        })
    }

    /// The linear layer `lm_head` from the hidden states to the vocabulary; `tied` is the embedding whose
    /// weight it shares.
    pub(crate) fn head(&mut self, inputs: u64, outputs: u64, tied: Option<&Embedding>) -> Linear {
        self.module("lm_head", |build| Linear {
            name: "lm_head",
            weight: match tied {
                Some(embedding) => embedding.weight.clone(),
                None => build.vocabulary(&[outputs, inputs]),
            },
            bias: None,
            adapter: build.adapter(inputs, outputs, true),
        })
    }

    pub(crate) fn conv1d(&mut self, name: &'static str, inputs: u64, outputs: u64) -> Conv1d {
        self.module(name, |build| Conv1d {
            name,
            weight: build.parameter("weight", &[inputs, outputs]),
            bias: build.parameter("bias", &[outputs]),
            adapter: build.adapter(inputs, outputs, false),
        })
    }

    pub(crate) fn embedding(&mut self, name: &'static str, rows: u64, width: u64) -> Embedding {
        self.module(name, |build| Embedding {
            name,
            weight: build.vocabulary(&[rows, width]),
            requires_grad: false,
            scale: None,
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
        self.module(name, |build| LayerNorm {
            name,
            weight: build.parameter("weight", &[width]),
            bias: build.parameter("bias", &[width]),
        })
    }

    pub(crate) fn rms_norm(&mut self, name: &'static str, width: u64, norm: Norm) -> RmsNorm {
        self.module(name, |build| RmsNorm { name, weight: build.parameter("weight", &[width]), norm })
    }

    /// The model whose parts were made here.
    pub(crate) fn finish(self, network: impl Network + 'static) -> Built {
        Built {
            network: Box::new(network),
            parameters: self.parameters,
            buffers: self.buffers,
            vocabulary: self.vocabulary,
            unmet_targets: self.unmet,
        }
    }
}

/// `torch.nn.Linear`: weight (out, in).
pub(crate) struct Linear {
    name: &'static str,
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<Adapter>,
}

impl Linear {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            let out = input.linear(&self.weight, self.bias.as_ref());
            adapted(self.adapter.as_ref(), input, out)
        })
    }
}

/// The result of a layer, with its adapter's part where it has one.
fn adapted(adapter: Option<&Adapter>, input: &Tensor, out: Tensor) -> Tensor {
    match adapter {
        Some(adapter) => adapter.forward(input, out),
        None => out,
    }
}

/// `transformers.pytorch_utils.Conv1D`: weight (in, out).
pub(crate) struct Conv1d {
    name: &'static str,
    weight: Tensor,
    bias: Tensor,
    adapter: Option<Adapter>,
}

impl Conv1d {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            let flat = input.view(input.rows());
            let mut out = Tensor::addmm(&self.bias, &flat, &self.weight);
            release!(flat);
            out = out.view(input.shape_with_last(self.weight.size(1)));
            adapted(self.adapter.as_ref(), input, out)
        })
    }
}

/// `torch.nn.Embedding`: weight (rows, width).
pub(crate) struct Embedding {
    name: &'static str,
    weight: Tensor,
    /// Whether its result is made to want a gradient where the weight is frozen.
    requires_grad: bool,
    scale: Option<Tensor>,
}

impl Embedding {
    pub(crate) fn forward(&self, indices: &Tensor) -> Tensor {
        let out = indices.session().scoped(self.name, || {
            let rows = self.weight.embedding(indices);
            self.scale.as_ref().map_or_else(|| rows.clone(), |scale| rows.mul(scale))
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
}

impl LayerNorm {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || input.layer_norm(&self.weight, &self.bias))
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
