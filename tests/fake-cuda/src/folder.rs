//! The folder that a child process gets as `LD_LIBRARY_PATH`.

use std::{
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

const NAMES: [&str; 9] = [
    "libcuda.so",
    "libcuda.so.1",
    "libnvrtc.so",
    "libnvrtc.so.12",
    "libcublasLt.so",
    "libcublasLt.so.12",
    "libnccl.so",
    "libnccl.so.2",
    "libcudnn.so.9",
];

/// Folder of links with the names of the CUDA libraries, all to this crate's `cdylib`.
///
/// The first call creates it in the cargo target directory, next to the `cdylib`. Run the code
/// under test in a child process with this folder as `LD_LIBRARY_PATH`: the dynamic linker reads
/// that variable when a process starts.
///
/// # Panics
/// If no `cdylib` is found near the executable, or the folder cannot be written.
pub fn library_folder() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| make_folder().unwrap_or_else(|error| fail(&error))).clone()
}

#[expect(clippy::panic, reason = "a test without its libraries cannot go on")]
fn fail(error: &io::Error) -> ! {
    panic!("the folder of fake CUDA libraries: {error}")
}

fn make_folder() -> io::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let library = find_library(&executable)?;
    let folder = library.with_file_name("fake-cuda-libraries");
    std::fs::create_dir_all(&folder)?;
    for name in NAMES {
        link(&library, &folder.join(name))?;
    }
    Ok(folder)
}

/// Finds the newest `cdylib`. Cargo puts tests into `deps` and programs one level above. Newer
/// versions of cargo give each build of a crate its own folder, `build/fake-cuda/HASH/out`.
fn find_library(executable: &Path) -> io::Result<PathBuf> {
    let parent = executable.parent().unwrap_or(Path::new("."));
    let mut folders = vec![parent.to_path_buf(), parent.join("deps"), parent.join("../deps")];
    for builds in std::fs::read_dir(parent.join("../../../fake-cuda")).into_iter().flatten() {
        folders.push(builds?.path().join("out"));
    }
    let libraries = folders.iter().map(|folder| folder.join("libfake_cuda.so"));
    let written = |library: &PathBuf| library.metadata().and_then(|data| data.modified()).ok();
    let found = libraries.filter(|library| library.exists()).max_by_key(written);
    let missing = || format!("no libfake_cuda.so beside {}", executable.display());
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, missing()))?.canonicalize()
}

/// Replaces the link in one step, because other tests may start with the same folder.
fn link(library: &Path, name: &Path) -> io::Result<()> {
    if std::fs::read_link(name).is_ok_and(|target| target == library) {
        return Ok(());
    }
    let temporary = name.with_extension(format!("new-{}", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    std::os::unix::fs::symlink(library, &temporary)?;
    std::fs::rename(&temporary, name)
}
