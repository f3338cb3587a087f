//! Documents of rows, made once: those of some rows side by side are a file in the user's cache folder, called after the hash of
//! the rows and of everything else that they follow from.

use super::document::Document;
use super::tokens::Cache;
use super::unread::Unread;
use crate::files::sealed::{self, Magic};
use xxhash_rust::xxh3::Xxh3Default;

/// At the start of each file.
const MAGIC: &Magic = b"onebox rows 2  \n";
/// Bytes of rows that are worth a file.
const WORTH: usize = 32 << 10;

/// What a row came to: its document and what of the row it does not have, or what is wrong with it.
pub(super) type Made = Result<(Document, Unread), String>;

impl Cache {
    /// What `rows` come to: kept under the hash of them and of `maker`, or what `make` says.
    pub(super) fn documents(
        &self,
        maker: u128,
        rows: &[Result<&str, &str>],
        make: impl FnOnce() -> Vec<Made>,
    ) -> Vec<Made> {
        let bytes: usize = rows.iter().map(|row| row.map_or(0, str::len)).sum();
        let name = || format!("{:032x}", name(maker, rows));
        let path = self.folder.as_ref().filter(|_| bytes >= WORTH).map(|f| f.join(name()));
        let found = path.as_deref().and_then(|path| sealed::read(path, MAGIC));
        let found = found.and_then(|bytes| decoded(&bytes)).filter(|all| all.len() == rows.len());
        if let Some(found) = found {
            return found;
        }
        let made = make();
        // Encoded only where it is kept.
        let parts = std::iter::once_with(|| encoded(&made));
        self.keep(path.as_deref(), MAGIC, parts, "the rows will be tokenized again");
        made
    }
}

fn name(maker: u128, rows: &[Result<&str, &str>]) -> u128 {
    let mut hash = Xxh3Default::new();
    hash.update(MAGIC);
    // Another version may make other tokens of them.
    hash.update(env!("ONEBOX_VERSION").as_bytes());
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

/// For each row its kind, a length, and what there is of that length: tokens with whether each counts, or a text. In front of a row
/// of which something is not read stands that, as JSON.
fn encoded(all: &[Made]) -> Vec<u8> {
    let mut out = Vec::new();
    for made in all {
        match made {
            Ok((Document { tokens, counted }, unread)) => {
                if !unread.is_empty() {
                    let json = serde_json::to_vec(unread)
                        .unwrap_or_else(|_| unreachable!("names are JSON"));
                    out.push(2);
                    out.extend((json.len() as u32).to_le_bytes());
                    out.extend(json);
                }
                out.push(0);
                out.extend((tokens.len() as u32).to_le_bytes());
                // No token has the highest bit.
                let marked = tokens.iter().zip(counted).map(|(t, c)| t | u32::from(*c) << 31);
                out.extend(marked.flat_map(u32::to_le_bytes));
            }
            Err(why) => {
                out.push(1);
                out.extend((why.len() as u32).to_le_bytes());
                out.extend(why.as_bytes());
            }
        }
    }
    out
}

/// None where they were not written so.
fn decoded(mut bytes: &[u8]) -> Option<Vec<Made>> {
    let (mut all, mut unread) = (Vec::new(), Unread::default());
    while !bytes.is_empty() {
        let ([kind], rest) = bytes.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        if *kind == 2 {
            let (json, rest) = rest.split_at_checked(length)?;
            (unread, bytes) = (serde_json::from_slice(json).ok()?, rest);
            continue;
        }
        let (made, rest) = if *kind == 0 {
            let (marked, rest) = rest.split_at_checked(length.checked_mul(4)?)?;
            let marked = marked.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
            let tokens = marked.clone().map(|token| token & (u32::MAX >> 1)).collect();
            let counted = marked.map(|token| token >> 31 == 1).collect();
            (Ok((Document { tokens, counted }, std::mem::take(&mut unread))), rest)
        } else {
            let (why, rest) = rest.split_at_checked(length)?;
            (Err(String::from_utf8(why.to_vec()).ok()?), rest)
        };
        all.push(made);
        bytes = rest;
    }
    Some(all)
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
        let mut unread = Unread { thoughts: true, ..Unread::default() };
        unread.keys.insert("`é`".into());
        let made = vec![
            Ok((document.clone(), unread)),
            Err("ohé".into()),
            Ok((document, Unread::default())),
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
        // Another maker, other rows, a text in the place of an error.
        cache.documents(8, &rows, make);
        cache.documents(7, &[rows[0], rows[2], rows[1]], make);
        cache.documents(7, &[rows[0], Ok("too long"), rows[2]], make);
        assert_eq!(times.get(), 4);
        let files = || std::fs::read_dir(folder.path().join("c")).unwrap().count();
        assert_eq!(files(), 4);
        // Few rows are worth no file, and a folder that is read alone gets none.
        cache.documents(7, &rows[..2], make);
        Cache { read_only: true, ..cache.clone() }.documents(9, &rows, make);
        assert_eq!((times.get(), files()), (6, 4));
        // A file that is not whole is made again.
        for entry in std::fs::read_dir(folder.path().join("c")).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        }
        assert_eq!(cache.documents(7, &rows, make), made);
        assert_eq!(times.get(), 7);
    }

    #[test]
    fn bytes_that_were_not_written_so_are_nothing() {
        let document = Document { tokens: vec![5, 6], counted: vec![false, true] };
        let unread = Unread { thoughts: true, ..Unread::default() };
        let all = [Ok((document, unread)), Err("no".into())];
        let bytes = encoded(&all);
        assert_eq!(decoded(&bytes).as_deref(), Some(&all[..]));
        for end in 1..bytes.len() {
            assert!(decoded(&bytes[..end]).is_none_or(|few| few.len() < all.len()));
        }
        assert!(decoded(&[1, 255, 255, 255, 255, 0]).is_none());
        assert!(decoded(&[0, 255, 255, 255, 255, 0]).is_none());
        assert!(decoded(&[1, 1, 0, 0, 0, 0xff]).is_none());
        assert!(decoded(&[2, 2, 0, 0, 0, b'{', b'!']).is_none());
    }
}
