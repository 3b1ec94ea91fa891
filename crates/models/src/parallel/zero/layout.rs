//! Where parameters lie in the flat buffer of stages 1 and 2, and which part of it is whose.

use engine::{Tensor, release};
use ledger::{Category, Dtype};

use super::Job;

/// A part of a parameter that lies in one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The rank whose partition it is.
    pub(super) rank: u64,
    /// Elements.
    pub(super) numel: u64,
}

/// Parameters one after the other, padded so that every rank has as much.
pub(super) struct Layout {
    rank: u64,
    /// Elements of the parameters, by index.
    numels: Vec<u64>,
    /// Where each parameter begins.
    starts: Vec<u64>,
    /// The parameters in the order in which they lie there.
    pub(super) order: Vec<usize>,
    /// Elements of a partition.
    pub(super) partition: u64,
    /// Elements behind the last parameter.
    pub(super) padding: u64,
}

/// A rank's part begins at a multiple of four bytes of 16-bit elements (`nccl_start_alignment_factor`).
const ALIGNMENT: u64 = 2;

impl Layout {
    /// Of parameters with `numels` elements over `world` ranks, dealt out in turn where `round_robin`.
    pub(super) fn new(numels: &[u64], (rank, world): (u64, u64), round_robin: bool) -> Self {
        let count = numels.len();
        let order: Vec<usize> = if round_robin {
            let ranks = usize::try_from(world).unwrap_or(usize::MAX).min(count.max(1));
            (0..ranks).flat_map(|first| (first..count).step_by(ranks)).collect()
        } else {
            (0..count).collect()
        };
        let mut starts = vec![0; count];
        let mut end = 0;
        for index in &order {
            starts[*index] = end;
            end += numels[*index];
        }
        let aligned = end.next_multiple_of(ALIGNMENT * world);
        let partition = aligned / world;
        Self { rank, numels: numels.to_vec(), starts, order, partition, padding: aligned - end }
    }

    /// Copies `parameters` into one buffer, whose views they become; by way of the host where it may go there
    /// (`by_host`) and the device has no room for both.
    pub(super) fn flatten(&self, job: &Job, parameters: &[Tensor], by_host: bool) -> Tensor {
        let make = |what, category, count: u64| {
            Tensor::of_category(&job.session, what, category, [count], job.dtype)
        };
        let room = job.session.unallocated().unwrap_or(u64::MAX);
        let by_host = by_host && room < self.total() * job.dtype.size();
        if by_host {
            for parameter in parameters {
                let place = Category::Temporary;
                parameter.move_into(&parameter.beside("zero.empty", place, [1], Dtype::Fp32));
            }
        }
        let padding =
            (self.padding > 0 && !by_host).then(|| make("zero.padding", Category::Temporary, self.padding));
        if parameters.len() == 1 && padding.is_none() && !by_host {
            return parameters[0].detach();
        }
        let flat = make("flat_parameters", Category::Parameter, self.total());
        release!(padding);
        self.order.iter().for_each(|index| parameters[*index].move_into(&flat));
        flat
    }

    /// Elements of the whole buffer.
    pub(super) fn total(&self) -> u64 {
        self.numels.iter().sum::<u64>() + self.padding
    }

    /// The pieces of a parameter, in order.
    pub(super) fn pieces(&self, index: usize) -> Vec<Piece> {
        let (start, end) = (self.starts[index], self.starts[index] + self.numels[index]);
        let ranks = start / self.partition..end.div_ceil(self.partition);
        let piece = |rank: u64| {
            let from = start.max(rank * self.partition);
            let to = end.min((rank + 1) * self.partition);
            Piece { rank, numel: to.saturating_sub(from) }
        };
        ranks.map(piece).filter(|piece| piece.numel > 0).collect()
    }

    /// Elements of a parameter that lie in the partition of this rank.
    pub(super) fn local(&self, index: usize) -> u64 {
        self.pieces(index).iter().filter(|piece| piece.rank == self.rank).map(|piece| piece.numel).sum()
    }

    /// The parameters of which a part lies in the partition of this rank, in the order of the buffer.
    pub(super) fn own(&self) -> Vec<usize> {
        self.order.iter().copied().filter(|index| self.local(*index) > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_cover_the_parameters_and_their_padding() {
        for world in [1, 2, 3, 8, 64] {
            for round_robin in [false, true] {
                let numels = [7, 1000, 3, 64, 129];
                let layouts: Vec<Layout> =
                    (0..world).map(|rank| Layout::new(&numels, (rank, world), round_robin)).collect();
                let total = layouts[0].total();
                assert_eq!(total % (2 * world), 0);
                assert_eq!(layouts[0].partition * world, total);
                let held: u64 =
                    layouts.iter().map(|layout| (0..5).map(|index| layout.local(index)).sum::<u64>()).sum();
                assert_eq!(held + layouts[0].padding, total);
                for (index, numel) in numels.iter().enumerate() {
                    let pieces: u64 = layouts[0].pieces(index).iter().map(|piece| piece.numel).sum();
                    assert_eq!(pieces, *numel);
                }
            }
        }
    }
}
