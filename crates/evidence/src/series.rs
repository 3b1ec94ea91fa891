//! A series: totals at the steps of a run, as a log has them.

use ledger::Bytes;

/// Totals of one device, or of one rank, at the steps of a run. In the order of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// The device or rank, as the log calls it; none where the log tells none apart.
    pub of: Option<String>,
    /// A point for each row of the log.
    pub points: Vec<Point>,
    /// The other numbers of each row: the sequence length, the loss.
    pub extras: Vec<Extra>,
}

/// What a log says at one step; what it does not say is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Point {
    /// The step as the log counts it; the number of the row, from 0, where it counts none.
    pub step: u64,
    /// Bytes of the allocator's blocks at that moment: `memory_allocated`.
    pub allocated: Option<Bytes>,
    /// Bytes of the allocator's segments at that moment: `memory_reserved`.
    pub reserved: Option<Bytes>,
    /// The most that was allocated up to that moment: `max_memory_allocated`.
    pub peak_allocated: Option<Bytes>,
    /// The most that was reserved up to that moment: `max_memory_reserved`.
    pub peak_reserved: Option<Bytes>,
    /// What the whole card has in use, all processes together: what nvidia-smi calls used.
    pub used: Option<Bytes>,
    /// All memory of the card.
    pub capacity: Option<Bytes>,
}

/// A column of numbers that are no bytes of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Extra {
    /// Its name in the log.
    pub name: String,
    /// Its value at each point; none where the row has none.
    pub values: Vec<Option<f64>>,
}

/// What of a point is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Figure {
    /// [`Point::allocated`].
    Allocated,
    /// [`Point::reserved`].
    Reserved,
    /// [`Point::peak_allocated`].
    PeakAllocated,
    /// [`Point::peak_reserved`].
    PeakReserved,
    /// [`Point::used`].
    Used,
    /// [`Point::capacity`].
    Capacity,
}

impl Figure {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 6] = [
        Self::Allocated,
        Self::Reserved,
        Self::PeakAllocated,
        Self::PeakReserved,
        Self::Used,
        Self::Capacity,
    ];

    /// Its name in documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allocated => "allocated",
            Self::Reserved => "reserved",
            Self::PeakAllocated => "peak_allocated",
            Self::PeakReserved => "peak_reserved",
            Self::Used => "used",
            Self::Capacity => "capacity",
        }
    }
}

impl Point {
    /// What the log says of `figure` here.
    pub const fn get(&self, figure: Figure) -> Option<Bytes> {
        match figure {
            Figure::Allocated => self.allocated,
            Figure::Reserved => self.reserved,
            Figure::PeakAllocated => self.peak_allocated,
            Figure::PeakReserved => self.peak_reserved,
            Figure::Used => self.used,
            Figure::Capacity => self.capacity,
        }
    }

    /// The place of `figure`.
    pub const fn get_mut(&mut self, figure: Figure) -> &mut Option<Bytes> {
        match figure {
            Figure::Allocated => &mut self.allocated,
            Figure::Reserved => &mut self.reserved,
            Figure::PeakAllocated => &mut self.peak_allocated,
            Figure::PeakReserved => &mut self.peak_reserved,
            Figure::Used => &mut self.used,
            Figure::Capacity => &mut self.capacity,
        }
    }
}

impl Series {
    /// The points that know `figure`: their steps, and what it is there.
    pub fn column(&self, figure: Figure) -> impl Iterator<Item = (u64, Bytes)> + '_ {
        self.points.iter().filter_map(move |point| Some((point.step, point.get(figure)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_has_the_points_that_know_it() {
        let mut points = vec![Point { step: 0, ..Point::default() }, Point { step: 20, ..Point::default() }];
        for figure in Figure::ALL {
            *points[1].get_mut(figure) = Some(Bytes::new(7));
        }
        let series = Series { points, ..Series::default() };
        for figure in Figure::ALL {
            assert_eq!(series.column(figure).collect::<Vec<_>>(), [(20, Bytes::new(7))], "{figure:?}");
        }
    }
}
