//! Elementwise operators, casts, dropout and softmax.

use std::rc::Rc;

use ledger::Dtype;
use smallvec::SmallVec;

use crate::dims::{broadcast, elementwise_strides};
use crate::graph::Op;
use crate::tensor::Tensor;

/// Whether `dtype` is a floating-point type.
pub(crate) const fn is_floating(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Fp64 | Dtype::Fp32 | Dtype::Fp16 | Dtype::Bf16)
}

/// The type that holds both: the wider one, floating-point before integers; fp16 with bf16 gives fp32.
pub(crate) const fn wider(x: Dtype, y: Dtype) -> Dtype {
    const fn rank(dtype: Dtype) -> u8 {
        match dtype {
            Dtype::Bool => 0,
            Dtype::Uint8 => 1,
            Dtype::Int32 => 2,
            Dtype::Int64 => 3,
            Dtype::Fp16 => 4,
            Dtype::Bf16 => 5,
            Dtype::Fp32 => 6,
            Dtype::Fp64 => 7,
        }
    }
    match (x, y) {
        (Dtype::Fp16, Dtype::Bf16) | (Dtype::Bf16, Dtype::Fp16) => Dtype::Fp32,
        _ if rank(x) > rank(y) => x,
        _ => y,
    }
}

/// The dtype of a result over `a` and `b`: the higher category wins, within one category tensors
/// with dimensions win over those without, then the wider type.
fn promote(a: &Tensor, b: &Tensor) -> Dtype {
    let (x, y) = (a.dtype(), b.dtype());
    match (a.shape().is_empty(), b.shape().is_empty()) {
        _ if is_floating(x) != is_floating(y) => wider(x, y),
        (true, false) => y,
        (false, true) => x,
        _ => wider(x, y),
    }
}

/// The result of an elementwise operator over `inputs`, uninitialised as everything here.
pub(crate) fn pointwise(what: &'static str, inputs: &[&Tensor], dtype: Dtype) -> Tensor {
    let shape =
        inputs.iter().skip(1).fold(inputs[0].shape(), |shape, input| broadcast(&shape, &input.shape()));
    let operands: SmallVec<[_; 3]> = inputs.iter().map(|input| (input.shape(), input.strides())).collect();
    let strides = elementwise_strides(&shape, &operands);
    Tensor::strided(inputs[0].session(), what, shape, strides, dtype)
}

impl Tensor {
    /// One result like `self` whose backward makes one buffer: `what` over self alone.
    fn unary(&self, what: &'static str, backward_what: &'static str, keeps: Keeps) -> Self {
        let op = Op::new(self.session(), &[self]);
        if keeps == Keeps::Input {
            op.save(self);
        }
        let out = self.session().results_of(what, || pointwise(what, &[self], self.dtype()));
        if keeps == Keeps::Result {
            op.save_result(&out);
        }
        op.finish(out, move |call| {
            let grad = call.grad();
            let gradient = match keeps {
                Keeps::Nothing => pointwise(backward_what, &[grad], grad.dtype()),
                _ => pointwise(backward_what, &[grad, call.saved(0)], grad.dtype()),
            };
            vec![Some(gradient)]
        })
    }

    /// `-self`.
    pub fn neg(&self) -> Self {
        self.unary("neg", "neg_backward", Keeps::Nothing)
    }

    /// `self * scalar`.
    pub fn mul_scalar(&self) -> Self {
        self.unary("mul", "mul_backward", Keeps::Nothing)
    }

    /// `self / scalar`.
    pub fn div_scalar(&self) -> Self {
        self.unary("div", "div_backward", Keeps::Nothing)
    }

    /// `self + scalar`: the gradient passes through.
    pub fn add_scalar(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = pointwise("add", &[self], self.dtype());
        op.finish(out, |call| vec![Some(call.grad().clone())])
    }

    /// `relu(self)`; keeps its result.
    pub fn relu(&self) -> Self {
        self.unary("relu", "relu_backward", Keeps::Result)
    }

    /// `tanh(self)`; keeps its result.
    pub fn tanh(&self) -> Self {
        self.unary("tanh", "tanh_backward", Keeps::Result)
    }

    /// `sigmoid(self)`; keeps its result.
    pub fn sigmoid(&self) -> Self {
        self.unary("sigmoid", "sigmoid_backward", Keeps::Result)
    }

    /// `exp(self)` in fp32 under autocast; keeps its result.
    pub fn exp(&self) -> Self {
        self.session().autocast_fp32(self).unary("exp", "exp_backward", Keeps::Result)
    }

    /// `silu(self)`; keeps its input.
    pub fn silu(&self) -> Self {
        self.unary("silu", "silu_backward", Keeps::Input)
    }

    /// `gelu(self)`, exact or by tanh; keeps its input.
    pub fn gelu(&self) -> Self {
        self.unary("gelu", "gelu_backward", Keeps::Input)
    }

    /// `cos(self)`; keeps its input.
    pub fn cos(&self) -> Self {
        self.unary("cos", "cos_backward", Keeps::Input)
    }

    /// `sin(self)`; keeps its input.
    pub fn sin(&self) -> Self {
        self.unary("sin", "sin_backward", Keeps::Input)
    }

    /// `self ** exponent` for a scalar exponent, in fp32 under autocast; keeps its input.
    /// Backward makes `self ** (exponent - 1)`, its multiple and the result.
    pub fn pow_scalar(&self) -> Self {
        let input = self.session().autocast_fp32(self);
        let op = Op::new(self.session(), &[&input]);
        op.save(&input);
        let out = pointwise("pow", &[&input], input.dtype());
        op.finish(out, |call| {
            let (grad, input) = (call.grad(), call.saved(0));
            let power = pointwise("pow_backward.power", &[input], input.dtype());
            let multiple = pointwise("pow_backward.multiple", &[&power], power.dtype());
            let gradient = pointwise("pow_backward", &[grad, &multiple], grad.dtype());
            crate::release!(multiple, power);
            vec![Some(gradient)]
        })
    }

    /// `1 / sqrt(self)`, in fp32 under autocast; keeps its result.
    pub fn rsqrt(&self) -> Self {
        let input = self.session().autocast_fp32(self);
        let op = Op::new(self.session(), &[&input]);
        let out = pointwise("rsqrt", &[&input], input.dtype());
        op.save_result(&out);
        op.finish(out, |call| {
            let (grad, result) = (call.grad(), call.saved(0));
            let cube = pointwise("rsqrt_backward.cube", &[result], result.dtype());
            let half = pointwise("rsqrt_backward.half", &[grad], grad.dtype());
            let gradient = pointwise("rsqrt_backward", &[&half, &cube], grad.dtype());
            crate::release!(half, cube);
            vec![Some(gradient)]
        })
    }

    /// `self + other`: one gradient passes to both.
    pub fn add(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self, other]);
        let out = pointwise("add", &[self, other], promote(self, other));
        op.finish(out, |call| {
            let pass = |index| call.when(index, || call.grad().clone());
            vec![pass(0), pass(1)]
        })
    }

    /// `self * other`: keeps each factor that the gradient of the other one needs.
    pub fn mul(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self, other]);
        let (left, right) = op.save_factors(self, other);
        let out = pointwise("mul", &[self, other], promote(self, other));
        op.finish(out, move |call| {
            let grad = call.grad();
            let product = |factor: &Self| pointwise("mul_backward", &[grad, factor], promote(grad, factor));
            let other = right.then(|| product(call.saved(call.saved_len() - 1)));
            let this = left.then(|| product(call.saved(0)));
            vec![this, other]
        })
    }

    /// `self *= other` for a factor without a gradient, which is kept: no memory.
    pub fn mul_in_place(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self]);
        op.save(other);
        let out = self.view_as(self.shape(), self.strides(), self.offset());
        op.finish(out, |call| {
            let grad = call.grad();
            vec![Some(pointwise("mul_backward", &[grad, call.saved(0)], grad.dtype()))]
        })
    }

    /// `self / divisor` for a divisor without a gradient, which is kept.
    pub fn div(&self, divisor: &Self) -> Self {
        let op = Op::new(self.session(), &[self]);
        op.save(divisor);
        let out = pointwise("div", &[self, divisor], promote(self, divisor));
        op.finish(out, |call| {
            let (grad, divisor) = (call.grad(), call.saved(0));
            vec![Some(pointwise("div_backward", &[grad, divisor], promote(grad, divisor)))]
        })
    }

    /// This tensor in `dtype`; the same handle where it has it already.
    pub fn to(&self, dtype: Dtype) -> Self {
        if self.dtype() == dtype {
            return self.clone();
        }
        let op = Op::new(self.session(), &[self]);
        let out = self.empty_like("to", dtype);
        let from = self.dtype();
        op.finish(out, move |call| vec![Some(call.grad().empty_like("to_backward", from))])
    }

    /// A copy of this tensor in `dtype`, without history.
    pub fn copied(&self, dtype: Dtype) -> Self {
        self.empty_like("copy", dtype)
    }

    /// Dropout in training: a mask of one byte an element and the result; keeps the mask. The same
    /// handle where the probability is zero.
    pub fn dropout(&self, probability: f64) -> Self {
        if probability == 0.0 {
            return self.clone();
        }
        let op = Op::new(self.session(), &[self]);
        let mask = self.empty_like("dropout.mask", Dtype::Bool);
        let out = self.empty_like("dropout", self.dtype());
        op.save_result(&mask);
        let out = op.finish(out, |call| {
            let grad = call.grad();
            vec![Some(pointwise("dropout_backward", &[grad, call.saved(0)], grad.dtype()))]
        });
        crate::release!(mask);
        out
    }

    /// Softmax over the last dimension, computed in `dtype` where given, else in fp32 under autocast; keeps
    /// its result. fp16 to fp32 is one kernel on CUDA, bf16 is cast first.
    pub fn softmax(&self, dtype: Option<Dtype>) -> Self {
        let fp32 = (self.is_half() && self.session().autocast_dtype().is_some()).then_some(Dtype::Fp32);
        let dtype = dtype.or(fp32);
        let fused = self.dtype() == Dtype::Fp16 && dtype == Some(Dtype::Fp32);
        let input = match dtype {
            Some(dtype) if !fused => self.to(dtype),
            _ => self.clone(),
        };
        let from = input.dtype();
        let op = Op::new(self.session(), &[&input]);
        let out = self.session().results_of("_softmax", || {
            Self::empty(self.session(), "softmax", input.shape(), dtype.unwrap_or(from))
        });
        op.save_result(&out);
        op.finish(out, move |call| {
            let grad = call.grad();
            let gradient = Self::empty(grad.session(), "softmax_backward", grad.shape(), from);
            let product = pointwise("softmax_backward.product", &[grad, call.saved(0)], grad.dtype());
            crate::release!(product);
            vec![Some(gradient)]
        })
    }

    /// An uninitialised tensor laid out like this one.
    pub fn like(&self, what: &'static str) -> Self {
        self.empty_like(what, self.dtype())
    }

    /// Whether the elements are of a half-precision type.
    pub(crate) fn is_half(&self) -> bool {
        matches!(self.dtype(), Dtype::Fp16 | Dtype::Bf16)
    }

    /// A scalar on the device, as `torch.zeros(())` or a filled constant makes.
    pub(crate) fn scalar(&self, what: &'static str, dtype: Dtype) -> Self {
        Self::empty(&Rc::clone(self.session()), what, [], dtype)
    }
}

/// What a unary operator keeps for backward.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    Nothing,
    Input,
    Result,
}
