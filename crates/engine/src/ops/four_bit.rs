//! Weights of 4 bits an element, as bitsandbytes holds and multiplies them.

use std::rc::Rc;

use ledger::{Category, Dtype};

use crate::graph::Op;
use crate::hardware::Hardware;
use crate::session::Session;
use crate::tensor::Tensor;

/// Elements that share a scale.
const BLOCK: u64 = 64;
/// Scales that share a scale of their own, where they are quantized too.
const BLOCK_OF_SCALES: u64 = 256;
/// Rows of the input from which a weight is always dequantized for the product.
const FUSED_ROWS: u64 = 1536;

/// A frozen (N, K) weight in 4 bits, with what is needed to read it.
pub struct FourBit {
    packed: Tensor,
    scales: Tensor,
    nested: Option<Nested>,
    _code: Tensor,
    shape: [u64; 2],
    dtype: Dtype,
}

/// Scales of 8 bits: their mean, their own scales and the map of their values.
struct Nested {
    _offset: Tensor,
    _scales: Tensor,
    _code: Tensor,
}

impl FourBit {
    /// Quantizes a weight that is on the device in `dtype`, its scales as well where it is `double`.
    ///
    /// A `transposed` weight, (K, N) in memory, is copied into order first.
    pub fn new(session: &Rc<Session>, shape: [u64; 2], dtype: Dtype, double: bool, transposed: bool) -> Self {
        let [rows, columns] = shape;
        let of = |what, category, size: &[u64], dtype| {
            Tensor::of_category(session, what, category, crate::Dims::new(size), dtype)
        };
        let temporary = |what, size: &[u64], dtype| of(what, Category::Temporary, size, dtype);
        let buffer = |what, size: &[u64], dtype| of(what, Category::Buffer, size, dtype);
        let weight = temporary("weight.loaded", &shape, dtype);
        let in_order = transposed.then(|| temporary("weight.loaded", &shape, dtype));
        let blocks = (rows * columns).div_ceil(BLOCK);
        let full_scales = |category| of("weight.absmax", category, &[blocks], Dtype::Fp32);
        let mut scales = full_scales(if double { Category::Temporary } else { Category::Buffer });
        let packed = of("weight", Category::Parameter, &[(rows * columns).div_ceil(2)], Dtype::Uint8);
        let code = buffer("weight.quant_map", &[16], Dtype::Fp32);
        let magnitudes = temporary("weight.quant_map.abs", &[16], Dtype::Fp32);
        let largest = temporary("weight.quant_map.max", &[], Dtype::Fp32);
        crate::release!(magnitudes, largest);
        let nested = double.then(|| {
            let offset = session.with_category(Category::Buffer, || scales.mean_all());
            let centred = temporary("weight.absmax.centred", &[blocks], Dtype::Fp32);
            session.keep("dynamic_map", 1024);
            let own = buffer("weight.nested_absmax", &[blocks.div_ceil(BLOCK_OF_SCALES)], Dtype::Fp32);
            let short = buffer("weight.absmax", &[blocks], Dtype::Uint8);
            let own_code = buffer("weight.nested_quant_map", &[256], Dtype::Fp32);
            crate::release!(centred);
            scales = short;
            Nested { _offset: offset, _scales: own, _code: own_code }
        });
        crate::release!(in_order, weight);
        Self { packed, scales, nested, _code: code, shape, dtype }
    }

    /// Elements of the weight.
    pub const fn numel(&self) -> u64 {
        self.shape[0] * self.shape[1]
    }

    /// Bytes of the elements, without their scales.
    pub fn nbytes(&self) -> u64 {
        self.packed.nbytes()
    }

    fn scales_in_fp32(&self, what: &'static str) -> Tensor {
        let session = self.scales.session();
        Tensor::of_category(session, what, Category::Workspace, self.scales.shape(), Dtype::Fp32)
    }

    fn in_full(&self, dtype: Dtype) -> Tensor {
        let session = self.scales.session();
        Tensor::of_category(session, "dequantized", Category::Workspace, self.shape, dtype)
    }

    /// The product of the forward pass: one kernel, or a product with the weight in full.
    fn product(&self, input: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let session = input.session();
        let [rows, columns] = self.shape;
        let tokens = input.numel() / columns.max(1);
        if is_fused(&session.hardware, input.dtype(), tokens, self.shape) {
            let input = input.contiguous();
            session.add_flops(2 * tokens * rows * columns);
            return Tensor::empty(session, "gemm_4bit", input.shape_with_last(rows), input.dtype());
        }
        let parts = self.nested.is_some().then(|| {
            let plain = self.scales_in_fp32("dequantized.absmax");
            (self.scales_in_fp32("dequantized.absmax"), plain)
        });
        let full = self.in_full(input.dtype());
        let out = input.linear(&full, bias);
        crate::release!(parts, full);
        out
    }

    /// The weight in the dtype that it was quantized from.
    fn dequantize(&self) -> Tensor {
        let scales = self.nested.is_some().then(|| self.scales_in_fp32("dequantized.absmax"));
        let full = self.in_full(self.dtype);
        crate::release!(scales);
        full
    }
}

impl Tensor {
    /// `self @ weight.t() + bias` over a frozen weight of 4 bits; keeps nothing but the weight.
    pub fn linear_4bit(&self, weight: &Rc<FourBit>, bias: Option<&Self>) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self]);
        let out = session.with_grad(false, || weight.product(self, bias));
        let weight = Rc::clone(weight);
        op.finish_custom(out, move |call, _| {
            let grad = call.grad();
            let full = weight.dequantize();
            let cast = full.to(grad.dtype());
            crate::release!(full);
            let gradient = grad.matmul_weight(&cast);
            crate::release!(cast);
            vec![Some(gradient)]
        })
    }
}

/// Whether bitsandbytes 0.50 multiplies `tokens` rows by a weight of `shape` in one kernel of its own. Its
/// thresholds are known here for compute capability 9; elsewhere the weight is taken to be dequantized.
fn is_fused(hardware: &Hardware, dtype: Dtype, tokens: u64, [n, k]: [u64; 2]) -> bool {
    if tokens > FUSED_ROWS || !k.is_multiple_of(BLOCK) || hardware.compute_capability.0 != 9 {
        return false;
    }
    if tokens <= 4 {
        return true;
    }
    if dtype == Dtype::Fp32 {
        return tokens < 8;
    }
    // Tiles of 64 outputs, in fractions of the multiprocessors.
    let (tiles, sms) = (n.div_ceil(64), hardware.multiprocessors);
    if n * k < 4 << 20 {
        return match () {
            () if 2 * k < n => tokens <= if 3 * tiles < sms { 512 } else { 320 },
            () if 4 * tiles <= sms => tokens <= 32,
            () if 2 * tiles <= sms => tokens <= 16,
            () => false,
        };
    }
    if tokens < 8 {
        let below_three_quarters = 4 * tiles < 3 * sms;
        let above_three_fifths = 5 * tiles >= 3 * sms;
        let loses = below_three_quarters && (k > n || (k == n && above_three_fifths));
        return !(tokens >= 6 && tiles >= 36 && loses);
    }
    match () {
        () if tiles >= 3 * sms => tokens <= 64,
        () if tiles >= 2 * sms => tokens <= 48,
        () if tiles >= sms => tokens <= 32,
        () if tiles >= sms / 2 => !(k >= n && 4 * tiles < 3 * sms) && tokens <= 16,
        () => false,
    }
}
