//! Token files that onebox writes: the parts of a text or of rows, in the user's cache folder and
//! in the folders of `onebox data prepare`. Tokens (.bin) are little-endian with 2 or 4 bytes. For
//! rows, a Megatron index (.idx) has the start of each document, and a mask (.mask) the tokens that
//! the loss counts. A list has the length and the hash of each file.

use super::document::Document;
use super::mask::{self, Mask, MaskBits};
use super::megatron::{self, Index};
use super::open::open_regular;
use super::problem::Problem;
use super::store::{TokenFile, widened};
use files::durable;
use files::foreign_text::foreign;
use files::path_text::PathText;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes of a mask per read.
const BITS: usize = 64 << 10;

/// A part in memory.
#[derive(Debug)]
pub(super) struct TokenPart {
    /// Bytes of a token.
    width: usize,
    /// All tokens, in several buffers.
    pub(super) tokens: Vec<Vec<u8>>,
    /// The documents; `None` for a part of a text.
    documents: Option<DocumentTable>,
}

/// The documents of a part.
#[derive(Debug, Default)]
struct DocumentTable {
    /// Number of tokens of each document.
    lengths: Vec<usize>,
    /// Number of targets of each document.
    targets: Vec<u32>,
    /// For each token, whether the loss counts it.
    counted: Vec<bool>,
}

/// Function that writes a file from consecutive buffers.
pub(super) type FileWriter<'a> = dyn Fn(&Path, &[Vec<u8>]) -> io::Result<FileRecord> + 'a;

impl TokenPart {
    /// A part of a text with these tokens.
    pub(super) const fn of_text(tokens: Vec<Vec<u8>>, width: usize) -> Self {
        Self { width, tokens, documents: None }
    }

    /// A part for documents, without documents yet.
    pub(super) fn of_documents(width: usize) -> Self {
        Self { width, tokens: vec![Vec::new()], documents: Some(DocumentTable::default()) }
    }

    /// Adds a document.
    pub(super) fn push(&mut self, Document { tokens, counted }: &Document) {
        let (Some(all), Some(table)) = (self.tokens.last_mut(), &mut self.documents) else {
            unreachable!("a text has no documents")
        };
        tokens.iter().for_each(|token| all.extend(&token.to_le_bytes()[..self.width]));
        table.lengths.push(tokens.len());
        table.targets.push(counted.iter().filter(|counts| **counts).count() as u32);
        table.counted.extend(counted);
    }

    pub(super) fn num_tokens(&self) -> u64 {
        (self.tokens.iter().map(Vec::len).sum::<usize>() / self.width) as u64
    }

    /// Writes the tokens to `path`; for documents also the index, and with `has_mask` the mask.
    pub(super) fn write(
        &self,
        path: &Path,
        has_mask: bool,
        write: &FileWriter<'_>,
    ) -> io::Result<Vec<FileRecord>> {
        let mut files = vec![write(path, &self.tokens)?];
        if let Some(DocumentTable { lengths, targets, counted }) = &self.documents {
            let index = megatron::written(lengths.iter().copied(), self.width);
            files.push(write(&megatron::path_of(path), &[index])?);
            if has_mask {
                files.push(write(&mask::path_of(path), &[mask::written(targets, counted)])?);
            }
        }
        Ok(files)
    }
}

/// The documents of a part that was written with a mask.
pub(super) fn documents(file: &TokenFile) -> Result<Vec<Document>, Problem> {
    let index = Index::open_for(file)?;
    let lost = || Problem::LostMask { mask: mask::path_of(&file.path) };
    let mask = Mask::open_for(file, &index, 0)?.ok_or_else(lost)?;
    let mut bytes = vec![0; file.stamp.bytes as usize];
    file.read(0, &mut bytes)?;
    let mut tokens = Vec::new();
    widened(&bytes, index.width(), |token| tokens.push(token));
    let (mut counted, mut block) = (vec![true; tokens.len()], vec![0; BITS]);
    let mut bits = MaskBits::new(&mut block);
    mask.not_counted(0..tokens.len(), &mut bits, |token| counted[token] = false)?;
    let ends = index.ends(0..index.num_documents())?;
    let documents = ends.into_iter().scan(0, |end, next| {
        let range = std::mem::replace(end, next)..next;
        let (tokens, counted) = (tokens[range.clone()].to_vec(), counted[range].to_vec());
        Some(Document { tokens, counted })
    });
    Ok(documents.collect())
}

/// Writes a file that gets its name after a sync, and creates its folder.
pub(super) fn write(path: &Path, unfinished: &Path, parts: &[Vec<u8>]) -> io::Result<FileRecord> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    fs::create_dir_all(folder)?;
    let record = durable::replace(path, unfinished, |file| fill(file, parts))?;
    Ok(FileRecord { name: name.to_string_lossy().into_owned(), ..record })
}

/// Writes and syncs the content of a new file; the returned record has no name yet.
pub(super) fn fill(mut file: File, parts: &[Vec<u8>]) -> io::Result<FileRecord> {
    let (mut hash, mut length) = (Xxh3Default::new(), 0);
    for bytes in parts {
        file.write_all(bytes)?;
        hash.update(bytes);
        length += bytes.len() as u64;
    }
    file.sync_all()?;
    Ok(FileRecord { name: String::new(), bytes: length, hash: hex(hash.digest128()) })
}

/// Record of a written file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub(super) name: String,
    /// Length in bytes.
    pub(super) bytes: u64,
    /// 128-bit xxh3 hash of all bytes.
    pub(super) hash: String,
}

/// The difference between a file and its record.
#[derive(Debug)]
pub(super) struct FileFault {
    pub(super) path: PathBuf,
    /// The state of the file, as text.
    is: String,
    /// The value in the record, as text.
    was: String,
}

impl FileFault {
    /// The difference as text; `list` is the path of the list with the record.
    pub(super) fn words(&self, list: &Path) -> String {
        format!("{}, and {} says {}", self.is, PathText(list), foreign(&self.was))
    }
}

impl FileRecord {
    /// Compares the length of the file in `folder` with the record.
    pub(super) fn check_length(&self, folder: &Path) -> Result<(), FileFault> {
        let path = folder.join(&self.name);
        let is = match fs::metadata(&path) {
            Ok(there) if there.len() == self.bytes => return Ok(()),
            Ok(there) => format!("it has {} bytes", there.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => "it is not there".into(),
            Err(error) => format!("it cannot be read ({error})"),
        };
        Err(FileFault { path, is, was: format!("{} bytes", self.bytes) })
    }

    /// Checks that the file in `folder` is no symbolic link, behind which others may change it.
    pub(super) fn check_own(&self, folder: &Path) -> Result<(), FileFault> {
        let path = folder.join(&self.name);
        let is_link = fs::symlink_metadata(&path).is_ok_and(|there| there.is_symlink());
        let was = format!("a file of {} bytes", self.bytes);
        if is_link {
            Err(FileFault { path, is: "it is a symbolic link".into(), was })
        } else {
            Ok(())
        }
    }

    /// Opens the file in `folder` and checks its hash. `add` receives the number of bytes read.
    pub(super) fn open(&self, folder: &Path, add: &dyn Fn(u64)) -> Result<TokenFile, FileFault> {
        self.check_length(folder)?;
        let path = folder.join(&self.name);
        let file = open_regular(&path).map_err(|problem| problem.to_string());
        let file = file.and_then(|file| TokenFile::new(&path, file).map_err(|e| e.to_string()));
        let hash = file.and_then(|file| Ok((file.hash(add).map_err(|unread| unread.why)?, file)));
        let is = match hash {
            Ok((hash, file)) if hex(hash) == self.hash => return Ok(file),
            Ok((hash, _)) => format!("its bytes have the xxh3-128 {}", hex(hash)),
            Err(why) => format!("it cannot be read ({why})"),
        };
        Err(FileFault { path, is, was: self.hash.clone() })
    }
}

/// A hash in the notation of the lists.
pub(super) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}
