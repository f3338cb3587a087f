//! Mixes several data sets by their weights: exactly in every period, almost exactly in parts of a
//! period. A sample's data set depends only on its number, so a resumed run needs no replay.

/// Samples of a period, a power of two; weights are rounded to multiples of 1 / PERIOD.
const PERIOD: usize = 4096;

/// The order of the data sets in a period.
#[derive(Clone, Debug)]
pub(super) struct SourceMix {
    /// For each place in the period: the data set, and its number of earlier samples in the period.
    turns: Vec<(u16, u16)>,
    /// Samples of a period for each data set.
    counts: Vec<u64>,
}

impl SourceMix {
    /// A mix of data sets with these weights, which must be positive.
    pub(super) fn new(weights: &[f32]) -> Self {
        let counts = shares(weights);
        let ends: Vec<usize> = counts
            .iter()
            .scan(0, |end, count| {
                *end += *count as usize;
                Some(*end)
            })
            .collect();
        let mut had = vec![0; counts.len()];
        // Reversed bits spread any run of places evenly over the period (van der Corput sequence).
        let reversed = |place: usize| place.reverse_bits() >> (usize::BITS - PERIOD.ilog2());
        let turn = |place| {
            let set = ends.partition_point(|end| *end <= reversed(place));
            had[set] += 1;
            (set as u16, had[set] - 1)
        };
        Self { turns: (0..PERIOD).map(turn).collect(), counts }
    }

    /// The data set of sample `number` of a run, and the sample's number within the data set.
    pub(super) fn of(&self, number: u64) -> (usize, u64) {
        let (period, place) = (number / PERIOD as u64, number % PERIOD as u64);
        let (set, had) = self.turns[place as usize];
        let set = usize::from(set);
        (set, period * self.counts[set] + u64::from(had))
    }

    /// Fraction of the samples that a data set provides.
    pub(super) fn share(&self, set: usize) -> f64 {
        self.counts[set] as f64 / PERIOD as f64
    }
}

/// Samples of a period for each weight, by the largest remainder, and at least one.
fn shares(weights: &[f32]) -> Vec<u64> {
    assert!((1..=PERIOD / 2).contains(&weights.len()), "{} data sets", weights.len());
    let all: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
    let exact = |weight: &f32| f64::from(*weight) / all * PERIOD as f64;
    let mut counts: Vec<u64> = weights.iter().map(|w| (exact(w) as u64).max(1)).collect();
    let given = |counts: &[u64]| counts.iter().sum::<u64>();
    let lacks = |i: usize, counts: &[u64]| exact(&weights[i]) - counts[i] as f64;
    while given(&counts) != PERIOD as u64 {
        let few = given(&counts) < PERIOD as u64;
        let by_need = |a: &usize, b: &usize| lacks(*a, &counts).total_cmp(&lacks(*b, &counts));
        let all = 0..counts.len();
        // A data set with a small weight keeps its single sample.
        let changed = match few {
            true => all.max_by(by_need),
            false => all.filter(|i| counts[*i] > 1).min_by(by_need),
        };
        let Some(changed) = changed else { unreachable!("a period has room for one of each") };
        counts[changed] = if few { counts[changed] + 1 } else { counts[changed] - 1 };
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: [&[f32]; 5] =
        [&[1.0], &[0.7, 0.3], &[1.0, 1.0, 1.0], &[1e-6, 5.0], &[0.5, 0.2, 0.15, 0.1, 0.05]];

    #[test]
    fn shares_are_those_of_the_weights_over_every_stretch() {
        for weights in WEIGHTS {
            let turns = SourceMix::new(weights);
            let all: f32 = weights.iter().sum();
            for (set, weight) in weights.iter().enumerate() {
                let share = f64::from(weight / all);
                assert!((turns.share(set) - share).abs() <= 1.0 / PERIOD as f64, "{weights:?}");
                for (start, length) in
                    [(0, 4096u64), (0, 50), (777, 100), (5000, 1000), (123, 20_000)]
                {
                    let stretch = start..start + length;
                    let had = stretch.filter(|number| turns.of(*number).0 == set).count() as f64;
                    let (want, most) = (turns.share(set) * length as f64, 8.0);
                    assert!(
                        (had - want).abs() <= most,
                        "{weights:?}: {had} of {length}, not {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn no_weight_is_too_small_for_a_sample_of_a_period() {
        for (small, many) in [(1e-4, 2), (1e-6, 255), (1e-45, 3)] {
            let weights = [vec![small; many], vec![1e6]].concat();
            let counts = shares(&weights);
            assert_eq!(counts, [vec![1; many], vec![(PERIOD - many) as u64]].concat());
        }
    }

    #[test]
    fn each_data_set_counts_its_samples_without_a_gap() {
        for weights in WEIGHTS {
            let turns = SourceMix::new(weights);
            let mut next = vec![0; weights.len()];
            for number in 0..3 * PERIOD as u64 {
                let (set, of_set) = turns.of(number);
                assert_eq!(of_set, next[set]);
                next[set] += 1;
            }
        }
    }
}
