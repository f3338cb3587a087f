//! Initial weights: a function of the seed, the tensor's name and the element's index in the whole tensor, so
//! that every layout starts from the same model.

use crate::checkpoint::{Checkpoint, CheckpointError, Reader};
use crate::config::{Config, Moments};
use device::numerics::normals;
use device::{Rank, random};
use offload::NoiseRun;
use std::collections::BTreeMap;
use std::sync::Arc;
use tensor_parallel::{Gpt, Init};

/// Whole tensors by global name, row-major.
pub type Weights = BTreeMap<String, Arc<[f32]>>;

/// A run of a segment's flat buffer that comes from one tensor.
#[derive(Debug)]
struct Run {
    start: usize,
    end: usize,
    /// Index in the whole tensor of the run's first element.
    global: usize,
    stream: u64,
    init: Init,
    /// The whole tensor, where it is given.
    given: Option<Arc<[f32]>>,
}

/// Values of a tensor-parallel rank's flat segments.
#[derive(Debug)]
pub(crate) struct Initial {
    /// By segment, sorted; what is in none is padding.
    runs: Vec<Vec<Run>>,
}

impl Initial {
    pub(crate) fn new(config: &Config, gpt: &Gpt, tp: usize, given: Option<&Weights>) -> Self {
        let segment = |layout: &tensor_parallel::SegmentLayout| {
            let mut runs = Vec::new();
            for param in &layout.params {
                let stream = random::key_of_name(config.train.seed, &param.name);
                let given = given.and_then(|all| all.get(&param.name));
                for run in param.runs(tp, config.parallel.tensor) {
                    let start = param.range.start + run.local.start;
                    let end = start + run.local.len();
                    let (init, given) = (param.init, given.cloned());
                    runs.push(Run { start, end, global: run.global, stream, init, given });
                }
            }
            runs.sort_by_key(|run| run.start);
            runs
        };
        Self { runs: gpt.segments().iter().map(segment).collect() }
    }

    /// Sets `values`, the elements from `first` on of a segment's flat buffer.
    pub(crate) fn fill(&self, segment: usize, first: usize, values: &mut [f32]) {
        values.fill(0.0);
        let (runs, end) = (&self.runs[segment], first + values.len());
        let start = runs.partition_point(|run| run.end <= first);
        for run in runs[start..].iter().take_while(|run| run.start < end) {
            let (from, to) = (run.start.max(first), run.end.min(end));
            let global = run.global + from - run.start;
            let values = &mut values[from - first..to - first];
            match (&run.given, run.init) {
                (Some(given), _) => values.copy_from_slice(&given[global..global + to - from]),
                (None, Init::Constant(value)) => values.fill(value as f32),
                (None, Init::Normal(deviation)) => {
                    normals(run.stream, global as u64, deviation, values);
                }
            }
        }
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
    /// By segment: (first and last element, its index in the whole tensor, number of the tensor).
    runs: Vec<Vec<(std::ops::Range<usize>, usize, usize)>>,
}

impl<'a> Stored<'a> {
    pub(crate) fn new(from: &'a Checkpoint, gpt: &Gpt, rank: Rank) -> Self {
        let mut numbers = 0..;
        let segment = |layout: &tensor_parallel::SegmentLayout| {
            let mut runs = Vec::new();
            for (param, tensor) in layout.params.iter().zip(&mut numbers) {
                let flat = |run: tensor_parallel::Run| {
                    let start = param.range.start + run.local.start;
                    (start..start + run.local.len(), run.global, tensor)
                };
                runs.extend(param.runs(rank.tp, rank.tp_size).into_iter().map(flat));
            }
            runs.sort_by_key(|(flat, ..)| flat.start);
            runs
        };
        Self { from: from.reader(), runs: gpt.segments().iter().map(segment).collect() }
    }

    /// Sets `values`, the elements from `first` on of a state of a segment; padding is 0.
    pub(crate) fn fill(
        &self,
        (segment, state): (usize, usize),
        first: usize,
        values: &mut [f32],
    ) -> Result<(), CheckpointError> {
        values.fill(0.0);
        let (runs, end) = (&self.runs[segment], first + values.len());
        let start = runs.partition_point(|(flat, ..)| flat.end <= first);
        for (flat, global, tensor) in runs[start..].iter().take_while(|(f, ..)| f.start < end) {
            let (from, to) = (flat.start.max(first), flat.end.min(end));
            let wanted = global + from - flat.start..global + to - flat.start;
            self.from.read((*tensor, state), wanted, &mut values[from - first..to - first])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load_str;
    use crate::train::build::build;
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
