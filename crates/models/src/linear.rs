//! The linear layers of a model, in full or in 4 bits, with or without an adapter, and its head.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{FourBit, Tensor, release};
use ledger::{Category, Dtype};

use crate::lora::Adapter;
use crate::nn::{Builder, Embedding};
use crate::parallel::{Owner, run_gathered};
use crate::setup::Quantize;

/// A linear layer.
pub(crate) struct Linear {
    name: &'static str,
    layer: Layer,
    adapter: Option<Adapter>,
    owner: Option<Owner>,
}

enum Layer {
    /// `torch.nn.Linear`: weight (out, in).
    Linear { weight: Tensor, bias: Option<Tensor> },
    /// `transformers.pytorch_utils.Conv1D`: weight (in, out).
    Conv1d { weight: Tensor, bias: Tensor },
    /// `bitsandbytes.nn.Linear4bit`.
    FourBit(Linear4bit),
}

impl Linear {
    pub(crate) fn forward(&self, input: &Tensor) -> Tensor {
        input.session().scoped(self.name, || {
            let out = run_gathered(self.owner.as_ref(), input, |input| match &self.layer {
                Layer::Linear { weight, bias } if self.owner.is_some() => {
                    input.linear_by_reference(weight, bias.as_ref())
                }
                Layer::Linear { weight, bias } => {
                    let weight = weight.on_device();
                    let bias = bias.as_ref().map(Tensor::on_device);
                    let out = input.linear(&weight, bias.as_ref());
                    release!(weight, bias);
                    out
                }
                Layer::Conv1d { weight, bias } => {
                    let bias = bias.on_device();
                    let flat = input.view(input.rows());
                    let weight = weight.on_device();
                    let out = Tensor::addmm(&bias, &flat, &weight);
                    let shape = input.shape_with_last(weight.size(1));
                    release!(bias, flat, weight);
                    out.view(shape)
                }
                Layer::FourBit(layer) => layer.forward(input),
            });
            match (&self.adapter, &self.layer) {
                (None, _) => out,
                (Some(adapter), Layer::FourBit(_)) => adapter.forward_beside_4bit(input, out),
                (Some(adapter), _) => adapter.forward(input, out),
            }
        })
    }
}

/// A frozen layer of 4 bits that computes in `compute`.
struct Linear4bit {
    weight: Rc<FourBit>,
    /// The first pass brings it to `compute` for good.
    bias: Option<RefCell<Tensor>>,
    compute: Dtype,
}

impl Linear4bit {
    fn forward(&self, input: &Tensor) -> Tensor {
        let x = input.to(self.compute);
        let bias = self.bias.as_ref().map(|bias| {
            let held = bias.borrow().clone();
            if held.dtype() == self.compute {
                return held;
            }
            let (session, shape) = (input.session(), held.shape());
            let cast = Tensor::of_category(session, "bias", Category::Parameter, shape, self.compute);
            let old = bias.replace(cast.clone());
            release!(held, old);
            cast
        });
        let out = x.linear_4bit(&self.weight, bias.as_ref());
        let cast = out.to(input.dtype());
        release!(out, x);
        cast
    }
}

/// `lm_head`, from hidden states to the vocabulary: always in full.
pub(crate) struct Head {
    weight: Tensor,
    adapter: Option<Adapter>,
    owner: Option<Owner>,
    /// Its result is cast to fp32.
    fp32: bool,
    /// Logits are kept small by a tanh.
    softcap: bool,
}

impl Head {
    /// The name of its module.
    pub(crate) const NAME: &str = "lm_head";

    pub(crate) const fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub(crate) fn forward(&self, hidden: &Tensor) -> Tensor {
        let mut logits = hidden.session().scoped(Self::NAME, || {
            let out = run_gathered(self.owner.as_ref(), hidden, |hidden| match &self.owner {
                Some(_) => hidden.linear_by_reference(&self.weight, None),
                None => hidden.linear(&self.weight.on_device(), None),
            });
            match &self.adapter {
                Some(adapter) => adapter.forward(hidden, out),
                None => out,
            }
        });
        if self.fp32 {
            logits = logits.to(Dtype::Fp32);
        }
        if !self.softcap {
            return logits;
        }
        hidden.session().scoped("logits", || {
            logits = logits.div_scalar();
            logits = logits.tanh();
            logits = logits.mul_scalar();
            logits
        })
    }
}

impl Builder {
    pub(crate) fn linear(&mut self, name: &'static str, inputs: u64, outputs: u64, bias: bool) -> Linear {
        self.module(name, |build| {
            let layer = match build.quantize {
                Some(form) => build.four_bit([outputs, inputs], form, bias, false),
                None => Layer::Linear {
                    weight: build.parameter("weight", &[outputs, inputs]),
                    bias: bias.then(|| build.parameter("bias", &[outputs])),
                },
            };
            build.with_layer(name, layer, [inputs, outputs])
        })
    }

    pub(crate) fn conv1d(&mut self, name: &'static str, inputs: u64, outputs: u64) -> Linear {
        self.module(name, |build| {
            let layer = match build.quantize {
                Some(form) => build.four_bit([outputs, inputs], form, true, true),
                None => Layer::Conv1d {
                    weight: build.parameter("weight", &[inputs, outputs]),
                    bias: build.parameter("bias", &[outputs]),
                },
            };
            build.with_layer(name, layer, [inputs, outputs])
        })
    }

    /// The module around `layer`, with its adapter where it has one.
    fn with_layer(&mut self, name: &'static str, layer: Layer, [inputs, outputs]: [u64; 2]) -> Linear {
        let owner = match &layer {
            Layer::Linear { weight, bias } => {
                let own: Vec<&Tensor> = std::iter::once(weight).chain(bias).collect();
                self.owner(&own)
            }
            Layer::Conv1d { weight, bias } => self.owner(&[weight, bias]),
            Layer::FourBit(_) => None,
        };
        Linear { name, layer, adapter: self.adapter(inputs, outputs, false), owner }
    }

    fn four_bit(&mut self, shape: [u64; 2], form: Quantize, bias: bool, transposed: bool) -> Layer {
        let (compute, double) = (self.compute, form == Quantize::Nf4Double);
        let weight = FourBit::new(&self.session, shape, compute, double, transposed);
        self.count(weight.numel(), Dtype::Uint8, weight.nbytes());
        let bias = bias.then(|| RefCell::new(self.parameter("bias", &[shape[0]])));
        Layer::FourBit(Linear4bit { weight: Rc::new(weight), bias, compute })
    }

    /// The head; `tied` is the embedding whose weight it shares.
    pub(crate) fn head(
        &mut self,
        inputs: u64,
        outputs: u64,
        tied: Option<&Embedding>,
        softcap: bool,
    ) -> Head {
        self.module(Head::NAME, |build| {
            let weight = match tied {
                Some(embedding) => embedding.weight().clone(),
                None => build.vocabulary(&[outputs, inputs]),
            };
            let owner = build.owner(&[&weight]);
            let adapter = build.adapter(inputs, outputs, true);
            Head { weight, adapter, owner, fp32: build.fp32_logits, softcap }
        })
    }
}
