//! The attention masks that transformers makes for a batch without padding.

use std::rc::Rc;

use engine::{Session, Tensor, release};
use ledger::{Category, Dtype};

use crate::causal_lm::{integers, shifted_range};

/// What the masks of a pass are made for.
#[derive(Clone, Copy)]
pub(crate) struct Masking<'a> {
    pub(crate) session: &'a Rc<Session>,
    pub(crate) batch: u64,
    pub(crate) length: u64,
    /// The dtype of the embeddings, which additive masks have.
    pub(crate) dtype: Dtype,
    /// Attention is written out and takes an additive mask.
    pub(crate) eager: bool,
    /// There is a cache, so that nobody looks for packed sequences.
    pub(crate) cached: bool,
}

impl Masking<'_> {
    /// `create_causal_mask`: for eager attention an additive mask (b, 1, s, s), else none.
    pub(crate) fn causal(self) -> Option<Tensor> {
        self.session.scoped("causal_mask", || {
            self.check_packed_sequences();
            self.eager.then(|| self.additive(|ranges| ranges.compare("allowed")))
        })
    }

    /// `create_sliding_window_causal_mask`: besides, a boolean mask where the window is no longer than the
    /// sequence, since sdpa's own causal mask cannot say it.
    pub(crate) fn sliding(self, window: u64) -> Option<Tensor> {
        self.session.scoped("sliding_window_mask", || {
            self.check_packed_sequences();
            if self.eager {
                return Some(self.additive(|ranges| ranges.windowed()));
            }
            (self.length >= window).then(|| {
                let ranges = Ranges::new(self);
                let mask = ranges.windowed();
                drop(ranges);
                mask.expand([self.batch, 1, self.length, self.length])
            })
        })
    }

    /// `find_packed_sequence_indices`: differences of neighbouring positions, their running count, and
    /// the question whether the last is zero in every row.
    fn check_packed_sequences(self) {
        if self.cached {
            return;
        }
        let Self { session, batch, length, .. } = self;
        let first = integers(session, "first_position", &[batch, 1]);
        let joined = integers(session, "positions", &[batch, length + 1]);
        let difference = integers(session, "position_diff", &[batch, length]);
        release!(joined);
        let changes = Tensor::empty(session, "position_changes", [batch, length], Dtype::Bool);
        let count = integers(session, "packed_sequence_mask", &[batch, length]);
        let scan = integers(session, "packed_sequence_mask.scan", &[batch, length]);
        // One row is scanned by CUB's device scan, several by a kernel of their own.
        let tiles = (batch == 1).then(|| {
            let bytes = session.scan_workspace(length, Dtype::Int64);
            let what = "packed_sequence_mask.tiles";
            Tensor::of_category(session, what, Category::Workspace, [bytes], Dtype::Uint8)
        });
        release!(tiles, scan, changes);
        let last = Tensor::empty(session, "last_is_zero", [batch], Dtype::Bool);
        let all = Tensor::empty(session, "all_zero", [], Dtype::Bool);
        release!(last, all, first, difference, count);
    }

    /// `eager_mask`: zero where `allowed`, else the smallest number.
    fn additive(self, allowed: impl FnOnce(&Ranges<'_>) -> Tensor) -> Tensor {
        let ranges = Ranges::new(self);
        let allowed = allowed(&ranges);
        drop(ranges);
        let zero = Tensor::empty(self.session, "zero", [], self.dtype);
        let minimum = Tensor::empty(self.session, "minimum", [], self.dtype);
        let shape = [self.batch, 1, self.length, self.length];
        let mask = Tensor::empty(self.session, "mask", shape, self.dtype);
        release!(minimum, zero, allowed);
        mask
    }
}

/// The positions that a mask is made from.
struct Ranges<'a> {
    of: Masking<'a>,
    /// Of batch, heads, queries and keys, in the order in which they die.
    _ranges: [Tensor; 4],
}

impl<'a> Ranges<'a> {
    fn new(of: Masking<'a>) -> Self {
        let batch = integers(of.session, "batch_range", &[of.batch]);
        let heads = integers(of.session, "head_range", &[1]);
        let queries = shifted_range(of.session, "query_range", of.length);
        let keys = shifted_range(of.session, "key_range", of.length);
        Self { of, _ranges: [batch, heads, queries, keys] }
    }

    /// A comparison of every key with every query, (1, 1, s, s).
    fn compare(&self, what: &'static str) -> Tensor {
        let length = self.of.length;
        Tensor::empty(self.of.session, what, [1, 1, length, length], Dtype::Bool)
    }

    /// `and_masks` of the window and the causal mask.
    fn windowed(&self) -> Tensor {
        let session = self.of.session;
        let all = Tensor::empty(session, "all_allowed", [], Dtype::Bool);
        let start = integers(session, "window_start", &[self.of.length]);
        let inside = self.compare("inside_window");
        release!(start);
        let allowed = self.compare("allowed");
        release!(inside, all);
        let causal = self.compare("causal");
        let both = self.compare("allowed");
        release!(causal, allowed);
        both
    }
}
