//! Rotary positions: rotation angles of the halves of heads, one table for all layers.

use device::{Arena, Device, Dtype, Error, Plan, Tensor};

/// Angles of rotary positions (arXiv 2104.09864).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies for contexts longer than in pretraining.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies of rotary positions.
#[derive(Clone, Copy, PartialEq, Debug)]
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
}

impl Rope {
    /// Radians per position of the D/2 pairs of a head of `dim`, rounded to fp32 as in the training
    /// of published models.
    fn frequencies(&self, dim: usize) -> Vec<f32> {
        let frequency = |pair: usize| {
            let plain = self.theta.powf(-2.0 * pair as f64 / dim as f64);
            self.scaling.scaled(f64::from(plain as f32)) as f32
        };
        (0..dim / 2).map(frequency).collect()
    }
}

impl RopeScaling {
    fn scaled(self, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
                let turns = original_seq_len as f64 * frequency / std::f64::consts::TAU;
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let unscaled = share.clamp(0.0, 1.0);
                (1.0 - unscaled) * frequency / factor + unscaled * frequency
            }
        }
    }
}

/// Cosines and sines of a model's positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RotaryTable {
    rope: Rope,
    head_dim: usize,
    /// (T, D) F32: D/2 cosines, then their sines.
    pub(crate) table: Tensor,
}

impl RotaryTable {
    pub(crate) fn plan(plan: &mut Plan, rope: Rope, seq_len: usize, head_dim: usize) -> Self {
        let size = (seq_len, head_dim);
        let table = plan.tensor((Arena::Device, "constants"), "rotary", Dtype::F32, size);
        Self { rope, head_dim, table }
    }

    /// Writes the table to the device, once.
    pub(crate) fn write(&self, dev: &Device) -> Result<(), Error> {
        let (dim, frequencies) = (self.head_dim, self.rope.frequencies(self.head_dim));
        dev.write(self.table, &|i| {
            let (position, column) = (i / dim, i % dim);
            let angle = f64::from(position as f32 * frequencies[column % (dim / 2)]);
            if column < dim / 2 { angle.cos() } else { angle.sin() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_seq_len: 8192,
        };
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(128);
        let scaled = Rope { theta: 500_000.0, scaling }.frequencies(128);
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
        let frequencies = Rope { theta: 10_000.0, scaling }.frequencies(4);
        assert_eq!(frequencies, [0.25, 0.0025]);
    }
}
