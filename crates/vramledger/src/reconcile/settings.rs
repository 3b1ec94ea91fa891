//! Which other setting would have made a prediction come near to what was found.

use ledger::Dtype;
use models::{Attention, Checkpoint, OptimizerImpl, Setup, Torch};
use wire::{Ledger, Reason};

use super::asked::Asked;
use crate::plan::plan;

/// A setting that the run may have had instead.
pub(super) struct Try {
    /// As flags.
    pub(super) setting: String,
    /// What a line that it explains is put down to.
    pub(super) reason: Reason,
    /// What is predicted with it.
    pub(super) ledger: Ledger,
    /// How far that is from what was found.
    pub(super) distance: u64,
}

/// A prediction that comes this much nearer, one in so many, is told.
const NEARER: u64 = 4;

/// The setting with which the plan comes nearest by `distance`, where that is much nearer than `now`.
pub(super) fn nearest(asked: &Asked, now: u64, distance: &dyn Fn(&Ledger) -> u64) -> Option<Try> {
    let tried = others(asked.setup()).into_iter().filter_map(|(setting, reason, setup)| {
        let ledger = plan(asked.with(setup)).ok()?.ledger;
        let distance = distance(&ledger);
        Some(Try { setting, reason, ledger, distance })
    });
    tried.min_by_key(|one| one.distance).filter(|best| best.distance <= now / NEARER)
}

fn others(setup: &Setup) -> Vec<(String, Reason, Setup)> {
    let mut others = Vec::new();
    let mut add = |setting: String, reason: Reason, change: &dyn Fn(&mut Setup)| {
        let mut other = setup.clone();
        change(&mut other);
        if other != *setup {
            others.push((setting, reason, other));
        }
    };
    for attention in Attention::ALL {
        let setting = format!("--attention {}", attention.as_str());
        add(setting, Reason::OtherImplementation, &|setup| setup.attention = *attention);
    }
    for torch in Torch::ALL {
        let setting = format!("--torch {}", torch.as_str());
        add(setting, Reason::OtherVersion, &|setup| setup.torch = *torch);
    }
    for form in OptimizerImpl::ALL {
        let setting = format!("--optimizer-impl {}", form.as_str());
        add(setting, Reason::OtherImplementation, &|setup| setup.optimizer_impl = Some(*form));
    }
    for checkpoint in [Checkpoint::None, Checkpoint::Full] {
        let setting = format!("--checkpoint {checkpoint}");
        add(setting, Reason::OtherSetting, &|setup| setup.checkpoint = checkpoint.clone());
    }
    for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Fp16] {
        let setting = format!("--dtype {}", dtype.as_str());
        add(setting, Reason::OtherSetting, &|setup| setup.dtype = Some(dtype));
    }
    for autocast in [None, Some(Dtype::Bf16), Some(Dtype::Fp16)] {
        let setting = format!("--autocast {}", autocast.map_or("none", Dtype::as_str));
        add(setting, Reason::OtherSetting, &|setup| setup.autocast = autocast);
    }
    let mut batches = vec![setup.batch.saturating_mul(2), setup.batch.saturating_mul(4)];
    batches.extend([setup.batch / 2, setup.batch / 4, setup.batch + 1, setup.batch.saturating_sub(1)]);
    batches.extend([setup.batch + 2, setup.batch.saturating_sub(2)]);
    for batch in batches.into_iter().filter(|batch| *batch > 0) {
        add(format!("--batch {batch}"), Reason::OtherSetting, &|setup| setup.batch = batch);
    }
    if let [seq] = setup.seqs[..] {
        for seq in [seq * 2, seq / 2].into_iter().filter(|seq| *seq > 0) {
            add(format!("--seq {seq}"), Reason::OtherSetting, &|setup| setup.seqs = vec![seq]);
        }
    }
    for accumulate in [1, 2, 4, 8] {
        let setting = format!("--accumulate {accumulate}");
        add(setting, Reason::OtherSetting, &|setup| setup.accumulate = accumulate);
    }
    for optimizer in models::Optimizer::ALL {
        let setting = format!("--optimizer {}", optimizer.as_str());
        add(setting, Reason::OtherSetting, &|setup| {
            (setup.optimizer, setup.optimizer_impl) = (*optimizer, None);
        });
    }
    add("--keep-outputs".into(), Reason::KeptByReference, &|setup| setup.keep_outputs = true);
    add("--master-weights".into(), Reason::OtherSetting, &|setup| setup.master_weights = true);
    add("--clip-grad-norm 1".into(), Reason::OtherSetting, &|setup| setup.clip_grad_norm = Some(1.0));
    others
}
