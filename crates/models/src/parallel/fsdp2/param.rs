//! A parameter of a unit: the shard that the optimizer steps, and the whole that the modules compute with.

use std::rc::Rc;

use engine::{Dims, Scope, Session, Tensor};
use ledger::{Category, Dtype};

/// Where a rank stands among those that share a parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Its number among them.
    pub(crate) rank: u64,
    /// How many they are.
    pub(crate) ranks: u64,
}

/// A parameter that ranks share by its first dimension.
pub(crate) struct Shard {
    scope: Scope,
    name: &'static str,
    /// What the optimizer steps: the rows of this rank.
    pub(crate) sharded: Tensor,
    /// What the modules hold: its memory comes with each gather and goes with each reshard.
    pub(crate) whole: Tensor,
    /// Elements of the largest shard, which the others are padded to.
    padded: u64,
    /// The part that a smaller group of ranks keeps between forward and backward.
    kept: std::cell::RefCell<Option<Tensor>>,
}

impl Shard {
    /// The parameter `name` of the current module, of `shape`: computed with in `compute`, stepped in `dtype`.
    pub(crate) fn new(
        session: &Rc<Session>,
        name: &'static str,
        shape: Dims,
        (dtype, compute): (Dtype, Dtype),
        on_host: bool,
        place: Place,
    ) -> Self {
        let rows = shape.first().copied().unwrap_or(1);
        let row = shape.numel() / rows.max(1);
        let most = rows.div_ceil(place.ranks);
        let own = rows.saturating_sub(most * place.rank).min(most);
        let mut sharded_shape = shape;
        if let Some(first) = sharded_shape.first_mut() {
            *first = own;
        }
        let sharded = Tensor::without_storage(session, sharded_shape, dtype, on_host);
        sharded.resize_storage(name, Category::Parameter, sharded.nbytes());
        Self {
            scope: session.scope(),
            name,
            sharded,
            whole: Tensor::without_storage(session, shape, compute, false),
            padded: most * row,
            kept: std::cell::RefCell::default(),
        }
    }

    fn session(&self) -> &Rc<Session> {
        self.whole.session()
    }

    /// Whether a gradient is wanted.
    pub(crate) fn set_requires_grad(&self) {
        self.sharded.set_requires_grad();
        self.whole.set_requires_grad();
    }

    /// The first pass pads the shard to the largest one; in host memory it is pinned.
    pub(crate) fn pad(&self, on_host: bool) {
        let bytes = self.padded * self.sharded.dtype().size();
        self.session().in_scope(self.scope, || {
            if self.sharded.numel() != self.padded {
                self.sharded.replace_storage(self.name, Category::Parameter, bytes);
            }
            if on_host {
                self.sharded.replace_storage(self.name, Category::Parameter, bytes);
            }
        });
    }

    /// What this rank brings to a gather, in the dtype of the optimizer or, kept since forward, in that of the
    /// pass.
    pub(crate) fn source(&self) -> (u64, Dtype) {
        match &*self.kept.borrow() {
            Some(kept) => (kept.numel(), kept.dtype()),
            None => (self.padded, self.sharded.dtype()),
        }
    }

    /// Memory for the whole, padded for `ranks`.
    pub(crate) fn allocate(&self, ranks: u64) {
        let (elements, _) = self.source();
        let bytes = elements * ranks * self.whole.dtype().size();
        self.session().in_scope(self.scope, || {
            self.whole.resize_storage("gathered", Category::CommunicationBuffer, bytes);
        });
    }

    /// The whole is there: a part kept since forward dies.
    pub(crate) fn gathered(&self) {
        let kept = self.kept.take();
        drop(kept);
    }

    /// The whole dies.
    pub(crate) fn free(&self) {
        self.whole.free_storage();
    }

    /// The whole dies but for this rank's part among `of` of all `ranks`.
    pub(crate) fn keep_part(&self, ranks: u64, of: u64) {
        let part = self.padded * ranks / of;
        let kept = self.session().in_scope(self.scope, || {
            Tensor::of_category(
                self.session(),
                "resharded",
                Category::CommunicationBuffer,
                [part],
                self.whole.dtype(),
            )
        });
        self.kept.replace(Some(kept));
        self.free();
    }

    /// Elements of the gradient, padded so that each of `ranks` gets as many.
    pub(crate) const fn padded_whole(&self, ranks: u64) -> u64 {
        self.padded * ranks
    }
}
