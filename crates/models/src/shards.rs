//! How frameworks divide the states of a model over ranks: which elements one rank holds, and which are padding.

use std::ops::Range;

/// A way of training one model on several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Every rank holds everything (`DistributedDataParallel`).
    Ddp,
    /// The optimizer's state is divided (DeepSpeed ZeRO, stage 1).
    Zero1,
    /// The gradients too (stage 2).
    Zero2,
    /// The weights too (stage 3).
    Zero3,
    /// Every parameter is divided by its rows (`fully_shard`).
    Fsdp2,
    /// The same within groups of ranks, each of which holds everything.
    Hsdp,
    /// Megatron's distributed optimizer.
    MegatronDo,
}

impl Sharding {
    /// Every way, the least divided first.
    pub const ALL: &[Self] =
        &[Self::Ddp, Self::Zero1, Self::Zero2, Self::Zero3, Self::Fsdp2, Self::Hsdp, Self::MegatronDo];

    /// The word used on the command line and in documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Zero2 => "zero2",
            Self::Zero3 => "zero3",
            Self::Fsdp2 => "fsdp2",
            Self::Hsdp => "hsdp",
            Self::MegatronDo => "megatron-do",
        }
    }
}

/// One state of a training recipe, an element a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// The weights.
    Parameter,
    /// Their gradients.
    Gradient,
    /// Their fp32 copies.
    MasterWeight,
    /// A moment of the optimizer.
    OptimizerState,
    /// fp32 copies of the gradients, made for the update alone.
    UpdateGradient,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 5] =
        [Self::Parameter, Self::Gradient, Self::MasterWeight, Self::OptimizerState, Self::UpdateGradient];
}

impl Sharding {
    /// Whether a rank holds a part of `state` alone.
    pub const fn divides(self, state: State) -> bool {
        match self {
            Self::Ddp => false,
            Self::Zero1 | Self::MegatronDo => !matches!(state, State::Parameter | State::Gradient),
            Self::Zero2 => !matches!(state, State::Parameter),
            Self::Zero3 | Self::Fsdp2 | Self::Hsdp => true,
        }
    }

    /// What `rank` of `ranks` holds of `state` of parameters of these shapes; of hsdp, of the ranks of one group.
    pub fn share(self, state: State, shapes: &[Vec<u64>], ranks: u64, rank: u64) -> Share {
        let numel = |shape: &Vec<u64>| shape.iter().product::<u64>();
        let total: u64 = shapes.iter().map(numel).sum();
        match self {
            Self::Ddp => Share::of(total, total),
            Self::Zero1 if state == State::Gradient => Share::of(total, total),
            Self::Zero1 | Self::Zero2 => {
                let aligned = total.next_multiple_of(2 * ranks);
                if state == State::Parameter {
                    Share::of(aligned, total)
                } else {
                    Share::part_of(total, aligned / ranks, rank)
                }
            }
            Self::Zero3 => {
                shapes.iter().map(numel).map(|one| Share::part_of(one, one.div_ceil(ranks), rank)).sum()
            }
            Self::Fsdp2 | Self::Hsdp => {
                let rows = shapes.iter().map(|shape| row_share(shape, ranks, rank));
                // The optimizer's state is made like the rows that are there, the rest like the padded ones.
                let padded = matches!(state, State::Parameter | State::Gradient);
                rows.map(|share| if padded { share } else { Share::of(share.real(), share.real()) }).sum()
            }
            Self::MegatronDo => {
                let sizes: Vec<u64> = shapes.iter().map(numel).collect();
                let buffer = FlatBuffer::new(&sizes, ranks, None);
                if self.divides(state) {
                    let held =
                        buffer.pieces(ranks, rank).iter().map(|(_, piece)| piece.end - piece.start).sum();
                    Share::of(held, held)
                } else {
                    Share::of(buffer.len(), total)
                }
            }
        }
    }
}

/// Elements that a rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// All of them.
    pub elements: u64,
    /// Those that belong to no parameter.
    pub padding: u64,
}

impl Share {
    const fn of(elements: u64, real: u64) -> Self {
        Self { elements, padding: elements - real }
    }

    /// Part `rank` of `total` elements in parts of `size`, of which the last ones are padded.
    fn part_of(total: u64, size: u64, rank: u64) -> Self {
        Self::of(size, total.saturating_sub(rank * size).min(size))
    }

    /// Those that belong to a parameter.
    pub const fn real(self) -> u64 {
        self.elements - self.padding
    }
}

impl std::iter::Sum for Share {
    fn sum<I: Iterator<Item = Self>>(shares: I) -> Self {
        shares.fold(Self::default(), |sum, share| Self {
            elements: sum.elements + share.elements,
            padding: sum.padding + share.padding,
        })
    }
}

/// The rows of a parameter that `fully_shard` gives to `rank`: as many for each as for the first.
fn row_share(shape: &[u64], ranks: u64, rank: u64) -> Share {
    let (rows, row) = shape.split_first().map_or((1, 1), |(rows, rest)| (*rows, rest.iter().product()));
    let part = Share::part_of(rows, rows.div_ceil(ranks), rank);
    Share { elements: part.elements * row, padding: part.padding * row }
}

/// Megatron's buffer of weights or gradients: the parameters from the last to the first, in buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatBuffer {
    /// Where each parameter lies, in the order of the model.
    places: Vec<Range<u64>>,
    /// The buckets, one after the other.
    buckets: Vec<Range<u64>>,
}

/// Elements at whose multiples a parameter, and a bucket, begins.
const PARAMETER_ALIGNMENT: u64 = 64;
const BUCKET_ALIGNMENT: u64 = 128;

impl FlatBuffer {
    /// The buffer of parameters of these sizes; a bucket is closed once it has `bucket_size` elements.
    pub fn new(sizes: &[u64], ranks: u64, bucket_size: Option<u64>) -> Self {
        let divisor = BUCKET_ALIGNMENT / gcd(BUCKET_ALIGNMENT, ranks) * ranks;
        let (mut places, mut buckets): (Vec<Range<u64>>, Vec<Range<u64>>) = (Vec::new(), Vec::new());
        let (mut end, mut open) = (0_u64, 0_u64);
        for size in sizes.iter().rev() {
            let start = end.next_multiple_of(PARAMETER_ALIGNMENT);
            end = start + size;
            places.push(start..end);
            if bucket_size.is_some_and(|full| end - open >= full) {
                end = end.next_multiple_of(divisor);
                buckets.push(open..end);
                open = end;
            }
        }
        if end > open {
            buckets.push(open..end.next_multiple_of(divisor));
        }
        places.reverse();
        Self { places, buckets }
    }

    /// Its elements, padding included.
    pub fn len(&self) -> u64 {
        self.buckets.last().map_or(0, |bucket| bucket.end)
    }

    /// Whether it holds no parameter.
    pub const fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The buckets, one after the other.
    pub fn buckets(&self) -> &[Range<u64>] {
        &self.buckets
    }

    /// Where parameter `index` of the model begins.
    pub fn start_of(&self, index: usize) -> u64 {
        self.places[index].start
    }

    /// Which parameters `rank` updates, and which elements of each: its part of every bucket, the parameters from the
    /// model's last to its first.
    pub fn pieces(&self, ranks: u64, rank: u64) -> Vec<(usize, Range<u64>)> {
        let of_bucket = |bucket: &Range<u64>| {
            let size = (bucket.end - bucket.start) / ranks;
            let (start, end) = (bucket.start + rank * size, bucket.start + (rank + 1) * size);
            let piece = move |(index, place): (usize, &Range<u64>)| {
                let (from, to) = (place.start.max(start), place.end.min(end));
                (from < to).then(|| (index, from - place.start..to - place.start))
            };
            self.places.iter().enumerate().rev().filter_map(piece).collect::<Vec<_>>()
        };
        self.buckets.iter().flat_map(of_bucket).collect()
    }
}

const fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three rows over two ranks: two and one, in two rows of each.
    #[test]
    fn rows_are_padded_to_those_of_the_first_rank() {
        let shapes = [vec![3, 5], vec![1]];
        let share = |state, rank| Sharding::Fsdp2.share(state, &shapes, 2, rank);
        assert_eq!(share(State::Parameter, 0), Share { elements: 11, padding: 0 });
        assert_eq!(share(State::Parameter, 1), Share { elements: 11, padding: 6 });
        assert_eq!(share(State::OptimizerState, 1), Share { elements: 5, padding: 0 });
    }

    /// Parameters begin at multiples of 64 elements, buckets end at those of 128 and of the ranks.
    #[test]
    fn a_flat_buffer_runs_from_the_last_parameter_to_the_first() {
        let buffer = FlatBuffer::new(&[100, 10, 300], 3, None);
        assert_eq!(buffer.places, [384..484, 320..330, 0..300]);
        assert_eq!((buffer.len(), buffer.buckets().len()), (768, 1));
        assert_eq!(buffer.pieces(3, 1), [(2, 256..300), (1, 0..10), (0, 0..100)]);
        let buffer = FlatBuffer::new(&[100, 10, 300], 3, Some(310));
        assert_eq!(buffer.buckets(), [0..384, 384..768]);
    }
}
