//! Pretrained weights: each rank reads its own parameters from a folder, block by block.

use super::FolderError;
use super::folder::{Folder, TensorPlace};
use super::untrained::UntrainedTensors;
use crate::manifest::Hash;

use data::progress::Progress;
use device::Rank;
use layout::segment_runs::SegmentRuns;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use tensor_parallel::Decoder;

/// The weights of a model in a folder, opened and checked once for all ranks.
#[derive(Debug)]
pub struct PretrainedWeights {
    pub(super) folder: Folder,
    /// Place of each tensor, by its number.
    pub(super) places: Vec<TensorPlace>,
    /// Hash of the folder's tensors, once it is computed.
    hash: OnceLock<Hash>,
}

impl PretrainedWeights {
    /// The weights of `gpt`, for any layout of ranks.
    ///
    /// # Errors
    /// A tensor is missing, has another shape or type, or belongs to another model.
    pub fn new(folder: Folder, gpt: &Decoder) -> Result<Self, FolderError> {
        let places = folder.places(gpt)?;
        Ok(Self { folder, places, hash: OnceLock::new() })
    }

    /// Reads all weights once, so that numbers that are not finite are found before the run begins.
    ///
    /// # Errors
    /// A file that cannot be read, or the first tensor with a number that is not finite.
    pub fn check(&self, progress: &dyn Progress) -> Result<(), FolderError> {
        let reading = progress.begin("checking weights", self.places.iter().map(bytes).sum());
        self.places.iter().try_for_each(|place| {
            self.folder.check(place)?;
            reading.add(bytes(place));
            Ok(())
        })
    }

    /// Hash of the names, types, shapes and bytes of the model's tensors. Reads all of them in the
    /// first call.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub fn hash(&self, progress: &dyn Progress) -> Result<&Hash, FolderError> {
        if self.hash.get().is_none() {
            let hash = self.folder.hash(progress)?;
            return Ok(self.hash.get_or_init(|| hash));
        }
        Ok(self.known_hash().unwrap_or_else(|| unreachable!("it was computed")))
    }

    /// The [`hash`](Self::hash), if it was computed.
    pub fn known_hash(&self) -> Option<&Hash> {
        self.hash.get()
    }

    /// The tensors of the folder that are no part of the model, with their hashes; `None` if the
    /// folder has the model alone.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub fn untrained(
        &self,
        progress: &dyn Progress,
    ) -> Result<Option<UntrainedTensors>, FolderError> {
        self.folder.untrained(progress)
    }

    /// The content of the file that a run keeps about the form of the folder's experts; `None` if it
    /// needs none.
    pub fn experts_file(&self) -> Option<Vec<u8>> {
        self.folder.experts_file()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The parameters of `rank` in the layout of `gpt`, without adapters.
    pub fn of_rank(&self, gpt: &Decoder, rank: Rank) -> RankWeights<'_> {
        let runs = SegmentRuns::of_base(gpt, rank, |number, _| number);
        RankWeights { from: self, runs, last_transposed: Mutex::default() }
    }
}

/// Bytes of a tensor in fp32.
const fn bytes(place: &TensorPlace) -> u64 {
    4 * place.num_elements() as u64
}

/// The pretrained parameters of one rank.
#[derive(Debug)]
pub struct RankWeights<'a> {
    from: &'a PretrainedWeights,
    /// Runs of elements that the rank holds; each run has the number of its tensor.
    runs: SegmentRuns<usize>,
    /// The last parameter that was read whole, since its elements are no run of its tensor.
    last_transposed: Mutex<Option<(usize, Arc<Vec<f32>>)>>,
}

impl RankWeights<'_> {
    /// Fills `values` with the elements from `first` on of a segment's flat buffer; padding is 0.
    ///
    /// # Errors
    /// A file cannot be read, or a number is not finite.
    pub fn fill(
        &self,
        segment: usize,
        first: usize,
        values: &mut [f32],
    ) -> Result<(), FolderError> {
        let PretrainedWeights { folder, places, .. } = self.from;
        self.runs.fill(segment, first, values, |tensor, global, values| {
            let place = &places[*tensor];
            if place.is_read_whole() {
                let whole = self.whole(*tensor)?;
                values.copy_from_slice(&whole[global..global + values.len()]);
                return Ok(());
            }
            folder.read_part(place, global, values)
        })
    }

    /// Reads a whole parameter, whose elements are no run of its tensor.
    fn whole(&self, tensor: usize) -> Result<Arc<Vec<f32>>, FolderError> {
        let mut last = self.last_transposed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, values)) = last.as_ref().filter(|(number, _)| *number == tensor) {
            return Ok(Arc::clone(values));
        }
        // Free the previous tensor before the next is read.
        *last = None;
        let values = Arc::new(self.from.folder.read(&self.from.places[tensor])?);
        *last = Some((tensor, Arc::clone(&values)));
        Ok(values)
    }
}
