//! What the causal language models of transformers share: positions, masks, the loss.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{Attention, Kernel, Session, Tensor, cat, release};
use ledger::{Category, Dtype};

use crate::network::Pass;
use crate::nn::Linear;
use crate::setup::Setup;

/// What attention is built from: the parts of a setup that models read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionSetup {
    /// Matrix products and a softmax, written out in the model.
    pub(crate) eager: bool,
    /// The kernel sdpa is held to; none: PyTorch's choice.
    pub(crate) kernel: Option<Kernel>,
    /// The dropout probability of the attention weights.
    pub(crate) dropout: f64,
}

impl AttentionSetup {
    /// `scaled_dot_product_attention` as `sdpa_attention_forward` calls it; the result is
    /// (b, s, h, d), contiguous.
    pub(crate) fn sdpa(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Tensor {
        let attention = Attention { mask: None, dropout: self.dropout, kernel: self.kernel };
        let mut out = query.attend(key, value, attention);
        out = out.reshape(out.shape());
        out = out.transpose(1, 2).contiguous();
        out
    }
}

/// The key-value cache of a forward pass with `use_cache`: copies of keys and values, layer by layer.
#[derive(Default)]
pub(crate) struct Cache {
    layers: RefCell<Vec<(Tensor, Tensor)>>,
}

impl Cache {
    /// `DynamicLayer.update` of an empty layer: both are copied by a concatenation with nothing.
    pub(crate) fn update(&self, key: &Tensor, value: &Tensor) -> (Tensor, Tensor) {
        let keys = cat(&[key], -2);
        let values = cat(&[value], -2);
        self.layers.borrow_mut().push((keys.clone(), values.clone()));
        (keys, values)
    }
}

impl Drop for Cache {
    /// A Python list lets go of its last element first.
    fn drop(&mut self) {
        while let Some((keys, values)) = self.layers.get_mut().pop() {
            release!(keys, values);
        }
    }
}

/// An int64 tensor of `shape`.
fn integers(session: &Rc<Session>, what: &'static str, shape: &[u64]) -> Tensor {
    Tensor::empty(session, what, engine::Dims::new(shape), Dtype::Int64)
}

/// `arange(length) + 0`, as position ids and mask ranges are made.
fn shifted_range(session: &Rc<Session>, what: &'static str, length: u64) -> Tensor {
    let range = integers(session, what, &[length]);
    let shifted = integers(session, what, &[length]);
    release!(range);
    shifted
}

/// Position ids (1, s), int64.
pub(crate) fn position_ids(session: &Rc<Session>, length: u64) -> Tensor {
    shifted_range(session, "position_ids", length).unsqueeze(0)
}

/// `create_causal_mask` of a batch without padding: the check for packed sequences (skipped with a
/// cache), then for eager attention an additive mask (b, 1, s, s) in `dtype`.
pub(crate) fn causal_mask(
    session: &Rc<Session>,
    batch: u64,
    length: u64,
    dtype: Dtype,
    eager: bool,
    cache: bool,
) -> Option<Tensor> {
    session.scoped("causal_mask", || {
        if !cache {
            check_packed_sequences(session, batch, length);
        }
        eager.then(|| eager_mask(session, batch, length, dtype))
    })
}

/// `find_packed_sequence_indices`: differences of neighbouring positions, their running count, and
/// the question whether the last is zero in every row.
fn check_packed_sequences(session: &Rc<Session>, batch: u64, length: u64) {
    let first = integers(session, "first_position", &[batch, 1]);
    let joined = integers(session, "positions", &[batch, length + 1]);
    let difference = integers(session, "position_diff", &[batch, length]);
    release!(joined);
    let changes = Tensor::empty(session, "position_changes", [batch, length], Dtype::Bool);
    let count = integers(session, "packed_sequence_mask", &[batch, length]);
    let scan = integers(session, "packed_sequence_mask.scan", &[batch, length]);
    // One row is scanned by CUB's device scan, several by a kernel of their own.
    let tiles = (batch == 1).then(|| {
        let bytes = session.scan_workspace(length);
        Tensor::of_category(session, "packed_sequence_mask.tiles", Category::Workspace, [bytes], Dtype::Uint8)
    });
    release!(tiles, scan, changes);
    let last = Tensor::empty(session, "last_is_zero", [batch], Dtype::Bool);
    let all = Tensor::empty(session, "all_zero", [], Dtype::Bool);
    release!(last, all, first, difference, count);
}

fn eager_mask(session: &Rc<Session>, batch: u64, length: u64, dtype: Dtype) -> Tensor {
    let batch_range = integers(session, "batch_range", &[batch]);
    let head_range = integers(session, "head_range", &[1]);
    let query_range = shifted_range(session, "query_range", length);
    let key_range = shifted_range(session, "key_range", length);
    let allowed = Tensor::empty(session, "allowed", [length, length], Dtype::Bool);
    release!(batch_range, head_range, query_range, key_range);
    let zero = Tensor::empty(session, "zero", [], dtype);
    let minimum = Tensor::empty(session, "minimum", [], dtype);
    let mask = Tensor::empty(session, "mask", [batch, 1, length, length], dtype);
    release!(minimum, zero, allowed);
    mask
}

/// `LlamaRotaryEmbedding.forward`: cosines and sines (1, s, d) in `dtype`, computed in fp32.
pub(crate) fn rotary_embedding(
    session: &Rc<Session>,
    length: u64,
    head: u64,
    dtype: Dtype,
) -> (Tensor, Tensor) {
    session.scoped("rotary_emb", || {
        let fp32 = |what, size| Tensor::empty(session, what, [1, length, size], Dtype::Fp32);
        let positions = fp32("positions", 1);
        let frequencies = fp32("freqs", head / 2);
        release!(positions);
        let embedding = fp32("emb", head);
        let of_embedding = |what, scaled| {
            let plain = fp32(what, head);
            let result = fp32(scaled, head);
            release!(plain);
            result
        };
        let cos = of_embedding("cos", "cos_scaled");
        let sin = of_embedding("sin", "sin_scaled");
        let (cos_cast, sin_cast) = (cos.to(dtype), sin.to(dtype));
        release!(frequencies, embedding, cos, sin);
        (cos_cast, sin_cast)
    })
}

/// What a training script does around a causal language model.
pub(crate) struct Script {
    batch: u64,
    keep_outputs: bool,
    autocast: Option<Dtype>,
}

impl Script {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { batch: setup.batch, keep_outputs: setup.keep_outputs, autocast: setup.autocast }
    }

    /// Token ids (b, s), int64; the labels are the same tensor.
    pub(crate) fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        Tensor::of_category(session, "input_ids", Category::Input, [self.batch, seq], Dtype::Int64)
    }

    /// The forward pass of the whole: `model` gives the last hidden state and the cache where there is one;
    /// then the head and the loss. The output object dies unless the script keeps it.
    pub(crate) fn forward(
        &self,
        input_ids: &Tensor,
        pass: &mut Pass,
        head: &Linear,
        model: impl FnOnce() -> (Tensor, Option<Cache>),
    ) {
        input_ids.session().autocast(self.autocast, || {
            let (hidden, cache) = model();
            let logits = head.forward(&hidden);
            let loss = causal_lm_loss(&logits, input_ids);
            release!(hidden);
            if self.keep_outputs {
                pass.rebind_output(logits, cache);
            } else {
                release!(logits, cache);
            }
            pass.rebind_loss(loss);
        });
    }
}

/// `ForCausalLMLoss` of (b, s, v) logits against (b, s) labels: fp32 logits, labels padded and
/// shifted by one, cross entropy.
fn causal_lm_loss(logits: &Tensor, labels: &Tensor) -> Tensor {
    let session = logits.session();
    session.scoped("loss", || {
        let mut logits = logits.to(Dtype::Fp32);
        let [batch, length] = [labels.size(0), labels.size(1)];
        let padded = integers(session, "padded_labels", &[batch, length + 1]);
        let mut shifted = padded.narrow(1, 1, length).contiguous();
        logits = logits.view(logits.rows());
        shifted = shifted.view([batch * length]);
        let loss = logits.cross_entropy(&shifted);
        release!(logits, padded, shifted);
        loss
    })
}
