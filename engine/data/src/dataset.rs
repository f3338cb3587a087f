//! The data of a run: training corpora, mixed by weight, and validation corpora with separate
//! losses.
//!
//! Invariant: sample i of step k is a function of (seed, k, i) only, not of the rank or the layout.
//! So a resumed or resharded run needs no replay.

use super::mixing::SourceMix;
use super::{Corpus, Identity, real_path, warn_of_overlap};
use config::{DataOrder, Source};
use device::random;
use files::path_text::PathText;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Key under the run's seed for the order of each corpus but the first.
const OF_CORPUS: u64 = 0x636f_7270;

/// The training data and the validation data of a run.
#[derive(Debug)]
pub struct Dataset {
    corpora: Vec<NamedCorpus>,
    /// Number of training corpora, which come first; the others are for validation only.
    to_train: usize,
    turns: SourceMix,
}

/// A corpus with its name.
#[derive(Debug)]
struct NamedCorpus {
    name: String,
    corpus: Corpus,
}

/// Corpora and their sources in the config.
#[derive(Debug)]
pub struct SourceCorpora<'a> {
    /// The corpora, in the order of the sources.
    pub corpora: Vec<Corpus>,
    /// The source of each corpus, with its weight.
    pub sources: &'a [Source],
}

/// A sample of a run.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// Name of the corpus; `None` if the run trains on a single corpus.
    pub corpus_name: Option<&'a String>,
    /// The corpus of the sample.
    pub corpus: &'a Corpus,
    /// Number of the sample among its corpus' document samples, or of the first token of its
    /// window.
    pub place: usize,
}

impl From<Corpus> for Dataset {
    /// A data set of one corpus with training and validation parts.
    fn from(corpus: Corpus) -> Self {
        let corpora = vec![NamedCorpus { name: String::new(), corpus }];
        Self { corpora, to_train: 1, turns: SourceMix::new(&[1.0]) }
    }
}

impl Dataset {
    /// Combines training corpora, with the weights of their sources, and validation corpora.
    /// Without validation corpora, each training corpus must have a validation part of its own.
    ///
    /// # Panics
    /// If there is no training corpus, or a corpus has no source.
    pub fn of_corpora(to_train: SourceCorpora<'_>, validation: SourceCorpora<'_>) -> Self {
        let weights: Vec<f32> = to_train.sources.iter().map(|source| source.weight).collect();
        let count = to_train.corpora.len();
        warn_of_files(&to_train.corpora, &validation.corpora);
        let named = |SourceCorpora { corpora, sources }: SourceCorpora<'_>| -> Vec<NamedCorpus> {
            assert!(corpora.len() == sources.len(), "a corpus has a source");
            let named = corpora.into_iter().zip(names(sources));
            named.map(|(corpus, name)| NamedCorpus { name, corpus }).collect()
        };
        let mut corpora = named(to_train);
        corpora.extend(named(validation));
        Self { corpora, to_train: count, turns: SourceMix::new(&weights) }
    }

    fn trained(&self) -> &[NamedCorpus] {
        &self.corpora[..self.to_train]
    }

    /// The corpora to evaluate on: the validation corpora, or the validation parts of all corpora.
    fn validation_corpora(&self) -> &[NamedCorpus] {
        match &self.corpora[self.to_train..] {
            [] => &self.corpora,
            own => own,
        }
    }

    /// Sample `number` of a run in the order `order`, counted from 0 over steps of `per_step`
    /// samples.
    pub fn sample(&self, order: DataOrder, seed: u64, number: u64, per_step: u64) -> Sample<'_> {
        let (index, of_corpus) = self.turns.of(number);
        let key = |index| random::key(random::key(seed, OF_CORPUS), index);
        let seed = if index == 0 { seed } else { key(index as u64) };
        let number = if order == DataOrder::Random { number } else { of_corpus };
        let NamedCorpus { name, corpus } = &self.corpora[index];
        let place = corpus.place(order, seed, number, per_step);
        Sample { corpus_name: (self.to_train > 1).then_some(name), corpus, place }
    }

    /// Number of training samples of all corpora.
    pub fn num_train_samples(&self) -> usize {
        self.trained().iter().map(|named| named.corpus.num_train_samples()).sum()
    }

    /// For each training corpus: its name, its number of samples, and its part of `samples`
    /// samples.
    pub fn shares(&self, samples: f64) -> impl Iterator<Item = (&str, usize, f64)> {
        self.trained().iter().enumerate().map(move |(index, NamedCorpus { name, corpus })| {
            (name.as_str(), corpus.num_train_samples(), samples * self.turns.share(index))
        })
    }

    /// Whether the report about the data has several lines.
    pub const fn is_several(&self) -> bool {
        self.corpora.len() > 1
    }

    /// Whether samples differ in the number of targets that count.
    pub fn is_uneven(&self) -> bool {
        self.trained().iter().any(|named| named.corpus.documents.is_some())
    }

    /// Whether a sample may hold several documents that do not attend to each other.
    pub fn is_packed(&self) -> bool {
        self.trained().iter().any(|named| named.corpus.packs)
    }

    /// Whether mask files say which tokens count, as for prepared chats.
    pub fn has_masks(&self) -> bool {
        let masked = |corpus: &Corpus| corpus.documents.as_ref().is_some_and(|d| d.are_in_files());
        self.trained().iter().any(|named| masked(&named.corpus))
    }

    /// The validation corpora with their names; each has a loss of its own.
    pub fn evaluations(&self) -> impl Iterator<Item = (&str, &Corpus)> {
        self.validation_corpora().iter().map(|named| (named.name.as_str(), &named.corpus))
    }

    /// A validation corpus.
    pub fn evaluation(&self, index: usize) -> &Corpus {
        &self.validation_corpora()[index].corpus
    }

    /// Number of windows of all validation corpora.
    pub fn num_eval_windows(&self) -> usize {
        self.evaluations().map(|(_, corpus)| corpus.num_eval_windows()).sum()
    }

    /// Number of tokens of all corpora.
    pub fn num_tokens(&self) -> usize {
        self.corpora.iter().map(|named| named.corpus.num_tokens()).sum()
    }

    /// Hashes of the tokens, independent of the files. For several corpora they include the shares.
    pub fn identity(&self) -> Identity {
        if let [one] = &*self.corpora {
            return one.corpus.identity();
        }
        let trained = self.trained().iter().enumerate().flat_map(|(index, named)| {
            let share = u128::from(self.turns.share(index).to_bits());
            [named.corpus.identity().train, share]
        });
        let validation =
            self.validation_corpora().iter().map(|named| named.corpus.identity().validation);
        let of = |parts: Vec<u128>| {
            let bytes: Vec<u8> = parts.into_iter().flat_map(u128::to_le_bytes).collect();
            xxh3_128(&bytes)
        };
        Identity { train: of(trained.collect()), validation: of(validation.collect()) }
    }

    /// Files, tokens and split of each corpus, for the start-up report.
    pub fn describe(&self) -> String {
        if let [one] = &*self.corpora {
            return one.corpus.describe();
        }
        let line = |(index, NamedCorpus { name, corpus }): (usize, &NamedCorpus)| {
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

/// Warns of files that are used both for training and for validation.
fn warn_of_files(to_train: &[Corpus], validation: &[Corpus]) {
    if !validation.is_empty() {
        return warn_of_overlap(files(to_train), files(validation));
    }
    let mut seen = HashSet::new();
    for file in files(to_train).filter_map(|file| real_path(file)) {
        if !seen.insert(file.clone()) {
            let file = PathText(&file);
            tracing::warn!(
                "{file} is in two data sets of data.train, each of which has its own end as validation set: evaluation uses training data"
            );
        }
    }
}

/// Names of the sources: given or file names, whole paths if not unique, numbers if still equal.
fn names(sources: &[Source]) -> Vec<String> {
    let all = |of: &dyn Fn(&Source) -> Option<String>| -> Vec<String> {
        let name = |source: &Source| {
            let name = source.name.clone().or_else(|| of(source));
            // `PathText` escapes characters that could act on a terminal.
            PathText(Path::new(name.as_ref().unwrap_or(&source.path))).to_string()
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
