//! Encodes runs of values for rank 0's process: place, length and values, little-endian.

use std::sync::{Mutex, PoisonError};

/// Encoded runs of a window, from all kernel threads of a rank.
#[derive(Default)]
pub(super) struct ValueRuns(Mutex<Vec<u8>>);

impl ValueRuns {
    /// Appends `values`, which belong at element `at` of the window. Always true.
    pub(super) fn take(&self, at: usize, values: &[f32]) -> bool {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.reserve(16 + 4 * values.len());
        [at, values.len()].iter().for_each(|number| bytes.extend((*number as u64).to_le_bytes()));
        values.iter().for_each(|x| bytes.extend(x.to_le_bytes()));
        true
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `work` with each run of `bytes`. False if `work` returned false.
    pub(super) fn each(mut bytes: &[u8], work: impl Fn(usize, &[f32]) -> bool) -> bool {
        let mut same = true;
        while let Some((head, rest)) = bytes.split_first_chunk::<16>() {
            let ([at, len], _) = head.as_chunks() else { unreachable!("16 bytes are two numbers") };
            let (at, len) = (u64::from_le_bytes(*at), u64::from_le_bytes(*len));
            let (values, rest) = rest.split_at(4 * len as usize);
            let (values, _) = values.as_chunks();
            let values: Vec<f32> = values.iter().map(|x| f32::from_le_bytes(*x)).collect();
            same &= work(at as usize, &values);
            bytes = rest;
        }
        same
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_arrive_as_they_were_taken() {
        let runs = ValueRuns::default();
        assert!(runs.take(7, &[1.0, -0.0]) && runs.take(0, &[]) && runs.take(9, &[f32::NAN]));
        let (bytes, seen) = (runs.into_bytes(), Mutex::new(Vec::new()));
        let note = |at: usize, values: &[f32]| {
            let bits: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
            seen.lock().unwrap().push((at, bits));
            at != 9
        };
        assert!(!ValueRuns::each(&bytes, note), "the last one said so");
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let all = vec![(7, bits(&[1.0, -0.0])), (0, Vec::new()), (9, bits(&[f32::NAN]))];
        assert_eq!(seen.into_inner().unwrap(), all);
    }
}
