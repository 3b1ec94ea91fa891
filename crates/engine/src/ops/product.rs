//! Matrix products, with the workspaces of cuBLAS.

use smallvec::SmallVec;

use crate::dims::Dims;
use crate::graph::Op;
use crate::tensor::Tensor;

/// A matrix as cuBLAS takes it: one of the two strides is 1 and the other spans a whole line; else
/// a contiguous copy.
fn operand(matrix: &Tensor) -> Tensor {
    let rank = matrix.shape().len();
    let (rows, columns) = (matrix.shape()[rank - 2], matrix.shape()[rank - 1]);
    let (row, column) = (matrix.strides()[rank - 2], matrix.strides()[rank - 1]);
    let fits = (column == 1 && row >= columns.max(1)) || (row == 1 && column >= rows.max(1));
    if fits {
        matrix.clone()
    } else {
        Tensor::empty(matrix.session(), "operand", matrix.shape(), matrix.dtype())
    }
}

/// `a @ b` of two matrices or two batches of them, without history.
pub(crate) fn multiply(what: &'static str, a: &Tensor, b: &Tensor) -> Tensor {
    let session = a.session();
    let rank = a.shape().len();
    let mut shape = a.shape();
    shape[rank - 1] = b.shape()[rank - 1];
    let out = Tensor::empty(session, what, shape, a.dtype());
    if rank == 3 && a.shape()[2] == 1 && session.profile.outer_product_kernel {
        session.add_flops(2 * out.numel());
        return out;
    }
    let (left, right) = (operand(a), operand(b));
    session.product_workspace(false);
    session.add_flops(2 * out.numel() * a.shape()[rank - 1]);
    crate::release!(right, left);
    out
}

/// A product written into a tensor that is there.
pub(crate) fn multiply_into(a: &Tensor, b: &Tensor) {
    let session = a.session();
    let (left, right) = (operand(a), operand(b));
    session.product_workspace(false);
    session.add_flops(2 * a.numel() * b.shape()[1]);
    crate::release!(right, left);
}

fn is_column_major(shape: &Dims, strides: &Dims) -> bool {
    strides[0] == 1 && strides[1] == shape[0]
}

/// The gradient of the left factor, in its layout.
fn left_gradient(grad: &Tensor, right: &Tensor, shape: &Dims, strides: &Dims) -> Tensor {
    if is_column_major(shape, strides) {
        multiply("mm_backward", right, &grad.t()).t()
    } else {
        multiply("mm_backward", grad, &right.t())
    }
}

/// The gradient of the right factor, in its layout.
fn right_gradient(grad: &Tensor, left: &Tensor, shape: &Dims, strides: &Dims) -> Tensor {
    if is_column_major(shape, strides) {
        multiply("mm_backward", &grad.t(), left).t()
    } else {
        multiply("mm_backward", &left.t(), grad)
    }
}

impl Tensor {
    /// The product of two matrices.
    pub fn mm(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self, other]);
        let (left, right) = op.save_factors(self, other);
        let out = self.session().results_of("mm", || multiply("mm", self, other));
        let (this_shape, this_strides) = (self.shape(), self.strides());
        let (other_shape, other_strides) = (other.shape(), other.strides());
        op.finish(out, move |call| {
            let grad = call.grad();
            let saved_left = || call.saved(call.saved_len() - 1);
            let other = right.then(|| right_gradient(grad, saved_left(), &other_shape, &other_strides));
            let this = left.then(|| left_gradient(grad, call.saved(0), &this_shape, &this_strides));
            vec![this, other]
        })
    }

    /// `bias + self @ other` in one kernel (cublasLt with a fused bias), as an `addmm` node.
    pub fn addmm(bias: &Self, mat1: &Self, mat2: &Self) -> Self {
        let session = mat1.session();
        let mat2 = &session.autocast_low(mat2);
        let mat1 = &session.autocast_low(mat1);
        let bias = &session.autocast_low(bias);
        let op = Op::new(session, &[bias, mat1, mat2]);
        let (left, right) = (op.needs(1), op.needs(2));
        if right {
            op.save(mat1);
        }
        if left {
            op.save(mat2);
        }
        let out = session.results_of("addmm", || {
            let shape = [mat1.shape()[0], mat2.shape()[1]];
            let inner = mat1.shape()[1];
            let out = Self::empty(session, "addmm", shape, mat1.dtype());
            let (a, b) = (operand(mat1), operand(mat2));
            session.product_workspace(inner > 1 && shape[1] > 1 && bias.is_contiguous());
            session.add_flops(2 * out.numel() * inner);
            crate::release!(b, a);
            out
        });
        let (mat1_shape, mat1_strides) = (mat1.shape(), mat1.strides());
        let (mat2_shape, mat2_strides) = (mat2.shape(), mat2.strides());
        op.finish(out, move |call| {
            let grad = call.grad();
            let saved_mat2 = || call.saved(call.saved_len() - 1);
            let mat1 = left.then(|| left_gradient(grad, saved_mat2(), &mat1_shape, &mat1_strides));
            let mat2 = right.then(|| right_gradient(grad, call.saved(0), &mat2_shape, &mat2_strides));
            vec![call.when(0, || grad.clone()), mat1, mat2]
        })
    }

    /// `self @ weight.t() + bias`, as `torch.nn.functional.linear`: weight is (out, in).
    pub fn linear(&self, weight: &Self, bias: Option<&Self>) -> Self {
        let session = self.session();
        let bias = bias.map(|bias| session.autocast_low(bias));
        let weight = session.autocast_low(weight);
        let input = session.autocast_low(self);
        let out = match &bias {
            Some(bias) if input.shape().len() == 2 => {
                session.without_autocast(|| Self::addmm(bias, &input, &weight.t()))
            }
            Some(bias) if input.is_contiguous() => {
                let flat = input.reshape(input.rows());
                let out = session.without_autocast(|| Self::addmm(bias, &flat, &weight.t()));
                out.view(input.shape_with_last(weight.shape()[0]))
            }
            Some(bias) => {
                let out = input.matmul_weight(&weight.t());
                out.add_in_place(bias)
            }
            None => input.matmul_weight(&weight.t()),
        };
        crate::release!(input, weight, bias);
        out
    }

    /// The same as a function written in Python, which keeps input, weight and bias and multiplies by the weight as
    /// it is then (`LinearFunctionForZeroStage3`).
    pub fn linear_by_reference(&self, weight: &Self, bias: Option<&Self>) -> Self {
        let session = self.session();
        let inputs: SmallVec<[&Self; 3]> = [self, weight].into_iter().chain(bias).collect();
        let op = Op::new(session, &inputs);
        let out = session.with_grad(false, || match bias {
            Some(bias) if self.shape().len() == 2 => Self::addmm(bias, self, &weight.t()),
            _ => self.matmul_weight(&weight.t()),
        });
        // What it keeps is asked for when it has run.
        inputs.iter().for_each(|input| op.save(input));
        if session.stopped.get() {
            return out.lost();
        }
        let out = out.detach();
        op.finish_custom(out, |call, saved| {
            let grad = call.grad();
            let [input, weight] = [&saved[0], &saved[1]];
            let session = std::rc::Rc::clone(grad.session());
            session.with_grad(false, || {
                let of_input = call.when(0, || grad.matmul_weight(weight));
                let of_weight = call.when(1, || {
                    let rows = grad.reshape(grad.rows());
                    rows.t().mm(&input.reshape(input.rows()))
                });
                let mut gradients = vec![of_input, of_weight];
                if saved.len() > 2 {
                    gradients.push(call.when(2, || {
                        let width = grad.size(-1);
                        grad.sum_to(Dims::from([width]))
                    }));
                }
                gradients
            })
        })
    }

    /// This tensor times a matrix: leading dimensions are folded into one, but for a matrix without a
    /// gradient only where that takes no copy.
    pub(crate) fn matmul_weight(&self, matrix: &Self) -> Self {
        if self.shape().len() == 2 {
            return self.mm(matrix);
        }
        if !matrix.requires_grad() && !self.leading_merge() {
            return self.matmul(matrix);
        }
        let flat = self.reshape(self.rows());
        let out = flat.mm(matrix);
        crate::release!(flat);
        out.unsafe_view(self.shape_with_last(matrix.shape()[1]))
    }

    /// Whether all dimensions but the last lie in memory as one.
    fn leading_merge(&self) -> bool {
        let (shape, strides) = (self.shape(), self.strides());
        (0..shape.len().saturating_sub(2)).all(|dim| strides[dim] == strides[dim + 1] * shape[dim + 1])
    }

    /// `self += other`: no memory; the gradient passes to both.
    pub fn add_in_place(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self, other]);
        let out = self.view_as(self.shape(), self.strides(), self.offset());
        op.finish(out, |call| {
            let pass = |index| call.when(index, || call.grad().clone());
            vec![pass(0), pass(1)]
        })
    }

    /// The extents of this tensor as a matrix: everything but the last dimension is rows.
    pub fn rows(&self) -> Dims {
        let last = self.size(-1);
        Dims::from([self.numel() / last.max(1), last])
    }

    /// The extents of this tensor with another last dimension.
    pub fn shape_with_last(&self, last: u64) -> Dims {
        let mut shape = self.shape();
        let dim = shape.len() - 1;
        shape[dim] = last;
        shape
    }

    /// The product of two batches of matrices (b, m, k) and (b, k, n).
    pub fn bmm(&self, other: &Self) -> Self {
        let op = Op::new(self.session(), &[self, other]);
        let (left, right) = op.save_factors(self, other);
        let out = self.session().results_of("bmm", || multiply("bmm", self, other));
        op.finish(out, move |call| {
            let grad = call.grad();
            let saved_left = || call.saved(call.saved_len() - 1);
            let other = right.then(|| multiply("bmm_backward", &saved_left().transpose(1, 2), grad));
            let this = left.then(|| multiply("bmm_backward", grad, &call.saved(0).transpose(1, 2)));
            vec![this, other]
        })
    }

    /// The product of two tensors of equal leading dimensions, or with one matrix, as `torch.matmul` runs it:
    /// both are brought to three dimensions, by a copy where batch and head strides do not merge.
    pub fn matmul(&self, other: &Self) -> Self {
        let session = self.session();
        let other = session.autocast_low(other);
        let this = session.autocast_low(self);
        let rank = this.shape().len();
        let batch: u64 = this.shape()[..rank - 2].iter().product();
        let three = |tensor: &Self| {
            let mut shape = this.shape();
            let [rows, columns] = [tensor.size(-2), tensor.size(-1)];
            shape[rank - 2] = rows;
            shape[rank - 1] = columns;
            tensor.expand(shape).reshape([batch, rows, columns])
        };
        let left = three(&this);
        let right = three(&other);
        let out = left.bmm(&right);
        let mut shape = this.shape();
        shape[rank - 1] = other.size(-1);
        crate::release!(right, left);
        out.unsafe_view(shape)
    }
}
