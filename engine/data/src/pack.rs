//! Packs whole documents into samples: best fit among some open samples, in one pass.
//!
//! A resumed run packs again, so a change of this rule changes the samples of existing runs.

use std::ops::Range;

/// Largest number of open samples.
const OPEN: usize = 256;

/// The documents of each sample.
#[derive(Clone, Debug, Default)]
pub(super) struct PackedSamples {
    /// The documents of all samples, in the order of the samples.
    documents: Vec<u32>,
    /// End of each sample in `documents`.
    ends: Vec<usize>,
}

/// A sample with free space.
struct OpenSample {
    documents: Vec<u32>,
    /// Number of targets that still fit.
    room: usize,
}

impl PackedSamples {
    /// Appends samples of at most `room` targets for a range of documents; `length` returns the
    /// targets of a document. A document goes into the sample that it fills best, and of equal
    /// samples into the oldest. If it fits into no sample, the fullest sample is closed and a new
    /// sample opened.
    pub(super) fn append(
        &mut self,
        documents: Range<usize>,
        room: usize,
        length: impl Fn(usize) -> usize,
    ) {
        let mut open: Vec<OpenSample> = Vec::with_capacity(OPEN);
        for document in documents {
            let (number, length) = (document as u32, length(document));
            assert!(length <= room, "a document of {length} targets is longer than a sample");
            let fits = open.iter_mut().filter(|sample| sample.room >= length);
            if let Some(sample) = fits.min_by_key(|sample| sample.room) {
                sample.documents.push(number);
                sample.room -= length;
                continue;
            }
            if open.len() == OPEN {
                let rooms = open.iter().map(|sample| sample.room).enumerate();
                let fullest = rooms.min_by_key(|(_, room)| *room).map_or(0, |(fullest, _)| fullest);
                self.close(open.remove(fullest));
            }
            open.push(OpenSample { documents: vec![number], room: room - length });
        }
        open.into_iter().for_each(|sample| self.close(sample));
    }

    fn close(&mut self, sample: OpenSample) {
        self.documents.extend(sample.documents);
        self.ends.push(self.documents.len());
    }

    /// Number of samples.
    pub(super) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// The documents of a sample.
    pub(super) fn of(&self, sample: usize) -> &[u32] {
        let start = sample.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.documents[start..self.ends[sample]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::random;

    fn packed(lengths: &[usize], room: usize) -> Vec<Vec<u32>> {
        let mut packed = PackedSamples::default();
        packed.append(0..lengths.len(), room, |i| lengths[i]);
        (0..packed.len()).map(|sample| packed.of(sample).to_vec()).collect()
    }

    #[test]
    fn a_document_goes_where_it_leaves_the_least_room() {
        assert_eq!(packed(&[6, 5, 4, 4, 2, 10], 10), [vec![0, 2], vec![1, 3], vec![4], vec![5]]);
        assert_eq!(packed(&[7, 8, 2, 3], 10), [vec![0, 3], vec![1, 2]]);
        assert_eq!(packed(&[5, 5], 5), [vec![0], vec![1]]);
        assert!(packed(&[], 5).is_empty());
    }

    #[test]
    fn every_document_is_in_one_sample_and_none_is_too_full() {
        for (seed, room) in [(1, 64), (2, 100), (3, 1000)] {
            let length = |i| 1 + random::below(seed, i, room as u64) as usize;
            let lengths: Vec<usize> = (0..5000).map(length).collect();
            let samples = packed(&lengths, room);
            let mut all = samples.concat();
            all.sort_unstable();
            assert_eq!(all, (0..5000).collect::<Vec<u32>>());
            let full =
                |sample: &Vec<u32>| sample.iter().map(|i| lengths[*i as usize]).sum::<usize>();
            assert!(samples.iter().all(|sample| (1..=room).contains(&full(sample))));
            assert!(samples.iter().all(|sample| sample.is_sorted()));
            // Evenly distributed lengths leave little free space.
            let least = lengths.iter().sum::<usize>().div_ceil(room);
            assert!(samples.len() * 100 <= least * 103, "{} samples for {least}", samples.len());
        }
    }
}
