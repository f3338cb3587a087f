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
use std::collections::BTreeSet;
use std::env;
use std::ffi::{CStr, OsStr, OsString, c_void};
use std::fs::File;
use std::io::Read;
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
const OWN_PARENT: &str = "the parent of onebox's Python environment";
const SYSTEM: &str = "the system";

/// The places in the order of the search:
///
/// 1. the folders of `LD_LIBRARY_PATH`;
/// 2. NVIDIA's wheels in the Python environment whose `bin` folder has `program`, then in its parent
///    if it was made with `--system-site-packages`;
/// 3. NVIDIA's wheels in the active environment (`VIRTUAL_ENV`, `CONDA_PREFIX`) and in its parent;
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
    let root = bin.and_then(Path::parent);
    add(OWN_ENVIRONMENT, root.map(environment_folders).unwrap_or_default());
    add(OWN_PARENT, root.map(parent_folders).unwrap_or_default());
    // The meaning of a relative path would depend on the current folder.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    for (name, parent) in [
        ("VIRTUAL_ENV", "the parent of VIRTUAL_ENV"),
        ("CONDA_PREFIX", "the parent of CONDA_PREFIX"),
    ] {
        let root = absolute(name);
        add(name, root.as_deref().map(environment_folders).unwrap_or_default());
        add(parent, root.as_deref().map(parent_folders).unwrap_or_default());
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
    folders_of_pythons(root, pythons(root))
}

/// The same folders of the parent of the environment at `root`, if the environment sees the packages
/// of its parent; of the same version of Python alone.
fn parent_folders(root: &Path) -> Vec<PathBuf> {
    let Some(parent) = parent_environment(root) else { return Vec::new() };
    let own = pythons(root);
    let is_same = |python: &PathBuf| {
        // Debian's packages are those of `python3`.
        let mut names = own.iter().filter_map(|own| own.file_name());
        python.ends_with("python3") || names.any(|name| python.ends_with(name))
    };
    // Debian's pip installs below /usr/local.
    let local = (parent == Path::new("/usr")).then(|| PathBuf::from("/usr/local"));
    let folders = |root: PathBuf| {
        folders_of_pythons(&root, pythons(&root).into_iter().filter(is_same).collect())
    };
    local.into_iter().chain([parent]).flat_map(folders).collect()
}

/// The root of the Python whose packages the virtual environment at `root` sees: its `pyvenv.cfg`
/// has `include-system-site-packages = true`, and the folder of the program as `home`.
#[expect(clippy::disallowed_methods, reason = "the crate is below `files`: the limit is here")]
fn parent_environment(root: &Path) -> Option<PathBuf> {
    /// Largest number of bytes to read; such a file has a few hundred.
    const LONGEST: u64 = 1 << 16;
    let file = root.join("pyvenv.cfg");
    let mut text = String::new();
    // Opening a pipe would wait.
    file.is_file().then_some(())?;
    File::open(file).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
    let value = |key: &str| {
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        let mut found = pairs.filter(|(name, _)| name.trim().eq_ignore_ascii_case(key));
        found.next().map(|(_, value)| value.trim())
    };
    let sees = value("include-system-site-packages")?.eq_ignore_ascii_case("true");
    let home = Path::new(value("home").filter(|_| sees)?);
    home.parent().filter(|_| home.is_absolute()).map(Path::to_path_buf)
}

/// The folders of Python's versions in the environment at `root`, such as `lib/python3.12`.
fn pythons(root: &Path) -> Vec<PathBuf> {
    // A virtual environment may have `lib64` as a link to `lib`.
    let libs = ["lib", "lib64"].map(|name| root.join(name)).into_iter();
    let libs = libs.filter(|lib| !lib.is_symlink());
    libs.flat_map(|lib| children(&lib)).filter(|path| is_python(path)).collect()
}

/// The library folders in the environment at `root`, of these versions of Python.
fn folders_of_pythons(root: &Path, pythons: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for python in pythons {
        for packages in ["site-packages", "dist-packages"] {
            let wheels = children(&python.join(packages).join("nvidia"));
            folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    if root.join("conda-meta").is_dir() {
        folders.push(root.join("lib"));
    }
    folders.retain(|folder| folder.is_dir());
    folders
}

/// The major version of CUDA of the wheel that has the library `file`, by the name of its package:
/// 12 for `nvidia/nccl/lib/libnccl.so.2` beside `nvidia_nccl_cu12-2.27.3.dist-info`. `None` if the
/// file is of no wheel, or of packages for several versions.
pub(super) fn wheel_cuda(file: &Path) -> Option<u32> {
    let library = file.parent().filter(|folder| folder.ends_with("lib"))?;
    let wheel = library.parent()?;
    let nvidia = wheel.parent().filter(|folder| folder.ends_with("nvidia"))?;
    let start = format!("nvidia_{}_cu", wheel.file_name()?.to_str()?);
    let major = |package: PathBuf| {
        let name = package.file_name()?.to_str()?.strip_suffix(".dist-info")?;
        name.strip_prefix(&start)?.split_once('-')?.0.parse::<u32>().ok()
    };
    let majors: BTreeSet<u32> = children(nvidia.parent()?).into_iter().filter_map(major).collect();
    majors.first().copied().filter(|_| majors.len() == 1)
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
    fn an_environment_that_sees_the_packages_of_its_parent_has_them_behind_its_own() {
        let scratch = Scratch::new("library-parents");
        let wheel = |path: &str| scratch.folder(&format!("{path}/nvidia/nccl/lib"));
        let own = wheel("env/lib/python3.12/site-packages");
        let parent = wheel("base/lib/python3.12/site-packages");
        let packages = wheel("base/lib/python3/dist-packages");
        wheel("base/lib/python3.9/site-packages");
        let home = scratch.folder("base/bin");
        let root = scratch.0.clone();
        let found = |config: &str| -> Vec<(&'static str, Vec<PathBuf>)> {
            std::fs::write(root.join("env/pyvenv.cfg"), config).unwrap();
            let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| root.join("env").into());
            let all = places(variable, Some(&root.join("env/bin/onebox")));
            let all = all.into_iter().filter(|place| !place.name.starts_with('/'));
            all.map(|place| (place.name, place.folders)).collect()
        };
        let sees = |what: &str| {
            format!("home = {}\nInclude-System-Site-Packages = {what}\n", home.display())
        };
        let (own, parent) = (vec![own], vec![parent, packages]);
        let (active, of_active) = ("VIRTUAL_ENV", "the parent of VIRTUAL_ENV");
        let all = [
            (OWN_ENVIRONMENT, own.clone()),
            (OWN_PARENT, parent.clone()),
            (active, own.clone()),
            (of_active, parent),
            (SYSTEM, vec![]),
        ];
        assert_eq!(found(&sees("true")), all);
        let alone = [(OWN_ENVIRONMENT, own.clone()), (active, own), (SYSTEM, vec![])];
        for config in ["", "home = bin\ninclude-system-site-packages = true\n", &sees("false")] {
            assert_eq!(found(config), alone, "{config}");
        }
    }

    #[test]
    fn the_cuda_version_of_a_wheel_is_in_the_name_of_its_package() {
        let scratch = Scratch::new("library-wheels");
        let file = scratch.folder("site-packages/nvidia/nccl/lib").join("libnccl.so.2");
        let cuda = |package: &str| {
            scratch.folder(&format!("site-packages/{package}"));
            wheel_cuda(&file)
        };
        assert_eq!(cuda("nvidia_cudnn_cu12-9.19.0.dist-info"), None, "another library");
        assert_eq!(cuda("nvidia_nccl_cu13-2.27.5.dist-info"), Some(13));
        assert_eq!(cuda("nvidia_nccl_cu12-2.27.3.dist-info"), None, "either wheel may have it");
        assert_eq!(wheel_cuda(Path::new("/usr/lib/libnccl.so.2")), None);
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
