//! The losses of a causal language model over token ids that are their own labels.

use std::fmt;
use std::str::FromStr;

use engine::{Tensor, release};
use ledger::Dtype;

use crate::causal_lm::integers;
use crate::contradiction::Contradiction;
use crate::linear::Head;
use crate::lora::Lora;
use crate::setup::Setup;

/// The loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Of an mlp: the mean of the squares of the output.
    MeanSquare,
    /// Of an mlp: the sum of the output.
    Sum,
    /// That of transformers: the logits are cast to fp32 in the loss.
    Default,
    /// The same, but the head already gives fp32 logits.
    Fp32Logits,
    /// The sequence is cut into so many chunks before the head, and the loss takes one of them in fp32 at a
    /// time, as torchtune's `CEWithChunkedOutputLoss` does in eager mode.
    Chunked(u64),
    /// Head and loss in one with the gradients made in the forward pass, as in Liger-Kernel.
    FusedLinear,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MeanSquare => "mean-square",
            Self::Sum => "sum",
            Self::Default => "default",
            Self::Fp32Logits => "fp32-logits",
            Self::Chunked(chunks) => return write!(f, "chunked:{chunks}"),
            Self::FusedLinear => "fused-linear",
        })
    }
}

impl FromStr for Loss {
    type Err = String;
    fn from_str(word: &str) -> Result<Self, String> {
        const MOST_CHUNKS: u64 = 1 << 20;
        let chunks = word.strip_prefix("chunked:").and_then(|chunks| chunks.parse().ok());
        Ok(match word {
            "mean-square" => Self::MeanSquare,
            "sum" => Self::Sum,
            "default" => Self::Default,
            "fp32-logits" => Self::Fp32Logits,
            "fused-linear" => Self::FusedLinear,
            _ => match chunks.filter(|chunks| (1..=MOST_CHUNKS).contains(chunks)) {
                Some(chunks) => Self::Chunked(chunks),
                None => {
                    return Err("a loss is default, fp32-logits, chunked:N or fused-linear; that of an mlp mean-square or sum".into());
                }
            },
        })
    }
}

impl Loss {
    /// What is taken to compute it, in a sentence, where it is not the model's own.
    pub(crate) const fn assumption(self) -> Option<&'static str> {
        match self {
            Self::Chunked(_) => Some("the loss is torchtune's CEWithChunkedOutputLoss (0.6), not compiled"),
            Self::FusedLinear => {
                Some("the loss is Liger-Kernel's fused linear cross entropy (0.8) without its other kernels")
            }
            _ => None,
        }
    }

    /// The parts in which a pass over samples of `seq` tokens computes it; `head` is the width and the rows of
    /// the head.
    pub(crate) fn parts(self, batch: u64, seq: u64, [width, vocabulary]: [u64; 2]) -> u64 {
        match self {
            Self::Chunked(chunks) => chunks.min(seq),
            Self::FusedLinear => {
                let rows = batch.saturating_mul(seq);
                rows.div_ceil(engine::loss_chunk(rows, width, vocabulary).max(1))
            }
            _ => 1,
        }
    }

    /// Whether it is one of an mlp.
    pub(crate) const fn is_of_mlp(self) -> bool {
        matches!(self, Self::MeanSquare | Self::Sum)
    }
}

/// Why `setup` cannot have its loss, where it cannot; `mlp` tells whether that is the model.
pub(crate) fn contradiction(setup: &Setup, mlp: bool) -> Option<Contradiction> {
    let loss = setup.loss?;
    let no = |settings: &[&'static str], sentence: String| {
        Some(Contradiction { settings: settings.to_vec(), sentence })
    };
    if loss.is_of_mlp() != mlp {
        let theirs = if mlp {
            "an mlp has mean-square or sum"
        } else {
            "a language model has default, fp32-logits, chunked:N or fused-linear"
        };
        return no(&["loss"], format!("`--loss` {loss}: {theirs}"));
    }
    if setup.keep_outputs && matches!(loss, Loss::Chunked(_) | Loss::FusedLinear) {
        return no(
            &["keep-outputs", "loss"],
            format!("`--keep-outputs`: with `--loss` {loss} there is no output with all logits"),
        );
    }
    let adapts_head = |lora: &Lora| lora.target_of(Head::NAME, true).is_some();
    if loss == Loss::FusedLinear && setup.lora.as_ref().is_some_and(adapts_head) {
        return no(
            &["loss", "lora-targets"],
            "`--loss` fused-linear takes the weight of the head alone, without an adapter on `lm_head`"
                .into(),
        );
    }
    None
}

/// `ForCausalLMLoss` of (b, s, v) logits against (b, s) labels: fp32 logits, labels padded and
/// shifted by one, cross entropy.
pub(crate) fn causal_lm_loss(logits: &Tensor, labels: &Tensor) -> Tensor {
    labels.session().scoped("loss", || {
        let mut logits = logits.to(Dtype::Fp32);
        let padded = padded_labels(labels);
        let shifted = shifted_labels(&padded);
        logits = logits.view(logits.rows());
        let loss = logits.cross_entropy(&shifted);
        release!(logits, padded, shifted);
        loss
    })
}

/// Labels (b, s + 1) with one more that counts for nothing.
fn padded_labels(labels: &Tensor) -> Tensor {
    integers(labels.session(), "padded_labels", &[labels.size(0), labels.size(1) + 1])
}

/// The labels of the next token, one for each row of logits.
fn shifted_labels(padded: &Tensor) -> Tensor {
    let [batch, length] = [padded.size(0), padded.size(1) - 1];
    padded.narrow(1, 1, length).contiguous().view([batch * length])
}

/// The loss of `head` over a last hidden state, by chunks of the sequence.
pub(crate) fn chunked_loss(head: &Head, hidden: Tensor, labels: &Tensor, chunks: u64) -> Tensor {
    let session = labels.session();
    let parts = hidden.chunk(1, chunks);
    let mut logits: Vec<Tensor> = parts.iter().map(|part| head.forward(part)).collect();
    release!(parts);
    session.scoped("loss", || {
        let labels = padded_labels(labels).narrow(1, 1, labels.size(1));
        let counted = Tensor::empty(session, "counted", labels.shape(), Dtype::Bool);
        let count = counted.count();
        release!(counted);
        let flat = |part: &Tensor| part.reshape([part.numel()]);
        let mut targets: Vec<Tensor> = labels.chunk(1, chunks).iter().map(flat).collect();
        let rows: Vec<Tensor> = logits.iter().map(|part| part.view(part.rows())).collect();
        let mut total: Option<Tensor> = None;
        for (rows, targets) in rows.iter().zip(&targets) {
            let loss = rows.to(Dtype::Fp32).cross_entropy(targets);
            total = Some(match total {
                Some(total) => total.add_in_place(&loss),
                None => loss.add_scalar(),
            });
        }
        let total = total.expect("a sequence has a first chunk");
        let loss = total.div(&count);
        // The loop's name holds the last of the targets longer than their list.
        let last = targets.last().cloned();
        release!(rows);
        release_list(&mut targets);
        release!(count, total, last);
        release!(hidden);
        release_list(&mut logits);
        release!(labels);
        loss
    })
}

/// Lets go of a list as Python does: the last element first.
fn release_list(list: &mut Vec<Tensor>) {
    while let Some(tensor) = list.pop() {
        release!(tensor);
    }
}

/// The loss of `head` over a last hidden state without the whole of its logits.
pub(crate) fn fused_linear_loss(head: &Head, hidden: Tensor, labels: &Tensor) -> Tensor {
    let session = labels.session();
    session.scoped("loss", || {
        let kept = hidden.alias();
        let padded = padded_labels(labels);
        let shifted = shifted_labels(&padded);
        let flat = kept.view(kept.rows());
        let loss = flat.fused_linear_cross_entropy(head.weight(), &shifted);
        release!(padded, flat, shifted);
        release!(hidden, kept);
        loss
    })
}
