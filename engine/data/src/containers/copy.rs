//! The copy of a packed file as text or JSON lines: a part of the user's cache folder, under the
//! hash of the file's bytes, with the length and hash of the copy in its list. A command that writes
//! nothing has a copy without a name, which ends with the process: on the disk of the cache folder,
//! or in the folder for temporary files, which may be in memory.

use super::output::{DiskSpace, Output};
use super::{BLOCK, Container, CountedReader};
use crate::cache_file::{self, hash_of_parts};
use crate::cache_folder;
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
/// The folders of copies and their variables; the message of a full disk says "another" before one.
const IN_CACHE: &str = "cache folder in XDG_CACHE_HOME";
const TEMPORARY: &str = "folder in TMPDIR";
/// The cache folder and the folders above it, up to the user's cache.
const CACHE_FOLDERS: usize = 3;

impl Cache {
    /// The text of a packed file: the copy in the folder; a missing copy is made. `store`
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
        let (file, disk) = self.nameless().map_err(|error| unpacking(error.into()))?;
        let mut writer = BufWriter::new(&file);
        fill(&mut writer, disk, source, container, progress).map_err(unpacking)?;
        writer.flush().map_err(|error| unpacking(error.into()))?;
        drop(writer);
        TokenFile::nameless(source, file, container.unit()).map_err(Problem::Unreadable)
    }

    /// A file without a name for a copy. A cache folder that may be written has failed before.
    fn nameless(&self) -> io::Result<(File, DiskSpace)> {
        let cache = self.folder.as_deref().filter(|_| self.read_only);
        let mut cache = cache.into_iter().flat_map(|folder| folder.ancestors().take(CACHE_FOLDERS));
        match cache.find_map(|folder| nameless(folder, IN_CACHE).ok()) {
            Some(made) => Ok(made),
            None => nameless(&std::env::temp_dir(), TEMPORARY),
        }
    }
}

/// A file without a name in a folder, and the space of its disk.
fn nameless(folder: &Path, setting: &'static str) -> io::Result<(File, DiskSpace)> {
    let folder = Directory::open(folder)?;
    Ok((private::nameless(&folder)?, DiskSpace::of(&folder, setting)?))
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
    // What a killed process left may need the room of this copy.
    if let Err(error) = cache_folder::remove_abandoned(&folder) {
        tracing::debug!("{}: {error}; unfinished files may stay", folder.path().display());
    }
    let unfinished = cache_file::unfinished_name(name);
    let made = cache_file::create_unfinished(&folder, &unfinished).map_err(UnpackError::from);
    let made = made.and_then(|file| {
        let disk = DiskSpace::of(&folder, IN_CACHE)?;
        let record = fill_hashed(&file, disk, source, container, progress)?;
        file.sync_all()?;
        Ok((FileRecord { name: name.to_owned(), ..record }, file))
    });
    let named = made.and_then(|(record, _lock)| {
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
    disk: DiskSpace,
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<FileRecord, UnpackError> {
    let mut writer = HashedWriter { to: BufWriter::new(file), hash: Xxh3Default::new(), bytes: 0 };
    fill(&mut writer, disk, source, container, progress)?;
    writer.flush()?;
    let HashedWriter { hash, bytes, .. } = writer;
    Ok(FileRecord { name: String::new(), bytes, hash: hex(hash.digest128()) })
}

/// Writes the text of `source`, which must not change meanwhile.
fn fill(
    to: &mut dyn Write,
    disk: DiskSpace,
    source: &TokenFile,
    container: Container,
    progress: &dyn Progress,
) -> Result<(), UnpackError> {
    let packed = source.stamp.bytes;
    let reading = progress.begin("unpacking data", packed);
    let file = source.open().map_err(|problem| UnpackError::Unusable(problem.to_string()))?;
    let from = CountedReader::new(file, &*reading, BLOCK);
    let mut out = Output::whole(to, packed, disk);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_copy_without_a_name_is_beside_the_cache_and_its_message_names_the_place() {
        let parent = tempfile::tempdir().unwrap();
        let place = |folder: Option<&Path>, read_only| {
            let cache = Cache { folder: folder.map(Path::to_owned), read_only };
            let (mut file, disk) = cache.nameless().unwrap();
            file.write_all(b"text").unwrap();
            let mut text = String::new();
            private::reopened(&file).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "text");
            format!("{disk:?}")
        };
        let temporary = format!("{:?}, setting: {TEMPORARY:?}", std::env::temp_dir());
        let path = |name: &str| parent.path().join(name);
        std::fs::create_dir_all(path("a/onebox/tokens")).unwrap();
        std::fs::create_dir(path("b")).unwrap();
        for (cache, found) in [("a", "a/onebox/tokens"), ("b", "b")] {
            let message = format!("{:?}, setting: {IN_CACHE:?}", path(found));
            let disk = place(Some(&path(cache).join("onebox/tokens")), true);
            assert!(disk.contains(&message), "{disk}");
        }
        // A user's cache that is not there is not made, and one that failed is not tried again.
        for (cache, read_only) in [(Some(path("c/onebox/tokens")), true), (Some(path("a")), false)]
        {
            let disk = place(cache.as_deref(), read_only);
            assert!(disk.contains(&temporary), "{disk}");
        }
        assert!(place(None, true).contains(&temporary));
        assert!(!path("c").exists());
    }
}
