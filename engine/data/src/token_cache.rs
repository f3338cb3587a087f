//! Tokens of texts and of rows in the user's cache folder. Each part is named by the hash of its
//! inputs. A damaged part is rebuilt.

use super::chunks::{TextChunk, TextChunks};
use super::ignored_keys::IgnoredKeys;
use super::problem::Failure;
use super::store::{Store, TokenFile};
use super::token_part::{FileRecord, TokenPart};
use crate::cache_file;
use files::path_text::ShownPath;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Version of parts of text; part of each hash.
const VERSION: &[u8] = b"onebox tokens 4\n";

/// The user's cache for tokens.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// The cache folder; `None` without a cache.
    pub folder: Option<PathBuf>,
    /// Whether the folder is only read: no part is written or marked as used.
    pub read_only: bool,
}

/// The list of a part. It is written last; without it the other files of the part are ignored.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PartRecord {
    files: Vec<FileRecord>,
    /// Reasons why rows of the part have no document, by row number.
    pub(super) problems: BTreeMap<usize, String>,
    /// Ignored keys of rows, by row number.
    pub(super) unread: BTreeMap<usize, IgnoredKeys>,
}

impl PartRecord {
    /// The list of a part that is one file.
    pub(super) fn of_file(file: FileRecord) -> Self {
        Self { files: vec![file], ..Self::default() }
    }
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

    /// Adds the tokens of a part of texts to `store`. They stay in a file of the folder, or in
    /// memory if the folder is not usable. `add` receives the bytes of text that are done.
    pub(super) fn add_part(
        &self,
        store: &mut Store,
        texts: &TextChunks<'_>,
        part: &TextChunk<'_>,
        add: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Failure> {
        let path = self.folder.as_ref().map(|folder| folder.join(name(texts, part)));
        let path = path.as_deref();
        if let Some(file) = path.and_then(|path| self.open_for(store, path)) {
            add(part.bytes);
            store.push_file(file);
            return Ok(());
        }
        let made = texts.encode(part, add)?;
        self.keep_part(path, &made, PartRecord::default());
        match path.and_then(|path| self.open_for(store, path)) {
            Some(file) => store.push_file(file),
            None => made.tokens.iter().for_each(|tokens| store.push_bytes(tokens)),
        }
        Ok(())
    }

    /// The tokens of the part with its list at `path`; `store` protects them from removal.
    pub(super) fn open_for(&self, store: &mut Store, path: &Path) -> Option<TokenFile> {
        let (folder, part) = (path.parent()?, path.file_stem()?.to_str()?);
        let held = path.exists().then(|| store.hold(folder, part, self.read_only))?;
        if let Err(error) = &held {
            tracing::debug!("{}: {error}; other runs may remove its parts", folder.display());
        }
        self.open(path).map(|(_, file)| file)
    }

    /// The content of a file of the folder. Marks the file as used, unless `read_only`.
    pub(super) fn read<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        cache_file::read(path, !self.read_only)
    }

    /// The part with its list at `path`, and its tokens. `None` if missing or damaged: then
    /// rebuilt.
    pub(super) fn open(&self, path: &Path) -> Option<(PartRecord, TokenFile)> {
        let record: PartRecord = self.read(path)?;
        let folder = path.parent()?;
        let mut files = record.files.iter().map(|file| file.open(folder, &|_| ()));
        let tokens = files.next()?.and_then(|tokens| {
            files.try_for_each(|file| file.map(drop))?;
            Ok(tokens)
        });
        let tokens = tokens.map_err(|fault| cache_file::warn_damaged(&fault.path)).ok()?;
        Some((record, tokens))
    }

    /// Writes a part with its list at `path`, if possible; logs a warning on failure.
    pub(super) fn keep_part(&self, path: Option<&Path>, part: &TokenPart, record: PartRecord) {
        self.keep(path, "the tokens will be made again", |path| {
            let files = part.write(&path.with_extension("bin"), true, &cache_file::write_bytes)?;
            cache_file::write(path, &PartRecord { files, ..record })
        });
    }

    /// Calls `write` with `path`, if there is a path and the cache is writable. On failure, logs a
    /// warning with the work that is repeated.
    pub(super) fn keep(
        &self,
        path: Option<&Path>,
        again: &str,
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) {
        if let Some(path) = path.filter(|_| !self.read_only)
            && let Err(error) = write(path)
        {
            tracing::warn!("{}: {error}; {again} next time", path.shown());
        }
    }
}

/// File name of the list of a part: a hash of everything that determines the tokens (texts,
/// tokenizer, version), and of the bytes of a token.
fn name(texts: &TextChunks<'_>, part: &TextChunk<'_>) -> String {
    let width = texts.tokenizer.token_bytes() as u8;
    let all = part.texts.iter().map(|(_, text)| text.as_bytes());
    let makers = [VERSION, &[width], texts.tokenizer.bytes()];
    format!("{:032x}.json", cache_file::hash_of_parts(makers.into_iter().chain(all)))
}

#[cfg(test)]
mod tests {
    use super::super::Tokenizer;
    use super::super::chunks::{ChunkSizes, TextPosition};
    use super::*;
    use std::fs::{self, File};

    fn tokenizer() -> Tokenizer {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizer-tiny.json");
        Tokenizer::open(&path).unwrap()
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        all.sort();
        all
    }

    /// The store of files with these texts.
    fn store(cache: &Cache, texts: &[&str], part: u64) -> Store {
        let folder = tempfile::tempdir().unwrap();
        let file = |(i, text): (usize, &&str)| {
            let path = folder.path().join(i.to_string());
            fs::write(&path, text).unwrap();
            TokenFile::new(&path, File::open(&path).unwrap()).unwrap()
        };
        let files: Vec<TokenFile> = texts.iter().enumerate().map(file).collect();
        let sizes = ChunkSizes { part, ..ChunkSizes::default() };
        let tokenizer = tokenizer();
        let texts = TextChunks::new(&files, &tokenizer, sizes);
        let (mut store, mut from) = (Store::new(2), TextPosition::default());
        while from.file < files.len() {
            let part = texts.read(from).unwrap();
            cache.add_part(&mut store, &texts, &part, &|_| ()).unwrap();
            from = part.next;
        }
        store
    }

    fn tokens(cache: &Cache, texts: &[&str], part: u64) -> Vec<u32> {
        let (store, mut all) = (store(cache, texts, part), Vec::new());
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
        let [file, list] = &all[..] else { panic!("{all:?}") };
        let good = [file, list].map(|path| fs::read(path).unwrap());
        // The cache is really read: other tokens with a valid list are accepted.
        let other = TokenPart::of_text(vec![[7u16, 8].map(u16::to_le_bytes).concat()], 2);
        cache.keep_part(Some(list), &other, PartRecord::default());
        assert_eq!(tokens(&cache, &texts, 1 << 20), [7, 8]);
        [file, list].iter().zip(&good).for_each(|(path, good)| fs::write(path, good).unwrap());
        assert!(cache.open(list).is_some());
        for (path, good) in [file, list].into_iter().zip(&good) {
            for at in 0..good.len() {
                let mut bytes = good.clone();
                bytes[at] ^= 4;
                for bad in [&bytes[..], &good[..at]] {
                    fs::write(path, bad).unwrap();
                    assert!(cache.open(list).is_none(), "byte {at} of {}", path.display());
                }
            }
            assert_eq!(tokens(&cache, &texts, 1 << 20), whole(&texts));
            assert_eq!(&fs::read(path).unwrap(), good);
        }
        assert_eq!(files(&folder.path().join("a/b")), all);
        // Another division of the same bytes is another file.
        tokens(&cache, &["the box", " holds the model"], 1 << 20);
        assert_eq!(files(&folder.path().join("a/b")).len(), 4);
    }

    #[test]
    fn a_part_under_the_name_of_another_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        let texts = ["the box holds", " the model"];
        let names = texts.map(|text| {
            let before = files(folder.path());
            assert_eq!(tokens(&cache, &[text], 1 << 20), whole(&[text]));
            let new: Vec<_> =
                files(folder.path()).into_iter().filter(|path| !before.contains(path)).collect();
            new
        });
        let good = names.each_ref().map(|names| fs::read(&names[0]).unwrap());
        for (a, b) in names[0].iter().zip(&names[1]) {
            let third = folder.path().join("third");
            for (from, to) in [(a, &third), (b, a), (&third, b)] {
                fs::rename(from, to).unwrap();
            }
        }
        for text in texts {
            assert_eq!(tokens(&cache, &[text], 1 << 20), whole(&[text]));
        }
        assert_eq!(names.map(|names| fs::read(&names[0]).unwrap()), good);
    }

    #[test]
    fn others_cannot_read_what_is_kept() {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a/b");
        let rights = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let cache = Cache { folder: Some(folder.clone()), read_only: false };
        tokens(&cache, &["the box"], 1 << 20);
        let all = files(&folder);
        assert_eq!(all.iter().map(|path| rights(path)).collect::<Vec<_>>(), [0o600; 2]);
        assert_eq!(rights(&folder), 0o700);
        // Permissions left by an earlier version. A read-only cache changes nothing.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        tokens(&Cache { read_only: true, ..cache.clone() }, &["the model"], 1 << 20);
        assert_eq!(rights(&folder), 0o755);
        tokens(&cache, &["the model"], 1 << 20);
        assert_eq!(rights(&folder), 0o700);
    }

    #[test]
    fn parts_stay_while_a_store_reads_them_and_the_time_of_use_decides_later() {
        use std::time::{Duration, SystemTime};
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        let texts = ["the box holds", " the model"];
        for text in texts {
            tokens(&cache, &[text], 1 << 20);
        }
        let old = SystemTime::now() - Duration::from_secs(1000);
        let age = || {
            for path in files(folder.path()) {
                File::open(path).unwrap().set_modified(old).unwrap();
            }
        };
        age();
        let store = store(&cache, &[texts[0]], 1 << 20);
        // A part in use counts as such even if its last use was long ago.
        let later = SystemTime::now() + Duration::from_secs(50);
        age();
        assert_eq!(cache.usage().unwrap().in_use.parts, 1);
        cache.make_room(0, later);
        assert_eq!(
            files(folder.path()).len(),
            3,
            "two files of the part, and the list of the store"
        );
        assert_eq!(tokens(&cache, &[texts[0]], 1 << 20), whole(&[texts[0]]));
        drop(store);
        assert_eq!(files(folder.path()).len(), 2);
        tokens(&cache, &[texts[1]], 1 << 20);
        age();
        tokens(&cache, &[texts[0]], 1 << 20);
        cache.make_room(cache.usage().unwrap().all.bytes - 1, later);
        let left = cache.usage().unwrap().all;
        assert_eq!(left.parts, 1);
        let before = files(folder.path());
        tokens(&cache, &[texts[0]], 1 << 20);
        assert_eq!(files(folder.path()), before, "the part that was used last is there");
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
        // State after an interrupted start: the list is written last.
        fs::remove_file(before[0].with_extension("json")).unwrap();
        let longer = text.clone() + "and it goes on";
        assert_eq!(tokens(&cache, &[&longer], 300), whole(&[&longer]));
        let after = files(&folder.path().join("c"));
        let kept = before.iter().filter(|path| after.contains(path)).count();
        assert!(kept + 2 >= before.len() && after.len() == before.len() + 2, "{kept}: {after:?}");
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
    fn many_at_once_leave_one_whole_part() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().to_owned()), read_only: false };
        let text = "the box holds the model ".repeat(500);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| tokens(&cache, &[&text], 1 << 20));
            }
        });
        assert_eq!(files(folder.path()).len(), 2);
        assert_eq!(tokens(&cache, &[&text], 1 << 20), whole(&[&text]));
    }
}
