//! The product of groups of rows, each with a matrix of its own.

use std::rc::Rc;

use ledger::Dtype;

use crate::dims::Dims;
use crate::graph::Op;
use crate::session::Session;
use crate::tensor::Tensor;

impl Tensor {
    /// Rows (n, k), sorted by group, times the matrix of their group: weight (groups, k, m), the transpose of a
    /// parameter. Every group is taken to have rows, where there are as many; keeps both factors and the `ends` of
    /// the groups.
    pub fn grouped_mm(&self, weight: &Self, ends: &Self) -> Self {
        let op = Op::new(self.session(), &[self, weight]);
        let (rows_wanted, weight_wanted) = (op.needs(0), op.needs(1));
        if rows_wanted {
            op.save(weight);
        }
        op.save(ends);
        if weight_wanted {
            op.save(self);
        }
        let [count, inner, outer] = [self.shape()[0], self.shape()[1], weight.shape()[2]];
        let groups = weight.shape()[0];
        let (dtype, shape, matrices) = (self.dtype(), self.shape(), Dims::from([groups, outer, inner]));
        let session = self.session();
        let run = move |session: &Rc<Session>, product: [u64; 2]| {
            session.grouped_workspaces(groups, count, product, dtype);
            session.add_flops(2 * count * inner * outer);
        };
        let out = Self::empty(session, "grouped_mm", [count, outer], dtype);
        run(session, [count / groups, outer]);
        op.finish(out, move |call| {
            let session = call.grad().session();
            let weight = call.when(1, || {
                let gradient = Self::empty(session, "grouped_mm_backward", matrices, dtype);
                run(session, [outer, inner]);
                gradient.transpose(-2, -1)
            });
            let rows = call.when(0, || {
                let gradient = Self::empty(session, "grouped_mm_backward", shape, dtype);
                run(session, [count / groups, inner]);
                gradient
            });
            vec![rows, weight]
        })
    }

    /// The same on cards without such a kernel, as a function of transformers that loops over the groups.
    pub fn grouped_mm_by_loop(&self, weight: &Self, ends: &Self) -> Self {
        let session = self.session();
        let op = Op::new(session, &[self, weight]);
        op.save(self);
        op.save(weight);
        let [count, inner, outer] = [self.shape()[0], self.shape()[1], weight.shape()[2]];
        let (groups, ends) = (weight.shape()[0].min(count), ends.clone());
        let out = Self::empty(session, "grouped_mm", [count, outer], self.dtype());
        for _ in 0..groups {
            session.product_workspace(false);
        }
        session.add_flops(2 * count * inner * outer);
        op.finish(out, move |call| {
            let _ = &ends;
            let session = call.grad().session();
            let rows = call.saved(0).like("grouped_mm_backward");
            let weight = call.saved(1).like("grouped_mm_backward");
            for _ in 0..2 * groups {
                session.product_workspace(false);
            }
            session.add_flops(4 * count * inner * outer);
            vec![Some(rows), Some(weight)]
        })
    }
}

impl Session {
    /// Whether PyTorch has a kernel for grouped products on this card.
    pub const fn groups_products(&self) -> bool {
        self.hardware.compute_capability.0 >= 8
    }

    /// What one grouped product takes besides its result. For bf16, compute capability 9 and 10 have a kernel that
    /// wants a description of each group, and space a multiprocessor: on 10 more of it, and more still where two
    /// multiprocessors share a tile, for results of a group (`product`) beyond 128 x 128. Everything else runs a
    /// product a group.
    fn grouped_workspaces(self: &Rc<Self>, groups: u64, rows: u64, product: [u64; 2], dtype: Dtype) {
        let space = match (dtype, self.hardware.compute_capability.0) {
            (Dtype::Bf16, 9) => 512,
            (Dtype::Bf16, 10) if product.iter().all(|extent| *extent > 128) => 5888,
            (Dtype::Bf16, 10) => 5376,
            _ => {
                for _ in 0..groups.min(rows) {
                    self.product_workspace(false);
                }
                return;
            }
        };
        let descriptions = self.scratch(60 * groups, "grouped_mm.groups");
        let space = self.scratch(space * self.hardware.multiprocessors, "grouped_mm.workspace");
        crate::release!(space, descriptions);
    }
}
