//! The folders that `onebox data prepare` makes, the list of what stands in them, and those of them that a run may not take.

use super::bad_rows::BadRows;
use super::mask;
use super::open::open_regular;
use super::parts::Place;
use super::problem::{Failure, Problem, at};
use super::store::TokenFile;
use crate::config::DataFormat;
use crate::report::shown::Shown;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The name of the list of finished parts, in the folder of all data sets.
pub(super) const MANIFEST: &str = "prepared.json";
/// Of the list. Formats 1 and, of chats, 2 have no hashes.
pub(super) const VERSION: u32 = 3;
/// Characters of two values that an error names.
const LONGEST: usize = 200;
/// Behind the name of the folder of a data set that is not finished.
const PARTIAL: &str = "partial";
/// The beginning of the name of a folder of tokens to train on.
const TRAIN: &str = "train";
/// That of tokens that are held out.
const HELD_OUT: &str = "validation";

/// The list of finished parts. Older formats have a number of tokens for each part, and nothing else of what is here.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    /// Makes all of it again.
    #[serde(default)]
    pub(super) command: String,
    /// What the tokens follow from beside the text, by its name.
    #[serde(default)]
    pub(super) makers: BTreeMap<String, String>,
    /// The name of the folder of each data set.
    #[serde(default)]
    pub(super) folders: Vec<String>,
    /// The text of each data set.
    #[serde(default)]
    pub(super) texts: Vec<Vec<SourceText>>,
    /// Those of each data set.
    pub(super) parts: Vec<Vec<Part>>,
}

impl Manifest {
    /// Finished ones of all data sets.
    pub(super) fn num_parts(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    /// Why parts of `before` are none of this one, if they are not.
    pub(super) fn differs(&self, before: &Self) -> Option<String> {
        if self.folders != before.folders {
            let [is, was] = [self, before].map(|of| of.folders.join(", "));
            return Some(format!("it is of other data sets: {was} then, and {is} now"));
        }
        let keys: BTreeSet<_> = self.makers.keys().chain(before.makers.keys()).collect();
        for key in keys {
            let [is, was] =
                [self, before].map(|of| of.makers.get(key).map_or("none", String::as_str));
            if is != was {
                let values = format!(": {was} then, and {is} now");
                let values = if values.len() > LONGEST { "" } else { &values };
                return Some(format!("it is of another {key}{values}"));
            }
        }
        let mut texts = self.texts.iter().zip(&before.texts);
        texts
            .find_map(|(is, was)| other_text(is, was))
            .map(|why| format!("it is of another text: {why}"))
    }
}

/// How the first other file is another one.
fn other_text(is: &[SourceText], was: &[SourceText]) -> Option<String> {
    let hash = |all: &[SourceText], i| all.get(i).map(|text: &SourceText| text.hash.clone());
    let first = (0..is.len().max(was.len())).find(|i| hash(is, *i) != hash(was, *i))?;
    let name = |all: &[SourceText]| Shown(&all[first].path).to_string();
    Some(match is.len().cmp(&was.len()) {
        Ordering::Greater => format!("{} is new", name(is)),
        Ordering::Less => format!("{} is gone", name(was)),
        Ordering::Equal => {
            let [is_now, was] = [is, was].map(|all| (all[first].bytes, &all[first].hash));
            let (name, (bytes, hash)) = (name(is), is_now);
            format!("{name} has {bytes} bytes of xxh3-128 {hash}, and had {} of {}", was.0, was.1)
        }
    })
}

/// A file of text that tokens were made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SourceText {
    pub(super) path: PathBuf,
    /// Length.
    pub(super) bytes: u64,
    /// xxh3, 128 bits, of all its bytes.
    pub(super) hash: String,
    /// What the system says of it as long as nobody writes to it; none where a change could go unnoticed.
    pub(super) stamp: Option<String>,
}

/// A finished part.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) tokens: u64,
    /// The tokens, and of rows their index and their mask beside them.
    #[serde(default)]
    pub(super) files: Vec<Written>,
    /// Bytes of its text.
    pub(super) text: u64,
    pub(super) next: Place,
    /// Rows of this part and of those before it.
    pub(super) rows: BadRows,
}

/// A file as it was written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) name: String,
    /// Length.
    pub(super) bytes: u64,
    /// xxh3, 128 bits, of all its bytes; empty where nobody knows it.
    pub(super) hash: String,
}

/// How a file is not as it was written.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) path: PathBuf,
    /// What it is now.
    is: String,
    /// What the list says.
    was: String,
}

impl Fault {
    /// What the file is, and what this list says.
    pub(super) fn words(&self, list: &Path) -> String {
        format!("{}, and {} says {}", self.is, Shown(list), self.was)
    }
}

impl Written {
    /// Compares the length of the file in this folder.
    pub(super) fn check_length(&self, folder: &Path) -> Result<(), Fault> {
        let path = folder.join(&self.name);
        let is = match fs::metadata(&path) {
            Ok(there) if there.len() == self.bytes => return Ok(()),
            Ok(there) => format!("it has {} bytes", there.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => "it is not there".into(),
            Err(error) => format!("it cannot be read ({error})"),
        };
        Err(Fault { path, is, was: format!("{} bytes", self.bytes) })
    }

    /// Compares all of the file in this folder. `add`: adds bytes that were read.
    pub(super) fn check(&self, folder: &Path, add: &dyn Fn(u64)) -> Result<(), Fault> {
        self.check_length(folder)?;
        let path = folder.join(&self.name);
        let file = open_regular(&path).map_err(|problem| problem.to_string());
        let file = file.and_then(|file| TokenFile::new(&path, file).map_err(|e| e.to_string()));
        let is = match file.and_then(|file| file.hash(add).map_err(|unread| unread.why)) {
            Ok(hash) if hex(hash) == self.hash => return Ok(()),
            Ok(hash) => format!("its bytes have the xxh3-128 {}", hex(hash)),
            Err(why) => format!("it cannot be read ({why})"),
        };
        Err(Fault { path, is, was: self.hash.clone() })
    }
}

/// What the list says of one of the folders that it names.
pub(super) struct Listed {
    pub(super) manifest: Manifest,
    /// The path of the list.
    pub(super) path: PathBuf,
    /// The number of the folder.
    number: usize,
}

impl Listed {
    /// Of a folder of tokens; none where it was not prepared.
    pub(super) fn of(folder: &Path) -> Result<Option<Self>, Failure> {
        let Ok(real) = folder.canonicalize() else { return Ok(None) };
        let (Some(all), Some(name)) = (real.parent(), real.file_name().and_then(|n| n.to_str()))
        else {
            return Ok(None);
        };
        let path = all.join(MANIFEST);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(Problem::Unreadable).map_err(at(&path))?,
        };
        let damaged = |error: serde_json::Error| at(&path)(Problem::BadList(error.to_string()));
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(damaged)?;
        let number = match name {
            _ if !manifest.folders.is_empty() => manifest.folders.iter().position(|f| f == name),
            TRAIN => Some(0),
            HELD_OUT => manifest.parts.len().checked_sub(1),
            _ => None,
        };
        let number = number.filter(|number| *number < manifest.parts.len());
        Ok(number.map(|number| Self { manifest, path, number }))
    }

    /// The files of tokens. An older list names none, and has lengths if `width`, the bytes of a token, is known.
    pub(super) fn tokens(&self, width: Option<usize>) -> impl Iterator<Item = Written> {
        let tokens = move |(number, part): (usize, &Part)| {
            if let Some(tokens) = part.files.first() {
                return Some(tokens.clone());
            }
            let name = mask::name_of_part(number, self.manifest.version == 2);
            Some(Written { name, bytes: part.tokens * width? as u64, hash: String::new() })
        };
        self.manifest.parts[self.number].iter().enumerate().filter_map(tokens)
    }

    /// The fault of a file as a failure.
    pub(super) fn failure(&self, fault: Fault) -> Failure {
        let all = Shown(self.path.parent().unwrap_or(&self.path)).to_string();
        let remedy = match self.manifest.command.as_str() {
            "" => format!("copy all files of {all} again, or delete it and prepare the text again"),
            command => format!("copy all files of {all} again, or make them again: {command}"),
        };
        let words = fault.words(&self.path);
        (fault.path, Problem::OtherPart { fault: words, remedy })
    }
}

/// A hash as the list has it.
pub(super) fn hex(hash: u128) -> String {
    format!("{hash:032x}")
}

/// Where the parts of a data set stand before the last one is done.
pub(super) fn partial(folder: &Path) -> PathBuf {
    folder.with_extension(PARTIAL)
}

/// The folders of files of tokens, and `text` if it is one itself.
pub(super) fn folders<'a>(
    text: &'a str,
    files: &'a [PathBuf],
    from_directory: bool,
) -> BTreeSet<&'a Path> {
    let tokens = files.iter().filter(|file| file.extension().is_some_and(|e| e == "bin"));
    let folders = tokens.filter_map(|file| file.parent());
    folders.chain(from_directory.then(|| Path::new(text))).collect()
}

/// Refuses files of tokens of a data set that is not finished; the folder `text` if it has several data sets: a run would train on
/// held-out ones; and a folder of which a part is not there, or is longer or shorter than it was written.
pub(super) fn check(
    (text, format): (&str, &DataFormat),
    files: &[PathBuf],
    from_directory: bool,
) -> Result<(), Failure> {
    let folders = folders(text, files, from_directory);
    let is_half = |folder: &&&Path| folder.extension().is_some_and(|e| e == PARTIAL);
    if let Some(half) = folders.iter().find(is_half) {
        return Err(at(half)(Problem::HalfPrepared));
    }
    let of_all = |folder: &Path| {
        let all = folder.parent().filter(|all| all.starts_with(text))?;
        all.join(MANIFEST).is_file().then(|| all.to_owned())
    };
    let Some(all) = folders.iter().find_map(|folder| of_all(folder)).filter(|_| from_directory)
    else {
        return folders.into_iter().try_for_each(|folder| check_lengths(folder, format));
    };
    let sets = folders.into_iter().filter(|folder| folder.parent() == Some(all.as_path()));
    let trains = |folder: &PathBuf| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TRAIN))
    };
    let (train, held_out) = sets.map(Path::to_owned).partition(trains);
    Err(at(&all)(Problem::AllPrepared { train, held_out }))
}

/// Compares the lengths of all parts in a folder with those that were written.
fn check_lengths(folder: &Path, format: &DataFormat) -> Result<(), Failure> {
    let Some(listed) = Listed::of(folder)? else { return Ok(()) };
    let mut parts = listed.tokens(format.width());
    parts.try_for_each(|part| part.check_length(folder)).map_err(|fault| listed.failure(fault))
}

/// Compares all bytes of the tokens in a folder with the hashes that were written. `add`: adds bytes that were read. Returns the path of a
/// list that has no hashes.
pub(super) fn check_bytes(folder: &Path, add: &dyn Fn(u64)) -> Result<Option<PathBuf>, Failure> {
    let Some(listed) = Listed::of(folder)? else { return Ok(None) };
    if listed.manifest.version < VERSION {
        return Ok(Some(listed.path));
    }
    let mut parts = listed.tokens(None);
    let checked = parts.try_for_each(|part| part.check(folder, add));
    checked.map_err(|fault| listed.failure(fault)).map(|()| None)
}
