//! Keys of rotary positions.

use super::declare::{choice, section};
use super::reading::{Choice, Interval, KeyDefault};
use serde::Serialize;

section! {
    /// Rotary positions.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct RopeConfig, read(s, defaults: &RopeDefaults) {
        /// Base of the frequencies of rotary positions.
        theta: f32 = float(
            Interval::closed(1.0, 1e12), defaults.or(KeyDefault::Default(10_000.0), |r| Some(r.theta))
        ), resume: Experiment;
        /// Share of the elements of a head that rotary positions rotate, from the first element on
        /// (Phi-4-mini).
        rotated_share: f32 = float(
            Interval::above(0.0, 1.0), defaults.or(KeyDefault::Default(1.0), |r| Some(r.rotated_share))
        ), resume: Experiment;
        /// How the frequencies of rotary positions are lowered, for contexts longer than in the
        /// model's first training. `None`: not at all. `Linear`: all by one factor. `Llama3`: as
        /// Llama 3.1 does. `Yarn`: as YaRN does (Ministral 3, OLMo 3). `LongRope`: each by a factor
        /// of its own (Phi-4-mini).
        scaling: RopeScaling = choice_with(
            defaults.or(KeyDefault::Default(RopeScaling::None), |r| Some(r.scaling.clone())), defaults.clone()
        ), resume: Experiment;
    }
}

choice! {
    /// How the frequencies of rotary positions are lowered.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub enum RopeScaling, read(of: RopeDefaults) {
        /// The frequencies stay unchanged.
        None,
        /// One factor divides all frequencies.
        Linear["(factor: 4.0)"] {
            /// Factor that divides every frequency of rotary positions.
            factor: f32 = float(FACTOR, of.or(KeyDefault::Required("factor: 4.0"), |r| r.scaling.factor("Linear")));
        },
        /// The scaling of Llama 3.1.
        Llama3["(factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_seq_len: 8192)"] {
            /// Factor that divides the low frequencies of rotary positions.
            factor: f32 = float(FACTOR, of.or(KeyDefault::Required("factor: 8.0"), |r| r.scaling.factor("Llama3")));
            /// Number of turns in `original_seq_len` tokens below which a frequency of rotary
            /// positions is low.
            low_freq_factor: f32 = float(FACTOR, of.or(KeyDefault::Default(1.0), |r| r.scaling.low("Llama3")));
            /// Number of turns in `original_seq_len` tokens above which a frequency of rotary
            /// positions stays unchanged.
            high_freq_factor: f32 = float(FACTOR, of.or(KeyDefault::Default(4.0), |r| r.scaling.high("Llama3")));
            /// Number of tokens of the contexts in the model's first training.
            original_seq_len: usize = uint(
                1..=MOST_POSITIONS, of.or(KeyDefault::Default(8192), |r| r.scaling.original_seq_len("Llama3"))
            );
        },
        /// YaRN (arXiv 2309.00071).
        Yarn["(factor: 4.0, original_seq_len: 32768)"] {
            /// Factor that divides the low frequencies of rotary positions.
            factor: f32 = float(FACTOR, of.or(KeyDefault::Required("factor: 4.0"), |r| r.scaling.factor("Yarn")));
            /// Number of tokens of the contexts in the model's first training.
            original_seq_len: usize = uint(
                1..=MOST_POSITIONS,
                of.or(KeyDefault::Required("original_seq_len: 32768"), |r| r.scaling.original_seq_len("Yarn"))
            );
            /// Number of turns in `original_seq_len` tokens above which a frequency of rotary
            /// positions stays unchanged.
            beta_fast: f32 = float(FACTOR, of.or(KeyDefault::Default(32.0), |r| r.scaling.high("Yarn")));
            /// Number of turns in `original_seq_len` tokens below which a frequency of rotary
            /// positions is low.
            beta_slow: f32 = float(FACTOR, of.or(KeyDefault::Default(1.0), |r| r.scaling.low("Yarn")));
            /// Whether the range between low and unchanged frequencies of rotary positions begins
            /// and ends at whole numbers of pairs of elements.
            truncate: bool = flag(of.or(KeyDefault::Default(true), |r| r.scaling.truncates()));
            /// Factor of cosines and sines of rotary positions. None: 0.1 ln(factor) + 1.
            attention_factor: Option<f32> = float_or_none(
                FACTOR, of.or(KeyDefault::Default(None), |r| r.scaling.attention_factor("Yarn"))
            );
        },
        /// LongRoPE (arXiv 2402.13753).
        LongRope["(factor: 32.0, original_seq_len: 4096, short_factors: [1.0], long_factors: [1.5])"] {
            /// Longest context of the model, divided by `original_seq_len`. It decides the default
            /// of `attention_factor`.
            factor: f32 = float(FACTOR, of.or(KeyDefault::Required("factor: 32.0"), |r| r.scaling.factor("LongRope")));
            /// Number of tokens of the contexts in the model's first training.
            original_seq_len: usize = uint(
                2..=MOST_POSITIONS,
                of.or(KeyDefault::Required("original_seq_len: 4096"), |r| r.scaling.original_seq_len("LongRope"))
            );
            /// A factor for each pair of rotated elements, which divides its frequency, if samples
            /// have at most `original_seq_len` tokens.
            short_factors: Vec<f32> = floats(
                FACTOR, of.or(KeyDefault::Required("short_factors: [1.0]"), |r| r.scaling.factors(0))
            );
            /// As `short_factors`, for longer samples.
            long_factors: Vec<f32> = floats(
                FACTOR, of.or(KeyDefault::Required("long_factors: [1.5]"), |r| r.scaling.factors(1))
            );
            /// Factor of cosines and sines of rotary positions. None: sqrt(1 + ln(factor) /
            /// ln(original_seq_len)), or 1 if `factor` is at most 1.
            attention_factor: Option<f32> = float_or_none(
                FACTOR, of.or(KeyDefault::Default(None), |r| r.scaling.attention_factor("LongRope"))
            );
        },
    }
}

/// Largest number of tokens of a sample.
pub(super) const MOST_POSITIONS: u64 = 16_777_216;

/// Allowed factors of a frequency.
const FACTOR: Interval = Interval::closed(0.01, 1e6);

/// Defaults of the keys of rotary positions.
#[derive(Clone, Debug)]
pub(super) struct RopeDefaults {
    /// Values that are the defaults. `None`: each key has a fixed default.
    rope: Option<RopeConfig>,
    /// Origin of these values in words, and the keys that decide it.
    how: &'static str,
    keys: &'static [&'static str],
}

impl RopeDefaults {
    /// The values of the folder of `model.from`, if there is one.
    pub(super) const fn of_folder(rope: Option<RopeConfig>) -> Self {
        Self { rope, how: "config.json", keys: &["model.from"] }
    }

    /// The values of `model.rope`.
    pub(super) const fn of_rope(rope: RopeConfig) -> Self {
        let keys = &["model.rope", "model.rope.theta", "model.rope.scaling"];
        Self { rope: Some(rope), how: "model.rope", keys }
    }

    /// Default of a key: the value that `value` reads from the known rotary positions, else
    /// `fixed`.
    fn or<T>(
        &self,
        fixed: KeyDefault<T>,
        value: impl FnOnce(&RopeConfig) -> Option<T>,
    ) -> KeyDefault<T> {
        match self.rope.as_ref().and_then(value) {
            Some(value) => KeyDefault::Derived(value, self.how, self.keys),
            None => fixed,
        }
    }
}

impl RopeConfig {
    /// Number of elements at the beginning of a head of `head_dim` elements that are rotated.
    pub fn rotated_elements(&self, head_dim: usize) -> usize {
        (head_dim as f64 * decimal(self.rotated_share)) as usize
    }
}

/// Keys of the variant with the name `of`; `None` for another variant.
impl RopeScaling {
    fn is(&self, of: &str) -> bool {
        self.name() == of
    }

    fn factor(&self, of: &str) -> Option<f32> {
        match self {
            Self::Linear { factor }
            | Self::Llama3 { factor, .. }
            | Self::Yarn { factor, .. }
            | Self::LongRope { factor, .. } => Some(*factor).filter(|_| self.is(of)),
            Self::None => None,
        }
    }

    fn low(&self, of: &str) -> Option<f32> {
        match self {
            Self::Llama3 { low_freq_factor: low, .. } | Self::Yarn { beta_slow: low, .. } => {
                Some(*low).filter(|_| self.is(of))
            }
            Self::None | Self::Linear { .. } | Self::LongRope { .. } => None,
        }
    }

    fn high(&self, of: &str) -> Option<f32> {
        match self {
            Self::Llama3 { high_freq_factor: high, .. } | Self::Yarn { beta_fast: high, .. } => {
                Some(*high).filter(|_| self.is(of))
            }
            Self::None | Self::Linear { .. } | Self::LongRope { .. } => None,
        }
    }

    fn original_seq_len(&self, of: &str) -> Option<usize> {
        match self {
            Self::Llama3 { original_seq_len, .. }
            | Self::Yarn { original_seq_len, .. }
            | Self::LongRope { original_seq_len, .. } => {
                Some(*original_seq_len).filter(|_| self.is(of))
            }
            Self::None | Self::Linear { .. } => None,
        }
    }

    const fn truncates(&self) -> Option<bool> {
        match self {
            Self::Yarn { truncate, .. } => Some(*truncate),
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::LongRope { .. } => None,
        }
    }

    fn attention_factor(&self, of: &str) -> Option<Option<f32>> {
        match self {
            Self::Yarn { attention_factor, .. } | Self::LongRope { attention_factor, .. } => {
                Some(*attention_factor).filter(|_| self.is(of))
            }
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } => None,
        }
    }

    /// The short factors (0) or the long factors (1).
    fn factors(&self, which: usize) -> Option<Vec<f32>> {
        match self {
            Self::LongRope { short_factors, long_factors, .. } => {
                Some([short_factors, long_factors][which].clone())
            }
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::Yarn { .. } => None,
        }
    }
}

/// Converts an f32 to the decimal number that the config has. The f32 holds only the nearest
/// number.
pub fn decimal(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|e| unreachable!("{x} is not a number: {e}"))
}
