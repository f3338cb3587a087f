//! Keys of gated delta nets.

use super::declare::section;
use super::reading::KeyDefault;
use device::{MOST_TAPS, WIDEST_DELTA_KEY};
use serde::Serialize;

section! {
    /// The gated delta net of some layers.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct DeltaNetConfig, read(s, of: Option<&DeltaNetConfig>) {
        /// Number of heads of queries and keys; a multiple of `parallel.tensor`.
        key_heads: usize = uint(
            1..=65_536, KeyDefault::Required("key_heads: 16").unless(of.map(|of| of.key_heads))
        ), resume: Experiment;
        /// Number of heads of values; a multiple of `model.delta_net.key_heads`.
        value_heads: usize = uint(
            1..=65_536, KeyDefault::Required("value_heads: 32").unless(of.map(|of| of.value_heads))
        ), resume: Experiment;
        /// Number of elements of a query and of a key.
        key_dim: usize = uint(
            1..=WIDEST_DELTA_KEY as u64, KeyDefault::Default(128).unless(of.map(|of| of.key_dim))
        ), resume: Experiment;
        /// Number of elements of a value.
        value_dim: usize = uint(
            1..=1024, KeyDefault::Default(128).unless(of.map(|of| of.value_dim))
        ), resume: Experiment;
        /// Number of weights of each channel of the causal convolution.
        taps: usize = uint(
            1..=MOST_TAPS as u64, KeyDefault::Default(4).unless(of.map(|of| of.taps))
        ), resume: Experiment;
    }
}
