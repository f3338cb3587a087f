//! Models in the cache of the Hugging Face hub, which `hf download` fills. onebox downloads nothing.
//!
//! A model `ORG/NAME` has a folder `models--ORG--NAME`, and a model without an organisation, such as
//! `gpt2`, has `models--gpt2`. Its folder `refs` maps a branch or a tag to a commit. The folder
//! `snapshots/COMMIT` has the files of the commit as links to files in `blobs` (huggingface_hub,
//! "Understand caching").

use super::directory::Directory;
use super::input;
use super::regular_file::{OtherKind, open_at};
use super::shell::quoted;
use rustix::fs::{OFlags, readlinkat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Beginning of the name of a model's folder.
const MODELS: &str = "models--";
/// Folder of the commits of a model.
const SNAPSHOTS: &str = "snapshots";
/// Folder of the branches and tags of a model.
const REFS: &str = "refs";
/// Branch that is used if a name has no revision.
const MAIN: &str = "main";
/// Bytes of the longest file in `refs`.
const LONGEST_REF: u64 = 256;

/// Endings of files, which the name of a model without an organisation does not have.
const FILE_ENDINGS: [&str; 5] = [".json", ".ron", ".safetensors", ".bin", ".gguf"];

/// Folder of the hub's cache: `HF_HUB_CACHE` or its older name `HUGGINGFACE_HUB_CACHE`, or `hub` in
/// `HF_HOME`, or `huggingface/hub` in `XDG_CACHE_HOME` or `~/.cache`. `~` at the start of a value is
/// `HOME`, as in huggingface_hub. `None` if no variable gives a place.
pub fn cache_folder() -> Option<PathBuf> {
    let given = |key| std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    let caches = || given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    let home = || given("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
    let cache = given("HF_HUB_CACHE").or_else(|| given("HUGGINGFACE_HUB_CACHE"));
    let folder = cache.or_else(|| Some(home()?.join("hub")))?;
    let in_home = folder.strip_prefix("~").ok().zip(given("HOME"));
    let in_home = in_home.map(|(rest, home)| home.join(rest));
    Some(in_home.unwrap_or(folder))
}

/// Name of a model on the hub: `ORG/NAME` or `NAME`, or with a branch, a tag or a commit
/// `ORG/NAME@REVISION`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    repository: String,
    revision: Option<String>,
}

impl HubModel {
    /// Reads a name; `None` if the text cannot be a name of the hub.
    pub fn parse(text: &str) -> Option<Self> {
        let (repository, revision) = match text.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let is_name = |part: &str| {
            let is_letter = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            part.len() <= 96
                && part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && part.chars().all(is_letter)
        };
        // A tag may have slashes, but none of its parts may lead elsewhere.
        let is_revision = |text: &str| text.split('/').all(is_name);
        // The hub has no name with `--`, which stands for `/` in the cache.
        let is_repository = !repository.contains("--")
            && match repository.split_once('/') {
                Some((org, name)) => is_name(org) && is_name(name),
                None => {
                    is_name(repository) && !FILE_ENDINGS.iter().any(|end| repository.ends_with(end))
                }
            };
        (is_repository && revision.is_none_or(is_revision)).then(|| Self {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
        })
    }

    /// Folder of the model's files in the cache folder `cache`.
    ///
    /// # Errors
    /// [`MissingSnapshot`] if the cache lacks the model or the revision, or may not be read.
    pub fn snapshot(&self, cache: Option<&Path>) -> Result<PathBuf, MissingSnapshot> {
        let missing =
            |what: String| MissingSnapshot { model: self.clone(), what, is_unread: false };
        let unread = |path: &Path, error: &io::Error| MissingSnapshot {
            model: self.clone(),
            what: format!("{}: {error}", path.display()),
            is_unread: true,
        };
        let Some(cache) = cache else {
            return Err(missing("HF_HUB_CACHE, HF_HOME and HOME are not set".into()));
        };
        let folder = cache.join(format!("{MODELS}{}", self.repository.replace('/', "--")));
        if !is_folder(&folder).map_err(|error| unread(&folder, &error))? {
            return Err(missing(format!("{} does not exist", folder.display())));
        }
        let revision = self.revision.as_deref().unwrap_or(MAIN);
        let snapshots = folder.join(SNAPSHOTS);
        let named = folder.join(REFS).join(revision);
        let commit = match input::text(&named, LONGEST_REF) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(unread(&named, &error));
            }
            Err(_) => revision.to_owned(),
        };
        let snapshot = snapshots.join(&commit);
        let is_name = Path::new(&commit).components().count() == 1
            && matches!(Path::new(&commit).components().next(), Some(Component::Normal(_)));
        match is_name && is_folder(&snapshot).map_err(|error| unread(&snapshot, &error))? {
            true => Ok(snapshot),
            false => Err(missing(format!("{} has no revision `{revision}`", folder.display()))),
        }
    }

    /// Command that downloads the model into the cache.
    fn download(&self) -> String {
        let revision = self.revision.iter().map(|text| format!(" --revision {}", quoted(text)));
        format!("hf download {}{}", quoted(&self.repository), revision.collect::<String>())
    }
}

/// Whether `path` leads to a folder.
///
/// # Errors
/// Returns the error of the file system if it does not tell, such as a lack of permission.
fn is_folder(path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

/// Folder of the newest files in the cache folder `models--ORG--NAME` of a model; `None` if `path` is
/// another folder.
///
/// # Errors
/// [`MissingSnapshot`] if the folder has no files of the branch `main`, or may not be read.
pub fn newest_snapshot(path: &Path) -> Result<Option<PathBuf>, MissingSnapshot> {
    let name = path.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix(MODELS));
    let model = name.and_then(|name| HubModel::parse(&name.replacen("--", "/", 1)));
    // A folder with files of its own may have such a name, too. An error of `is_folder` is an error
    // of `snapshot`, too.
    match model.filter(|_| is_folder(&path.join(SNAPSHOTS)).unwrap_or(true)) {
        Some(model) => model.snapshot(path.parent()).map(Some),
        None => Ok(None),
    }
}

/// Name of the model `ORG/NAME` to whose snapshot `path` leads; `None` for other folders.
pub fn name_of_snapshot(path: &Path) -> Option<String> {
    let snapshots = path.parent().filter(|folder| folder.ends_with(SNAPSHOTS))?;
    let model = snapshots.parent()?.file_name()?.to_str()?;
    Some(model.strip_prefix(MODELS)?.replacen("--", "/", 1))
}

/// Command that downloads the files which the snapshot `path` lacks; `None` for other folders.
pub fn download_of_snapshot(path: &Path) -> Option<String> {
    let repository = name_of_snapshot(path)?;
    let revision = Some(path.file_name()?.to_str()?.to_owned());
    Some(HubModel { repository, revision }.download())
}

/// Reason and remedy for a file that the snapshot `path` lacks; `None` for other folders.
pub fn incomplete_download(path: &Path) -> Option<String> {
    let command = download_of_snapshot(path)?;
    Some(format!("the download of the model is not complete: run `{command}`"))
}

/// Error: the hub's cache on this machine lacks a model or its revision, or may not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSnapshot {
    model: HubModel,
    what: String,
    /// Whether the cache may have the model, but cannot be read.
    is_unread: bool,
}

impl MissingSnapshot {
    /// Remedy, with the command that downloads a missing model.
    pub fn help(&self) -> String {
        match self.is_unread {
            true => "check this folder and its permissions, or name another cache by HF_HUB_CACHE"
                .into(),
            false => format!(
                "nothing is downloaded: run `{}`, or name a folder on this machine",
                self.model.download()
            ),
        }
    }
}

impl fmt::Display for MissingSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, what, is_unread } = self;
        match is_unread {
            true => {
                write!(f, "the Hugging Face cache, looked up for `{model}`, cannot be read: {what}")
            }
            false => write!(
                f,
                "`{model}` is neither a folder nor a model in the Hugging Face cache: {what}"
            ),
        }
    }
}

impl std::error::Error for MissingSnapshot {}

/// An open folder with the files of a model. In a snapshot of the hub's cache, links to files in the
/// folder of the same model are followed; all other links are refused.
#[derive(Debug)]
pub struct ModelFolder {
    folder: Directory,
    cached: Option<CachedModel>,
}

/// The folder `models--ORG--NAME` of an open snapshot.
#[derive(Debug)]
struct CachedModel {
    folder: Directory,
    /// Path of the folder, from the kernel.
    path: PathBuf,
    /// Name of the snapshot.
    commit: PathBuf,
}

impl ModelFolder {
    /// Opens a folder.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let folder = Directory::open(path)?;
        let cached = CachedModel::of(&folder.real_path()?);
        Ok(Self { folder, cached })
    }

    /// Opens the regular file `name`, or the file of the same model to which the link `name` leads.
    ///
    /// # Errors
    /// Returns the error of the file system, or an error that says where a refused link leads. The
    /// kind `NotFound` means that neither a file nor a link has this name.
    pub fn file(&self, name: &str) -> io::Result<File> {
        let name = Path::new(name);
        match (open_at(&self.folder, name, OFlags::empty()), &self.cached) {
            (Err(error), Some(cached)) if Errno::from_io_error(&error) == Some(Errno::LOOP) => {
                let to = readlinkat(&self.folder, name, Vec::new())?;
                cached.follow(Path::new(OsStr::from_bytes(to.to_bytes())))
            }
            (opened, _) => opened,
        }
    }
}

impl AsFd for ModelFolder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

impl CachedModel {
    /// Opens the model's folder if `path` is the real path of a snapshot.
    fn of(path: &Path) -> Option<Self> {
        let (commit, snapshots) = (path.file_name()?, path.parent()?);
        let model = snapshots.parent()?;
        let is_model = model.file_name()?.as_bytes().starts_with(MODELS.as_bytes());
        if !is_model || snapshots.file_name()? != SNAPSHOTS {
            return None;
        }
        let folder = Directory::open(model).ok()?;
        Some(Self { folder, path: model.to_owned(), commit: commit.into() })
    }

    /// Opens the file to which a link of the snapshot leads. No further link is followed.
    fn follow(&self, to: &Path) -> io::Result<File> {
        let refused = |why: &str| {
            let why = format!("it is a link to {}, {why}", to.display());
            OtherKind::error(ErrorKind::Other, why)
        };
        let leaves = || refused("which leaves the cache folder of the model");
        let mut parts: Vec<&OsStr> = vec![OsStr::new(SNAPSHOTS), self.commit.as_os_str()];
        let rest = match to.is_absolute() {
            true => {
                parts.clear();
                to.strip_prefix(&self.path).map_err(|_| leaves())?
            }
            false => to,
        };
        for part in rest.components() {
            match part {
                Component::CurDir => {}
                Component::ParentDir => drop(parts.pop().ok_or_else(leaves)?),
                Component::Normal(name) => parts.push(name),
                Component::RootDir | Component::Prefix(_) => return Err(leaves()),
            }
        }
        let (name, folders) = parts.split_last().ok_or_else(leaves)?;
        let missing = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => {
                let snapshot = self.path.join(SNAPSHOTS).join(&self.commit);
                let command = download_of_snapshot(&snapshot).map(|c| format!(" with `{c}`"));
                let command = command.unwrap_or_default();
                refused(&format!("which is missing: download the model again{command}"))
            }
            _ => error,
        };
        let mut folder = None;
        for name in folders {
            let above = folder.as_ref().map_or(self.folder.as_fd(), AsFd::as_fd);
            folder = Some(open_at(above, Path::new(name), OFlags::DIRECTORY).map_err(missing)?);
        }
        let above = folder.as_ref().map_or(self.folder.as_fd(), AsFd::as_fd);
        open_at(above, Path::new(name), OFlags::empty()).map_err(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    /// A cache with one model of one commit.
    fn cache() -> (tempfile::TempDir, PathBuf) {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--Org--Model-1B");
        for folder in ["blobs", "refs/pr", "refs/refs/pr", "snapshots/0123"] {
            fs::create_dir_all(model.join(folder)).unwrap();
        }
        fs::write(model.join("blobs/abc"), "blob").unwrap();
        fs::write(model.join("refs/main"), "0123").unwrap();
        fs::write(model.join("refs/pr/1"), "0123\n").unwrap();
        fs::write(model.join("refs/refs/pr/2"), "0123").unwrap();
        fs::write(model.join("refs/stale"), "9999").unwrap();
        fs::write(model.join("refs/outside"), "../../..").unwrap();
        (cache, model)
    }

    #[test]
    fn a_name_leads_to_the_snapshot_of_its_revision() {
        let (cache, model) = cache();
        let at = |name: &str| HubModel::parse(name).unwrap().snapshot(Some(cache.path()));
        for revision in ["", "@main", "@pr/1", "@refs/pr/2", "@0123"] {
            let name = format!("Org/Model-1B{revision}");
            assert_eq!(at(&name).unwrap(), model.join("snapshots/0123"), "{name}");
        }
        let message = "the download of the model is not complete: run `hf download Org/Model-1B --revision 0123`";
        assert_eq!(incomplete_download(&model.join("snapshots/0123")).as_deref(), Some(message));
        assert_eq!(incomplete_download(&model), None);
        fs::create_dir_all(cache.path().join("models--gpt2/snapshots/main")).unwrap();
        assert_eq!(at("gpt2").unwrap(), cache.path().join("models--gpt2/snapshots/main"));
        for (name, command) in [
            ("Org/Other", "hf download Org/Other"),
            ("Org/Model-1B@stale", "hf download Org/Model-1B --revision stale"),
            ("Org/Model-1B@outside", "hf download Org/Model-1B --revision outside"),
            ("Org/Model-1B@v2", "hf download Org/Model-1B --revision v2"),
            ("Org/Model-1B@refs/pr/9", "hf download Org/Model-1B --revision refs/pr/9"),
            ("gpt2-xl", "hf download gpt2-xl"),
        ] {
            let help = at(name).unwrap_err().help();
            assert!(help.contains(&format!("run `{command}`,")), "{help}");
        }
        for text in ["a/b/c", "../b", "/a/b", "a/", "a/b@", "a/b@../c", "a b/c", "a/.b", "a--b"] {
            assert_eq!(HubModel::parse(text), None, "{text}");
        }
        for text in ["config.json", "a.ron", ".", "..", "", "models--Org--Model-1B"] {
            assert_eq!(HubModel::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_link_within_the_model_is_followed_and_no_other() {
        let (cache, model) = cache();
        let snapshot = model.join("snapshots/0123");
        fs::write(cache.path().join("secret"), "theirs").unwrap();
        fs::create_dir(cache.path().join("models--Org--Other")).unwrap();
        fs::write(cache.path().join("models--Org--Other/blob"), "theirs").unwrap();
        symlink("abc", model.join("blobs/link")).unwrap();
        symlink("/etc", model.join("folder")).unwrap();
        fs::write(snapshot.join("plain"), "plain").unwrap();
        let blob = model.canonicalize().unwrap().join("blobs/abc").display().to_string();
        let links = [
            ("good", "../../blobs/abc", ""),
            ("whole", &blob, ""),
            ("lost", "../../blobs/gone", "is missing: download the model again"),
            ("out", "../../../secret", "leaves the cache folder"),
            ("other", "../../../models--Org--Other/blob", "leaves the cache folder"),
            ("far", "/etc/passwd", "leaves the cache folder"),
            ("twice", "../../blobs/link", "symbolic link"),
            ("through", "../../folder/passwd", ""),
            ("folder", "../../blobs", "not a regular file"),
        ];
        for (name, to, _) in links {
            symlink(to, snapshot.join(name)).unwrap();
        }
        let folder = ModelFolder::open(&snapshot).unwrap();
        let read = |name: &str| {
            let mut text = String::new();
            folder.file(name).and_then(|mut file| file.read_to_string(&mut text)).map(|_| text)
        };
        assert_eq!(read("plain").unwrap(), "plain");
        assert_eq!((read("good").unwrap(), read("whole").unwrap()), ("blob".into(), "blob".into()));
        assert_eq!(read("none").unwrap_err().kind(), ErrorKind::NotFound);
        for (name, _, why) in &links[2..] {
            let error = read(name).unwrap_err();
            assert_ne!(error.kind(), ErrorKind::NotFound, "{name}");
            assert!(error.to_string().contains(why) || *name == "twice", "{name}: {error}");
        }
        // Outside of a cache no link is followed.
        let plain = tempfile::tempdir().unwrap();
        symlink(&blob, plain.path().join("good")).unwrap();
        assert!(ModelFolder::open(plain.path()).unwrap().file("good").is_err());
    }
}
