//! Texts as tokens, made once: those of a part are a file in the user's cache folder, called after the hash of tokenizer and text.

use super::parts::{Text, Texts};
use super::problem::Failure;
use super::store::{Store, TokenFile};
use crate::files::sealed::{self, Magic};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

/// At the start of each file.
const MAGIC: &Magic = b"onebox tokens 2\n";

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

    /// Adds the tokens of a part of texts to `store`: they stay in a file of the folder, or in memory where that cannot be. `add`:
    /// adds bytes of text that are done.
    pub(super) fn add_part(
        &self,
        store: &mut Store,
        (texts, part): (&Texts<'_>, &Text<'_>),
        add: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Failure> {
        let path = self.folder.as_ref().map(|folder| folder.join(name(texts, part, store.width)));
        if let Some(path) = path.as_deref().filter(|path| path.exists())
            && push(store, path)
        {
            add(part.bytes);
            return Ok(());
        }
        let tokens = texts.encode(part, store.width, add)?;
        self.keep(
            path.as_deref(),
            MAGIC,
            tokens.iter().cloned(),
            "the text will be tokenized again",
        );
        if !path.is_some_and(|path| path.exists() && push(store, &path)) {
            tokens.iter().for_each(|tokens| store.push_bytes(tokens));
        }
        Ok(())
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

/// By everything that the tokens follow from, and how many bytes each has.
fn name(texts: &Texts<'_>, part: &Text<'_>, width: usize) -> String {
    let mut hash = Xxh3Default::new();
    let all = part.texts.iter().map(|(_, text)| text.as_bytes());
    for part in [&MAGIC[..], &[width as u8], texts.tokenizer.bytes()].into_iter().chain(all) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    format!("{:032x}", hash.digest128())
}

/// Adds the tokens of a file. False where it is not whole: then it is made again.
fn push(store: &mut Store, path: &Path) -> bool {
    let Some((file, body)) = sealed::open(path, MAGIC) else { return false };
    let Ok(file) = TokenFile::new(path, file) else { return false };
    let has_tokens = (body.end - body.start).is_multiple_of(store.width as u64);
    if has_tokens {
        store.push_part(file, body);
    }
    has_tokens
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::super::parts::{Place, Sizes};
    use super::*;
    use std::fs::{self, File};

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

    /// The tokens of files with these texts.
    fn tokens(cache: &Cache, texts: &[&str], part: u64) -> Vec<u32> {
        let folder = tempfile::tempdir().unwrap();
        let file = |(i, text): (usize, &&str)| {
            let path = folder.path().join(i.to_string());
            fs::write(&path, text).unwrap();
            TokenFile::new(&path, File::open(&path).unwrap()).unwrap()
        };
        let files: Vec<TokenFile> = texts.iter().enumerate().map(file).collect();
        let sizes = Sizes { part, ..Sizes::default() };
        let tokenizer = tokenizer();
        let texts = Texts::new(&files, &tokenizer, sizes);
        let (mut store, mut from) = (Store::new(2), Place::default());
        while from.file < files.len() {
            let part = texts.read(from).unwrap();
            cache.add_part(&mut store, (&texts, &part), &|_| ()).unwrap();
            from = part.next;
        }
        let mut all = Vec::new();
        store.each(0..store.num_tokens(), |_, token| all.push(token)).unwrap();
        all
    }

    fn whole(texts: &[&str]) -> Vec<u32> {
        texts.iter().flat_map(|text| tokenizer().encode(text).unwrap()).collect()
    }

    #[test]
    fn tokens_are_kept_by_content_and_a_broken_file_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().join("a/b")), read_only: false };
        let texts = ["the box holds", " the model"];
        assert_eq!(tokens(&cache, &texts, 1 << 20), whole(&texts));
        let all = files(&folder.path().join("a/b"));
        assert_eq!(all.len(), 1);
        let good = fs::read(&all[0]).unwrap();
        // It is what is read: a sealed file with other tokens is believed.
        let other = [7u16, 8].map(u16::to_le_bytes).concat();
        sealed::fill(&folder.path().join("other"), MAGIC, [other].into_iter()).unwrap();
        fs::rename(folder.path().join("other"), &all[0]).unwrap();
        assert_eq!(tokens(&cache, &texts, 1 << 20), [7, 8]);
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            for bad in [&bytes[..], &good[..at]] {
                fs::write(&all[0], bad).unwrap();
                assert!(sealed::open(&all[0], MAGIC).is_none(), "byte {at}");
            }
        }
        assert_eq!(tokens(&cache, &texts, 1 << 20), whole(&texts));
        assert_eq!((fs::read(&all[0]).unwrap(), files(&folder.path().join("a/b"))), (good, all));
        // Another cut of the same bytes is another file.
        tokens(&cache, &["the box", " holds the model"], 1 << 20);
        assert_eq!(files(&folder.path().join("a/b")).len(), 2);
    }

    #[test]
    fn a_text_that_grows_keeps_the_parts_before() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().join("c")), read_only: false };
        let line = |i: u32| format!("box {i} holds the model. that is too large\n");
        let text: String = (0..50).map(line).collect();
        assert_eq!(tokens(&cache, &[&text], 300), whole(&[&text]));
        let before = files(&folder.path().join("c"));
        assert!(before.len() > 5, "{before:?}");
        // As a start that was interrupted left it.
        fs::remove_file(&before[0]).unwrap();
        let longer = text.clone() + "and it goes on";
        assert_eq!(tokens(&cache, &[&longer], 300), whole(&[&longer]));
        let after = files(&folder.path().join("c"));
        let kept = before.iter().filter(|path| after.contains(path)).count();
        assert!(kept + 1 >= before.len() && after.len() == before.len() + 1, "{kept}: {after:?}");
    }

    #[test]
    fn a_cache_that_cannot_be_written_costs_only_time() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        let cache = Cache { folder: Some(folder.path().join("file/x")), read_only: false };
        assert_eq!(tokens(&cache, &["text"], 1), whole(&["text"]));
        let there = folder.path().join("not");
        let cache = Cache { folder: Some(there.clone()), read_only: true };
        assert_eq!(tokens(&cache, &["text"], 1), whole(&["text"]));
        assert!(!there.exists());
    }

    #[test]
    fn many_at_once_leave_one_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        let text = "the box holds the model ".repeat(500);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| tokens(&cache, &[&text], 1 << 20));
            }
        });
        assert_eq!(files(folder.path()).len(), 1);
        assert_eq!(tokens(&cache, &[&text], 1 << 20), whole(&[&text]));
    }
}
