//! Where training starts from: a rank reads the bytes of its own parameters out of a folder, block by block.

use super::FolderError;
use super::folder::{Folder, Place};
use device::Rank;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use tensor_parallel::{Gpt, SegmentLayout};

/// A run of a segment's flat buffer that comes from one tensor.
#[derive(Debug)]
struct Run {
    flat: Range<usize>,
    /// Index in the whole tensor of the run's first element.
    global: usize,
    /// Into `places`.
    tensor: usize,
}

/// The parameters of a rank, in a folder.
#[derive(Debug)]
pub(crate) struct Pretrained<'a> {
    folder: &'a Folder,
    places: Vec<Place>,
    /// By segment, sorted; what is in none is padding.
    runs: Vec<Vec<Run>>,
    /// The last tensor that stands there transposed: those are read whole.
    turned: Mutex<Option<(usize, Arc<Vec<f32>>)>>,
}

impl<'a> Pretrained<'a> {
    /// # Errors
    /// A tensor that is not there, or of another shape or type.
    pub(crate) fn new(folder: &'a Folder, gpt: &Gpt, rank: Rank) -> Result<Self, FolderError> {
        let mut numbers = 0..;
        let segment = |layout: &SegmentLayout| {
            let mut runs = Vec::new();
            for (param, tensor) in layout.params.iter().zip(&mut numbers) {
                for run in param.runs(rank.tp, rank.tp_size) {
                    let start = param.range.start + run.local.start;
                    runs.push(Run {
                        flat: start..start + run.local.len(),
                        global: run.global,
                        tensor,
                    });
                }
            }
            runs.sort_by_key(|run| run.flat.start);
            runs
        };
        let runs = gpt.segments().iter().map(segment).collect();
        Ok(Self { folder, places: folder.places(gpt)?, runs, turned: Mutex::default() })
    }

    /// Sets `values`, the elements from `first` on of a segment's flat buffer; padding is 0.
    ///
    /// # Errors
    /// What cannot be read, and numbers that are not finite.
    pub(crate) fn fill(
        &self,
        segment: usize,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), FolderError> {
        values.fill(0.0);
        let (runs, end) = (&self.runs[segment], first + values.len());
        let start = runs.partition_point(|run| run.flat.end <= first);
        for run in runs[start..].iter().take_while(|run| run.flat.start < end) {
            let (from, to) = (run.flat.start.max(first), run.flat.end.min(end));
            let global = run.global + from - run.flat.start;
            let values = &mut values[from - first..to - first];
            let place = &self.places[run.tensor];
            if place.turned {
                let whole = self.whole(run.tensor)?;
                values.copy_from_slice(&whole[global..global + values.len()]);
            } else {
                self.folder.read_part(place, global, values)?;
            }
        }
        Ok(())
    }

    /// A tensor that stands there transposed.
    fn whole(&self, tensor: usize) -> Result<Arc<Vec<f32>>, FolderError> {
        let mut last = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, values)) = last.as_ref().filter(|(number, _)| *number == tensor) {
            return Ok(Arc::clone(values));
        }
        // The one before makes room first.
        *last = None;
        let values = Arc::new(self.folder.read(&self.places[tensor])?);
        *last = Some((tensor, Arc::clone(&values)));
        Ok(values)
    }
}
