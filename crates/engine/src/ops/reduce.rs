//! Sums and means, with the workspace of CUDA's reduction kernel.

use ledger::Dtype;

use crate::dims::{Dims, iteration_order};
use crate::graph::Op;
use crate::hardware::Hardware;
use crate::tensor::Tensor;

/// Bytes of a partial result: sums of half-precision values are accumulated in fp32, those of integers and of fp64
/// in 64 bits.
const fn accumulator(dtype: Dtype) -> u64 {
    if matches!(dtype, Dtype::Int64 | Dtype::Fp64) { 8 } else { 4 }
}

/// The global workspace of a reduction: partial results and semaphores, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Workspace {
    partials: u64,
    semaphores: u64,
}

/// One axis of an iteration, with the strides of input and output in elements.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: u64,
    stride: u64,
    output_stride: u64,
    reduced: bool,
}

/// What TensorIterator walks in a reduction: axes in its order, fastest first, from an offset into
/// the input.
#[derive(Clone, Debug)]
struct Iteration {
    axes: Vec<Axis>,
    offset: u64,
}

/// Bytes of an element of input and output.
#[derive(Clone, Copy)]
struct Elements {
    input: u64,
    output: u64,
}

impl Iteration {
    /// The axes of reducing `input` over `reduced`, neighbours merged where memory allows.
    fn new(input: &Tensor, reduced: &[bool]) -> Self {
        let (shape, strides) = (input.shape(), input.strides());
        let order = iteration_order(&shape, &[strides], Some(reduced));
        // The output is contiguous over the kept dimensions and stands still along the reduced ones.
        let kept: Vec<u64> = (0..shape.len()).map(|dim| if reduced[dim] { 1 } else { shape[dim] }).collect();
        let output = Dims::new(&kept).contiguous_strides();
        let mut axes: Vec<Axis> = Vec::new();
        for dim in order {
            let output_stride = if reduced[dim] { 0 } else { output[dim] };
            let axis = Axis { size: shape[dim], stride: strides[dim], output_stride, reduced: reduced[dim] };
            match axes.last_mut() {
                Some(last) if last.size == 1 => *last = axis,
                Some(_) if axis.size == 1 => {}
                Some(last)
                    if last.size * last.stride == axis.stride
                        && last.size * last.output_stride == axis.output_stride =>
                {
                    last.size *= axis.size;
                }
                _ => axes.push(axis),
            }
        }
        Self { axes, offset: input.offset() }
    }

    /// Whether every byte offset fits in 32 bits, as one launch of the kernel needs.
    fn fits_32_bits(&self, elements: Elements) -> bool {
        let extent = |stride: fn(&Axis) -> u64, element: u64| -> u64 {
            1 + self.axes.iter().map(|axis| (axis.size - 1) * stride(axis) * element).sum::<u64>()
        };
        let numel: u64 = self.axes.iter().map(|axis| axis.size).product();
        let largest = extent(|axis| axis.stride, elements.input)
            .max(extent(|axis| axis.output_stride, elements.output));
        numel.max(largest) <= i32::MAX as u64
    }

    /// The launches of the kernel, in order: halves of the axis with the largest extent, until each fits.
    fn launches(self, elements: Elements) -> Vec<Self> {
        let mut pending = vec![self];
        let mut launches = Vec::new();
        while let Some(mut rest) = pending.pop() {
            if rest.fits_32_bits(elements) {
                launches.push(rest);
                continue;
            }
            let extent = |axis: &Axis| {
                (axis.size - 1) * (axis.stride * elements.input).max(axis.output_stride * elements.output)
            };
            let widest = (0..rest.axes.len()).rev().fold(None, |best: Option<(usize, u64)>, index| {
                let extent = extent(&rest.axes[index]);
                if best.is_none_or(|(_, largest)| extent > largest) { Some((index, extent)) } else { best }
            });
            let Some((widest, _)) = widest else { break };
            let mut first = rest.clone();
            let axis = rest.axes[widest];
            first.axes[widest].size = axis.size / 2;
            rest.axes[widest].size = axis.size - axis.size / 2;
            rest.offset += axis.size / 2 * axis.stride;
            pending.push(rest);
            pending.push(first);
        }
        launches
    }

    /// The workspace of one launch of `gpu_reduce_kernel` (aten/src/ATen/native/cuda/Reduce.cuh): none
    /// unless few outputs with many inputs each are split over blocks.
    fn workspace(&self, hardware: &Hardware, accumulator: u64) -> Option<Workspace> {
        const VECTOR: u64 = 4;
        const WARP: u64 = 32;
        let axes = &self.axes;
        let outputs: u64 = axes.iter().filter(|axis| !axis.reduced).map(|axis| axis.size).product();
        let inputs: u64 = axes.iter().filter(|axis| axis.reduced).map(|axis| axis.size).product();
        let reduced_axes = axes.iter().filter(|axis| axis.reduced).count();
        let along_fastest =
            axes.is_empty() || reduced_axes == axes.len() || axes[0].stride < axes[reduced_axes].stride;
        let (mut dim0, dim1, fastest_stride) = if axes.is_empty() {
            (1, 1, 1)
        } else if along_fastest {
            (inputs, outputs, axes[0].stride)
        } else {
            (outputs, inputs, axes[reduced_axes].stride)
        };
        let mut output_vector = 1;
        if fastest_stride == 1 {
            if along_fastest && dim0 > 128 && axes.len() == 1 {
                dim0 /= VECTOR;
            } else if !along_fastest {
                output_vector = VECTOR;
                let mut fit = |value: u64| {
                    while !value.is_multiple_of(output_vector) {
                        output_vector /= 2;
                    }
                };
                fit(self.offset);
                fit(axes[reduced_axes].size);
                for (index, axis) in axes.iter().enumerate() {
                    if index != reduced_axes {
                        fit(axis.stride);
                    }
                }
                dim0 /= output_vector;
            }
        }
        let most_threads = 512 / output_vector;
        let power = |dim: u64| if dim < most_threads { 1 << dim.max(1).ilog2() } else { most_threads };
        let height = power(dim1).min(most_threads / power(dim0).min(WARP));
        let width = power(dim0).min(most_threads / height);
        let (mut input_step, mut output_step) = (1, 1);
        if along_fastest {
            input_step *= width;
        } else {
            output_step *= width;
        }
        let values = |input_step: u64| inputs.div_ceil(input_step);
        let across_warps = values(input_step) >= (height * 16).min(256);
        if across_warps {
            input_step *= height;
        } else {
            output_step *= height;
        }
        let target = hardware.multiprocessors * (hardware.threads_per_multiprocessor / (width * height));
        let grid = (outputs / output_vector).div_ceil(output_step);
        if !across_warps || values(input_step) < 256 || grid > target {
            return None;
        }
        let blocks =
            target.div_ceil(grid).min(values(input_step).div_ceil(16)).max(values(input_step).div_ceil(256));
        if blocks <= 1 {
            return None;
        }
        let lanes = if along_fastest { 1 } else { width * output_vector };
        Some(Workspace { partials: accumulator * outputs * blocks * lanes, semaphores: 4 * grid })
    }

    /// Elements that the output spans.
    fn output_span(&self) -> u64 {
        self.axes.iter().map(|axis| axis.size * axis.output_stride).max().unwrap_or(1).max(1)
    }
}

impl Tensor {
    /// Writes to the tape what reducing this tensor over `reduced` into elements of `output` needs
    /// besides its result: an fp32 accumulator where several launches meet in a narrower output, and the
    /// workspace of each launch.
    fn reduction_workspaces(&self, reduced: &[bool], output: Dtype) {
        self.workspaces(reduced, output, accumulator(output));
    }

    /// The same with partial results of `partial` bytes.
    fn workspaces(&self, reduced: &[bool], output: Dtype, partial: u64) {
        if self.numel() == 0 {
            return;
        }
        let session = self.session();
        let elements = Elements { input: self.dtype().size(), output: output.size() };
        let iteration = Iteration::new(self, reduced);
        let span = iteration.output_span();
        let launches = iteration.launches(elements);
        let accumulator = (launches.len() > 1 && elements.output < partial)
            .then(|| session.scratch(span * partial, "reduction_accumulator"));
        for launch in launches {
            if let Some(needed) = launch.workspace(&session.hardware, partial) {
                let partials = session.scratch(needed.partials, "reduction_workspace");
                let semaphores = session.scratch(needed.semaphores, "reduction_semaphores");
                crate::release!(semaphores, partials);
            }
        }
        crate::release!(accumulator);
    }

    /// A reduction of this tensor over `reduced`, whose result has `shape`, with its workspace.
    pub(crate) fn reduce(&self, what: &'static str, reduced: &[bool], shape: Dims) -> Self {
        let out = Self::empty(self.session(), what, shape, self.dtype());
        self.reduction_workspaces(reduced, self.dtype());
        out
    }

    /// This tensor summed to the extents it was broadcast from; the same handle where they are equal.
    pub(crate) fn sum_to(&self, shape: Dims) -> Self {
        if shape == self.shape() {
            return self.clone();
        }
        let leading = self.shape().len() - shape.len();
        let reduced: Vec<bool> = (0..self.shape().len())
            .map(|dim| dim < leading || (shape[dim - leading] == 1 && self.shape()[dim] != 1))
            .collect();
        let mut keepdim = self.shape();
        for dim in 0..keepdim.len() {
            if reduced[dim] {
                keepdim[dim] = 1;
            }
        }
        let sum = self.reduce("sum", &reduced, keepdim);
        if leading > 0 { sum.view(shape) } else { sum }
    }

    /// The mean of the last dimension, which stays with size 1.
    pub fn mean_last(&self) -> Self {
        let mut reduced = vec![false; self.shape().len()];
        reduced[self.dim(-1)] = true;
        let mut shape = self.shape();
        let last = self.dim(-1);
        shape[last] = 1;
        let op = Op::new(self.session(), &[self]);
        let out = self.reduce("mean", &reduced, shape);
        self.finish_mean(op, out)
    }

    /// The sum over `dim`, which goes, or stays with size 1; under autocast the result is fp32.
    pub fn sum_dim(&self, dim: isize, keep: bool) -> Self {
        let op = Op::new(self.session(), &[self]);
        let dim = self.dim(dim);
        let from = self.shape();
        let mut reduced = vec![false; from.len()];
        reduced[dim] = true;
        let mut kept = from;
        kept[dim] = 1;
        let dtype = self.sum_dtype();
        let out = Self::empty(self.session(), "sum", kept, dtype);
        self.reduction_workspaces(&reduced, dtype);
        let out = if keep { out } else { out.without(dim) };
        op.finish(out, move |call| {
            let grad = call.grad();
            let grad = if keep { grad.clone() } else { grad.unsqueeze(dim) };
            vec![Some(grad.expand(from))]
        })
    }

    /// The mean of all elements.
    pub fn mean_all(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = self.reduce("mean", &vec![true; self.shape().len()], Dims::default());
        self.finish_mean(op, out)
    }

    fn finish_mean(&self, op: Op, out: Self) -> Self {
        let from = self.shape();
        op.finish(out, move |call| {
            let wide = call.grad().expand(from);
            vec![Some(Self::empty(wide.session(), "mean_backward", from, wide.dtype()))]
        })
    }

    /// The largest or the smallest of all elements, without history: partial results are elements.
    pub fn extreme_all(&self) -> Self {
        let out = Self::empty(self.session(), "extreme", [], self.dtype());
        self.workspaces(&vec![true; self.shape().len()], self.dtype(), self.dtype().size());
        out
    }

    /// The sum of all elements, without history.
    pub fn total(&self) -> Self {
        self.reduce("total", &vec![true; self.shape().len()], Dims::default())
    }

    /// The 2-norm of all elements, without history.
    pub fn norm_all(&self) -> Self {
        self.reduce("norm", &vec![true; self.shape().len()], Dims::default())
    }

    /// The 2-norm over `dim`, which stays with size 1, without history.
    pub fn norm_dim(&self, dim: isize) -> Self {
        self.reduce_one("norm", dim)
    }

    /// The mean over `dim`, which stays with size 1, without history.
    pub fn mean_dim(&self, dim: isize) -> Self {
        self.reduce_one("mean", dim)
    }

    fn reduce_one(&self, what: &'static str, dim: isize) -> Self {
        let dim = self.dim(dim);
        let mut reduced = vec![false; self.shape().len()];
        reduced[dim] = true;
        let mut shape = self.shape();
        shape[dim] = 1;
        self.reduce(what, &reduced, shape)
    }

    /// The dtype of a sum over this tensor: fp32 for half precision under autocast.
    fn sum_dtype(&self) -> Dtype {
        let autocast = self.session().autocast_dtype().is_some();
        if autocast && self.is_half() { Dtype::Fp32 } else { self.dtype() }
    }

    /// How many elements of a mask are set, int64; the mask is made wide first.
    pub fn count(&self) -> Self {
        let out = Self::empty(self.session(), "count", [], Dtype::Int64);
        let wide = self.empty_like("count.to", Dtype::Int64);
        wide.reduction_workspaces(&vec![true; self.shape().len()], Dtype::Int64);
        crate::release!(wide);
        out
    }

    /// The sum of all elements; under autocast the result is fp32.
    pub fn sum_all(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let dtype = self.sum_dtype();
        let out = Self::empty(self.session(), "sum", [], dtype);
        self.reduction_workspaces(&vec![true; self.shape().len()], dtype);
        let from = self.shape();
        op.finish(out, move |call| vec![Some(call.grad().expand(from))])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Hardware =
        Hardware { compute_capability: (9, 0), multiprocessors: 132, threads_per_multiprocessor: 2048 };

    fn of(shape: &[u64], reduced: &[bool]) -> Option<(u64, u64)> {
        let device = ledger::Device {
            name: "H100".into(),
            kind: ledger::DeviceKind::Gpu,
            capacity: None,
            context: None,
        };
        let session = crate::Session::new(device, H100, crate::Profile::TORCH_2_15);
        let tensor = Tensor::empty(&session, "x", Dims::new(shape), Dtype::Fp32);
        Iteration::new(&tensor, reduced)
            .workspace(&H100, 4)
            .map(|needed| (needed.partials, needed.semaphores))
    }

    #[test]
    fn recorded_workspaces_of_reductions() {
        assert_eq!(of(&[1024, 256], &[true, false]), Some((2_097_152, 8)));
        assert_eq!(of(&[262_144], &[true]), Some((128, 4)));
        assert_eq!(of(&[4, 256, 256], &[false, false, true]), None);
    }
}
