//! Initial weights: a function of the seed, the tensor's name and the element's index in the whole
//! tensor, so that every layout starts from the same model.

use checkpoint::{Checkpoint, CheckpointError, CheckpointReader, TensorState};
use config::{Config, Moments};
use device::numerics::normals;
use device::{Rank, random};
use layout::segment_runs::{SegmentRun, SegmentRuns};
use offload::{NoiseRun, StatePosition};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use tensor_parallel::{Decoder, Init, Param};

/// Whole tensors by global name, row-major.
pub type Weights = BTreeMap<String, Arc<[f32]>>;

/// Source of the initial values of a tensor.
#[derive(Clone, Debug)]
struct TensorInit {
    stream: u64,
    init: Init,
    /// Values of the whole tensor, if the caller gives them.
    given: Option<Arc<[f32]>>,
}

/// Initial values of a tensor-parallel rank's flat segments.
#[derive(Debug)]
pub(crate) struct InitialParameters(SegmentRuns<TensorInit>);

impl InitialParameters {
    pub(crate) fn new(
        config: &Config,
        decoder: &Decoder,
        rank: Rank,
        given: Option<&Weights>,
    ) -> Self {
        Self(SegmentRuns::of_all(decoder, rank, |_, param| TensorInit {
            stream: random::key_of_name(config.train.seed, &param.name),
            init: param.init,
            given: given.and_then(|all| all.get(&param.name)).cloned(),
        }))
    }

    /// Fills `values` with the initial values of a segment's flat buffer, from element `first` on.
    pub(crate) fn fill(&self, segment: usize, first: usize, values: &mut [f32]) {
        let Ok(()) = self.0.fill(segment, first, values, |source, global, values| {
            match (&source.given, source.init) {
                (Some(given), _) => {
                    values.copy_from_slice(&given[global..global + values.len()]);
                }
                (None, Init::Constant(value)) => values.fill(value as f32),
                (None, Init::Normal(deviation)) => {
                    normals(source.stream, global as u64, deviation, values);
                }
                (None, Init::LogUniform { low, high }) => {
                    for (i, value) in values.iter_mut().enumerate() {
                        let bits = random::bits32(source.stream, (global + i) as u64);
                        let share = f64::from(bits) / 2f64.powi(32);
                        *value = (low + (high - low) * share).ln() as f32;
                    }
                }
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// Keys of the random bits that round bf16 moments stochastically, for each segment. A key depends
/// on the tensor and the index in the whole tensor. Empty for fp32 moments.
pub(crate) fn noise(config: &Config, decoder: &Decoder, rank: Rank) -> Vec<Arc<[NoiseRun]>> {
    if config.offload.moments != Moments::Bf16 {
        return decoder.segments().iter().map(|_| Arc::default()).collect();
    }
    let seed = random::key_of_name(config.train.seed, "moments");
    let stream = |_, param: &Param| random::key_of_name(seed, &param.name);
    let runs = SegmentRuns::new(decoder, rank, stream);
    let noise = |SegmentRun { flat, global, source: stream }| NoiseRun {
        flat,
        stream,
        global: global as u64,
    };
    runs.by_segment.into_iter().map(|runs| runs.into_iter().map(noise).collect()).collect()
}

/// The states of a checkpoint, read for the flat segments of a rank.
#[derive(Debug)]
pub(crate) struct CheckpointStates<'a> {
    from: CheckpointReader<'a>,
    /// Runs of each segment, with the number of their tensor.
    runs: SegmentRuns<usize>,
}

impl<'a> CheckpointStates<'a> {
    pub(crate) fn new(from: &'a Checkpoint, decoder: &Decoder, rank: Rank) -> Self {
        let runs = SegmentRuns::new(decoder, rank, |number, _| number);
        Self { from: from.reader(), runs }
    }

    /// Fills `values` with a state of a segment, from element `first` on. Padding is 0.
    pub(crate) fn fill(
        &self,
        StatePosition { segment, state, first }: StatePosition,
        values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        self.runs.fill(segment, first, values, |tensor, global, values| {
            let which = TensorState { tensor: *tensor, state };
            self.from.read(which, global..global + values.len(), values)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use layout::LocalMachine;
    use layout::build::lay_out;
    use std::path::Path;

    /// Number of ranks out of `tp_size` that hold an element, by (stream, global index).
    fn bits(tp_size: usize) -> BTreeMap<(u64, u64), usize> {
        const RON: &str = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, vocab: 257), \
                            offload: (moments: Bf16), data: (train: \"x\"), train: (steps: 1))";
        let sets = [format!("parallel.tensor={tp_size}"), "device=Cpu".into()];
        let config = load_str(RON, "a.ron", Path::new("."), &sets).unwrap().config;
        let decoder = lay_out(&config, &LocalMachine::default()).decoder;
        let mut all = BTreeMap::new();
        for tp in 0..tp_size {
            let rank = Rank { tp, tp_size, dp: 0, dp_size: 1 };
            for run in noise(&config, &decoder, rank).iter().flat_map(|runs| runs.iter()) {
                let first = run.global;
                for i in 0..run.flat.len() as u64 {
                    *all.entry((run.stream, first + i)).or_insert(0) += 1;
                }
            }
        }
        all
    }

    #[test]
    fn an_element_has_the_same_random_bits_on_every_grid_and_no_two_share_them() {
        let one = bits(1);
        assert!(one.values().all(|count| *count == 1));
        let four = bits(4);
        assert!(four.keys().eq(one.keys()));
        // An element that every rank holds has the same random bits on each rank.
        assert!(four.values().all(|count| [1, 4].contains(count)));
    }
}
