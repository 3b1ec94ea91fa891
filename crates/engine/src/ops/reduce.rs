//! Sums and means, with the workspace of CUDA's reduction kernel.

use std::rc::Rc;

use crate::dims::{Dims, iteration_order};
use crate::graph::Op;
use crate::hardware::Hardware;
use crate::tensor::{Storage, Tensor};

/// Bytes of a partial result: sums of half-precision values are accumulated in fp32.
const ACCUMULATOR: u64 = 4;

/// The global workspace of a reduction: partial results and semaphores, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Workspace {
    partials: u64,
    semaphores: u64,
}

/// The launch configuration of `gpu_reduce_kernel` (aten/src/ATen/native/cuda/Reduce.cuh), as far as
/// it decides the workspace: none unless few outputs with many inputs each are split over blocks.
fn workspace(
    hardware: &Hardware,
    shape: &Dims,
    strides: &Dims,
    offset: u64,
    reduced: &[bool],
    element: u64,
) -> Option<Workspace> {
    const VECTOR: u64 = 4;
    const WARP: u64 = 32;
    let axes = coalesce(shape, strides, reduced);
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
            fit(offset);
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
    Some(Workspace { partials: ACCUMULATOR * outputs * blocks * lanes, semaphores: 4 * grid })
        .filter(|_| element > 0)
}

/// One axis of the iteration, with its stride in elements of the input.
struct Axis {
    size: u64,
    stride: u64,
    reduced: bool,
}

/// The axes of the reduction in TensorIterator's order, neighbours merged where memory allows.
fn coalesce(shape: &Dims, strides: &Dims, reduced: &[bool]) -> Vec<Axis> {
    let order = iteration_order(shape, &[*strides], Some(reduced));
    let mut axes: Vec<Axis> = Vec::new();
    // Strides of the output: contiguous over the kept dimensions, zero over the reduced ones.
    let kept =
        Dims::new(&(0..shape.len()).map(|dim| if reduced[dim] { 1 } else { shape[dim] }).collect::<Vec<_>>());
    let output = kept.contiguous_strides();
    let mut output_stride = 0;
    for dim in order {
        let axis = Axis { size: shape[dim], stride: strides[dim], reduced: reduced[dim] };
        let out = if reduced[dim] { 0 } else { output[dim] };
        match axes.last_mut() {
            Some(last)
                if last.size == 1
                    || axis.size == 1
                    || (last.size * last.stride == axis.stride && last.size * output_stride == out) =>
            {
                if last.size == 1 {
                    (last.stride, last.reduced, output_stride) = (axis.stride, axis.reduced, out);
                }
                last.size *= axis.size;
            }
            _ => {
                axes.push(axis);
                output_stride = out;
            }
        }
    }
    axes
}

impl Tensor {
    /// The workspace of reducing this tensor over `reduced`, held by the handles returned.
    pub(crate) fn reduction_workspace(&self, reduced: &[bool]) -> Option<(Rc<Storage>, Rc<Storage>)> {
        let session = self.session();
        let needed = workspace(
            &session.hardware,
            &self.shape(),
            &self.strides(),
            self.offset(),
            reduced,
            self.dtype().size(),
        )?;
        let partials = session.scratch(needed.partials, "reduction_workspace");
        let semaphores = session.scratch(needed.semaphores, "reduction_semaphores");
        Some((partials, semaphores))
    }

    /// A reduction of this tensor over `reduced`, whose result has `shape`, with its workspace.
    pub(crate) fn reduce(&self, what: &'static str, reduced: &[bool], shape: Dims) -> Self {
        let out = Self::empty(self.session(), what, shape, self.dtype());
        if let Some((partials, semaphores)) = self.reduction_workspace(reduced) {
            crate::release!(semaphores, partials);
        }
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

    /// The sum of all elements; under autocast the result is fp32.
    pub fn sum_all(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let half = matches!(self.dtype(), ledger::Dtype::Bf16 | ledger::Dtype::Fp16);
        let dtype = if half && self.session().autocast_dtype().is_some() {
            ledger::Dtype::Fp32
        } else {
            self.dtype()
        };
        let out = Self::empty(self.session(), "sum", [], dtype);
        if let Some((partials, semaphores)) = self.reduction_workspace(&vec![true; self.shape().len()]) {
            crate::release!(semaphores, partials);
        }
        let from = self.shape();
        op.finish(out, move |call| vec![Some(call.grad().expand(from))])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H100: Hardware =
        Hardware { compute_capability: (9, 0), multiprocessors: 132, threads_per_multiprocessor: 2048 };

    fn of(shape: &[u64], reduced: &[bool], element: u64) -> Option<(u64, u64)> {
        let shape = Dims::new(shape);
        workspace(&H100, &shape, &shape.contiguous_strides(), 0, reduced, element)
            .map(|needed| (needed.partials, needed.semaphores))
    }

    #[test]
    fn recorded_workspaces_of_reductions() {
        assert_eq!(of(&[1024, 256], &[true, false], 2), Some((2_097_152, 8)));
        assert_eq!(of(&[262_144], &[true], 4), Some((128, 4)));
        assert_eq!(of(&[4, 256, 256], &[false, false, true], 4), None);
    }
}
