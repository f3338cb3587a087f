//! Documents of rows in the user's cache folder. Consecutive rows form a part, named by the hash of
//! the rows and of all other inputs of the documents.

use super::document::Document;
use super::ignored_keys::IgnoredKeys;
use super::token_cache::{Cache, PartRecord};
use super::token_part::{self, TokenPart};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3Default;

/// Version of the cached files. The hash that names a part includes it.
const VERSION: &[u8] = b"onebox rows 4  \n";
/// Smallest total size of rows, in bytes, for which their documents are cached.
const WORTH: usize = 32 << 10;
/// Bytes of a token in the files.
const WIDTH: usize = 4;

/// The document of a row and the ignored keys, or the reason why the row has no document.
pub(super) type RowResult = Result<(Document, IgnoredKeys), String>;

impl Cache {
    /// The results of `rows`: cached under the hash of the rows and of `maker`, or from `make`.
    pub(super) fn documents(
        &self,
        maker: u128,
        rows: &[Result<&str, &str>],
        make: impl FnOnce() -> Vec<RowResult>,
    ) -> Vec<RowResult> {
        let bytes: usize = rows.iter().map(|row| row.map_or(0, str::len)).sum();
        let name = || format!("{:032x}.json", name(maker, rows));
        let path = self.folder.as_ref().filter(|_| bytes >= WORTH).map(|f| f.join(name()));
        let found =
            path.as_deref().and_then(|path| self.rows(path)).filter(|all| all.len() == rows.len());
        if let Some(found) = found {
            return found;
        }
        let made = make();
        if let Some(path) = path.filter(|_| !self.read_only) {
            let (mut part, mut record) = (TokenPart::of_documents(WIDTH), PartRecord::default());
            for (row, result) in made.iter().enumerate() {
                match result {
                    Ok((document, unread)) => {
                        part.push(document);
                        if !unread.is_empty() {
                            record.unread.insert(row, unread.clone());
                        }
                    }
                    Err(why) => drop(record.problems.insert(row, why.clone())),
                }
            }
            self.keep_part(Some(&path), &part, record);
        }
        made
    }

    /// The rows of the part with its list at `path`, in order.
    fn rows(&self, path: &Path) -> Option<Vec<RowResult>> {
        let (mut record, tokens) = self.open(path)?;
        let mut documents = token_part::documents(&tokens).ok()?.into_iter();
        let mut all = Vec::new();
        loop {
            let row = all.len();
            all.push(match (record.problems.remove(&row), record.unread.remove(&row)) {
                (Some(why), _) => Err(why),
                (None, unread) => match documents.next() {
                    Some(document) => Ok((document, unread.unwrap_or_default())),
                    None => return Some(all),
                },
            });
        }
    }
}

fn name(maker: u128, rows: &[Result<&str, &str>]) -> u128 {
    let mut hash = Xxh3Default::new();
    hash.update(VERSION);
    // Another version of onebox may make other tokens.
    hash.update(files::VERSION.as_bytes());
    hash.update(&maker.to_le_bytes());
    for row in rows {
        let (kind, text) = match row {
            Ok(text) => (0u8, text),
            Err(why) => (1, why),
        };
        hash.update(&[kind]);
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn rows_are_made_once_and_anew_where_anything_differs() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { folder: Some(folder.path().join("c")), read_only: false };
        let long = "x".repeat(WORTH);
        let rows = [Ok("a"), Err("too long"), Ok(long.as_str())];
        let document = Document { tokens: vec![1, 70_000, 3], counted: vec![false, true, false] };
        let mut unread = IgnoredKeys { thoughts: true, ..IgnoredKeys::default() };
        unread.keys.insert("`é`".into());
        let made = vec![
            Ok((document.clone(), unread)),
            Err("ohé".into()),
            Ok((document, IgnoredKeys::default())),
        ];
        let times = Cell::new(0);
        let make = || {
            times.set(times.get() + 1);
            made.clone()
        };
        for cache in [&cache, &cache, &Cache { read_only: true, ..cache.clone() }] {
            assert_eq!(cache.documents(7, &rows, make), made);
        }
        assert_eq!(times.get(), 1);
        // Another maker, other rows, a text in place of an error.
        cache.documents(8, &rows, make);
        cache.documents(7, &[rows[0], rows[2], rows[1]], make);
        cache.documents(7, &[rows[0], Ok("too long"), rows[2]], make);
        assert_eq!(times.get(), 4);
        let files = || std::fs::read_dir(folder.path().join("c")).unwrap().count();
        // A list, the tokens, their index and their mask.
        assert_eq!(files(), 16);
        // A few rows are not cached, and a read-only folder gets no files.
        cache.documents(7, &rows[..2], make);
        Cache { read_only: true, ..cache.clone() }.documents(9, &rows, make);
        assert_eq!((times.get(), files()), (6, 16));
        // An incomplete file is rebuilt, and so is a missing one.
        for kind in ["json", "bin", "idx", "mask"] {
            for entry in std::fs::read_dir(folder.path().join("c")).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().unwrap() == kind {
                    let bytes = std::fs::read(&path).unwrap();
                    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
                }
            }
            let before = times.get();
            assert_eq!(cache.documents(7, &rows, make), made);
            assert_eq!(cache.documents(7, &rows, make), made);
            assert_eq!(times.get(), before + 1, "{kind}");
        }
    }
}
