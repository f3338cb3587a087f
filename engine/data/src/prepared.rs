//! Folders from `onebox data prepare`: their list, and the checks before a run uses them.

use super::bad_rows::BadRows;
use super::chunks::TextPosition;
use super::prepare_command::PrepareCommand;
use super::problem::{Failure, Problem, at};
use super::rows::{CHAT_RULES, CHAT_TEMPLATE};
use super::token_part::{FileFault, FileRecord};
use files::foreign_text::{foreign, reason};
use files::input;
use files::names::is_there;
use files::path_text::PathText;
use files::shell::quoted_path;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Name of the list of finished parts, which is in the parent folder of the data sets.
pub(super) const MANIFEST: &str = "prepared.json";
/// Format version of the list. Formats 1 and 2 have no hashes, so runs do not read them.
pub(super) const VERSION: u32 = 3;
/// Largest list, in bytes: enough for 50 thousand parts or 100 thousand text files.
pub(super) const LARGEST: u64 = 32 << 20;
/// Most bytes of two differing values in an error; longer values are omitted.
const LONGEST: usize = 200;
/// Extension of the folder of an unfinished data set.
const PARTIAL: &str = "partial";
/// Prefix of the names of folders with training tokens.
const TRAIN: &str = "train";

/// The field that every format of the list has.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    version: Value,
}

/// The list of finished parts.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    /// Shell command that recreates everything; empty if the list has no command.
    pub(super) command: String,
    /// Output folder of the command, which a copied list still names. The first lists of this
    /// format have no such field.
    #[serde(default)]
    pub(super) out: PathBuf,
    /// The settings that decide the tokens of a text, by name.
    pub(super) makers: BTreeMap<String, String>,
    /// Name of the folder of each data set.
    pub(super) folders: Vec<String>,
    /// The text files of each data set.
    pub(super) texts: Vec<Vec<SourceText>>,
    /// The finished parts of each data set.
    pub(super) parts: Vec<Vec<PreparedPart>>,
}

impl Manifest {
    /// Reads the list at `path`. A list of another format is returned with its version only. `None`
    /// if the file is missing or was written by another tool.
    pub(super) fn open(path: &Path) -> Result<Option<Self>, Problem> {
        let bytes = match input::bytes(path, LARGEST) {
            // A dangling link means that the list is gone.
            Err(error) if error.kind() == ErrorKind::NotFound && !is_there(path) => {
                return Ok(None);
            }
            read => read.map_err(Problem::Unreadable)?,
        };
        let damaged = |error: serde_json::Error| Problem::BadList(reason(error).to_string());
        // Accept only an object: serde would fill the fields from a JSON list in order.
        let is_object = bytes.trim_ascii_start().starts_with(b"{");
        let version = match is_object {
            true => serde_json::from_slice(&bytes).map(|Header { version }| version.as_u64()),
            false => serde_json::from_slice(&bytes).map(|IgnoredAny| None),
        };
        let version = version.map_err(damaged)?;
        match version.map(|version| u32::try_from(version).unwrap_or(u32::MAX)) {
            None => Ok(None),
            Some(version) if version != VERSION => Ok(Some(Self { version, ..Self::default() })),
            Some(_) => serde_json::from_slice(&bytes).map(Some).map_err(damaged),
        }
    }

    /// Number of finished parts of all data sets.
    pub(super) fn num_parts(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    /// Whether both lists are of chats and another version of onebox used other chat rules for
    /// `before`. In that case the hash of the same template differs too.
    pub(super) fn has_other_rules(&self, before: &Self) -> bool {
        let both = |key| [self, before].map(|of| of.makers.get(key));
        let [rules, others] = both(CHAT_RULES);
        both(CHAT_TEMPLATE).iter().all(Option::is_some) && rules != others
    }

    /// The reason why parts of `before` do not fit this list; `None` if they fit.
    pub(super) fn differs(&self, before: &Self) -> Option<String> {
        if self.folders != before.folders {
            let [is, was] = [self, before].map(|of| foreign(of.folders.join(", ")));
            return Some(format!("it is of other data sets: {was} then, and {is} now"));
        }
        let keys: BTreeSet<_> = self.makers.keys().chain(before.makers.keys()).collect();
        for key in keys {
            let [is, was] =
                [self, before].map(|of| of.makers.get(key).map_or("none", String::as_str));
            if is != was {
                let values = format!(": {was} then, and {is} now");
                let values = if values.len() > LONGEST { String::new() } else { values };
                return Some(format!("it is of another {}{}", foreign(key), foreign(values)));
            }
        }
        let mut texts = self.texts.iter().zip(&before.texts);
        texts
            .find_map(|(is, was)| other_text(is, was))
            .map(|why| format!("it is of another text: {why}"))
    }
}

/// The difference between the files of two texts. Files are compared by their bytes, in order.
fn other_text(is: &[SourceText], was: &[SourceText]) -> Option<String> {
    let name = |text: &SourceText| PathText(&text.path).to_string();
    let (is_new, is_gone) = (without(is, was), without(was, is));
    let before: BTreeMap<_, _> = is_gone.iter().map(|was| (&was.path, was)).collect();
    let changed = is_new.iter().find_map(|is| Some((is, before.get(&is.path)?)));
    if let Some((is, was)) = changed {
        return Some(format!(
            "{} has {} bytes of xxh3-128 {}, and had {} of {}",
            name(is),
            is.bytes,
            is.hash,
            was.bytes,
            foreign(&was.hash)
        ));
    }
    match (is_new.first(), is_gone.first()) {
        (Some(is), Some(was)) => Some(format!("{} is new, and {} is gone", name(is), name(was))),
        (Some(is), None) => Some(format!("{} is new", name(is))),
        (None, Some(was)) => Some(format!("{} is gone", name(was))),
        (None, None) => {
            let (is, was) = is.iter().zip(was).find(|(is, was)| is.hash != was.hash)?;
            let (is, was) = (name(is), name(was));
            Some(format!("its files have another order: {is} is where {was} was"))
        }
    }
}

/// The files of `all` whose bytes are missing, or occur less often, in `others`.
fn without<'a>(all: &'a [SourceText], others: &[SourceText]) -> Vec<&'a SourceText> {
    let mut left = BTreeMap::<_, usize>::new();
    for text in others {
        *left.entry(&text.hash).or_default() += 1;
    }
    let mut is_other = |text: &&SourceText| match left.get_mut(&text.hash) {
        Some(left) if *left > 0 => {
            *left -= 1;
            false
        }
        _ => true,
    };
    all.iter().filter(|text| is_other(text)).collect()
}

/// A text file that was tokenized.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SourceText {
    pub(super) path: PathBuf,
    /// Length in bytes.
    pub(super) bytes: u64,
    /// 128-bit xxh3 hash of all bytes.
    pub(super) hash: String,
    /// Hash of the file's stamp, which changes with each write; `None` if a change could be missed.
    pub(super) stamp: Option<String>,
}

/// A finished part.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PreparedPart {
    pub(super) tokens: u64,
    /// The token file; for rows also the index, and for chats the mask.
    pub(super) files: Vec<FileRecord>,
    /// Bytes of the part's text.
    pub(super) text: u64,
    pub(super) next: TextPosition,
    /// Counts of bad rows in this part and all earlier parts.
    pub(super) rows: BadRows,
}

/// A folder that a list names.
pub(super) struct PreparedFolder {
    pub(super) manifest: Manifest,
    /// The path of the list.
    pub(super) path: PathBuf,
    /// Number of the folder in the list.
    number: usize,
}

impl PreparedFolder {
    /// The list entry of a token folder; `None` if the folder was not prepared.
    pub(super) fn of(folder: &Path) -> Result<Option<Self>, Failure> {
        let Ok(real) = folder.canonicalize() else { return Ok(None) };
        let (Some(all), Some(name)) = (real.parent(), real.file_name().and_then(|n| n.to_str()))
        else {
            return Ok(None);
        };
        let path = all.join(MANIFEST);
        let Some(manifest) = Manifest::open(&path).map_err(at(&path))? else { return Ok(None) };
        let (version, known) = (manifest.version, VERSION);
        if version > known {
            return Err(at(&path)(Problem::NewerList { version, known }));
        } else if version < known {
            return Err(at(&path)(Problem::OlderList { version, all: all.into() }));
        }
        let number = manifest.folders.iter().position(|folder| folder == name);
        let number = number.filter(|number| *number < manifest.parts.len());
        Ok(number.map(|number| Self { manifest, path, number }))
    }

    /// The token files of the folder.
    fn tokens(&self) -> impl Iterator<Item = &FileRecord> {
        self.manifest.parts[self.number].iter().filter_map(|part| part.files.first())
    }

    /// The parent folder of all data sets.
    fn all(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Converts the fault of a file into an error with a remedy.
    pub(super) fn failure(&self, fault: FileFault) -> Failure {
        let (all, list) = (PathText(self.all()), &self.manifest);
        let is_there = list.out.canonicalize().is_ok_and(|out| out == self.all());
        let again = match list.command.is_empty() || !is_there {
            true => None,
            false => Some(PrepareCommand::read(&list.command).map_or_else(
                || format!("onebox data prepare CONFIG {}", quoted_path(self.all())),
                |command| command.text(self.all()),
            )),
        };
        let remedy = match again {
            Some(command) => format!("make them again: {command}"),
            None => format!("delete the folder {all} and prepare the text again"),
        };
        let remedy = format!("copy all files of {all} again, or {remedy}");
        let words = fault.words(&self.path);
        (fault.path, Problem::OtherPart { fault: words, remedy })
    }

    /// Refuses token files in this folder that the list does not name.
    fn check_names(&self, folder: &Path, files: &[PathBuf]) -> Result<(), Failure> {
        let known: BTreeSet<_> = self.tokens().map(|file| Path::new(&file.name)).collect();
        let is_other = |file: &&PathBuf| {
            is_tokens(file) && file.strip_prefix(folder).is_ok_and(|name| !known.contains(name))
        };
        let other = files.iter().find(is_other);
        other.map_or(Ok(()), |other| Err(at(other)(unnamed(&self.path))))
    }
}

/// Whether a file of a directory is a token file by its name.
pub(super) fn is_tokens(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "bin")
}

/// The problem of a token file that the list does not name.
pub(super) fn unnamed(list: &Path) -> Problem {
    let all = PathText(list.parent().unwrap_or(list));
    Problem::OtherPart {
        fault: format!("{} does not name it", PathText(list)),
        remedy: format!("move it away, or delete the folder {all} and prepare the text again"),
    }
}

/// Folder of the parts of a data set until the last part is finished.
pub(super) fn partial(folder: &Path) -> PathBuf {
    folder.with_extension(PARTIAL)
}

/// The folders of the token files, and `text` itself if it is a directory.
pub(super) fn folders<'a>(
    text: &'a str,
    files: &'a [PathBuf],
    from_directory: bool,
) -> BTreeSet<&'a Path> {
    let tokens = files.iter().filter(|file| is_tokens(file));
    let folders = tokens.filter_map(|file| file.parent());
    folders.chain(from_directory.then(|| Path::new(text))).collect()
}

/// Refuses unfinished data sets; a folder with several data sets, since a run would train on
/// validation tokens; and a folder in which a part is missing or has another length, or which has
/// unlisted token files.
pub(super) fn check(text: &str, files: &[PathBuf], from_directory: bool) -> Result<(), Failure> {
    let folders = folders(text, files, from_directory);
    let is_half = |folder: &&&Path| folder.extension().is_some_and(|e| e == PARTIAL);
    if let Some(half) = folders.iter().find(is_half) {
        return Err(at(half)(Problem::HalfPrepared));
    }
    let of_all = |folder: &Path| {
        let all = folder.parent().filter(|all| all.starts_with(text))?;
        let is_list = !matches!(Manifest::open(&all.join(MANIFEST)), Ok(None));
        is_list.then(|| all.to_owned())
    };
    let Some(all) = folders.iter().find_map(|folder| of_all(folder)).filter(|_| from_directory)
    else {
        return folders.into_iter().try_for_each(|folder| check_folder(folder, files));
    };
    let sets = folders.into_iter().filter(|folder| folder.parent() == Some(all.as_path()));
    let trains = |folder: &PathBuf| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TRAIN))
    };
    let (train, validation) = sets.map(Path::to_owned).partition(trains);
    Err(at(&all)(Problem::AllPrepared { train, validation }))
}

/// Compares the lengths of all parts in a folder, and the names of its files, with the list.
fn check_folder(folder: &Path, files: &[PathBuf]) -> Result<(), Failure> {
    let Some(listed) = PreparedFolder::of(folder)? else { return Ok(()) };
    let checked = listed.tokens().try_for_each(|part| part.check_length(folder));
    checked.map_err(|fault| listed.failure(fault))?;
    listed.check_names(folder, files)
}

/// Compares all tokens in a folder with the hashes of the list. `add` receives the bytes read.
pub(super) fn check_bytes(folder: &Path, add: &dyn Fn(u64)) -> Result<(), Failure> {
    let Some(listed) = PreparedFolder::of(folder)? else { return Ok(()) };
    let checked = listed.tokens().try_for_each(|part| part.open(folder, add).map(drop));
    checked.map_err(|fault| listed.failure(fault))
}
