//! Initial weights: a function of the seed, the tensor's name and the element's index in the whole tensor, so
//! that every layout starts from the same model.

use crate::checkpoint::{Checkpoint, CheckpointError, Reader};
use crate::config::{Config, Moments};
use crate::layout::runs::Runs;
use device::numerics::normals;
use device::{Rank, random};
use offload::{NoiseRun, StateAt};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use tensor_parallel::{Gpt, Init};

/// Whole tensors by global name, row-major.
pub type Weights = BTreeMap<String, Arc<[f32]>>;

/// How the values of a tensor are made.
#[derive(Clone, Debug)]
struct Source {
    stream: u64,
    init: Init,
    /// The whole tensor, where it is given.
    given: Option<Arc<[f32]>>,
}

/// Values of a tensor-parallel rank's flat segments.
#[derive(Debug)]
pub(crate) struct Initial(Runs<Source>);

impl Initial {
    pub(crate) fn new(config: &Config, gpt: &Gpt, tp: usize, given: Option<&Weights>) -> Self {
        Self(Runs::new(gpt, (tp, config.parallel.tensor), |_, param| Source {
            stream: random::key_of_name(config.train.seed, &param.name),
            init: param.init,
            given: given.and_then(|all| all.get(&param.name)).cloned(),
        }))
    }

    /// Sets `values`, the elements from `first` on of a segment's flat buffer.
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
            }
            Ok::<(), Infallible>(())
        });
    }
}

/// By segment: the random bits of moments that are rounded by chance, by tensor and index in the whole tensor; none
/// where moments are fp32.
pub(crate) fn noise(config: &Config, gpt: &Gpt, rank: Rank) -> Vec<Arc<[NoiseRun]>> {
    let seed = random::key_of_name(config.train.seed, "moments");
    let segment = |layout: &tensor_parallel::SegmentLayout| {
        let runs = |param: &tensor_parallel::Param| {
            let (stream, start) = (random::key_of_name(seed, &param.name), param.range.start);
            let run = move |run: tensor_parallel::Run| NoiseRun {
                flat: start + run.local.start..start + run.local.end,
                stream,
                global: run.global as u64,
            };
            param.runs(rank.tp, rank.tp_size).into_iter().map(run)
        };
        let rounded = config.offload.moments == Moments::Bf16;
        let params = layout.params.iter().filter(|_| rounded);
        let mut runs: Vec<NoiseRun> = params.flat_map(runs).collect();
        runs.sort_by_key(|run| run.flat.start);
        runs.into()
    };
    gpt.segments().iter().map(segment).collect()
}

/// States of a checkpoint as a rank's flat segments have them.
#[derive(Debug)]
pub(crate) struct Stored<'a> {
    from: Reader<'a>,
    /// By number of the tensor.
    runs: Runs<usize>,
}

impl<'a> Stored<'a> {
    pub(crate) fn new(from: &'a Checkpoint, gpt: &Gpt, rank: Rank) -> Self {
        let runs = Runs::new(gpt, (rank.tp, rank.tp_size), |number, _| number);
        Self { from: from.reader(), runs }
    }

    /// Sets `values`, the elements from `first` on of a state of a segment; padding is 0.
    pub(crate) fn fill(
        &self,
        StateAt { segment, state, first }: StateAt,
        values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        self.runs.fill(segment, first, values, |tensor, global, values| {
            self.from.read((*tensor, state), global..global + values.len(), values)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_str;
    use crate::layout::build::build;
    use std::path::Path;

    /// By (stream, global index): how often a rank of `tp_size` has it.
    fn bits(tp_size: usize) -> BTreeMap<(u64, u64), usize> {
        const RON: &str = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, vocab: 257), \
                            offload: (moments: Bf16), data: (train: \"x\"), train: (steps: 1))";
        let sets = [format!("parallel.tensor={tp_size}"), "device=Cpu".into()];
        let config = load_str(RON, "a.ron", Path::new("."), &sets).unwrap().config;
        let gpt = build(&config).gpt;
        let mut all = BTreeMap::new();
        for tp in 0..tp_size {
            let rank = Rank { tp, tp_size, dp: 0, dp_size: 1 };
            for run in noise(&config, &gpt, rank).iter().flat_map(|runs| runs.iter()) {
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
        // What every rank holds is rounded alike on each.
        assert!(four.values().all(|count| [1, 4].contains(count)));
    }
}
