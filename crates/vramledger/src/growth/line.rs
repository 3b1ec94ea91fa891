//! The straight line through points, and how well it is known.

/// What stands for a normal distribution: 95 of 100 draws lie within so many standard deviations.
const Z: f64 = 1.959_963_984_540_054;

/// The line of least squares through points `(x, y)`: its slope is `b = Sxy / Sxx`, where `Sxy` sums
/// `(x - mean x) (y - mean y)` and `Sxx` sums `(x - mean x)^2`. With `s^2`, the sum of the squared
/// distances of the points from the line over `n - 2`, 95 of 100 such intervals
/// `b ± t(n - 2) s / sqrt(Sxx)` hold the true slope, where the distances do not hang together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Line {
    /// `b`.
    pub(crate) slope: f64,
    /// Half the width of the interval.
    pub(crate) half: f64,
    at_x: f64,
    at_y: f64,
}

impl Line {
    /// The line through `points`; none through fewer than three, or where all have one x.
    pub(crate) fn through(points: &[(u64, i64)]) -> Option<Self> {
        let [first, _, _, ..] = points else { return None };
        // Differences from the first point are exact where the numbers themselves are too large.
        let x = |point: &(u64, i64)| point.0 as f64 - first.0 as f64;
        let y = |point: &(u64, i64)| point.1.saturating_sub(first.1) as f64;
        let count = points.len() as f64;
        let mean_x = points.iter().map(x).sum::<f64>() / count;
        let mean_y = points.iter().map(y).sum::<f64>() / count;
        let sum = |term: &dyn Fn(&(u64, i64)) -> f64| points.iter().map(term).sum::<f64>();
        let across = sum(&|point| (x(point) - mean_x).powi(2));
        if across <= 0.0 {
            return None;
        }
        let slope = sum(&|point| (x(point) - mean_x) * (y(point) - mean_y)) / across;
        let left = sum(&|point| (y(point) - mean_y - slope * (x(point) - mean_x)).powi(2));
        let free = count - 2.0;
        let half = quantile(free) * (left / free / across).sqrt();
        let (at_x, at_y) = (mean_x + first.0 as f64, mean_y + first.1 as f64);
        Some(Self { slope, half, at_x, at_y })
    }

    /// Whether the slope is so far above nothing that its interval, as wide as `times`, does not reach it.
    pub(crate) fn rises(&self, times: f64) -> bool {
        self.slope > 0.0 && times * self.half <= self.slope
    }

    /// Whether the slope is below `slope`, as far as its interval tells.
    pub(crate) fn is_below(&self, slope: f64) -> bool {
        self.slope + self.half < slope
    }

    /// Where it is at `level`; none where it does not rise.
    pub(crate) fn reaches(&self, level: f64) -> Option<f64> {
        (self.slope > 0.0).then(|| self.at_x + (level - self.at_y) / self.slope)
    }
}

/// The quantile of Student's distribution with `free` degrees of freedom beyond which 2.5 of 100 draws
/// lie: exact for one and two, else by Cornish and Fisher's expansion, to 1 in 100.
fn quantile(free: f64) -> f64 {
    if free < 1.5 {
        return 12.706_204_736;
    }
    if free < 2.5 {
        return 4.302_652_730;
    }
    let z = |power| Z.powi(power);
    let terms = [
        (z(3) + Z) / 4.0,
        (5.0 * z(5) + 16.0 * z(3) + 3.0 * Z) / 96.0,
        (3.0 * z(7) + 19.0 * z(5) + 17.0 * z(3) - 15.0 * Z) / 384.0,
    ];
    terms.iter().enumerate().map(|(index, term)| term / free.powi(index as i32 + 1)).sum::<f64>() + Z
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_interval_is_that_of_the_books() {
        // The example of a text: x 1..5, y 2, 4, 5, 4, 5: b 0.6, s 0.8944, Sxx 10, t(3) 3.182.
        let line = Line::through(&[(1, 2), (2, 4), (3, 5), (4, 4), (5, 5)]).unwrap();
        assert!((line.slope - 0.6).abs() < 1e-12);
        assert!((line.half - 3.182 * 0.8944 / 10.0_f64.sqrt()).abs() < 0.01, "{}", line.half);
        assert!(!line.rises(1.0));
        for (free, known) in [(1.0, 12.706), (2.0, 4.303), (3.0, 3.182), (5.0, 2.571), (30.0, 2.042)] {
            assert!((quantile(free) / known - 1.0).abs() < 0.01, "{free}: {}", quantile(free));
        }
    }

    #[test]
    fn few_points_have_no_line() {
        assert_eq!(Line::through(&[(0, 1), (1, 2)]), None);
        assert_eq!(Line::through(&[(3, 1), (3, 2), (3, 3)]), None);
        let flat = Line::through(&[(0, 7), (1, 7), (2, 7)]).unwrap();
        assert_eq!((flat.slope, flat.half, flat.rises(1.0), flat.reaches(9.0)), (0.0, 0.0, false, None));
    }

    proptest! {
        #[test]
        fn points_on_a_line_give_it(
            steps in proptest::collection::btree_set(0_u64..100_000, 3..40),
            slope in 1_i64..1 << 36,
            start in 0_i64..1 << 40,
        ) {
            let points: Vec<(u64, i64)> = steps.iter().map(|x| (*x, start + slope * *x as i64)).collect();
            let line = Line::through(&points).unwrap();
            prop_assert_eq!(line.slope.round(), slope as f64);
            prop_assert!(line.rises(2.0));
            let mut turned = points.clone();
            turned.reverse();
            let turned = Line::through(&turned).unwrap();
            prop_assert!((turned.slope / line.slope - 1.0).abs() < 1e-9);
            let reached = line.reaches((start + slope * 200_000) as f64).unwrap();
            prop_assert!((reached - 200_000.0).abs() < 1.0);
        }
    }
}
