//! Rotary positions: rotation angles of the halves of heads, one table for all layers with the same
//! angles.

use device::{Arena, Device, Dtype, Error, Plan, Tensor};
use std::sync::Arc;

/// Angles of rotary positions (arXiv 2104.09864).
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// d: number of leading elements of a head that turn; an even number, at most D.
    pub dims: usize,
    /// Scaling of the frequencies for contexts longer than in pretraining.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies of rotary positions.
#[derive(Clone, PartialEq, Debug)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// One factor for all frequencies (arXiv 2306.15595).
    Linear {
        /// Divisor of every frequency.
        factor: f64,
    },
    /// A factor for low frequencies, none for high ones, interpolated in between (Llama 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Frequencies with fewer turns than this within `original_seq_len` are low.
        low_freq_factor: f64,
        /// Frequencies with more turns than this are high.
        high_freq_factor: f64,
        /// Context length of the pretraining in tokens.
        original_seq_len: usize,
    },
    /// A factor for low frequencies, none for high ones, interpolated linearly by the number of the
    /// pair (YaRN, arXiv 2309.00071, section 3.2).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Frequencies with more turns than this within `original_seq_len` are high.
        beta_fast: f64,
        /// Frequencies with fewer turns than this are low.
        beta_slow: f64,
        /// Context length of the pretraining in tokens.
        original_seq_len: usize,
        /// Whether the interpolation begins and ends at whole numbers of pairs.
        truncate: bool,
        /// Factor of cosines and sines, so that its square is a factor of the scores.
        attention_factor: f64,
    },
    /// A factor for each frequency (LongRoPE, arXiv 2402.13753).
    Listed {
        /// Divisor of each of the d/2 frequencies.
        factors: Arc<[f64]>,
        /// Factor of cosines and sines, so that its square is a factor of the scores.
        attention_factor: f64,
    },
}

impl Rope {
    /// Radians per position of the d/2 pairs of a head, rounded to fp32 as in the training of
    /// published models.
    fn frequencies(&self) -> Vec<f32> {
        let frequency = |pair: usize| {
            let plain = self.theta.powf(-2.0 * pair as f64 / self.dims as f64);
            self.scaled(pair, f64::from(plain as f32)) as f32
        };
        (0..self.dims / 2).map(frequency).collect()
    }

    /// The frequency of a pair after scaling.
    fn scaled(&self, pair: usize, frequency: f64) -> f64 {
        match &self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
                let turns = *original_seq_len as f64 * frequency / std::f64::consts::TAU;
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let unscaled = share.clamp(0.0, 1.0);
                (1.0 - unscaled) * frequency / factor + unscaled * frequency
            }
            RopeScaling::Yarn {
                factor, beta_fast, beta_slow, original_seq_len, truncate, ..
            } => {
                // The pair, as a fraction, with this number of turns in the original context.
                let pair_of = |turns: f64| {
                    let length = *original_seq_len as f64 / (turns * std::f64::consts::TAU);
                    self.dims as f64 * length.ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (pair_of(*beta_fast), pair_of(*beta_slow));
                if *truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                (first, last) = (first.max(0.0), last.min(self.dims as f64 - 1.0));
                if first == last {
                    last += 0.001;
                }
                let scaled = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
                scaled * frequency / factor + (1.0 - scaled) * frequency
            }
            RopeScaling::Listed { factors, .. } => frequency / factors[pair],
        }
    }

    /// Factor of cosines and sines.
    const fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
            RopeScaling::Yarn { attention_factor, .. }
            | RopeScaling::Listed { attention_factor, .. } => attention_factor,
        }
    }
}

/// Cosines and sines of a model's positions, one table for each different [`Rope`].
#[derive(Clone, Debug)]
pub(crate) struct RotaryTables(Vec<(Rope, Tensor)>);

impl RotaryTables {
    /// Plans the tables: (T, d) F32 each, d/2 cosines, then their sines. `ropes` may repeat.
    pub(crate) fn plan<'a>(
        plan: &mut Plan,
        ropes: impl Iterator<Item = &'a Rope>,
        seq_len: usize,
        head_dim: usize,
    ) -> Self {
        let mut tables: Vec<(Rope, Tensor)> = Vec::new();
        for rope in ropes {
            if tables.iter().any(|(planned, _)| planned == rope) {
                continue;
            }
            assert!(rope.dims.is_multiple_of(2) && rope.dims <= head_dim, "halves of heads");
            let name = match tables.len() {
                0 => "rotary".to_owned(),
                number => format!("rotary.{number}"),
            };
            let (at, size) = ((Arena::Device, "constants"), (seq_len, rope.dims));
            tables.push((rope.clone(), plan.tensor(at, name, Dtype::F32, size)));
        }
        Self(tables)
    }

    /// The table of a planned rope.
    pub(crate) fn of(&self, rope: &Rope) -> Tensor {
        let found = self.0.iter().find(|(planned, _)| planned == rope);
        found.unwrap_or_else(|| unreachable!("all kinds have tables: {rope:?}")).1
    }

    /// Writes the tables to the device, once.
    pub(crate) fn write(&self, dev: &Device) -> Result<(), Error> {
        self.0.iter().try_for_each(|(rope, table)| {
            let (dims, frequencies) = (rope.dims, rope.frequencies());
            let factor = rope.attention_factor();
            dev.write(*table, &|i| {
                let (position, column) = (i / dims, i % dims);
                let angle = f64::from(position as f32 * frequencies[column % (dims / 2)]);
                factor * if column < dims / 2 { angle.cos() } else { angle.sin() }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
    use device::{Communicator, HostPlace, HostWork, Rank};
    use std::time::Duration;

    /// YaRN of 32 elements of a head, with a base of 10,000 and the defaults of `beta_fast` and
    /// `beta_slow`.
    fn yarn(truncate: bool) -> Rope {
        let scaling = RopeScaling::Yarn {
            factor: 8.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_seq_len: 4096,
            truncate,
            attention_factor: 1.0,
        };
        Rope { theta: 10_000.0, dims: 32, scaling }
    }

    /// Longest relative distance of frequencies: transformers computes them in fp32.
    const NEAR: f64 = 1e-6;

    fn assert_near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (pair, (got, want)) in got.iter().zip(want).enumerate() {
            let difference = (f64::from(*got) / want - 1.0).abs();
            assert!(difference < NEAR, "pair {pair}: {got} instead of {want}");
        }
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_seq_len: 8192,
        };
        let rope = |scaling| Rope { theta: 500_000.0, dims: 128, scaling }.frequencies();
        let (plain, scaled) = (rope(RopeScaling::None), rope(scaling));
        // One turn in 8192 tokens is 7.67e-4 radians per token; four turns are 3.07e-3.
        for (plain, scaled) in plain.into_iter().zip(scaled) {
            if plain > 3.07e-3 {
                assert_eq!(plain, scaled);
            } else if plain < 7.66e-4 {
                assert_eq!(plain / 8.0, scaled);
            } else {
                assert!(plain / 8.0 <= scaled && scaled <= plain);
            }
        }
    }

    #[test]
    fn linear_scaling_stretches_positions() {
        let scaling = RopeScaling::Linear { factor: 4.0 };
        let frequencies = Rope { theta: 10_000.0, dims: 4, scaling }.frequencies();
        assert_eq!(frequencies, [0.25, 0.0025]);
    }

    /// Expected values: `ROPE_INIT_FUNCTIONS["yarn"]` of transformers 5.24. Pairs 0 to 5 turn 32
    /// times or more in 4096 tokens, and pairs from 12 on turn less than once.
    #[test]
    fn yarn_has_the_frequencies_of_transformers() {
        let high = [1.0, 0.562341332, 0.316227764, 0.177827939, 0.1, 0.0562341288];
        let low = [0.000125, 7.02926627e-5, 3.95284733e-5, 2.22284925e-5];
        let between = [
            0.0276699308,
            0.0133370962,
            0.00624999963,
            0.00281170662,
            0.0011858542,
            0.000444569858,
        ];
        assert_near(&yarn(true).frequencies(), &[&high[..], &between, &low].concat());
        let between = [
            0.0281120818,
            0.0132241333,
            0.00598313287,
            0.00254728785,
            0.000972857641,
            0.00028863296,
        ];
        assert_near(&yarn(false).frequencies(), &[&high[..], &between, &low].concat());
    }

    /// Expected values: `ROPE_INIT_FUNCTIONS["longrope"]` of transformers 5.24.
    #[test]
    fn each_frequency_has_its_listed_factor() {
        let rope = |factors: [f64; 4]| {
            let scaling = RopeScaling::Listed { factors: factors.into(), attention_factor: 1.0 };
            Rope { theta: 100.0, dims: 8, scaling }.frequencies()
        };
        let long = [0.666666687, 0.079056941, 0.0199999996, 0.00421637017];
        assert_near(&rope([1.5, 4.0, 5.0, 7.5]), &long);
        let short = [1.0, 0.243252128, 0.0666666701, 0.0158113893];
        assert_near(&rope([1.0, 1.3, 1.5, 2.0]), &short);
    }

    #[test]
    fn kinds_of_layers_share_a_table_if_they_have_the_same_angles() {
        let plain = Rope { theta: 100.0, dims: 4, scaling: RopeScaling::None };
        let scaling =
            RopeScaling::Listed { factors: [1.5].into(), attention_factor: 2.0f64.sqrt() };
        let listed = Rope { theta: 100.0, dims: 2, scaling };
        let mut plan = Plan::default();
        let ropes = [&plain, &listed, &plain];
        let tables = RotaryTables::plan(&mut plan, ropes.into_iter(), 5, 6);
        let [first, second] = [&plain, &listed].map(|rope| tables.of(rope));
        assert_eq!(tables.0.len(), 2);
        assert_eq!((plan.name(first), first.shape()), ("rotary", (5, 4)));
        assert_eq!((plan.name(second), second.shape()), ("rotary.1", (5, 2)));

        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::default(),
            work: HostWork::default(),
        };
        let (plan, world) = (Arc::new(plan), Communicator::new(1, 1, Duration::from_secs(60)));
        let rank = Rank::all(1, 1).next().unwrap();
        let dev = cpu::open(rank, &plan, &world, &options).unwrap();
        tables.write(&dev).unwrap();
        // Position 3: the angles of the first table are 3 and 0.3, that of the second is 3 / 1.5.
        for (table, want) in [
            (first, vec![3.0f64.cos(), 0.3f64.cos(), 3.0f64.sin(), 0.3f64.sin()]),
            (second, [2.0f64.cos(), 2.0f64.sin()].map(|x| 2.0f64.sqrt() * x).to_vec()),
        ] {
            let mut got = vec![0.0; want.len()];
            dev.read(table.rows(3..4), &mut got).unwrap();
            let near = got.iter().zip(&want).all(|(got, want)| (got - want).abs() < NEAR);
            assert!(near, "{got:?} instead of {want:?}");
        }
        dev.finish().unwrap();
    }
}
