//! The parameters of the whole model of a checkpoint: its own, and those of the folder of its frozen
//! parameters, into which its adapters are merged.

use super::FolderError;
use super::export_error::ExportError;
use super::weights::PretrainedWeights;
use crate::{Checkpoint, CheckpointError, TensorState};
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;
use std::collections::BTreeMap;
use tensor_parallel::{Decoder, FACTORS, Param, linears_of_factor};

/// The parameters of a model to export, without adapters.
#[derive(Debug)]
pub(super) struct ModelParameters<'a> {
    checkpoint: &'a Checkpoint,
    /// The parameters, in the order of the model.
    pub(super) params: Vec<&'a Param>,
    /// For each of them, its number in the checkpoint. `None`: it is frozen.
    trained: Vec<Option<usize>>,
    /// The folder of the frozen parameters.
    base: Option<&'a PretrainedWeights>,
    merged: Option<MergedAdapters>,
}

/// The adapters of a checkpoint, to merge them.
#[derive(Debug)]
struct MergedAdapters {
    /// Numbers of the factors in the checkpoint, by the name of their linear.
    factors: BTreeMap<String, [usize; 2]>,
    /// Factor of the adapters' outputs.
    scale: f64,
}

impl<'a> ModelParameters<'a> {
    /// The parameters of `checkpoint`, which has the model of `decoder`. A model with frozen parameters
    /// needs their folder, `base`.
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        decoder: &'a Decoder,
        base: Option<&'a PretrainedWeights>,
    ) -> Self {
        let params: Vec<&Param> =
            decoder.segments().iter().flat_map(|layout| layout.base_params()).collect();
        let all_trained = decoder.segments().iter().flat_map(|layout| &layout.params).enumerate();
        let by_name: BTreeMap<&str, usize> =
            all_trained.map(|(number, param)| (param.name.as_str(), number)).collect();
        let trained =
            params.iter().map(|param| by_name.get(param.name.as_str()).copied()).collect();
        let has_frozen = decoder.shape().has_frozen_params();
        assert_eq!(has_frozen, base.is_some(), "frozen parameters are in a folder");
        let merged = decoder.shape().adapters().map(|adapters| {
            let mut factors: BTreeMap<String, [usize; 2]> = BTreeMap::new();
            let trained = decoder.segments().iter().flat_map(|layout| &layout.params);
            for (number, param) in trained.enumerate() {
                for which in 0..FACTORS.len() {
                    for linear in linears_of_factor(&param.name, which) {
                        factors.entry(linear).or_default()[which] = number;
                    }
                }
            }
            MergedAdapters { factors, scale: adapters.scale }
        });
        Self { checkpoint, params, trained, base, merged }
    }

    /// Reads a whole parameter in the layout of onebox.
    pub(super) fn values(&self, number: usize) -> Result<Vec<f32>, ExportError> {
        let mut values = match (self.trained[number], self.base) {
            (Some(own), _) => read(self.checkpoint, own)?,
            (None, Some(base)) => base.whole(number)?,
            (None, None) => unreachable!("frozen parameters are in a folder"),
        };
        let Some(MergedAdapters { factors, scale }) = &self.merged else { return Ok(values) };
        let linear = self.params[number].name.strip_suffix(".weight");
        if let Some([a, b]) = linear.and_then(|linear| factors.get(linear)) {
            let columns = self.params[number].global.1;
            let [a, b] = [read(self.checkpoint, *a)?, read(self.checkpoint, *b)?];
            merge(&mut values, columns, [&a, &b], *scale);
        }
        Ok(values)
    }
}

/// Reads a whole tensor of a checkpoint.
pub(super) fn read(from: &Checkpoint, number: usize) -> Result<Vec<f32>, CheckpointError> {
    let elements = from.summary().tensors()[number].num_elements();
    let mut values = vec![0.0; elements];
    from.reader().read(TensorState::parameter(number), 0..elements, &mut values)?;
    Ok(values)
}

/// Computes w (n, k) += s b (n, r) a (r, k), with one rounding.
fn merge(w: &mut [f32], k: usize, [a, b]: [&[f32]; 2], s: f64) {
    let rank = a.len() / k;
    w.par_chunks_mut(k).enumerate().for_each(|(row, w)| {
        let b = &b[row * rank..(row + 1) * rank];
        for (column, w) in w.iter_mut().enumerate() {
            let product = b.iter().enumerate();
            let product = product.map(|(i, b)| f64::from(*b) * f64::from(a[i * k + column]));
            *w = (f64::from(*w) + s * product.sum::<f64>()) as f32;
        }
    });
}

impl PretrainedWeights {
    /// Reads a whole parameter, in the layout of onebox.
    pub(super) fn whole(&self, number: usize) -> Result<Vec<f32>, FolderError> {
        self.folder.read(&self.places[number])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merged_weight_is_the_weight_plus_the_scaled_product() {
        let (mut w, a, b) =
            ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, 0.0, 1.0, 1.0], [1.0, 2.0, 0.0, 3.0]);
        // Two rows of three; rank 2.
        merge(&mut w, 3, [&a, &b], 0.5);
        assert_eq!(w, [1.5, 3.0, 5.0, 4.0, 6.5, 7.5]);
    }
}
