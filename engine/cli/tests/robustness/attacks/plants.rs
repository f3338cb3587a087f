//! Foreign objects in the place of a file of onebox or of the user.

use super::Folder;
use crate::common::without_roots_rights;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Kind of a planted object. The original moves to `theirs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plant {
    /// A link to the original.
    Link,
    /// A link to somebody else's file or folder with other contents.
    Foreign,
    /// A link to a missing file.
    Dangling,
    /// A link to itself.
    Loop,
    /// A named pipe without a writer.
    Pipe,
    Socket,
    /// A directory instead of a file, or a file instead of a directory.
    OtherKind,
    /// A link to /dev/zero, which never ends.
    Zero,
    /// A link to /dev/full, which accepts no bytes.
    Full,
    /// A sparse file of a terabyte.
    Sparse,
    /// The original, without the right to read it.
    Unreadable,
}

impl Plant {
    pub(crate) const ALL: [Self; 11] = [
        Self::Link,
        Self::Foreign,
        Self::Dangling,
        Self::Loop,
        Self::Pipe,
        Self::Socket,
        Self::OtherKind,
        Self::Zero,
        Self::Full,
        Self::Sparse,
        Self::Unreadable,
    ];
}

pub(crate) const TERABYTE: u64 = 1 << 40;

/// Contents of a folder: the kind of each entry, and its bytes or the target of its link.
pub(crate) type Tree = BTreeMap<PathBuf, (String, Vec<u8>)>;

/// Everything below `path`, or `path` itself, without following links.
pub(crate) fn tree(path: &Path) -> Tree {
    let mut found = Tree::new();
    add(path, Path::new(""), &mut found);
    found
}

fn add(path: &Path, name: &Path, found: &mut Tree) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    let kind = metadata.file_type();
    let mode = metadata.permissions().mode();
    let of = |word: &str| format!("{word} {mode:o}");
    let entry = if kind.is_symlink() {
        ("link".to_owned(), fs::read_link(path).unwrap().into_os_string().into_encoded_bytes())
    } else if kind.is_dir() {
        for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
            add(&entry.path(), &name.join(entry.file_name()), found);
        }
        (of("folder"), Vec::new())
    } else if kind.is_file() && metadata.len() < TERABYTE {
        (of("file"), fs::read(path).unwrap())
    } else if kind.is_file() {
        (of("terabyte"), metadata.len().to_le_bytes().to_vec())
    } else if kind.is_fifo() {
        (of("pipe"), Vec::new())
    } else {
        (of("other"), Vec::new())
    };
    found.insert(name.to_owned(), entry);
}

/// Names that differ between two trees.
pub(crate) fn differences(before: &Tree, after: &Tree) -> Vec<String> {
    let names = before.keys().chain(after.keys().filter(|name| !before.contains_key(*name)));
    let differs = names.filter(|name| before.get(*name) != after.get(*name));
    let words = |name: &PathBuf| {
        let state = match (before.get(name), after.get(name)) {
            (None, _) => "is new",
            (_, None) => "is gone",
            _ => "is changed",
        };
        format!("{} {state}", name.display())
    };
    differs.map(words).collect()
}

/// Removes a file, directory or link of any kind.
pub(crate) fn remove(path: &Path) {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
}

/// A planted object at a path, with the files of others next to it.
pub(crate) struct Trap {
    path: PathBuf,
    theirs: PathBuf,
    /// Files of others before the attack.
    before: Tree,
    plant: Plant,
    had: bool,
    /// Keeps a planted socket alive.
    _socket: Option<UnixListener>,
}

impl Trap {
    /// Plants an object at a name in `folder`, if the name is fit for this kind.
    pub(crate) fn new(folder: &Folder, name: &str, plant: Plant) -> Option<Self> {
        let (path, theirs) = (folder.path(name), folder.path("theirs"));
        remove(&theirs);
        fs::create_dir_all(theirs.join("folder")).unwrap();
        fs::write(theirs.join("file"), "theirs, and nobody else's\n").unwrap();
        fs::write(theirs.join("folder/step-00000004"), "theirs").unwrap();
        let metadata = fs::symlink_metadata(&path).ok();
        let (had, is_folder) =
            (metadata.is_some(), metadata.as_ref().is_some_and(fs::Metadata::is_dir));
        let needs_original = matches!(plant, Plant::Link | Plant::Unreadable);
        if needs_original && (!had || plant == Plant::Unreadable && is_folder) {
            return None;
        }
        let original = theirs.join("original");
        if plant == Plant::Unreadable {
            fs::copy(&path, &original).unwrap();
        } else if had {
            fs::rename(&path, &original).unwrap();
        }
        let mut socket = None;
        match plant {
            Plant::Link => symlink(&original, &path).unwrap(),
            Plant::Foreign if is_folder => symlink(theirs.join("folder"), &path).unwrap(),
            Plant::Foreign => symlink(theirs.join("file"), &path).unwrap(),
            Plant::Dangling => symlink(theirs.join("new"), &path).unwrap(),
            Plant::Loop => symlink(path.file_name().unwrap(), &path).unwrap(),
            Plant::Pipe => {
                assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            }
            Plant::Socket => {
                // The path of a socket must be short.
                let near = folder.path("socket");
                socket = Some(UnixListener::bind(&near).unwrap());
                fs::rename(&near, &path).unwrap();
            }
            Plant::OtherKind if is_folder => fs::write(&path, "no folder").unwrap(),
            Plant::OtherKind => fs::create_dir(&path).unwrap(),
            Plant::Zero => symlink("/dev/zero", &path).unwrap(),
            Plant::Full => symlink("/dev/full", &path).unwrap(),
            Plant::Sparse => File::create(&path).unwrap().set_len(TERABYTE).unwrap(),
            Plant::Unreadable => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
            }
        }
        let before = tree(&theirs);
        Some(Self { path, theirs, before, plant, had, _socket: socket })
    }

    /// Files of others that have changed.
    pub(crate) fn harm(&self) -> Vec<String> {
        differences(&self.before, &tree(&self.theirs))
    }

    /// Whether the planted object is unchanged.
    pub(crate) fn is_there(&self) -> bool {
        let Ok(metadata) = fs::symlink_metadata(&self.path) else { return false };
        let kind = metadata.file_type();
        match self.plant {
            Plant::Link
            | Plant::Foreign
            | Plant::Dangling
            | Plant::Loop
            | Plant::Zero
            | Plant::Full => kind.is_symlink(),
            Plant::Pipe => kind.is_fifo(),
            Plant::Socket => kind.is_socket(),
            Plant::OtherKind => true,
            Plant::Sparse => metadata.len() == TERABYTE,
            Plant::Unreadable => metadata.permissions().mode() & 0o777 == 0,
        }
    }

    /// Restores the original, if the plant still exists.
    pub(crate) fn undo(self) {
        let original = self.theirs.join("original");
        if self.plant == Plant::Unreadable {
            if self.path.exists() {
                fs::set_permissions(&self.path, fs::Permissions::from_mode(0o644)).unwrap();
            }
        } else if self.is_there() {
            remove(&self.path);
            if self.had {
                fs::rename(original, &self.path).unwrap();
            }
        }
        remove(&self.theirs);
    }
}

/// Command of a case: root gives up its right to read everything if the case needs that.
pub(crate) fn with_rights(command: Command, plant: Plant) -> Command {
    let is_root = rustix::process::geteuid().is_root();
    if is_root && plant == Plant::Unreadable { without_roots_rights(&command) } else { command }
}
