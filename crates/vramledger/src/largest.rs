//! The largest value of a setting with which a plan fits.

use std::collections::BTreeMap;

use wire::{Largest, Try};

use crate::vary::ONE_PROCESS;
use crate::{Error, PlanQuestion, plan};

/// The setting whose largest value is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grows {
    /// Samples of one micro-batch.
    Batch,
    /// Tokens of one sample.
    Seq,
}

impl Grows {
    /// Every such setting.
    pub const ALL: &[Self] = &[Self::Batch, Self::Seq];

    /// Its key in a setup file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Seq => "seq",
        }
    }

    fn set<'a>(self, question: &PlanQuestion<'a>, value: u64) -> PlanQuestion<'a> {
        let mut question = question.clone();
        match self {
            Self::Batch => question.setup.batch = value,
            Self::Seq => question.setup.seqs = vec![value],
        }
        question
    }
}

/// The largest value of `grows` with which `question` fits, found by doubling and halving; every value is
/// run through the whole allocator.
///
/// # Errors
/// A question that cannot be planned with the value 1, or a length for a model that has none.
pub fn largest(question: &PlanQuestion<'_>, grows: Grows) -> Result<Largest, Error> {
    if grows == Grows::Seq && question.model.model.usual_seq().is_none() {
        return Err(Error::Setup {
            what: "an mlp has no sequence: `--largest seq` needs a model of text".into(),
        });
    }
    let mut tries = BTreeMap::new();
    let mut bound = None;
    // What cannot be planned is as good as too large, from the second value on; the sentence says why.
    let mut attempt = |value: u64| -> Result<bool, Error> {
        let ledger = match plan(grows.set(question, value)) {
            Ok(plan) => plan.ledger,
            Err(refused) if value > 1 => {
                bound = Some(refused.to_string());
                return Ok(false);
            }
            Err(refused) => return Err(refused),
        };
        let fits = ledger.fits == Some(true);
        if !fits {
            bound = None;
        }
        let peak_reserved_bytes = ledger.peaks.reserved.filter(|_| fits).map(|peak| peak.bytes);
        let (headroom_bytes, oom) = (ledger.headroom_bytes, ledger.oom);
        tries.insert(value, Try { value, fits, peak_reserved_bytes, headroom_bytes, oom });
        Ok(fits)
    };
    // The largest that fits, 0 for none, and the smallest that does not.
    let (mut fits, mut fails) = (0, 1);
    while attempt(fails)? {
        (fits, fails) = (fails, fails.saturating_mul(2));
    }
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        *(if attempt(middle)? { &mut fits } else { &mut fails }) = middle;
    }
    Ok(Largest {
        format: Largest::FORMAT.into(),
        model: question.model.name.clone(),
        gpu: question.gpu.name.to_owned(),
        key: grows.as_str().into(),
        value: (fits > 0).then_some(fits),
        tries: tries.into_values().collect(),
        bound,
        interpretation_limits: vec![
            "the next value does not fit; a much larger one might, by the chance of fragmentation, which is not looked for".into(),
            ONE_PROCESS.into(),
        ],
    })
}
