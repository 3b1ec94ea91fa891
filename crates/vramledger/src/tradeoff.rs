//! What a smaller dtype and a smaller saved fraction do to one saved tensor.

use ledger::{Bytes, Dtype};
use wire::answers::{Tradeoff, TradeoffRow};

use crate::Error;

/// The question: one tensor of batch x seq x hidden, and how it is kept.
#[derive(Clone, Copy, Debug)]
pub struct TradeoffQuestion {
    /// Samples of one micro-batch.
    pub batch: u64,
    /// Tokens of one sample.
    pub seq: u64,
    /// Width of the tensor.
    pub hidden: u64,
    /// The element type; none: fp32 beside bf16.
    pub dtype: Option<Dtype>,
    /// The fraction that is kept, in (0, 1]; none: a half.
    pub saved_fraction: Option<f64>,
    /// The fraction of the forward pass that runs again, in [0, 1]; none: what is not kept.
    pub extra_forward: Option<f64>,
}

/// Bytes kept and forward work added, without checkpointing and with it.
///
/// Kept: batch * seq * hidden * bytes of the dtype * fraction. The fractions are assumptions, no
/// property of a model (the specification, memory-profiling-and-optimization, Q4).
pub fn tradeoff(question: TradeoffQuestion) -> Result<Tradeoff, Error> {
    let TradeoffQuestion { batch, seq, hidden, .. } = question;
    for (what, value) in [("--batch", batch), ("--seq", seq), ("--hidden", hidden)] {
        if value == 0 {
            return Err(Error::out_of_range(what, "at least 1", value));
        }
    }
    let saved = question.saved_fraction.unwrap_or(0.5);
    if !(saved > 0.0 && saved <= 1.0) {
        return Err(Error::out_of_range("--saved-fraction", "in (0, 1]", saved));
    }
    let extra = question.extra_forward.unwrap_or(1.0 - saved);
    if !(0.0..=1.0).contains(&extra) {
        return Err(Error::out_of_range("--extra-forward", "in [0, 1]", extra));
    }
    let elements = Bytes::new(batch).checked_mul(seq).and_then(|elements| elements.checked_mul(hidden));
    let dtypes = question.dtype.map_or(vec![Dtype::Fp32, Dtype::Bf16], |dtype| vec![dtype]);
    let mut rows = Vec::new();
    for (saved_fraction, extra_forward_fraction) in [(1.0, 0.0), (saved, extra)] {
        for dtype in &dtypes {
            let full = elements.and_then(|elements| elements.checked_mul(dtype.size())).ok_or_else(|| {
                let value = format!("{batch} x {seq} x {hidden} of {}", dtype.as_str());
                Error::out_of_range("--batch x --seq x --hidden", "below 2^63 bytes", value)
            })?;
            let how = match saved_fraction {
                1.0 if extra_forward_fraction == 0.0 => "no checkpoint".to_owned(),
                _ => format!("save {}%", saved_fraction * 100.0),
            };
            rows.push(TradeoffRow {
                name: format!("{} / {how}", dtype.as_str()),
                dtype: dtype.as_str().into(),
                saved_fraction,
                saved_activation_bytes: (full.get() as f64 * saved_fraction).round() as u64,
                extra_forward_fraction,
            });
        }
    }
    rows.dedup_by(|a, b| a == b);
    Ok(Tradeoff {
        format: Tradeoff::FORMAT.into(),
        batch,
        seq,
        hidden,
        rows,
        interpretation_limits: vec![
            "one saved tensor: the fractions are assumptions that show a direction, no gain of a given model"
                .into(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTION: TradeoffQuestion = TradeoffQuestion {
        batch: 8,
        seq: 32,
        hidden: 512,
        dtype: None,
        saved_fraction: None,
        extra_forward: None,
    };

    /// memory-profiling-and-optimization, Q4: the four rows, in MiB.
    #[test]
    fn dtype_and_saved_fraction() {
        let rows = tradeoff(QUESTION).unwrap().rows;
        let rows: Vec<(&str, u64, f64)> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.saved_activation_bytes, row.extra_forward_fraction))
            .collect();
        assert_eq!(
            rows,
            [
                ("fp32 / no checkpoint", 512 << 10, 0.0),
                ("bf16 / no checkpoint", 256 << 10, 0.0),
                ("fp32 / save 50%", 256 << 10, 0.5),
                ("bf16 / save 50%", 128 << 10, 0.5),
            ]
        );
    }

    /// memory-profiling-and-optimization, Q4: the ranges.
    #[test]
    fn fractions_out_of_range_are_refused() {
        for saved in [0.0, -0.5, 1.1, f64::NAN, f64::INFINITY] {
            assert!(
                tradeoff(TradeoffQuestion { saved_fraction: Some(saved), ..QUESTION }).is_err(),
                "{saved}"
            );
        }
        for extra in [-0.1, 1.1, f64::NAN] {
            assert!(
                tradeoff(TradeoffQuestion { extra_forward: Some(extra), ..QUESTION }).is_err(),
                "{extra}"
            );
        }
        assert!(
            tradeoff(TradeoffQuestion { saved_fraction: Some(1.0), extra_forward: Some(1.0), ..QUESTION })
                .is_ok()
        );
        assert!(tradeoff(TradeoffQuestion { batch: 0, ..QUESTION }).is_err());
        assert!(tradeoff(TradeoffQuestion { batch: u64::MAX, ..QUESTION }).is_err());
    }
}
