//! Maps the elements of a rank's flat segments to elements of whole tensors.

use device::Rank;
use std::ops::Range;
use tensor_parallel::{Decoder, Param, SegmentLayout};

/// Runs of flat elements that are contiguous in their whole tensors, too. Elements outside of all
/// runs are padding.
#[derive(Debug)]
pub struct SegmentRuns<T> {
    /// Runs of each segment, sorted by place in the segment.
    pub by_segment: Vec<Vec<SegmentRun<T>>>,
}

/// A run of flat elements.
#[derive(Debug)]
pub struct SegmentRun<T> {
    /// Range of the run's elements in the segment.
    pub flat: Range<usize>,
    /// Index of the run's first element in the whole tensor.
    pub global: usize,
    /// Source of the run's values.
    pub source: T,
}

impl<T: Clone> SegmentRuns<T> {
    /// Runs of the trained parameters of `rank`. `source` returns the source of
    /// a parameter's values. Its first argument is the number of the parameter over all segments.
    pub fn new(decoder: &Decoder, rank: Rank, source: impl FnMut(usize, &Param) -> T) -> Self {
        Self::of(decoder, rank, |layout| layout.params.iter().collect(), source)
    }

    /// As [`new`](Self::new), for all parameters, also frozen ones.
    pub fn of_all(decoder: &Decoder, rank: Rank, source: impl FnMut(usize, &Param) -> T) -> Self {
        Self::of(decoder, rank, |layout| layout.all_params().collect(), source)
    }

    /// As [`new`](Self::new), for all parameters of the model itself, without adapters.
    pub fn of_base(decoder: &Decoder, rank: Rank, source: impl FnMut(usize, &Param) -> T) -> Self {
        Self::of(decoder, rank, |layout| layout.base_params().collect(), source)
    }

    fn of(
        decoder: &Decoder,
        Rank { tp, tp_size, .. }: Rank,
        params: impl Fn(&SegmentLayout) -> Vec<&Param>,
        mut source: impl FnMut(usize, &Param) -> T,
    ) -> Self {
        let mut numbers = 0..;
        let by_segment = decoder.segments().iter().map(|layout| {
            let mut runs = Vec::new();
            for (param, number) in params(layout).into_iter().zip(&mut numbers) {
                let (source, start) = (source(number, param), param.range.start);
                runs.extend(param.runs(tp, tp_size).into_iter().map(|run| SegmentRun {
                    flat: start + run.local.start..start + run.local.end,
                    global: run.global,
                    source: source.clone(),
                }));
            }
            runs.sort_by_key(|run| run.flat.start);
            runs
        });
        Self { by_segment: by_segment.collect() }
    }

    /// Sets `values`, the elements of a segment's flat buffer from element `first` on. Padding
    /// becomes 0. All other values are set by `fill` (source, index in the whole tensor of the
    /// first value, values).
    pub fn fill<E>(
        &self,
        segment: usize,
        first: usize,
        values: &mut [f32],
        mut fill: impl FnMut(&T, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        values.fill(0.0);
        let (runs, end) = (&self.by_segment[segment], first + values.len());
        let start = runs.partition_point(|run| run.flat.end <= first);
        for run in runs[start..].iter().take_while(|run| run.flat.start < end) {
            let (from, to) = (run.flat.start.max(first), run.flat.end.min(end));
            let global = run.global + from - run.flat.start;
            fill(&run.source, global, &mut values[from - first..to - first])?;
        }
        Ok(())
    }
}
