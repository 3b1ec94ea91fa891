//! Which tensors share a bucket.

use ledger::Dtype;

/// Divides tensors of a dtype and so many bytes, in order, into buckets of one dtype each. A bucket is full when its
/// bytes reach its cap: that of the first bucket of a dtype, then of the second, and so on; the last cap holds for
/// all later ones. Full buckets come first, as they fill up.
pub(super) fn assign(tensors: &[(Dtype, u64)], caps: &[u64]) -> Vec<Vec<usize>> {
    let mut full = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for (index, (dtype, bytes)) in tensors.iter().enumerate() {
        let known = open.iter().position(|bucket| bucket.dtype == *dtype);
        let at = known.unwrap_or_else(|| {
            open.push(Open { dtype: *dtype, bytes: 0, filled: 0, members: Vec::new() });
            open.len() - 1
        });
        let bucket = &mut open[at];
        bucket.members.push(index);
        bucket.bytes += bytes;
        let cap = caps.get(bucket.filled).or(caps.last());
        if cap.is_some_and(|cap| bucket.bytes >= *cap) {
            full.push(std::mem::take(&mut bucket.members));
            bucket.bytes = 0;
            bucket.filled += 1;
        }
    }
    full.extend(open.into_iter().map(|bucket| bucket.members).filter(|members| !members.is_empty()));
    full
}

/// The same, sorted by the first tensor of each.
pub(super) fn assign_in_order(tensors: &[(Dtype, u64)], caps: &[u64]) -> Vec<Vec<usize>> {
    let mut buckets = assign(tensors, caps);
    buckets.sort_by_key(|members| members[0]);
    buckets
}

/// The bucket of a dtype that is not full yet.
struct Open {
    dtype: Dtype,
    bytes: u64,
    /// Buckets of the dtype that are full.
    filled: usize,
    members: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Dtype = Dtype::Fp32;
    const B: Dtype = Dtype::Bf16;

    #[test]
    fn a_bucket_is_full_when_its_bytes_reach_the_cap() {
        assert_eq!(
            assign(&[(A, 4), (A, 4), (A, 7), (A, 1), (A, 1)], &[4, 8]),
            [vec![0], vec![1, 2], vec![3, 4]]
        );
        assert_eq!(assign(&[(A, 100)], &[4]), [vec![0]]);
        assert!(assign(&[], &[4]).is_empty());
    }

    #[test]
    fn each_dtype_has_buckets_of_its_own() {
        let tensors = [(A, 1), (B, 9), (A, 1), (B, 1)];
        assert_eq!(assign(&tensors, &[9]), [vec![1], vec![0, 2], vec![3]]);
        assert_eq!(assign_in_order(&tensors, &[9]), [vec![0, 2], vec![1], vec![3]]);
    }
}
