//! Fills samples into batches; the tokens are read from their files.

use super::mask::MaskBits;
use super::{Corpus, Document, Documents, Origin, ReadError};
use device::PADDING;
use std::ops::Range;

/// Bytes of a mask per read, on the stack: a step allocates no memory.
const BITS: usize = 1 << 10;

impl Corpus {
    /// Fills `inputs` (T) and `targets` (T), the next tokens, of the sample at `place` (from
    /// [`sample`](Self::sample) or [`shuffled`](Self::shuffled)). Targets that do not count are -1 in
    /// documents, and [`PADDING`] behind them.
    ///
    /// # Errors
    /// A file has changed since it was opened, or cannot be read.
    pub fn fill_train(
        &self,
        place: usize,
        inputs: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), ReadError> {
        self.retry_if_touched(|| match &self.documents {
            Some(documents) => self.fill_documents(documents, place, inputs, targets),
            None => self.fill(place, self.split, inputs, targets),
        })
    }

    /// Fills `inputs` (T) and `targets` (T) of an evaluation window. After the end of the
    /// validation part, so everywhere for `window >= num_eval_windows()`, inputs are 0 and targets
    /// [`PADDING`]: ignored.
    ///
    /// # Errors
    /// As for [`fill_train`](Self::fill_train).
    pub fn fill_eval(
        &self,
        window: usize,
        inputs: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), ReadError> {
        self.retry_if_touched(|| match &self.documents {
            Some(documents) => {
                let sample = documents.samples_to_train().saturating_add(window);
                self.fill_documents(documents, sample, inputs, targets)
            }
            None => {
                let start = self.split.saturating_add(window.saturating_mul(self.seq_len));
                self.fill(start, self.num_tokens(), inputs, targets)
            }
        })
    }

    /// Fills `starts` (T): for each token of the sample at `place`, the position in the sample at
    /// which its document starts. Padding is a document of its own.
    pub fn fill_starts(&self, place: usize, starts: &mut [i32]) {
        let mut at = 0;
        for document in self.documents.iter().flat_map(|d| d.of_sample(place).map(|i| d.tokens(i)))
        {
            let end = at + document.len() - 1;
            starts[at..end].fill(at as i32);
            at = end;
        }
        starts[at..].fill(at as i32);
    }

    /// Like [`fill_starts`](Self::fill_starts), for an evaluation window.
    pub fn fill_eval_starts(&self, window: usize, starts: &mut [i32]) {
        let first = self.documents.as_ref().map_or(0, Documents::samples_to_train);
        self.fill_starts(first.saturating_add(window), starts);
    }

    /// The documents of the sample at `place` of the training part, or its window, without padding:
    /// the tokens and which of them count. The last token is only a target.
    ///
    /// # Errors
    /// As for [`fill_train`](Self::fill_train).
    pub fn documents(&self, place: usize) -> Result<Vec<Document>, ReadError> {
        let whole = |tokens: Range<usize>| {
            let mut counted = vec![true; tokens.len()];
            counted[0] = false;
            let mut all = Vec::with_capacity(tokens.len());
            self.store.each(tokens, |_, token| all.push(token))?;
            Ok(Document { tokens: all, counted })
        };
        self.retry_if_touched(|| {
            let Some(documents) = &self.documents else {
                return Ok(vec![whole(place..place + self.seq_len + 1)?]);
            };
            let mut block = [0; BITS];
            let mut bits = MaskBits::new(&mut block);
            let document = |number| {
                let mut document = whole(documents.tokens(number))?;
                let counted = &mut document.counted;
                documents.not_counted(number, &mut bits, |token| counted[token] = false)?;
                Ok(document)
            };
            documents.of_sample(place).map(document).collect()
        })
    }

    /// File and place of each of [`documents`](Self::documents), if known; unknown for windows.
    pub fn origins(&self, place: usize) -> Vec<Option<Origin>> {
        self.documents.as_ref().map_or_else(|| vec![None], |documents| documents.origins(place))
    }

    /// Starts of documents in the window at `place`, according to the index of its file; the first
    /// is 0. Without an index, and for a sample of documents, the result is only 0.
    ///
    /// # Errors
    /// As for [`fill_train`](Self::fill_train).
    pub fn starts_in_window(&self, place: usize) -> Result<Vec<usize>, ReadError> {
        if self.indexes.is_empty() || self.documents.is_some() {
            return Ok(vec![0]);
        }
        self.retry_if_touched(|| {
            let mut starts = vec![0];
            for (segment, part) in self.store.parts(place..place + self.seq_len + 1) {
                let first = self.store.start(segment);
                // A file begins with a document.
                starts.push(part.start - place);
                let of_file = part.start - first..part.end - first;
                let ends = self.indexes[segment].ends_inside(&of_file)?;
                starts.extend(ends.into_iter().map(|end| first + end - place));
            }
            starts.dedup();
            Ok(starts)
        })
    }

    /// Fills the documents of a sample, then padding. A sample after the last one is only padding. In
    /// a document a target that does not count is -1.
    fn fill_documents(
        &self,
        documents: &Documents,
        sample: usize,
        mut inputs: &mut [i32],
        mut targets: &mut [i32],
    ) -> Result<(), ReadError> {
        let mut block = [0; BITS];
        let mut bits = MaskBits::new(&mut block);
        for document in documents.of_sample(sample) {
            let tokens = documents.tokens(document);
            let (own, of_inputs) = inputs.split_at_mut(tokens.len() - 1);
            let (own_targets, of_targets) = targets.split_at_mut(tokens.len() - 1);
            self.fill(tokens.start, tokens.end, own, own_targets)?;
            documents.not_counted(document, &mut bits, |token| {
                // The first token is not a target.
                if let Some(target) = token.checked_sub(1) {
                    own_targets[target] = -1;
                }
            })?;
            (inputs, targets) = (of_inputs, of_targets);
        }
        self.fill(0, 0, inputs, targets)
    }

    /// Fills pairs of tokens in `start..end`, then padding with the target [`PADDING`]. Tokens are
    /// below `vocab`, so they fit i32.
    fn fill(
        &self,
        start: usize,
        end: usize,
        inputs: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), ReadError> {
        let pairs = end.saturating_sub(start.saturating_add(1)).min(inputs.len());
        inputs[pairs..].fill(0);
        targets[pairs..].fill(PADDING);
        if pairs == 0 {
            return Ok(());
        }
        self.store.each(start..start + pairs + 1, |i, token| {
            if let Some(input) = inputs[..pairs].get_mut(i) {
                *input = token as i32;
            }
            if let Some(before) = i.checked_sub(1) {
                targets[before] = token as i32;
            }
        })
    }
}
