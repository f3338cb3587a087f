//! The data of a run: corpora that take turns by their weights, and corpora that are held out, each with a loss of its own.
//!
//! Invariant: sample i of step k is a function of (seed, k, i) only, never of rank or layout, so a resumed or re-sharded run
//! needs no replay.

use super::problem::DataError;
use super::turns::Turns;
use super::{Corpus, Document, Identity, Origin, Unread, behind, warn_of_overlap};
use crate::config::{DataFormat, DataOrder, Source};
use crate::files::shown::Shown;
use device::random;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Word that keys the order of each corpus but the first under the seed of a run.
const OF_CORPUS: u64 = 0x636f_7270;
/// Bits of a place that say where it is in its corpus. Those above are the number of the corpus.
const AT: u32 = 48;

/// What a run trains on, and what it is evaluated on.
#[derive(Debug)]
pub struct Dataset {
    corpora: Vec<Named>,
    /// How many of them are to train; the others are held out.
    to_train: usize,
    turns: Turns,
}

/// A corpus with its name.
#[derive(Debug)]
struct Named {
    name: String,
    corpus: Corpus,
}

impl From<Corpus> for Dataset {
    /// One corpus that has both parts.
    fn from(corpus: Corpus) -> Self {
        let corpora = vec![Named { name: String::new(), corpus }];
        Self { corpora, to_train: 1, turns: Turns::new(&[1.0]) }
    }
}

impl Dataset {
    /// [`Corpus::open`] of one corpus.
    ///
    /// # Errors
    /// As there.
    pub fn open(
        train: &str,
        validation: Option<&str>,
        format: DataFormat,
        validation_fraction: f32,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        let size = (vocab, seq_len);
        Corpus::open(train, validation, format, validation_fraction, size.0, size.1).map(Self::from)
    }

    /// [`Corpus::of_documents`], which are one corpus.
    ///
    /// # Panics
    /// As there.
    pub fn of_documents(train: &[Document], held_out: &[Document], size: (usize, bool)) -> Self {
        Corpus::of_documents(train, held_out, size).into()
    }

    /// No tokens: for a step that is counted, not run.
    pub(crate) fn none(seq_len: usize) -> Self {
        Corpus::none(seq_len).into()
    }

    /// Bytes without meaning, a window of them held out: for a step that is timed.
    pub(crate) fn noise(seq_len: usize) -> Self {
        Corpus::noise(seq_len).into()
    }

    /// Corpora to train, with the weights of their sources; and those that are held out, or none where each of the others has
    /// a held-out part of its own.
    ///
    /// # Panics
    /// If there is nothing to train, or a corpus without its source.
    pub(crate) fn of_corpora(
        to_train: (Vec<Corpus>, &[Source]),
        held_out: (Vec<Corpus>, &[Source]),
    ) -> Self {
        let weights: Vec<f32> = to_train.1.iter().map(|source| source.weight).collect();
        let count = to_train.0.len();
        warn_of_files(&to_train.0, &held_out.0);
        let named = |(corpora, sources): (Vec<Corpus>, &[Source])| -> Vec<Named> {
            assert!(corpora.len() == sources.len(), "a corpus has a source");
            let named = corpora.into_iter().zip(names(sources));
            named.map(|(corpus, name)| Named { name, corpus }).collect()
        };
        let mut corpora = named(to_train);
        corpora.extend(named(held_out));
        Self { corpora, to_train: count, turns: Turns::new(&weights) }
    }

    fn trained(&self) -> &[Named] {
        &self.corpora[..self.to_train]
    }

    /// The held-out corpora: those that are nothing else, or the held-out parts of all.
    fn held_out(&self) -> &[Named] {
        match &self.corpora[self.to_train..] {
            [] => &self.corpora,
            apart => apart,
        }
    }

    /// The corpus of a place, and the place in it.
    fn find(&self, place: usize) -> (&Corpus, usize) {
        (&self.corpora[place >> AT].corpus, place & ((1 << AT) - 1))
    }

    /// The place of sample `index` of the global batch of `step`, by chance: see [`Corpus::sample`]. Of the first corpus.
    pub fn sample(&self, seed: u64, step: u64, index: u64) -> usize {
        self.corpora[0].corpus.sample(seed, step, index)
    }

    /// The place of sample `number` of a run of the first corpus alone, if each epoch takes every sample once.
    pub fn shuffled(&self, seed: u64, number: u64) -> usize {
        self.corpora[0].corpus.shuffled(seed, number)
    }

    /// The place of sample `number` of a run, counted from 0 over all its steps of `per_step` samples, in this order.
    pub(crate) fn place(
        &self,
        order: DataOrder,
        seed: u64,
        (number, per_step): (u64, u64),
    ) -> usize {
        let (index, of_corpus) = self.turns.of(number);
        let key = |index| random::key(random::key(seed, OF_CORPUS), index);
        let seed = if index == 0 { seed } else { key(index as u64) };
        let number = if order == DataOrder::Random { number } else { of_corpus };
        let at = self.corpora[index].corpus.place(order, seed, (number, per_step));
        assert!(at >> AT == 0, "a corpus of {at} tokens");
        index << AT | at
    }

    /// How many samples all corpora have to train.
    pub fn num_train_samples(&self) -> usize {
        self.trained().iter().map(|named| named.corpus.num_train_samples()).sum()
    }

    /// By corpus: its name, its samples, and how many of so many samples of a run are of it.
    pub(crate) fn shares(&self, samples: f64) -> impl Iterator<Item = (&str, usize, f64)> {
        self.trained().iter().enumerate().map(move |(index, Named { name, corpus })| {
            (name.as_str(), corpus.num_train_samples(), samples * self.turns.share(index))
        })
    }

    /// [`Corpus::fill_train`] of the sample at `place`.
    ///
    /// # Errors
    /// As there.
    pub fn fill_train(
        &self,
        place: usize,
        inputs: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), Unread> {
        let (corpus, at) = self.find(place);
        corpus.fill_train(at, inputs, targets)
    }

    /// [`Corpus::fill_starts`] of the sample at `place`.
    pub(crate) fn fill_starts(&self, place: usize, starts: &mut [i32]) {
        let (corpus, at) = self.find(place);
        corpus.fill_starts(at, starts);
    }

    /// [`Corpus::targets`] of the sample at `place`.
    pub fn targets(&self, place: usize) -> u64 {
        let (corpus, at) = self.find(place);
        corpus.targets(at)
    }

    /// How many documents the sample at `place` holds, and how many of its places are no padding; of windows nothing.
    pub(crate) fn held(&self, place: usize) -> Option<(u64, u64)> {
        let (corpus, at) = self.find(place);
        corpus.held(at)
    }

    /// [`Corpus::documents`] of the sample at `place`.
    ///
    /// # Errors
    /// As there.
    pub fn documents(&self, place: usize) -> Result<Vec<Document>, Unread> {
        let (corpus, at) = self.find(place);
        corpus.documents(at)
    }

    /// [`Corpus::origins`] of the sample at `place`.
    pub(crate) fn origins(&self, place: usize) -> Vec<Option<Origin>> {
        let (corpus, at) = self.find(place);
        corpus.origins(at)
    }

    /// [`Corpus::starts_in_window`] of the sample at `place`.
    ///
    /// # Errors
    /// As there.
    pub fn starts_in_window(&self, place: usize) -> Result<Vec<usize>, Unread> {
        let (corpus, at) = self.find(place);
        corpus.starts_in_window(at)
    }

    /// The name of the corpus of the sample at `place`, where there are several to train.
    pub(crate) fn name(&self, place: usize) -> Option<&str> {
        (self.to_train > 1).then(|| self.corpora[place >> AT].name.as_str())
    }

    /// Whether it is told of in several lines.
    pub(crate) const fn is_several(&self) -> bool {
        self.corpora.len() > 1
    }

    /// Whether samples differ in how many targets count.
    pub(crate) fn is_uneven(&self) -> bool {
        self.trained().iter().any(|named| named.corpus.is_uneven())
    }

    /// Whether a sample may hold several documents.
    pub(crate) fn is_packed(&self) -> bool {
        self.trained().iter().any(|named| named.corpus.is_packed())
    }

    /// Whether files say of each token whether it counts, as those of prepared chats do.
    pub(crate) fn has_masks(&self) -> bool {
        let masked = |corpus: &Corpus| corpus.documents.as_ref().is_some_and(|d| d.are_in_files());
        self.trained().iter().any(|named| masked(&named.corpus))
    }

    /// The held-out corpora with their names, each of which has a loss of its own.
    pub(crate) fn evaluations(&self) -> impl Iterator<Item = (&str, &Corpus)> {
        self.held_out().iter().map(|named| (named.name.as_str(), &named.corpus))
    }

    /// A held-out corpus.
    pub(crate) fn evaluation(&self, index: usize) -> &Corpus {
        &self.held_out()[index].corpus
    }

    /// Windows of all held-out corpora.
    pub fn num_eval_windows(&self) -> usize {
        self.evaluations().map(|(_, corpus)| corpus.num_eval_windows()).sum()
    }

    /// Tokens of all corpora.
    pub(crate) fn num_tokens(&self) -> usize {
        self.corpora.iter().map(|named| named.corpus.num_tokens()).sum()
    }

    /// What the tokens are, whatever files they stand in. That of several corpora has their shares, too.
    pub fn identity(&self) -> Identity {
        if let [one] = &*self.corpora {
            return one.corpus.identity();
        }
        let trained = self.trained().iter().enumerate().flat_map(|(index, named)| {
            let share = u128::from(self.turns.share(index).to_bits());
            [named.corpus.identity().train, share]
        });
        let held_out = self.held_out().iter().map(|named| named.corpus.identity().held_out);
        let of = |parts: Vec<u128>| {
            let bytes: Vec<u8> = parts.into_iter().flat_map(u128::to_le_bytes).collect();
            xxh3_128(&bytes)
        };
        Identity { train: of(trained.collect()), held_out: of(held_out.collect()) }
    }

    /// Files, tokens and split of each corpus, for the start-up report.
    pub fn describe(&self) -> String {
        if let [one] = &*self.corpora {
            return one.corpus.describe();
        }
        let line = |(index, Named { name, corpus }): (usize, &Named)| {
            let share = match index < self.to_train {
                true => format!("{:.1} % of the samples", 100.0 * self.turns.share(index)),
                false => "for evaluation".into(),
            };
            format!("{name}: {share}; {}", corpus.describe())
        };
        self.corpora.iter().enumerate().map(line).collect::<Vec<_>>().join("\n        ")
    }
}

fn files(corpora: &[Corpus]) -> impl Iterator<Item = &PathBuf> {
    corpora.iter().flat_map(|corpus| &corpus.files)
}

/// Says which files are trained on and held out all the same.
fn warn_of_files(to_train: &[Corpus], held_out: &[Corpus]) {
    if !held_out.is_empty() {
        return warn_of_overlap(files(to_train), files(held_out));
    }
    let mut seen = HashSet::new();
    for file in files(to_train).filter_map(|file| behind(file)) {
        if !seen.insert(file.clone()) {
            let file = Shown(&file);
            tracing::warn!(
                "{file} is in two data sets of data.train, each of which holds out its own end: evaluation is not held out"
            );
        }
    }
}

/// Names that are given, or those of files; whole paths where files have the same name, and numbers where paths are the same.
fn names(sources: &[Source]) -> Vec<String> {
    let all = |of: &dyn Fn(&Source) -> Option<String>| -> Vec<String> {
        let name = |source: &Source| {
            let name = source.name.clone().or_else(|| of(source));
            // Nothing in a name may act on a terminal.
            Shown(Path::new(name.as_ref().unwrap_or(&source.path))).to_string()
        };
        sources.iter().map(name).collect()
    };
    let differ = |names: &[String]| names.iter().collect::<HashSet<_>>().len() == names.len();
    let stem = |path: &str| Some(Path::new(path).file_stem()?.to_string_lossy().into_owned());
    let mut names = all(&|source| stem(&source.path));
    if !differ(&names) {
        names = all(&|_| None);
    }
    let mut seen = HashSet::new();
    for name in &mut names {
        let (first, mut number) = (name.clone(), 1);
        while !seen.insert(name.clone()) {
            number += 1;
            *name = format!("{first} ({number})");
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_data_set_has_a_name_of_its_own_that_does_nothing_to_a_terminal() {
        let of = |sources: &[(Option<&str>, &str)]| {
            let source = |(name, path): &(Option<&str>, &str)| {
                let name = name.map(Into::into);
                Source { name, path: (*path).into(), weight: 1.0 }
            };
            names(&sources.iter().map(source).collect::<Vec<_>>())
        };
        assert_eq!(of(&[(None, "/a/x.txt"), (Some("b"), "/a/y.txt")]), ["x", "b"]);
        assert_eq!(of(&[(None, "/a/x"), (None, "/b/x"), (Some("c"), "/x")]), ["/a/x", "/b/x", "c"]);
        let same = [(None, "/a"), (None, "/a"), (Some("/a (2)"), "/b"), (None, "/a")];
        assert_eq!(of(&same), ["/a", "/a (2)", "/a (2) (2)", "/a (3)"]);
        assert_eq!(of(&[(None, "/\u{1b}[2J\u{202e}.txt")]), ["\\u001b[2J\\u202e"]);
    }
}
