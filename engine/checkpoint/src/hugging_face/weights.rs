//! Where training starts from: each rank reads the bytes of its own parameters out of a folder, block by block.

use super::FolderError;
use super::folder::{Folder, TensorPlace};

use device::Rank;
use layout::segment_runs::SegmentRuns;
use std::sync::{Arc, Mutex, PoisonError};
use tensor_parallel::Decoder;

/// The weights of a model, in a folder; opened and looked through once for all ranks.
#[derive(Debug)]
pub struct PretrainedWeights {
    folder: Folder,
    /// By number of the tensor.
    places: Vec<TensorPlace>,
}

impl PretrainedWeights {
    /// Those of `gpt`, in any layout.
    ///
    /// # Errors
    /// A tensor that is missing, of another shape or type, or of another model.
    pub fn new(folder: Folder, gpt: &Decoder) -> Result<Self, FolderError> {
        let places = folder.places(gpt)?;
        Ok(Self { folder, places })
    }

    /// Reads all of it once, so that what is no number is found before a run begins.
    ///
    /// # Errors
    /// A file that cannot be read, and the first tensor with a number that is not finite.
    pub fn check(&self) -> Result<(), FolderError> {
        self.places.iter().try_for_each(|place| self.folder.check(place))
    }

    /// The part of a rank of `gpt`.
    pub fn of_rank(&self, gpt: &Decoder, rank: Rank) -> RankWeights<'_> {
        let runs = SegmentRuns::new(gpt, (rank.tp, rank.tp_size), |number, _| number);
        RankWeights { from: self, runs, turned: Mutex::default() }
    }
}

/// The parameters of a rank.
#[derive(Debug)]
pub struct RankWeights<'a> {
    from: &'a PretrainedWeights,
    /// By number of the tensor.
    runs: SegmentRuns<usize>,
    /// The last tensor that stands there transposed: those are read whole.
    turned: Mutex<Option<(usize, Arc<Vec<f32>>)>>,
}

impl RankWeights<'_> {
    /// Sets `values`, the elements from `first` on of a segment's flat buffer; padding is 0.
    ///
    /// # Errors
    /// A file that cannot be read, and numbers that are not finite.
    pub fn fill(
        &self,
        segment: usize,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), FolderError> {
        let PretrainedWeights { folder, places } = self.from;
        self.runs.fill(segment, first, values, |tensor, global, values| {
            let place = &places[*tensor];
            if place.turned {
                let whole = self.whole(*tensor)?;
                values.copy_from_slice(&whole[global..global + values.len()]);
                return Ok(());
            }
            folder.read_part(place, global, values)
        })
    }

    /// A tensor that stands there transposed.
    fn whole(&self, tensor: usize) -> Result<Arc<Vec<f32>>, FolderError> {
        let mut last = self.turned.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, values)) = last.as_ref().filter(|(number, _)| *number == tensor) {
            return Ok(Arc::clone(values));
        }
        // The one before makes room first.
        *last = None;
        let values = Arc::new(self.from.folder.read(&self.from.places[tensor])?);
        *last = Some((tensor, Arc::clone(&values)));
        Ok(values)
    }
}
