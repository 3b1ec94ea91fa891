//! The modules that architectures are made of, as `torch.nn` and transformers run them.

use std::rc::Rc;

use engine::{Session, Tensor, release};
use ledger::{Category, Dtype};

/// Makes parameters and buffers in the order in which a module's `_apply` visits them.
pub(crate) struct Builder {
    pub(crate) session: Rc<Session>,
    /// The dtype of the weights.
    pub(crate) dtype: Dtype,
    parameters: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl Builder {
    pub(crate) fn new(session: &Rc<Session>, dtype: Dtype) -> Self {
        Self { session: Rc::clone(session), dtype, parameters: Vec::new(), buffers: Vec::new() }
    }

    /// Runs `build` inside the module `name`.
    pub(crate) fn module<R>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> R) -> R {
        let session = Rc::clone(&self.session);
        session.scoped(name, || build(self))
    }

    fn parameter(&mut self, name: &'static str, shape: &[u64]) -> Tensor {
        let shape = engine::Dims::new(shape);
        let tensor = Tensor::of_category(&self.session, name, Category::Parameter, shape, self.dtype);
        tensor.set_requires_grad();
        self.parameters.push(tensor.clone());
        tensor
    }

    /// A buffer of the module, not a parameter.
    pub(crate) fn buffer(&mut self, name: &'static str, size: u64, dtype: Dtype) {
        let buffer = Tensor::of_category(&self.session, name, Category::Buffer, [size], dtype);
        self.buffers.push(buffer);
    }

    pub(crate) fn linear(&mut self, name: &'static str, inputs: u64, outputs: u64, bias: bool) -> Linear {
        self.module(name, |build| Linear {
            name,
            weight: build.parameter("weight", &[outputs, inputs]),
            bias: bias.then(|| build.parameter("bias", &[outputs])),
        })
    }

    pub(crate) fn conv1d(&mut self, name: &'static str, inputs: u64, outputs: u64) -> Conv1d {
        self.module(name, |build| Conv1d {
            name,
            weight: build.parameter("weight", &[inputs, outputs]),
            bias: build.parameter("bias", &[outputs]),
        })
    }

    pub(crate) fn embedding(&mut self, name: &'static str, rows: u64, width: u64) -> Embedding {
        self.module(name, |build| Embedding { name, weight: build.parameter("weight", &[rows, width]) })
    }

    pub(crate) fn layer_norm(&mut self, name: &'static str, width: u64) -> LayerNorm {
        self.module(name, |build| LayerNorm {
            name,
            weight: build.parameter("weight", &[width]),
            bias: build.parameter("bias", &[width]),
        })
    }

    pub(crate) fn rms_norm(&mut self, name: &'static str, width: u64) -> RmsNorm {
        self.module(name, |build| RmsNorm { name, weight: build.parameter("weight", &[width]) })
    }

    /// The parameters made, in order, and the buffers.
    pub(crate) fn finish(self) -> (Vec<Tensor>, Vec<Tensor>) {
        (self.parameters, self.buffers)
    }
}

/// `torch.nn.Linear`: weight (out, in).
pub(crate) struct Linear {
    name: &'static str,
    pub(crate) weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A linear layer without bias that shares an embedding's weight.
    pub(crate) fn tied(name: &'static str, embedding: &Embedding) -> Self {
        Self { name, weight: embedding.weight.clone(), bias: None }
    }

    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || input.linear(&self.weight, self.bias.as_ref()))
    }
}

/// `transformers.pytorch_utils.Conv1D`: weight (in, out).
pub(crate) struct Conv1d {
    name: &'static str,
    weight: Tensor,
    bias: Tensor,
}

impl Conv1d {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            let flat = input.view(input.rows());
            let out = Tensor::addmm(&self.bias, &flat, &self.weight);
            release!(flat);
            out.view(input.shape_with_last(self.weight.size(1)))
        })
    }
}

/// `torch.nn.Embedding`: weight (rows, width).
pub(crate) struct Embedding {
    name: &'static str,
    weight: Tensor,
}

impl Embedding {
    pub(crate) fn forward(&self, indices: &Tensor) -> Tensor {
        indices.session().scoped(self.name, || self.weight.embedding(indices))
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

/// `LlamaRMSNorm`: computed in fp32, cast back before the weight is applied.
pub(crate) struct RmsNorm {
    name: &'static str,
    weight: Tensor,
}

impl RmsNorm {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            let mut hidden = input.to(Dtype::Fp32);
            let squares = hidden.pow_scalar();
            let variance = squares.mean_last();
            release!(squares);
            let shifted = variance.add_scalar();
            let scale = shifted.rsqrt();
            release!(shifted);
            let product = hidden.mul(&scale);
            release!(scale);
            hidden = product;
            let cast = hidden.to(input.dtype());
            let out = self.weight.mul(&cast);
            release!(cast, hidden, variance);
            out
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
