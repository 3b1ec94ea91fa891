//! Settings that rule each other out.

use ledger::Dtype;

use crate::checkpoint::Checkpoint;
use crate::lora;
use crate::loss::{self, Loss};
use crate::parallel::{self, Parallel};
use crate::setup::{Offload, Optimizer, OptimizerImpl, Setup, Torch, ZeroGrad};

/// Why no run can have a setup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contradiction {
    /// The settings that rule each other out, under their names on the command line.
    pub settings: Vec<&'static str>,
    /// What is wrong, with the settings named.
    pub sentence: String,
}

impl Optimizer {
    /// The implementation torch picks on CUDA.
    pub(crate) const fn default_implementation(self) -> OptimizerImpl {
        match self {
            Self::Sgd | Self::Adam | Self::AdamW | Self::RmsProp | Self::Adagrad => OptimizerImpl::Foreach,
            _ => OptimizerImpl::ForLoop,
        }
    }

    /// The implementations there are.
    const fn implementations(self) -> &'static [OptimizerImpl] {
        match self {
            Self::Sgd | Self::Adam | Self::AdamW | Self::Adagrad => OptimizerImpl::ALL,
            Self::RmsProp | Self::Adafactor => &[OptimizerImpl::Foreach, OptimizerImpl::ForLoop],
            _ => &[OptimizerImpl::ForLoop],
        }
    }

    const fn has_amsgrad(self) -> bool {
        matches!(self, Self::Adam | Self::AdamW)
    }

    const fn is_capturable(self) -> bool {
        matches!(self, Self::Adam | Self::AdamW | Self::RmsProp)
    }
}

impl Setup {
    /// Whether the optimizer has its state on the host and steps there.
    fn steps_on_host(&self) -> bool {
        self.offloads(Offload::Optimizer) || self.offloads(Offload::Parameters)
    }

    /// The setting that an optimizer, or parameters, on the host cannot have, and why.
    fn bars_host(&self) -> Option<(&'static str, String)> {
        use Optimizer::{Adagrad, Adam, AdamW, RmsProp, Sgd};
        // DeepSpeed has its own ways (`parallel`).
        if !self.steps_on_host() || matches!(self.parallel, Some(Parallel::Zero(_))) {
            return None;
        }
        let parameters = self.offloads(Offload::Parameters);
        let on_host = matches!(self.optimizer, Sgd | Adam | AdamW | RmsProp | Adagrad);
        let clipped = self.clip_grad_norm.is_some();
        let fused = self.loss == Some(Loss::FusedLinear);
        let adapted = self.lora.is_some() || self.quantize.is_some();
        let bars = [
            (
                "offload",
                parameters && self.offloads(Offload::Optimizer),
                "parameters have their optimizer with them",
            ),
            ("optimizer", !on_host, "the optimizer is sgd, adam, adamw, rmsprop or adagrad"),
            ("optimizer-impl", self.optimizer_impl.is_some(), "the host has no `--optimizer-impl`"),
            ("capturable", self.capturable, "a step on the host cannot be captured"),
            ("clip-grad-norm", clipped && !parameters, "the host has its gradients before they are clipped"),
            ("clip-grad-norm", clipped && parameters, "clipping on the host is not planned"),
            (
                "zero-grad",
                !parameters && self.zero_grad == ZeroGrad::Keep,
                "gradients are let go of, not kept",
            ),
            ("optimizer-in-backward", self.optimizer_in_backward, "it steps after backward"),
            ("lora-rank", parameters && adapted, "adapters are not planned with it"),
            ("loss", parameters && fused, "a loss that takes the head's weight is not planned with it"),
        ];
        let what = if parameters { Offload::Parameters } else { Offload::Optimizer };
        let told = |because| format!("`--offload {}`: {because}", what.as_str());
        bars.into_iter().find(|(_, barred, _)| *barred).map(|(key, _, because)| (key, told(because)))
    }

    /// The first settings that rule each other out, or that a model of `dtype` and `layers` layers cannot have,
    /// where there are any.
    pub(crate) fn contradiction_of(
        &self,
        mlp: bool,
        dtype: Option<Dtype>,
        layers: u64,
    ) -> Option<Contradiction> {
        self.bars_masters(dtype)
            .or_else(|| self.contradiction())
            .or_else(|| parallel::contradiction(self))
            .or_else(|| lora::contradiction(self, mlp))
            .or_else(|| loss::contradiction(self, mlp))
            .or_else(|| {
                let sentence = self.checkpoint.problem(layers)?;
                Some(Contradiction { settings: vec!["checkpoint"], sentence })
            })
            .or_else(|| self.bars_reentrant(mlp))
    }

    /// Why what is trained in `dtype` has no master weights.
    fn bars_masters(&self, dtype: Option<Dtype>) -> Option<Contradiction> {
        let trained = self.lora.as_ref().map(|lora| lora.dtype).or(self.dtype).or(dtype);
        let wide = trained.unwrap_or(Dtype::Fp32) == Dtype::Fp32;
        (self.master_weights && wide).then(|| Contradiction {
            settings: vec!["master-weights", "dtype", "lora-dtype"],
            sentence: "`--master-weights` is of weights of 16 bits: what is trained is fp32 already".into(),
        })
    }

    /// Why the first layer of an mlp cannot be recomputed within the backward of one node.
    fn bars_reentrant(&self, mlp: bool) -> Option<Contradiction> {
        let untrained = self.checkpoint_reentrant && mlp && self.checkpoint.recomputes_first();
        let because =
            "the input of an mlp needs no gradient, so that a recomputed first layer would get none";
        untrained.then(|| Contradiction {
            settings: vec!["checkpoint-reentrant", "checkpoint"],
            sentence: format!("`--checkpoint-reentrant`: {because}"),
        })
    }

    /// The first two settings that rule each other out, where there are any.
    pub fn contradiction(&self) -> Option<Contradiction> {
        let optimizer = self.optimizer.as_str();
        let no = |settings: &[&'static str], sentence: String| {
            Some(Contradiction { settings: settings.to_vec(), sentence })
        };
        if let Some(form) =
            self.optimizer_impl.filter(|form| !self.optimizer.implementations().contains(form))
        {
            let there = self.optimizer.implementations().iter().map(|form| form.as_str());
            let there = there.collect::<Vec<_>>().join(" or ");
            return no(
                &["optimizer-impl", "optimizer"],
                format!("`--optimizer-impl {}`: {optimizer} is {there}", form.as_str()),
            );
        }
        if self.optimizer == Optimizer::Muon && self.torch != Torch::V2_15 {
            return no(&["optimizer", "torch"], "`--optimizer muon` is that of torch 2.15".into());
        }
        if self.nesterov && self.optimizer != Optimizer::Sgd {
            return no(&["nesterov", "optimizer"], format!("`--nesterov` is of sgd, not of {optimizer}"));
        }
        if self.nesterov && self.momentum == 0.0 {
            return no(&["nesterov", "momentum"], "`--nesterov` needs `--momentum` above 0".into());
        }
        if self.amsgrad && !self.optimizer.has_amsgrad() {
            return no(
                &["amsgrad", "optimizer"],
                format!("`--amsgrad` is of adam and adamw, not of {optimizer}"),
            );
        }
        if self.capturable && !self.optimizer.is_capturable() {
            return no(
                &["capturable", "optimizer"],
                format!("`--capturable` is of adam, adamw and rmsprop, not of {optimizer}"),
            );
        }
        if self.checkpoint_reentrant && self.checkpoint == Checkpoint::None {
            return no(
                &["checkpoint-reentrant", "checkpoint"],
                "`--checkpoint-reentrant` needs a `--checkpoint` other than none".into(),
            );
        }
        if self.checkpoint_reentrant && matches!(self.checkpoint, Checkpoint::Selective(_)) {
            return no(
                &["checkpoint-reentrant", "checkpoint"],
                "`--checkpoint-reentrant`: a selective checkpoint is not reentrant".into(),
            );
        }
        if self.offloads(Offload::Activations) && self.offloads(Offload::ActivationsPinned) {
            return no(&["offload"], "`--offload` has activations either pinned or not".into());
        }
        if self.offloads(Offload::Checkpoints) {
            if self.checkpoint == Checkpoint::None {
                return no(
                    &["offload", "checkpoint"],
                    "`--offload checkpoints` needs a `--checkpoint` other than none".into(),
                );
            }
            if self.saved_on_host().is_some() {
                return no(
                    &["offload"],
                    "`--offload`: activations are checkpoints too, name one of them".into(),
                );
            }
        }
        if self.fp32_state {
            if !matches!(self.optimizer, Optimizer::Adam | Optimizer::AdamW) || self.amsgrad {
                return no(
                    &["fp32-state", "optimizer", "amsgrad"],
                    "`--fp32-state` is of adam and adamw without amsgrad".into(),
                );
            }
            if self.optimizer_impl.is_some() || self.capturable || self.steps_on_host() {
                return no(
                    &["fp32-state", "optimizer-impl", "capturable", "offload"],
                    "`--fp32-state`: the step is one of bitsandbytes' kernels, without forms".into(),
                );
            }
            if self.master_weights {
                return no(
                    &["fp32-state", "master-weights"],
                    "`--fp32-state`: the state of `--master-weights` is fp32 already".into(),
                );
            }
        }
        if self.master_weights && self.optimizer_in_backward {
            return no(
                &["master-weights", "optimizer-in-backward"],
                "`--master-weights`: an update in backward steps the parameters themselves".into(),
            );
        }
        if self.master_weights && self.steps_on_host() {
            return no(
                &["master-weights", "offload"],
                "`--master-weights`: an optimizer on the host has copies of its own".into(),
            );
        }
        if let Some((key, sentence)) = self.bars_host() {
            return no(&["offload", key], sentence);
        }
        if self.optimizer_in_backward {
            let because = "an update in backward lets go of each gradient as soon as it is there";
            if self.accumulate > 1 {
                return no(&["optimizer-in-backward", "accumulate"], format!("`--accumulate`: {because}"));
            }
            if self.clip_grad_norm.is_some() {
                return no(
                    &["optimizer-in-backward", "clip-grad-norm"],
                    format!("`--clip-grad-norm`: {because}"),
                );
            }
            if self.zero_grad == ZeroGrad::Keep {
                return no(&["optimizer-in-backward", "zero-grad"], format!("`--zero-grad keep`: {because}"));
            }
        }
        None
    }
}
