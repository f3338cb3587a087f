//! Where the libraries of CUDA lie. [`places`] is the order in which onebox looks for them, and
//! [`load`] takes the first file that loads.
//!
//! cudarc loads a library by its bare name. The dynamic linker then finds neither NVIDIA's wheels
//! nor a toolkit in `CUDA_HOME`, so this file loads NVRTC, cuBLASLt, NCCL and
//! cuDNN itself. The driver's
//! library belongs to the system, and cudarc loads it.
#![expect(unsafe_code, reason = "loads C libraries and asks the dynamic linker for their paths")]

use super::driver::{self, path_of};
use libloading::Library;
use std::cmp::Reverse;
use std::env;
use std::ffi::{CStr, OsStr, OsString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The file of a loaded library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryFile {
    /// Path of the file.
    pub path: PathBuf,
    /// The place that has the file, such as `CUDA_HOME`.
    pub place: &'static str,
}

/// A place that may have libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    name: &'static str,
    /// The folders. None: the dynamic linker searches for the bare name.
    folders: Vec<PathBuf>,
}

/// A file that may be the library.
#[derive(Debug, PartialEq, Eq)]
struct Candidate<'n> {
    place: &'static str,
    /// The folder of the file. `None`: the dynamic linker searches for the bare name.
    folder: Option<PathBuf>,
    name: &'n str,
}

const OWN_ENVIRONMENT: &str = "the Python environment of onebox";
const SYSTEM: &str = "the system";

/// The places in the order of the search:
///
/// 1. the folders of `LD_LIBRARY_PATH`;
/// 2. NVIDIA's wheels in the Python environment whose `bin` folder has `program`;
/// 3. NVIDIA's wheels in the active environment (`VIRTUAL_ENV`, `CONDA_PREFIX`);
/// 4. the toolkit in `CUDA_HOME` or `CUDA_PATH`;
/// 5. the system: the folders of the dynamic linker, then `/usr/local/cuda`.
///
/// `variable` returns the value of an environment variable.
fn places(variable: impl Fn(&str) -> Option<OsString>, program: Option<&Path>) -> Vec<Place> {
    let mut all = Vec::new();
    let mut add = |name, folders: Vec<PathBuf>| {
        if !folders.is_empty() {
            all.push(Place { name, folders });
        }
    };
    let listed = variable("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = listed.as_bytes().split(|byte| b":;".contains(byte));
    let listed = listed.filter(|folder| !folder.is_empty());
    add("LD_LIBRARY_PATH", listed.map(|folder| OsStr::from_bytes(folder).into()).collect());
    let bin = program.and_then(Path::parent).filter(|folder| folder.ends_with("bin"));
    add(OWN_ENVIRONMENT, bin.and_then(Path::parent).map(environment_folders).unwrap_or_default());
    // The meaning of a relative path would depend on the current folder.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        add(name, absolute(name).as_deref().map(environment_folders).unwrap_or_default());
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        add(name, absolute(name).as_deref().map(toolkit_folders).unwrap_or_default());
    }
    all.push(Place { name: SYSTEM, folders: Vec::new() });
    all.push(Place {
        name: "/usr/local/cuda",
        folders: toolkit_folders(Path::new("/usr/local/cuda")),
    });
    all
}

fn toolkit_folders(root: &Path) -> Vec<PathBuf> {
    ["lib64", "lib"].map(|name| root.join(name)).into()
}

/// The library folders of NVIDIA's wheels in the Python environment at `root`, and those of conda's
/// packages. A wheel for CUDA 12 has its own folder (`nvidia/cublas/lib`); those for CUDA 13 share
/// one (`nvidia/cu13/lib`).
fn environment_folders(root: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for lib in ["lib", "lib64"].map(|name| root.join(name)) {
        // A virtual environment may have `lib64` as a link to `lib`.
        if lib.is_symlink() {
            continue;
        }
        for python in children(&lib).into_iter().filter(|path| is_python(path)) {
            for packages in ["site-packages", "dist-packages"] {
                let wheels = children(&python.join(packages).join("nvidia"));
                folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
            }
        }
    }
    if root.join("conda-meta").is_dir() {
        folders.push(root.join("lib"));
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

fn is_python(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python"))
}

/// The entries of a folder, those with the largest numbers in their names first; none if the folder
/// cannot be read.
fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    all.sort_by_cached_key(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
        Reverse((numbers.collect::<Vec<u32>>(), name))
    });
    all
}

/// The files to try: in each place the first of `names` in all of its folders, then the next name.
/// Names without a version follow after all others, since they may be any version. Libraries of a
/// later CUDA than the driver's come last.
fn candidates<'n>(places: &[Place], names: &[&'n str], driver: Option<u32>) -> Vec<Candidate<'n>> {
    let mut all = Vec::new();
    for Place { name: place, folders } in places {
        for name in names {
            let mut add = |folder| all.push(Candidate { place, folder, name });
            match folders.is_empty() {
                true => add(None),
                false => folders.iter().cloned().map(Some).for_each(add),
            }
        }
    }
    let major = |name: &str| name.rsplit_once(".so.")?.1.parse::<u32>().ok();
    all.sort_by_key(|candidate| match (major(candidate.name), driver) {
        (None, _) => 1,
        (Some(major), Some(driver)) if major > driver => 2,
        _ => 0,
    });
    all
}

/// The major version of CUDA that the driver supports; `None` without a working driver.
fn driver_major() -> Option<u32> {
    let version = || {
        driver::init()?;
        driver::version()
    };
    let version = driver::is_present().then(version)?.ok()?;
    u32::try_from(version / 1000).ok()
}

/// A library and its file.
#[derive(Debug)]
pub(super) struct LoadedLibrary {
    library: Library,
    pub(super) file: LibraryFile,
}

/// Loads the first library with one of `names` that `accept` accepts; returns what `accept` makes of
/// it. `symbol` is a function of the library.
///
/// # Errors
/// The names, the places, and the files that exist and cannot be used.
pub(super) fn load<T>(
    names: &[&str],
    symbol: &CStr,
    accept: impl Fn(LoadedLibrary) -> Result<T, String>,
) -> Result<T, String> {
    let program = env::current_exe().ok();
    let places = places(|name| env::var_os(name), program.as_deref());
    let mut unusable = String::new();
    for Candidate { place, folder, name } in candidates(&places, names, driver_major()) {
        let path = folder.as_ref().map_or_else(|| name.into(), |folder| folder.join(name));
        if folder.is_some() && !path.exists() {
            continue;
        }
        let library = match open(&path) {
            Ok(library) => library,
            Err(why) if folder.is_some() => {
                tracing::warn!("{} does not load: {why}", path.display());
                unusable += &format!("; {} does not load: {why}", path.display());
                continue;
            }
            Err(_) => continue,
        };
        let found = || path_of(address(&library, symbol)?);
        let path = if folder.is_some() { path } else { found().unwrap_or(path) };
        tracing::info!("{name} of {place}: {}", path.display());
        match accept(LoadedLibrary { library, file: LibraryFile { path, place } }) {
            Ok(accepted) => return Ok(accepted),
            Err(why) => {
                tracing::warn!("{why}");
                unusable += &format!("; {why}");
            }
        }
    }
    Err(not_found(names) + &unusable)
}

/// The message that no place has a library with one of `names`.
fn not_found(names: &[&str]) -> String {
    format!(
        "none of {} found in LD_LIBRARY_PATH, {OWN_ENVIRONMENT}, the active environment, CUDA_HOME or \
         {SYSTEM}",
        names.join(", ")
    )
}

fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the initialisers of NVIDIA's libraries expect nothing of the process.
    unsafe { Library::new(path) }.map_err(|error| error.to_string())
}

/// Loads a file that another library opens by its bare name later: the dynamic linker then takes
/// the loaded one. The file stays loaded. Returns whether it did load.
pub(super) fn load_beforehand(path: &Path) -> bool {
    let loaded = open(path);
    if let Err(why) = &loaded {
        tracing::warn!("{} does not load: {why}", path.display());
    }
    loaded.map(Box::new).map(Box::leak).is_ok()
}

fn address(library: &Library, symbol: &CStr) -> Option<*const c_void> {
    // SAFETY: the type is that of an address, and nothing is called through it.
    let found = unsafe { library.get::<*const c_void>(symbol.to_bytes_with_nul()) };
    found.ok().map(|symbol| *symbol)
}

impl LoadedLibrary {
    /// A function of the library.
    ///
    /// # Safety
    /// `F` is the function's type in the library's header.
    ///
    /// # Errors
    /// The library does not have the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static CStr) -> Result<F, String> {
        // SAFETY: the caller knows the type.
        let found = unsafe { self.library.get::<F>(name.to_bytes_with_nul()) };
        found.map(|function| *function).map_err(|_| {
            let path = self.file.path.display();
            format!("{path} lacks {}: it is too old", name.to_string_lossy())
        })
    }
}

/// The text of a version number, such as `2.24.3` for 22403.
pub(super) fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// Declares a struct with functions of a library. `of` looks up all of them.
macro_rules! library_functions {
    ($functions:ident { $($name:ident: fn($($argument:ty),* $(,)?) -> $result:ty;)* }) => {
        #[expect(non_snake_case, reason = "names of the C interface")]
        struct $functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
            loaded: LoadedLibrary,
        }

        impl $functions {
            fn of(loaded: LoadedLibrary) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) {
                            Ok(name) => name,
                            Err(_) => unreachable!(),
                        };
                        // SAFETY: the declaration repeats the header of the library.
                        unsafe { loaded.function(NAME) }?
                    },)*
                    loaded,
                })
            }
        }
    };
}
pub(super) use library_functions;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all};
    use std::os::unix::fs::symlink;

    /// An empty folder of this name, which Drop removes.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("onebox-{name}-{}", std::process::id()));
            create_dir_all(&path).unwrap();
            Self(path)
        }

        fn folder(&self, path: &str) -> PathBuf {
            let path = self.0.join(path);
            create_dir_all(&path).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_environment_of_the_program_comes_before_the_toolkit_and_the_system() {
        let scratch = Scratch::new("library-places");
        let packages = "env/lib/python3.12/site-packages/nvidia";
        let [blas, compiler, newer] = ["cublas", "cuda_nvrtc", "cu13"]
            .map(|wheel| scratch.folder(&format!("{packages}/{wheel}/lib")));
        scratch.folder(&format!("{packages}/cuda_runtime/include"));
        let active = scratch.folder("active/lib/python3.9/site-packages/nvidia/nccl/lib");
        symlink("lib", scratch.0.join("env/lib64")).unwrap();
        let root = scratch.0.clone();
        let variable = |name: &str| match name {
            "LD_LIBRARY_PATH" => Some("/first:;/second:".into()),
            "VIRTUAL_ENV" => Some(root.join("active").into()),
            "CUDA_HOME" => Some("/opt/cuda".into()),
            // Relative, so it is not used.
            "CUDA_PATH" => Some("cuda".into()),
            _ => None,
        };
        let found = places(variable, Some(&root.join("env/bin/onebox")));
        let found: Vec<(&str, Vec<&Path>)> = found
            .iter()
            .map(|place| (place.name, place.folders.iter().map(PathBuf::as_path).collect()))
            .collect();
        let path = Path::new;
        let expected: [(&str, Vec<&Path>); 6] = [
            ("LD_LIBRARY_PATH", vec![path("/first"), path("/second")]),
            (OWN_ENVIRONMENT, vec![&newer, &compiler, &blas]),
            ("VIRTUAL_ENV", vec![&active]),
            ("CUDA_HOME", vec![path("/opt/cuda/lib64"), path("/opt/cuda/lib")]),
            (SYSTEM, vec![]),
            ("/usr/local/cuda", vec![path("/usr/local/cuda/lib64"), path("/usr/local/cuda/lib")]),
        ];
        assert_eq!(found, expected);
        // A program that lies elsewhere has no environment.
        let found = places(|_| None, Some(&root.join("env/onebox")));
        assert_eq!(found[0], Place { name: SYSTEM, folders: Vec::new() });
    }

    #[test]
    fn libraries_that_the_driver_cannot_run_come_last() {
        let place = |name| Place { name, folders: Vec::new() };
        let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let order = |driver| -> Vec<(&str, &str)> {
            let all = candidates(&[place("a"), place("b")], &names, driver);
            all.into_iter().map(|candidate| (candidate.place, candidate.name)).collect()
        };
        let [newer, older, any] = names;
        let all = [("a", newer), ("a", older), ("b", newer), ("b", older), ("a", any), ("b", any)];
        assert_eq!(order(None), all);
        assert_eq!(order(Some(13)), all);
        // A name without a version may be the later CUDA, too.
        let all = [("a", older), ("b", older), ("a", any), ("b", any), ("a", newer), ("b", newer)];
        assert_eq!(order(Some(12)), all);
    }

    #[test]
    fn the_newer_version_of_a_place_comes_first_in_whatever_folder_it_is() {
        let folders = ["x/cuda_nvrtc/lib", "x/cu13/lib"].map(PathBuf::from);
        let place = Place { name: "env", folders: folders.to_vec() };
        let all = candidates(&[place], &["libnvrtc.so.13", "libnvrtc.so.12"], Some(13));
        let found: Vec<_> =
            all.iter().map(|one| (one.folder.as_ref().unwrap(), one.name)).collect();
        let [old, new] = &folders;
        let expected = [
            (old, "libnvrtc.so.13"),
            (new, "libnvrtc.so.13"),
            (old, "libnvrtc.so.12"),
            (new, "libnvrtc.so.12"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_library_that_is_not_accepted_does_not_end_the_search() {
        let tried = std::cell::Cell::new(0);
        let found = load(&["libm.so.6", "libc.so.6"], c"malloc", |loaded| {
            tried.set(tried.get() + 1);
            if tried.get() == 1 { Err("it is too old".to_owned()) } else { Ok(loaded.file) }
        });
        assert!(found.is_ok() && tried.get() == 2, "{found:?}");
        let why = load(&["libm.so.6"], c"malloc", |_| Err::<(), _>("it is too old".to_owned()));
        assert!(why.unwrap_err().contains("it is too old"));
    }

    #[test]
    fn a_library_that_is_nowhere_is_named_with_the_places() {
        let why = load(&["libonebox-nothing.so.1"], c"nothing", Ok).unwrap_err();
        for text in ["libonebox-nothing.so.1", "LD_LIBRARY_PATH", OWN_ENVIRONMENT, "CUDA_HOME"] {
            assert!(why.contains(text), "{why}");
        }
    }

    #[test]
    fn the_linker_knows_the_path_of_a_library() {
        let loaded = load(&["libc.so.6"], c"malloc", Ok).unwrap();
        assert_eq!(loaded.file.place, SYSTEM);
        assert!(loaded.file.path.is_absolute(), "{:?}", loaded.file);
        assert!(loaded.file.path.exists(), "{:?}", loaded.file);
    }
}
