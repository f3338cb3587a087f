//! The starts of documents in samples of several documents.

use super::{Memory, slice};
use crate::Tensor;

/// For each row, the start of its document in the sample. It is 0 if a sample is one document.
#[derive(Clone, Copy)]
pub(super) struct Starts<'a> {
    starts: Option<&'a [i32]>,
    /// Position of the first row in its sample.
    first_row: usize,
    seq_len: usize,
}

impl<'a> Starts<'a> {
    /// Checks `starts` (rows) I32. Samples have `seq_len` rows; the first row is row `first_row` of
    /// all samples.
    pub(super) fn new(
        m: &'a impl Memory,
        starts: Option<Tensor>,
        first_row: usize,
        seq_len: usize,
    ) -> Result<Self, String> {
        let starts = starts.map(|starts| slice::<i32>(m, starts)).transpose()?;
        let all = Self { starts, first_row, seq_len };
        for (row, start) in starts.into_iter().flatten().enumerate() {
            let place = all.place(row);
            let starts_here = *start == place as i32;
            let goes_on = place > 0 && (row == 0 || all.of(row - 1) as i32 == *start);
            if !(starts_here || goes_on && (0..place as i32).contains(start)) {
                return Err(format!("row {place} of a sample in a document from row {start} on"));
            }
        }
        Ok(all)
    }

    fn place(self, row: usize) -> usize {
        (self.first_row + row) % self.seq_len
    }

    /// Start of a row's document in its sample.
    pub(super) fn of(self, row: usize) -> usize {
        self.starts.map_or(0, |starts| starts[row] as usize)
    }

    /// Position of a row in its document.
    pub(super) fn position(self, row: usize) -> usize {
        self.place(row) - self.of(row)
    }

    /// The rows below `rows` at `position` of their documents, in order.
    pub(super) fn rows_at(
        self,
        position: usize,
        rows: usize,
    ) -> impl Iterator<Item = usize> + Clone + use<'a> {
        let next = move |from| self.next_at(position, from, rows);
        std::iter::successors(next(0), move |row| next(row + 1))
    }

    fn next_at(self, position: usize, mut row: usize, rows: usize) -> Option<usize> {
        while row < rows {
            let here = self.position(row);
            if here == position {
                return Some(row);
            }
            row = if here < position {
                // A document that starts before this row reaches the position only after it.
                row + (position - here)
            } else {
                self.end_of_document(row).min(rows)
            };
        }
        None
    }

    /// The first row after a row's document.
    fn end_of_document(self, row: usize) -> usize {
        let end_of_sample = row + self.seq_len - self.place(row);
        let Some(starts) = self.starts else { return end_of_sample };
        let rest = &starts[row..end_of_sample.min(starts.len())];
        row + rest.partition_point(|start| *start == rest[0])
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, starts};
    use super::*;
    use crate::{Dtype, Op};

    #[test]
    fn rows_at_a_position_are_those_of_a_search() {
        let all = starts(12, &[5, 1, 6, 12, 1, 1, 2, 8, 9, 3]);
        for first_row in [0, 5, 12, 17, 20] {
            let slice = &all[first_row..];
            let of = |starts| Starts { starts, first_row, seq_len: 12 };
            for starts in [of(Some(slice)), of(None)] {
                for (position, rows) in (0..12).flat_map(|p| [(p, slice.len()), (p, 7)]) {
                    let found: Vec<usize> = starts.rows_at(position, rows).collect();
                    let is_there = |row: &usize| starts.position(*row) == position;
                    assert_eq!(found, (0..rows).filter(is_there).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn starts_that_are_no_documents_are_an_error() {
        let op = |starts: &[i32]| {
            let mut rig = Rig::new(1);
            let x = rig.out(Dtype::F32, (6, 3));
            let (table, starts) = (rig.out(Dtype::F32, (3, 3)), rig.put_ints(starts));
            rig.try_run(&Op::AddPositions { x, table, first_row: 0, starts: Some(starts) })
        };
        op(&[0, 0, 2, 0, 1, 2]).expect("documents");
        for wrong in [
            [0, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0],
            [0, 2, 2, 0, 0, 0],
            [-1, 0, 0, 0, 0, 0],
            [0, 0, 0, 1, 1, 1],
        ] {
            assert!(op(&wrong).expect_err("no documents").contains("of a sample"), "{wrong:?}");
        }
    }
}
