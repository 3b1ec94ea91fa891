//! Extents and strides of a tensor, and the layout rules of dense tensors.

use std::ops::Deref;

/// The most dimensions a tensor has here.
const MAX_DIMS: usize = 6;

/// Extents or strides of a tensor, in elements, outermost dimension first.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Dims {
    len: u8,
    values: [u64; MAX_DIMS],
}

impl Dims {
    /// The values of `slice`, which has at most six.
    pub fn new(slice: &[u64]) -> Self {
        let mut values = [0; MAX_DIMS];
        values[..slice.len()].copy_from_slice(slice);
        Self { len: slice.len() as u8, values }
    }

    /// These dimensions with `value` appended.
    pub fn with(mut self, value: u64) -> Self {
        self.values[usize::from(self.len)] = value;
        self.len += 1;
        self
    }

    /// The number of elements of a tensor of these extents.
    pub fn numel(&self) -> u64 {
        self.iter().product()
    }

    /// The strides of a contiguous tensor of these extents.
    pub fn contiguous_strides(&self) -> Self {
        let mut strides = *self;
        let mut stride = 1;
        for dim in (0..self.len()).rev() {
            strides.values[dim] = stride;
            stride *= self[dim].max(1);
        }
        strides
    }

    /// Whether `strides` lays these extents out in row-major order (dimensions of size 1 are free).
    pub fn is_contiguous(&self, strides: &Self) -> bool {
        let mut expected = 1;
        for dim in (0..self.len()).rev() {
            if self[dim] != 1 {
                if strides[dim] != expected {
                    return false;
                }
                expected *= self[dim];
            }
        }
        true
    }

    /// Whether `strides` covers a stretch of memory without gaps or overlap.
    pub fn is_dense(&self, strides: &Self) -> bool {
        if self.is_contiguous(strides) {
            return true;
        }
        let mut order: Vec<usize> = (0..self.len()).filter(|dim| self[*dim] != 1).collect();
        order.sort_by_key(|dim| strides[*dim]);
        let mut expected = 1;
        for dim in order {
            if strides[dim] != expected {
                return false;
            }
            expected *= self[dim];
        }
        true
    }

    /// Dense strides in the order of `permutation`, fastest dimension first.
    pub fn strides_in_order(&self, permutation: &[usize]) -> Self {
        let mut strides = *self;
        let mut stride = 1;
        for dim in permutation {
            strides.values[*dim] = stride;
            stride *= self[*dim].max(1);
        }
        strides
    }

    /// The strides of a view of shape `to`, where a tensor of these extents and `strides` has one
    /// (the rule of `Tensor.view`: only dimensions that lie contiguous in memory may merge).
    pub fn view_strides(&self, strides: &Self, to: &Self) -> Option<Self> {
        if self.numel() == 0 {
            return Some(to.contiguous_strides());
        }
        let mut result = *to;
        let mut view_dim = to.len();
        let mut chunk_stride = *strides.last().unwrap_or(&1);
        let (mut tensor_numel, mut view_numel) = (1, 1);
        for dim in (0..self.len()).rev() {
            tensor_numel *= self[dim];
            let chunk_ends =
                dim == 0 || (self[dim - 1] != 1 && strides[dim - 1] != tensor_numel * chunk_stride);
            if chunk_ends {
                while view_dim > 0 && (view_numel < tensor_numel || to[view_dim - 1] == 1) {
                    view_dim -= 1;
                    result.values[view_dim] = view_numel * chunk_stride;
                    view_numel *= to[view_dim];
                }
                if view_numel != tensor_numel {
                    return None;
                }
                if dim > 0 {
                    chunk_stride = strides[dim - 1];
                    (tensor_numel, view_numel) = (1, 1);
                }
            }
        }
        if self.is_empty() {
            return Some(to.contiguous_strides());
        }
        (view_dim == 0).then_some(result)
    }
}

impl Deref for Dims {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        &self.values[..usize::from(self.len)]
    }
}

impl std::ops::DerefMut for Dims {
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.values[..usize::from(self.len)]
    }
}

impl<const N: usize> From<[u64; N]> for Dims {
    fn from(values: [u64; N]) -> Self {
        Self::new(&values)
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.deref().fmt(f)
    }
}

/// The extents of the broadcast of `a` and `b`.
pub fn broadcast(a: &Dims, b: &Dims) -> Dims {
    let len = a.len().max(b.len());
    let extent = |dims: &Dims, dim: usize| (dim + dims.len()).checked_sub(len).map_or(1, |own| dims[own]);
    let mut result = Dims { len: len as u8, ..Dims::default() };
    for dim in 0..len {
        let (x, y) = (extent(a, dim), extent(b, dim));
        debug_assert!(x == y || x == 1 || y == 1, "{a:?} and {b:?} do not broadcast");
        result[dim] = if x == 1 { y } else { x };
    }
    result
}

/// The strides that TensorIterator gives the result of an elementwise operator over `operands`
/// (extents and strides of each), whose broadcast is `shape`.
pub fn elementwise_strides(shape: &Dims, operands: &[(Dims, Dims)]) -> Dims {
    let same_shape = operands.iter().all(|(extents, _)| extents == shape);
    if same_shape {
        if operands.iter().all(|(extents, strides)| extents.is_contiguous(strides)) {
            return shape.contiguous_strides();
        }
        let (_, first) = operands[0];
        if operands.iter().all(|(extents, strides)| *strides == first && extents.is_dense(strides)) {
            return first;
        }
    }
    let broadcast_strides: Vec<Dims> = operands
        .iter()
        .map(|(extents, strides)| {
            let mut result = *shape;
            let offset = shape.len() - extents.len();
            for dim in 0..shape.len() {
                result[dim] = match dim.checked_sub(offset) {
                    Some(own) if !(extents[own] == 1 && shape[dim] != 1) => strides[own],
                    _ => 0,
                };
            }
            result
        })
        .collect();
    shape.strides_in_order(&iteration_order(shape, &broadcast_strides, None))
}

/// The order in which TensorIterator walks the dimensions, fastest first. Where `reduced` is given
/// it tells which dimensions a reduction sums over; they come first.
pub fn iteration_order(shape: &Dims, strides: &[Dims], reduced: Option<&[bool]>) -> Vec<usize> {
    use std::cmp::Ordering::{self, Equal, Greater, Less};
    let compare = |a: usize, b: usize| -> Ordering {
        if let Some(reduced) = reduced
            && reduced[a] != reduced[b]
        {
            return if reduced[b] { Greater } else { Less };
        }
        for operand in strides {
            let (x, y) = (operand[a], operand[b]);
            if x == 0 || y == 0 {
                continue;
            }
            if x != y {
                return x.cmp(&y);
            }
            if shape[a] > shape[b] {
                return Greater;
            }
        }
        Equal
    };
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    for start in 1..order.len() {
        let mut moving = start;
        for other in (0..start).rev() {
            match compare(order[other], order[moving]) {
                Greater => {
                    order.swap(other, moving);
                    moving = other;
                }
                Less => break,
                Equal => {}
            }
        }
    }
    order
}
