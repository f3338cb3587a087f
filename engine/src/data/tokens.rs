//! Texts as tokens, made once: a file in the user's cache folder, called after the hash of tokenizer and texts.

use super::cores;
use super::sealed::{self, Magic};
use super::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

/// At the start of each file.
const MAGIC: &Magic = b"onebox tokens 1\n";

/// Where tokens are kept.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// None: nowhere.
    pub folder: Option<PathBuf>,
    /// What is not there is not put there.
    pub read_only: bool,
}

impl Cache {
    /// The folder onebox/tokens of the user's cache.
    pub fn of_user(read_only: bool) -> Self {
        let given = |key| std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from);
        let cache =
            given("XDG_CACHE_HOME").or_else(|| given("HOME").map(|home| home.join(".cache")));
        let folder = cache.filter(|cache| cache.is_absolute());
        Self { folder: folder.map(|cache| cache.join("onebox/tokens")), read_only }
    }

    /// The tokens of `texts`, each of which is one file's, one after another.
    ///
    /// # Errors
    /// (number of the text, what the tokenizer says)
    pub(super) fn tokens(
        &self,
        tokenizer: &Tokenizer,
        texts: &[&str],
    ) -> Result<Vec<u32>, (usize, String)> {
        let path = self.folder.as_ref().map(|folder| folder.join(name(tokenizer, texts)));
        if let Some(found) = path.as_deref().and_then(read) {
            return Ok(found);
        }
        let encode = |i: usize| tokenizer.encode(texts[i]).map_err(|why| (i, why));
        let longest = texts.iter().map(|text| text.len() as u64).max().unwrap_or(0);
        let parts = cores::map_by(cores::texts_at_once(longest), texts.len(), encode)
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let tokens = parts.concat();
        self.keep(path.as_deref(), MAGIC, stored(&tokens), "the text will be tokenized again");
        Ok(tokens)
    }

    /// Keeps a file, where there is a path and files may be put there; warns where it cannot, with the work that is done again.
    pub(super) fn keep(
        &self,
        path: Option<&Path>,
        magic: &Magic,
        parts: impl Iterator<Item = Vec<u8>>,
        again: &str,
    ) {
        if let Some(path) = path.filter(|_| !self.read_only)
            && let Err(error) = sealed::write(path, magic, parts)
        {
            tracing::warn!("{}: {error}; {again} next time", path.display());
        }
    }
}

/// By everything that the tokens follow from.
fn name(tokenizer: &Tokenizer, texts: &[&str]) -> String {
    let mut hash = Xxh3Default::new();
    for part in
        [&MAGIC[..], tokenizer.bytes()].into_iter().chain(texts.iter().map(|t| t.as_bytes()))
    {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{:032x}", hash.digest128())
}

/// None where it is not there, or not whole: then it is made again.
fn read(path: &Path) -> Option<Vec<u32>> {
    let bytes = sealed::read(path, MAGIC)?;
    let (tokens, rest) = bytes.as_chunks();
    rest.is_empty().then(|| tokens.iter().map(|b| u32::from_le_bytes(*b)).collect())
}

/// As they are written.
fn stored(tokens: &[u32]) -> impl Iterator<Item = Vec<u8>> {
    tokens.chunks(1 << 16).map(|part| part.iter().flat_map(|token| token.to_le_bytes()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tokenizer() -> Tokenizer {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer-tiny.json");
        Tokenizer::open(&path).unwrap()
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        all.sort();
        all
    }

    #[test]
    fn tokens_are_kept_by_content_and_a_broken_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().join("a/b")), read_only: false };
        let (tokenizer, texts) = (tokenizer(), ["the box holds", " the model"]);
        let tokens = cache.tokens(&tokenizer, &texts).unwrap();
        let expected = texts.map(|text| tokenizer.encode(text).unwrap()).concat();
        assert_eq!(tokens, expected);
        let all = files(&folder.path().join("a/b"));
        assert_eq!(all.len(), 1);
        let good = fs::read(&all[0]).unwrap();
        // It is what is read: a sealed file with other tokens is believed.
        sealed::fill(&folder.path().join("other"), MAGIC, stored(&[7, 8])).unwrap();
        fs::rename(folder.path().join("other"), &all[0]).unwrap();
        assert_eq!(cache.tokens(&tokenizer, &texts).unwrap(), [7, 8]);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            for bad in [&bytes[..], &good[..at]] {
                fs::write(&all[0], bad).unwrap();
                assert!(read(&all[0]).is_none(), "byte {at}");
            }
        }
        assert_eq!(cache.tokens(&tokenizer, &texts).unwrap(), expected);
        assert_eq!((fs::read(&all[0]).unwrap(), files(&folder.path().join("a/b"))), (good, all));
        // Another cut of the same bytes is another file.
        cache.tokens(&tokenizer, &["the box", " holds the model"]).unwrap();
        assert_eq!(files(&folder.path().join("a/b")).len(), 2);
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_only_time() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let cache = Cache { folder: Some(folder.path().join("file/x")), read_only: false };
        assert!(!cache.tokens(&tokenizer(), &["text"]).unwrap().is_empty());
        let there = folder.path().join("not");
        let cache = Cache { folder: Some(there.clone()), read_only: true };
        assert!(!cache.tokens(&tokenizer(), &["text"]).unwrap().is_empty() && !there.exists());
    }

    #[test]
    fn many_at_once_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        let (tokenizer, text) = (tokenizer(), "the box holds the model ".repeat(500));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| cache.tokens(&tokenizer, &[&text]).unwrap());
            }
        });
        let all = files(folder.path());
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!(read(&all[0]).unwrap(), tokenizer.encode(&text).unwrap());
    }
}
