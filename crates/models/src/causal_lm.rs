//! What the causal language models of transformers share: attention, the cache, positions, the loss.

use std::cell::RefCell;
use std::rc::Rc;

use engine::{Attention, Kernel, Session, Tensor, cat, release};
use ledger::{Category, Dtype};

use crate::linear::Head;
use crate::loss::{Loss, causal_lm_loss, chunked_loss, fused_linear_loss};
use crate::network::{Output, Pass};
use crate::nn::Builder;
use crate::parallel::{self, Passage, Unit};
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
    /// `sdpa_attention_forward`: the result is (b, s, h, d), contiguous. Keys and values are copied for
    /// each query head where the kernels cannot share them.
    pub(crate) fn sdpa(&self, query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>) -> Tensor {
        let groups = if shares_heads(mask.is_some(), key.size(-1)) { 1 } else { query.size(1) / key.size(1) };
        let key = repeat_kv(key, groups);
        let value = repeat_kv(value, groups);
        let attention = Attention { mask, dropout: self.dropout, kernel: self.kernel };
        let mut out = query.attend(&key, &value, attention);
        out = out.reshape(out.shape());
        out = out.transpose(1, 2).contiguous();
        release!(key, value);
        out
    }
}

/// `use_gqa_in_sdpa`: whether sdpa is asked to share keys and values among query heads.
pub(crate) const fn shares_heads(mask: bool, head: u64) -> bool {
    !mask && head <= 256
}

/// `repeat_kv`: key-value heads repeated for each query head.
pub(crate) fn repeat_kv(x: &Tensor, groups: u64) -> Tensor {
    if groups == 1 {
        return x.clone();
    }
    let [b, heads, s, d] = [x.size(0), x.size(1), x.size(2), x.size(3)];
    let wide = x.unsqueeze(2).expand([b, heads, groups, s, d]);
    wide.reshape([b, heads * groups, s, d])
}

/// The key-value cache of a forward pass with `use_cache`: copies of keys and values, layer by layer.
#[derive(Default)]
pub(crate) struct Cache {
    layers: RefCell<Vec<CacheLayer>>,
}

/// Keys and values of a layer, and the size of its window on the device.
type CacheLayer = (Tensor, Tensor, Option<Tensor>);

impl Cache {
    /// `update` of an empty layer: keys and values are copied by a concatenation with nothing. A layer with a
    /// `window` keeps of them what the next token will see.
    pub(crate) fn update(&self, key: &Tensor, value: &Tensor, window: Option<u64>) -> (Tensor, Tensor) {
        let session = key.session();
        let size = window.map(|_| Tensor::empty(session, "sliding_window", [], Dtype::Int64));
        let keys = cat(&[key], -2);
        let values = cat(&[value], -2);
        let last = |whole: &Tensor| match window {
            Some(window) if whole.size(-2) > window - 1 && window > 1 => {
                whole.narrow(-2, whole.size(-2) - (window - 1), window - 1)
            }
            _ => whole.clone(),
        };
        self.layers.borrow_mut().push((last(&keys), last(&values), size));
        (keys, values)
    }
}

impl Drop for Cache {
    /// A Python list lets go of its last element first.
    fn drop(&mut self) {
        while let Some((keys, values, size)) = self.layers.get_mut().pop() {
            release!(keys, values, size);
        }
    }
}

/// An int64 tensor of `shape`.
pub(crate) fn integers(session: &Rc<Session>, what: &'static str, shape: &[u64]) -> Tensor {
    Tensor::empty(session, what, engine::Dims::new(shape), Dtype::Int64)
}

/// `arange(length) + 0`, as position ids and mask ranges are made.
pub(crate) fn shifted_range(session: &Rc<Session>, what: &'static str, length: u64) -> Tensor {
    let range = integers(session, what, &[length]);
    let shifted = integers(session, what, &[length]);
    release!(range);
    shifted
}

/// Position ids (1, s), int64.
pub(crate) fn position_ids(session: &Rc<Session>, length: u64) -> Tensor {
    shifted_range(session, "position_ids", length).unsqueeze(0)
}

/// What a training script does around a causal language model.
pub(crate) struct Script {
    batch: u64,
    keep_outputs: bool,
    autocast: Option<Dtype>,
    loss: Option<Loss>,
    root: Option<Rc<Unit>>,
    copies_results: bool,
    passage: Passage,
}

impl Script {
    pub(crate) fn new(setup: &Setup, build: &Builder) -> Self {
        Self {
            batch: setup.batch,
            keep_outputs: setup.keep_outputs,
            autocast: setup.autocast,
            loss: setup.loss,
            root: build.root(),
            copies_results: parallel::copies_results(setup),
            passage: build.passage(),
        }
    }

    /// Token ids (b, s), int64; the labels are the same tensor.
    pub(crate) fn input(&self, session: &Rc<Session>, seq: u64) -> Tensor {
        Tensor::of_category(session, "input_ids", Category::Input, [self.batch, seq], Dtype::Int64)
    }

    /// The forward pass of the whole: `model` gives the last hidden state and the cache where there is one,
    /// `head` the logits; then the loss, to which `balance` adds that of a router. The output object dies unless
    /// the script keeps it. A loss that takes the place of the model's own sees no router.
    pub(crate) fn forward(
        &self,
        input_ids: &Tensor,
        pass: &mut Pass,
        model: impl FnOnce() -> (Tensor, Option<Cache>),
        head: &Head,
        balance: impl FnOnce(Tensor) -> (Tensor, Option<Tensor>, Vec<Tensor>),
    ) {
        input_ids.session().autocast(self.autocast, || {
            match self.loss {
                Some(Loss::Chunked(chunks)) => {
                    let (hidden, cache) = model();
                    release!(cache);
                    return pass.rebind_loss(chunked_loss(head, hidden, input_ids, chunks));
                }
                Some(Loss::FusedLinear) => {
                    let (hidden, cache) = model();
                    let loss = fused_linear_loss(head, hidden, input_ids);
                    release!(cache);
                    return pass.rebind_loss(loss);
                }
                _ => {}
            }
            let mut rest = None;
            self.passage.enter();
            let forward = |_: &[Tensor]| {
                let (hidden, cache) = model();
                let logits = head.forward(&hidden);
                let loss = causal_lm_loss(&logits, input_ids);
                let (loss, router_loss, router_logits) = balance(loss);
                release!(hidden);
                rest = Some((router_loss, cache, router_logits));
                vec![loss, logits]
            };
            let mut results = match &self.root {
                Some(root) => root.run(vec![input_ids.clone()], forward),
                None => forward(std::slice::from_ref(input_ids)),
            };
            if self.copies_results {
                results = parallel::copied(results);
            }
            let (Some(logits), Some(loss)) = (results.pop(), results.pop()) else { return };
            let loss = self.passage.leave(loss);
            let (router_loss, cache, router_logits) = rest.unwrap_or_default();
            let output: Output = (router_loss, logits, cache, router_logits);
            if self.keep_outputs {
                pass.rebind_output(output);
            } else {
                drop(output);
            }
            pass.rebind_loss(loss);
        });
    }
}
