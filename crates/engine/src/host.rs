//! Host memory: saved values that wait there (`torch.autograd.graph.save_on_cpu`), tensors that live there.

use ledger::{Category, ObjectId};

use crate::checkpoint::SavedHook;
use crate::dims::Dims;
use crate::graph::Op;
use crate::session::Session;
use crate::tensor::{History, Tensor};

/// What a copy to the host may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pinning {
    /// Pageable memory: the copy has the strides of its source.
    Pageable,
    /// Page-locked memory: the copy is contiguous.
    Pinned,
}

/// A copy of a saved value in host memory.
pub(crate) struct OnHost {
    copy: Tensor,
    source: Option<ObjectId>,
    category: Category,
    history: History,
}

impl Session {
    /// Runs `f` with every value that an operator saves put in host memory, and brought back when
    /// backward wants it.
    pub fn saved_on_host<R>(&self, pinning: Pinning, f: impl FnOnce() -> R) -> R {
        self.hooks.borrow_mut().push(SavedHook::Host(pinning));
        let result = f();
        self.hooks.borrow_mut().pop();
        result
    }

    /// The category of a copy of `object`: an activation stays one, a copy of anything else is temporary.
    fn category_of_copy(&self, object: Option<ObjectId>) -> Category {
        match object.map(|object| self.category_of(object)) {
            Some(Category::Activation) => Category::Activation,
            _ => Category::Temporary,
        }
    }
}

impl OnHost {
    /// Copies `tensor` to the host. Where the two are laid out differently, it is made contiguous on its
    /// device first, and arrives in contiguous host memory first.
    pub(crate) fn pack(tensor: &Tensor, pinning: Pinning) -> Self {
        let (session, source) = (tensor.session(), tensor.object());
        let category = session.category_of_copy(source);
        let strides = match pinning {
            Pinning::Pageable => tensor.dense_strides(),
            Pinning::Pinned => tensor.shape().contiguous_strides(),
        };
        let copy = tensor.host_companion("host", category).laid_out(strides);
        session.add_traffic(copy.nbytes(), 0);
        if let Some(object) = copy.object() {
            session.note_saved(object);
        }
        if !same_layout(tensor.shape(), tensor.strides(), strides) {
            let pass = |tensor: &Tensor| {
                let shape = tensor.shape();
                (!tensor.is_contiguous())
                    .then(|| tensor.beside("host_copy", Category::Temporary, shape, tensor.dtype()))
            };
            let arrived = pass(&copy);
            let gathered = pass(tensor);
            crate::release!(gathered, arrived);
        }
        Self { copy, source, category, history: tensor.history() }
    }

    /// A copy on the device again, with the history of the value.
    pub(crate) fn unpack(&self) -> Tensor {
        let Self { copy, source, category, history } = self;
        let layout = (copy.dtype(), copy.shape());
        let reloaded = copy.companion_of(*source, Session::DEVICE, "reloaded", *category, layout);
        let reloaded = reloaded.laid_out(copy.strides());
        copy.session().add_traffic(0, copy.nbytes());
        reloaded.set_history(history.clone());
        reloaded
    }
}

impl Tensor {
    /// `self.to("cuda")` of a tensor in host memory; its gradient goes back there. Any other is itself.
    pub fn on_device(&self) -> Self {
        if self.device() != Session::HOST {
            return self.clone();
        }
        let op = Op::new(self.session(), &[self]);
        let (layout, category) = ((self.dtype(), self.shape()), Category::Temporary);
        let copy = self.companion_of(self.object(), Session::DEVICE, "on_device", category, layout);
        op.finish(copy, |call| vec![Some(call.grad().host_companion("host", Category::Temporary))])
    }
}

/// Whether two strides mean the same layout: dimensions of size 1 have no stride.
fn same_layout(shape: Dims, a: Dims, b: Dims) -> bool {
    (0..shape.len()).all(|dim| shape[dim] == 1 || a[dim] == b[dim])
}
