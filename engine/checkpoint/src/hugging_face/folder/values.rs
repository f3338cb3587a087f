//! Numbers of a folder's tensors.

use super::super::tensors::widen;
use super::super::{FolderError, tensor_codes, transposed};
use super::{AT_ONCE, Folder, ForeignTensor, TensorPlace, cut_off};
use rayon::iter::{
    IndexedParallelIterator, IntoParallelIterator, IntoParallelRefIterator, ParallelIterator,
};
use rayon::slice::ParallelSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Elements that a thread checks per task.
const CHECKED: usize = 1 << 18;

impl Folder {
    /// Reads bytes of a tensor from its byte `first` on.
    pub(in crate::hugging_face) fn read_bytes(
        &self,
        foreign: &ForeignTensor,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), FolderError> {
        let (path, file) = &self.files[foreign.file];
        let read = file.read_exact_at(bytes, foreign.entry.at + first as u64);
        read.map_err(|e| cut_off(path, e))
    }

    /// Reads elements of a tensor from element `first` on, in the order of the file.
    fn read_elements(
        &self,
        foreign: &ForeignTensor,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FolderError> {
        let each = foreign.entry.width() as usize;
        let mut bytes = vec![0; out.len() * each];
        self.read_bytes(foreign, first * each, &mut bytes)?;
        widen(&foreign.entry.dtype, &bytes, out);
        Ok(())
    }

    /// Reads the numbers of codes and scales from number `first` on.
    fn read_codes(
        &self,
        [codes, scales]: [&ForeignTensor; 2],
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FolderError> {
        let read = |of: &ForeignTensor, range: Range<usize>| {
            let mut bytes = vec![0; range.len()];
            self.read_bytes(of, range.start, &mut bytes).map(|()| bytes)
        };
        let [of_codes, of_scales] = tensor_codes::bytes(&(first..first + out.len()));
        tensor_codes::decode(first, &read(codes, of_codes)?, &read(scales, of_scales)?, out);
        Ok(())
    }

    /// Reads a part of a parameter that is not stored transposed, from element `first` on.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub(in crate::hugging_face) fn read_part(
        &self,
        place: &TensorPlace,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FolderError> {
        self.read_runs(place, first, out)?;
        self.check_finite(place, out)
    }

    /// Reads elements of a parameter from element `first` on, in the order of the file.
    fn read_runs(
        &self,
        place: &TensorPlace,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FolderError> {
        let (end, mut left) = (first + out.len(), out);
        for (at, count) in place.elements(first, end) {
            let (part, rest) = left.split_at_mut(count);
            self.read_elements(&place.foreign, at, part)?;
            left = rest;
        }
        Ok(())
    }

    fn check_finite(&self, place: &TensorPlace, values: &[f32]) -> Result<(), FolderError> {
        let Some(x) = values.par_iter().with_min_len(1 << 14).find_first(|x| !x.is_finite()) else {
            return Ok(());
        };
        let of_expert = place.expert.map_or_else(String::new, |n| format!(" in expert {n}"));
        let why = format!("`{}` has a {x}{of_expert}", place.foreign.entry.name);
        Err(self.refused(&place.foreign, why))
    }

    /// Checks that a parameter is readable and finite, without keeping its values.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub(in crate::hugging_face) fn check(&self, place: &TensorPlace) -> Result<(), FolderError> {
        if place.is_read_whole() && !place.transposed {
            return self.read(place).map(drop);
        }
        let all = place.num_elements();
        let parts = (0..all.div_ceil(CHECKED)).into_par_iter().map(|i| i * CHECKED);
        parts
            .map(|first| self.read_part(place, first, &mut vec![0.0; CHECKED.min(all - first)]))
            .reduce(|| Ok(()), Result::and)
    }

    /// Reads a whole parameter, (rows, columns) row-major, on all cores.
    ///
    /// # Errors
    /// A file cannot be read, or a number is not finite.
    pub(in crate::hugging_face) fn read(
        &self,
        place: &TensorPlace,
    ) -> Result<Vec<f32>, FolderError> {
        let (rows, columns) = place.shape;
        let run = place.steps.map_or(rows * columns, |steps| steps.run(place.shape));
        let mut values = vec![0.0; run];
        let parts = values.par_chunks_mut(AT_ONCE / 4).enumerate();
        let read = |(i, part): (usize, &mut [f32])| {
            let offset = i * (AT_ONCE / 4);
            match (&place.scales, place.steps) {
                (Some(scales), _) => {
                    self.read_codes([&place.foreign, scales], place.first + offset, part)
                }
                (None, Some(_)) => self.read_elements(&place.foreign, place.first + offset, part),
                (None, None) => self.read_runs(place, offset, part),
            }
        };
        parts.try_for_each(read)?;
        if let Some(steps) = place.steps {
            values = steps.pick(&values, place.shape);
        }
        self.check_finite(place, &values)?;
        Ok(if place.transposed { transposed(&values, (columns, rows)) } else { values })
    }
}
