//! Documents that samples are made of: ranges of tokens, and which tokens count as targets.

use super::bad_rows::BadRows;
use super::identity::TokenRanges;
use super::mask::{self, Mask, MaskBits};
use super::origins::{Origin, Origins, RowLocation};
use super::pack::PackedSamples;
use super::store::ReadError;
use std::ops::Range;
use xxhash_rust::xxh3::Xxh3Default;

/// Treatment of a document with more tokens than fit into a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LongDocument {
    /// The document is divided into documents of at most a sample's length. Each begins with the
    /// last token of the previous document, so that every target counts once.
    Divided,
    /// The first tokens are used, the rest is dropped.
    Cut,
    /// The document is left out.
    LeftOut,
}

/// Size of the documents that fit into a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleCapacity {
    /// Tokens of the longest document that fits.
    pub(super) most: usize,
    pub(super) long: LongDocument,
}

impl SampleCapacity {
    /// A capacity for samples of `seq_len` targets. Longer documents are cut with `truncate`, else
    /// divided with `divides`, else left out.
    pub(super) const fn new(seq_len: usize, truncate: bool, divides: bool) -> Self {
        let long = match (truncate, divides) {
            (true, _) => LongDocument::Cut,
            (false, true) => LongDocument::Divided,
            (false, false) => LongDocument::LeftOut,
        };
        // The last token of a document is only a target.
        Self { most: seq_len + 1, long }
    }

    /// Number of tokens used of a document of `tokens` tokens; `None` if the document is left out.
    pub(super) fn taken(&self, tokens: usize) -> Option<usize> {
        match self.long {
            _ if tokens <= self.most => Some(tokens),
            LongDocument::Divided => Some(tokens),
            LongDocument::Cut => Some(self.most),
            LongDocument::LeftOut => None,
        }
    }

    /// Counts a document of `tokens` tokens in `bad_rows` if it is too long.
    pub(super) fn note(&self, tokens: usize, at: RowLocation<'_>, bad_rows: &mut BadRows) {
        match self.long {
            _ if tokens <= self.most => {}
            LongDocument::Divided => bad_rows.divided += 1,
            LongDocument::Cut => bad_rows.cut += 1,
            LongDocument::LeftOut => bad_rows.add_long(at, tokens),
        }
    }
}

/// The tokens that count as targets.
#[derive(Debug)]
enum Targets {
    /// All tokens but the first of each document.
    All,
    /// A flag for each token. The first token of a document never counts.
    Some(Vec<bool>),
    /// The tokens that the masks next to the token files mark.
    InFiles(Vec<Mask>),
}

/// Bytes of a mask in memory while all of it is checked.
const BLOCK: usize = 64 << 10;

/// Documents that become samples, alone or several in a sample.
#[derive(Debug)]
pub(super) struct Documents {
    pub(super) room: SampleCapacity,
    /// First token of each document.
    starts: Vec<usize>,
    /// Number of tokens of each document.
    lengths: Vec<u32>,
    targets: Targets,
    /// Number of targets of each document, unless all tokens count.
    counts: Vec<u32>,
    origins: Origins,
    /// Number of training documents, which come first.
    pub(super) split: usize,
    /// Packed samples and the number of training samples among them; `None` without packing.
    packed: Option<(PackedSamples, usize)>,
}

impl Documents {
    /// No documents yet; all tokens but the first of each will count.
    pub(super) fn that_count(room: SampleCapacity) -> Self {
        Self::new(room, Targets::All)
    }

    /// No documents yet; each will come with its own flags.
    pub(super) fn that_say(room: SampleCapacity) -> Self {
        Self::new(room, Targets::Some(Vec::new()))
    }

    fn new(room: SampleCapacity, targets: Targets) -> Self {
        Self {
            room,
            starts: Vec::new(),
            lengths: Vec::new(),
            targets,
            counts: Vec::new(),
            origins: Origins::default(),
            split: 0,
            packed: None,
        }
    }

    /// Adds the document with these tokens. All tokens count as targets.
    pub(super) fn push(&mut self, tokens: Range<usize>) {
        assert!(matches!(self.targets, Targets::All), "it says what counts");
        self.push_parts(tokens);
    }

    /// Adds a document after the existing tokens, with a flag for each of its tokens.
    pub(super) fn push_counted(&mut self, document: &[bool]) {
        let Targets::Some(counted) = &mut self.targets else { unreachable!("all tokens count") };
        let before = counted.len();
        counted.extend(document);
        for part in self.push_parts(before..before + document.len()) {
            let (start, length) = (self.starts[part] - before, self.lengths[part] as usize);
            let counts = document[start + 1..start + length].iter().filter(|counts| **counts);
            self.counts.push(counts.count() as u32);
        }
    }

    /// Switches to masks: each further document comes with the number of its targets, and each file
    /// with a mask. Long documents are not divided then, since an answer without its question is
    /// useless for training.
    pub(super) fn say_in_files(&mut self) {
        assert!(self.len() == 0, "documents are there already");
        self.targets = Targets::InFiles(Vec::new());
        if self.room.long == LongDocument::Divided {
            self.room.long = LongDocument::LeftOut;
        }
    }

    /// Whether masks in files say which tokens count.
    pub(super) const fn are_in_files(&self) -> bool {
        matches!(self.targets, Targets::InFiles(_))
    }

    /// The masks; empty without mask files.
    pub(super) fn masks(&self) -> &[Mask] {
        match &self.targets {
            Targets::InFiles(masks) => masks,
            Targets::All | Targets::Some(_) => &[],
        }
    }

    /// Adds the document with these tokens; its mask counts `count` of them.
    pub(super) fn push_masked(&mut self, tokens: Range<usize>, count: u32) {
        assert!(self.are_in_files(), "a mask says it");
        let parts = self.push_parts(tokens);
        assert!(parts.len() <= 1, "it is not divided");
        self.counts.extend(parts.map(|_| count));
    }

    /// Adds the mask of the next file.
    pub(super) fn push_mask(&mut self, mask: Mask) {
        let Targets::InFiles(masks) = &mut self.targets else { unreachable!("no mask says it") };
        masks.push(mask);
    }

    /// Adds a document, divided if it is too long, and returns the numbers of its parts.
    fn push_parts(&mut self, tokens: Range<usize>) -> Range<usize> {
        let before = self.len();
        // The last token of a part is the first of the next.
        for start in (tokens.start..tokens.end.saturating_sub(1)).step_by(self.room.most - 1) {
            self.starts.push(start);
            self.lengths.push(self.room.most.min(tokens.end - start) as u32);
        }
        before..self.len()
    }

    pub(super) const fn len(&self) -> usize {
        self.starts.len()
    }

    /// Declares the first `to_train` documents as training documents. `packs` packs documents into
    /// samples, separately for training and validation.
    pub(super) fn hold_out(&mut self, to_train: usize, packs: bool) {
        self.split = to_train;
        if !packs {
            return;
        }
        assert!(u32::try_from(self.len()).is_ok(), "documents have numbers of 32 bits");
        let mut packed = PackedSamples::default();
        // The last token of a document is only a target.
        let (length, room) =
            (|document: usize| self.lengths[document] as usize - 1, self.room.most - 1);
        packed.append(0..self.split, room, length);
        let samples = packed.len();
        packed.append(self.split..self.len(), room, length);
        self.packed = Some((packed, samples));
    }

    /// Records the origin of the documents from number `before` on.
    pub(super) fn came_from(&mut self, before: usize, at: RowLocation<'_>) {
        (before..self.len()).for_each(|document| self.origins.note(document, at));
    }

    /// The origins of the documents of a sample, if known.
    pub(super) fn origins(&self, sample: usize) -> Vec<Option<Origin>> {
        self.of_sample(sample).map(|document| self.origins.of(document)).collect()
    }

    /// The cut nearest to `at`, if any, that splits no divided document and has some on both sides.
    pub(super) fn whole_cut(&self, at: usize) -> Option<usize> {
        let continues = |next: usize| self.starts[next] < self.tokens(next - 1).end;
        let before = (1..=at.min(self.len() - 1)).rev().find(|next| !continues(*next));
        let after = (at.max(1)..self.len()).find(|next| !continues(*next));
        let far = |cut: &usize| cut.abs_diff(at);
        before.into_iter().chain(after).min_by_key(far)
    }

    /// Whether samples hold several documents.
    pub(super) const fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Number of samples.
    pub(super) fn samples(&self) -> usize {
        self.packed.as_ref().map_or(self.len(), |(packed, _)| packed.len())
    }

    /// Number of training samples.
    pub(super) fn samples_to_train(&self) -> usize {
        self.packed.as_ref().map_or(self.split, |(_, to_train)| *to_train)
    }

    /// The documents of a sample, in order; empty after the last sample.
    pub(super) fn of_sample(&self, sample: usize) -> impl Iterator<Item = usize> {
        let there = sample < self.samples();
        let packed = self.packed.as_ref().filter(|_| there).map(|(packed, _)| packed.of(sample));
        let alone = (there && packed.is_none()).then_some(sample);
        packed.into_iter().flatten().map(|document| *document as usize).chain(alone)
    }

    /// The tokens of a document.
    pub(super) fn tokens(&self, document: usize) -> Range<usize> {
        let start = self.starts[document];
        start..start + self.lengths[document] as usize
    }

    /// Tokens of all documents; a token that ends a document and begins the next counts twice.
    pub(super) fn num_tokens(&self) -> usize {
        self.lengths.iter().map(|length| *length as usize).sum()
    }

    /// Calls `each` with the index within the document of each token that is not a target.
    ///
    /// # Errors
    /// A mask cannot be read.
    pub(super) fn not_counted(
        &self,
        document: usize,
        bits: &mut MaskBits<'_>,
        mut each: impl FnMut(usize),
    ) -> Result<(), ReadError> {
        each(0);
        let Range { start, end } = self.tokens(document);
        match &self.targets {
            Targets::All => {}
            Targets::Some(counted) => {
                let own = &counted[start..end];
                (1..own.len()).filter(|i| !own[*i]).for_each(each);
            }
            Targets::InFiles(masks) => {
                mask::not_counted(masks, start + 1..end, bits, |i| each(1 + i))?;
            }
        }
        Ok(())
    }

    /// Number of targets of `samples`.
    pub(super) fn targets(&self, samples: Range<usize>) -> u64 {
        let of = |document: usize| match &self.targets {
            Targets::All => self.lengths[document] - 1,
            Targets::Some(_) | Targets::InFiles(_) => self.counts[document],
        };
        let of = |sample| self.of_sample(sample).map(|document| u64::from(of(document)));
        samples.flat_map(of).sum()
    }

    /// Number of documents of a sample and of places filled; a document's last token is only a
    /// target.
    pub(super) fn held(&self, sample: usize) -> (u64, u64) {
        let filled = |document: usize| u64::from(self.lengths[document]) - 1;
        self.of_sample(sample).fold((0, 0), |(n, all), document| (n + 1, all + filled(document)))
    }

    /// Token ranges of the training documents and of the validation documents.
    pub(super) fn parts(&self) -> [TokenRanges; 2] {
        [0..self.split, self.split..self.len()].map(|part| {
            let mut pieces = TokenRanges::default();
            part.for_each(|document| pieces.push(self.tokens(document)));
            pieces
        })
    }

    /// For each part, a hash of the ends of its documents and of the tokens that count.
    ///
    /// # Errors
    /// A mask cannot be read, or contradicts itself.
    pub(super) fn hashes(&self) -> Result<[u128; 2], ReadError> {
        let validation = self.hash(self.split..self.len());
        Ok([self.hash(0..self.split)?, validation?])
    }

    fn hash(&self, part: Range<usize>) -> Result<u128, ReadError> {
        let (mut hash, mut end) = (Xxh3Default::new(), 0);
        for document in part.clone() {
            end += u64::from(self.lengths[document]);
            hash.update(&end.to_le_bytes());
        }
        let (mut counted, mut block) = (vec![0; self.room.most], vec![0; BLOCK]);
        let mut bits = MaskBits::new(&mut block);
        for document in part {
            let counted = &mut counted[..self.lengths[document] as usize];
            counted.fill(1);
            self.not_counted(document, &mut bits, |token| counted[token] = 0)?;
            hash.update(counted);
            if let Targets::InFiles(masks) = &self.targets {
                let found: u32 = counted.iter().map(|counts| u32::from(*counts)).sum();
                let (at, count) = (self.starts[document], self.counts[document]);
                if found != count {
                    return Err(mask::contradiction(masks, at, found, count));
                }
            }
        }
        Ok(hash.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_leaves_documents_whole_and_both_sides_one() {
        let mut documents = Documents::that_count(SampleCapacity::new(4, false, true));
        // The documents have 1, 5 and 1 parts.
        [0..3, 3..24, 24..27].into_iter().for_each(|tokens| documents.push(tokens));
        assert_eq!(documents.len(), 7);
        let cuts: Vec<_> = (0..=7).map(|at| documents.whole_cut(at)).collect();
        assert_eq!(cuts, [1, 1, 1, 1, 6, 6, 6, 6].map(Some));
        let mut one = Documents::that_count(SampleCapacity::new(4, false, true));
        one.push(0..24);
        assert_eq!(one.whole_cut(3), None);
    }
}
