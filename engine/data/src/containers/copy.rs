//! The copy of a packed file as text or JSON lines: a part of the user's cache folder, under the
//! hash of the file's bytes, with the length and hash of the copy in its list. Without a folder to
//! write into, the copy is a file without a name, which ends with the process.

use super::output::{DiskSpace, Output};
use super::{BLOCK, Container, CountedReader};
use crate::cache_file::{self, hash_of_parts};
use crate::problem::Problem;
use crate::progress::Progress;
use crate::store::{Store, TokenFile};
use crate::token_cache::{Cache, PartRecord};
use crate::token_part::{FileRecord, hex};
use crate::unpack_error::UnpackError;
use files::directory::Directory;
use files::path_text::ShownPath;
use files::private;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3Default;

/// Version of the copies; part of each name.
const VERSION: &[u8] = b"onebox unpacked 3\n";
/// Extension of the file of a copy.
const KIND: &str = "unpacked";

impl Cache {
    /// The text of a packed file: the copy in the folder, which is made if it is not there. `store`
    /// protects it from removal.
    pub(crate) fn unpacked(
        &self,
        source: &TokenFile,
        container: Container,
        store: &mut Store,
        progress: &dyn Progress,
    ) -> Result<TokenFile, Problem> {
        let path = match &self.folder {
            None => None,
            Some(folder) => Some(folder.join(name(source, container, progress)?)),
        };
        let in_cache = |store: &mut Store| {
            let copy = path.as_deref().and_then(|path| self.open_for(store, path))?;
            Some(copy.into_copy_of(source, container.unit()))
        };
        if let Some(copy) = in_cache(store) {
            return Ok(copy);
        }
        let unpacking = |error| Problem::Packed { what: container.what(), error };
        if let Some(path) = path.as_deref().filter(|_| !self.read_only) {
            match write(path, source, container, progress) {
                Ok(()) => {
                    if let Some(copy) = in_cache(store) {
                        return Ok(copy);
                    }
                }
                Err(UnpackError::Unwritten(error)) => {
                    tracing::warn!(
                        "{}: {error}; the text is unpacked again next time",
                        path.shown()
                    );
                }
                Err(error) => return Err(unpacking(error)),
            }
        }
        let folder = std::env::temp_dir();
        let file = Directory::open(&folder).and_then(|folder| {
            let file = private::nameless(&folder)?;
            Ok((folder, file))
        });
        let (folder, file) = file.map_err(|error| unpacking(error.into()))?;
        let mut writer = BufWriter::new(&file);
        fill(&mut writer, &folder, source, container, progress).map_err(unpacking)?;
        writer.flush().map_err(|error| unpacking(error.into()))?;
        drop(writer);
        TokenFile::nameless(source, file, container.unit()).map_err(Problem::Unreadable)
    }
}

/// Name of the list of a copy: the hash of the file's bytes and of its form.
fn name(
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<String, Problem> {
    let reading = progress.begin("reading packed data", source.stamp.bytes);
    let hash = source.hash(&|bytes| reading.add(bytes))?.to_le_bytes();
    let form = format!("{container:?}");
    let parts = [VERSION, files::VERSION.as_bytes(), form.as_bytes(), &hash];
    Ok(format!("{:032x}.json", hash_of_parts(parts)))
}

/// Writes the copy with its list at `path`. Nothing stays of a copy that is not whole.
fn write(
    path: &Path,
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<(), UnpackError> {
    let copy_path = path.with_extension(KIND);
    let (Some(folder), Some(name)) =
        (path.parent(), copy_path.file_name().and_then(|n| n.to_str()))
    else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
    };
    let folder = private::folder(folder)?;
    let unfinished = cache_file::unfinished_name(name);
    let made =
        private::create_new(&folder, &unfinished).map_err(UnpackError::from).and_then(|file| {
            let record = fill_hashed(&file, &folder, source, container, progress)?;
            file.sync_all()?;
            Ok(FileRecord { name: name.to_owned(), ..record })
        });
    let named = made.and_then(|record| {
        // A copy of the same bytes stays, since another process may be reading it.
        match record.open(folder.path(), &|_| ()) {
            Ok(_) => folder.remove_file(&unfinished)?,
            Err(_) => folder.rename(&unfinished, name)?,
        }
        folder.sync()?;
        Ok(record)
    });
    if named.is_err() {
        // The first error is the one to report.
        drop(folder.remove_file(&unfinished));
    }
    let record = PartRecord::of_file(named?);
    Ok(cache_file::write(path, &record)?)
}

/// Writes the text of `source` and returns its length and hash.
fn fill_hashed(
    file: &File,
    folder: &Directory,
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<FileRecord, UnpackError> {
    let mut writer = HashedWriter { to: BufWriter::new(file), hash: Xxh3Default::new(), bytes: 0 };
    fill(&mut writer, folder, source, container, progress)?;
    writer.flush()?;
    let HashedWriter { hash, bytes, .. } = writer;
    Ok(FileRecord { name: String::new(), bytes, hash: hex(hash.digest128()) })
}

/// Writes the text of `source`, which must not change meanwhile.
fn fill(
    to: &mut dyn Write,
    folder: &Directory,
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<(), UnpackError> {
    let packed = source.stamp.bytes;
    let reading = progress.begin("unpacking data", packed);
    let file = source.open().map_err(|problem| UnpackError::Unusable(problem.to_string()))?;
    let from = CountedReader::new(file, &*reading, BLOCK);
    let mut out = Output::whole(to, packed, DiskSpace::of(folder)?);
    container.write(from, packed, &mut out).0?;
    // A read of 0 bytes checks that the file still has its stamp.
    let unread = source.read(0, &mut []);
    unread.map_err(|unread| UnpackError::Unusable(format!("it has changed: {}", unread.why)))
}

/// A writer that hashes what it writes.
struct HashedWriter<'a> {
    to: BufWriter<&'a File>,
    hash: Xxh3Default,
    bytes: u64,
}

impl Write for HashedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}
