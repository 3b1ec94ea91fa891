//! Views and the copies they need.

use crate::dims::Dims;
use crate::graph::Op;
use crate::tensor::Tensor;

impl Tensor {
    /// A view of other extents on the same memory, where the strides allow one.
    fn try_view(&self, shape: Dims, op: Op) -> Option<Self> {
        let strides = self.shape().view_strides(&self.strides(), &shape)?;
        let out = self.view_as(shape, strides, self.offset());
        let from = self.shape();
        let out = op.finish(out, move |call| vec![Some(call.grad().reshape(from))]);
        Some(out)
    }

    /// This tensor with other extents: a view where the strides allow it, else a view of a contiguous copy.
    pub fn reshape(&self, shape: impl Into<Dims>) -> Self {
        let shape = shape.into();
        if shape == self.shape() {
            return self.view_whole(shape);
        }
        if self.shape().view_strides(&self.strides(), &shape).is_some() {
            return self.view_whole(shape);
        }
        let copy = self.copy_contiguous();
        copy.view_whole(shape)
    }

    /// `Tensor.view`: only for extents that the strides allow.
    pub fn view(&self, shape: impl Into<Dims>) -> Self {
        self.view_whole(shape.into())
    }

    /// `_unsafe_view` of a contiguous result: other extents, and no view of anything.
    pub(crate) fn unsafe_view(&self, shape: Dims) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = self.view_as(shape, shape.contiguous_strides(), self.offset()).detach();
        let from = self.shape();
        op.finish(out, move |call| vec![Some(call.grad().reshape(from))])
    }

    fn view_whole(&self, shape: Dims) -> Self {
        let op = Op::new(self.session(), &[self]);
        self.try_view(shape, op).expect("extents that the strides allow")
    }

    /// A contiguous copy; the gradient passes through.
    pub(crate) fn copy_contiguous(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = Self::empty(self.session(), "clone", self.shape(), self.dtype());
        op.finish(out, |call| vec![Some(call.grad().clone())])
    }

    /// `clone()`: a copy in the same layout; the gradient passes through.
    pub fn copy(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = self.empty_like("clone", self.dtype());
        op.finish(out, |call| vec![Some(call.grad().clone())])
    }

    /// The same handle where the elements lie in row-major order, else a copy.
    pub fn contiguous(&self) -> Self {
        if self.is_contiguous() { self.clone() } else { self.copy_contiguous() }
    }

    /// A view with two dimensions exchanged; negative counts from the last.
    pub fn transpose(&self, first: isize, second: isize) -> Self {
        let op = Op::new(self.session(), &[self]);
        let (a, b) = (self.dim(first), self.dim(second));
        let (mut shape, mut strides) = (self.shape(), self.strides());
        shape.swap(a, b);
        strides.swap(a, b);
        let out = self.view_as(shape, strides, self.offset());
        op.finish(out, move |call| vec![Some(call.grad().transpose(a as isize, b as isize))])
    }

    /// The transpose of a matrix, as a view.
    pub fn t(&self) -> Self {
        self.transpose(0, 1)
    }

    /// A view with a dimension of size 1 before `dim`.
    pub fn unsqueeze(&self, dim: usize) -> Self {
        let op = Op::new(self.session(), &[self]);
        let (shape, strides) = (self.shape(), self.strides());
        let insert = |values: Dims, value: u64| {
            let mut result = Dims::new(&values[..dim]).with(value);
            for value in &values[dim..] {
                result = result.with(*value);
            }
            result
        };
        let stride = if dim < shape.len() { shape[dim] * strides[dim] } else { 1 };
        let out = self.view_as(insert(shape, 1), insert(strides, stride), self.offset());
        op.finish(out, move |call| vec![Some(call.grad().squeeze(dim))])
    }

    /// This result, not yet part of a graph, without dimension `dim`, whose size is 1.
    pub(crate) fn without(self, dim: usize) -> Self {
        self.squeeze(dim).detach()
    }

    /// A view without dimension `dim`, whose size is 1.
    fn squeeze(&self, dim: usize) -> Self {
        let remove = |values: Dims| {
            let mut result = Dims::new(&values[..dim]);
            for value in &values[dim + 1..] {
                result = result.with(*value);
            }
            result
        };
        self.view_as(remove(self.shape()), remove(self.strides()), self.offset())
    }

    /// A view with dimensions of size 1 stretched to `shape`; the gradient is summed back.
    pub fn expand(&self, shape: impl Into<Dims>) -> Self {
        let shape = shape.into();
        let op = Op::new(self.session(), &[self]);
        let from = self.shape();
        let mut strides = shape;
        let offset = shape.len() - from.len();
        for dim in 0..shape.len() {
            strides[dim] = match dim.checked_sub(offset) {
                Some(own) if from[own] == shape[dim] => self.strides()[own],
                _ => 0,
            };
        }
        let out = self.view_as(shape, strides, self.offset());
        op.finish(out, move |call| vec![Some(call.grad().sum_to(from))])
    }

    /// A view of `length` elements of dimension `dim` from `start`, as Python's indexing takes it; backward fills
    /// zeros around it, and passes where it was the whole.
    pub fn narrow(&self, dim: isize, start: u64, length: u64) -> Self {
        let op = Op::new(self.session(), &[self]);
        let dim = self.dim(dim);
        let from = self.shape();
        let mut shape = from;
        shape[dim] = length;
        let out = self.view_as(shape, self.strides(), self.offset() + start * self.strides()[dim]);
        op.finish(out, move |call| {
            let grad = call.grad();
            if shape == from {
                return vec![Some(grad.clone())];
            }
            vec![Some(Self::empty(grad.session(), "slice_backward", from, grad.dtype()))]
        })
    }

    /// Views of `length` along `dim`, the last one of what is left; backward waits for all parts and joins them.
    pub fn split(&self, dim: isize, length: u64) -> Vec<Self> {
        let op = Op::new(self.session(), &[self]);
        let dim = self.dim(dim);
        let from = self.shape();
        let dtype = self.dtype();
        let parts: Vec<Self> = (0..from[dim].div_ceil(length))
            .map(|part| {
                let start = part * length;
                let mut shape = from;
                shape[dim] = length.min(from[dim] - start);
                self.view_as(shape, self.strides(), self.offset() + start * self.strides()[dim])
            })
            .collect();
        op.finish_all(&parts, move |call| {
            let any = (0..).find_map(|part| call.grad_of(part)).expect("one part has a gradient");
            vec![Some(Self::empty(any.session(), "split_backward", from, dtype))]
        });
        parts
    }

    /// At most `count` views of equal length along `dim`, but for the last one.
    pub fn chunk(&self, dim: isize, count: u64) -> Vec<Self> {
        self.split(dim, self.size(dim).div_ceil(count).max(1))
    }

    /// Another handle on the same elements, as indexing by whole slices gives it; the gradient passes through.
    pub fn alias(&self) -> Self {
        let op = Op::new(self.session(), &[self]);
        let out = self.view_as(self.shape(), self.strides(), self.offset());
        op.finish(out, |call| vec![Some(call.grad().clone())])
    }
}
