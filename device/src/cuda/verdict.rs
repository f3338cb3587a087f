//! Verdicts of comparisons between a GPU and the `cpu` backend. The cache folder keeps them by
//! everything that they depend on. A file that is damaged, of another key or of another user is no
//! verdict.

use super::compile::{cache_folder, read, write};
use super::launch::{PROGRAMS, Program};
use super::probe::guarded;
use super::{blaslt, cudnn, driver, nccl, nvrtc};
use std::io::Read;
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_128;

/// The model of a GPU, the versions of the driver and of all libraries, and the texts of all
/// kernels, `programs` included.
///
/// # Errors
/// The driver or a library that a run needs does not work.
pub fn stack(ordinal: usize, programs: &[Program]) -> Result<String, String> {
    guarded(|| {
        driver::init()?;
        let (name, sm) = (driver::device_name(ordinal)?, driver::device_sm(ordinal)?);
        let processors = driver::device_processors(ordinal)?;
        let versions = (driver::version()?, nvrtc::version()?, blaslt::version()?);
        let others = (nccl::version().ok(), cudnn::version().ok());
        let texts: Vec<String> = PROGRAMS.iter().chain(programs).map(Program::text).collect();
        let kernels = xxh3_128(texts.concat().as_bytes());
        let module = kernel_module();
        Ok(format!("{name} sm_{sm} {processors} {versions:?} {others:?} {module:?} {kernels:032x}"))
    })
}

/// The version of the driver's kernel module, such as 580.159.04, if the system shows it.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel, with a limit")]
fn kernel_module() -> Option<String> {
    let mut text = String::new();
    let file = std::fs::File::open("/sys/module/nvidia/version").ok()?;
    file.take(64).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

fn file(key: &str) -> Option<PathBuf> {
    Some(cache_folder()?.join(format!("proof-{:032x}.txt", xxh3_128(key.as_bytes()))))
}

/// Whether the cache has a verdict for `key`: a comparison found no difference.
pub fn is_proven(key: &str) -> bool {
    file(key).and_then(|path| read(&path)).is_some_and(|kept| kept == key.as_bytes())
}

/// Keeps the verdict that a comparison found no difference.
///
/// # Errors
/// The text names the file that cannot be written.
pub fn keep_proven(key: &str) -> Result<(), String> {
    let path =
        file(key).ok_or("there is no cache folder: neither XDG_CACHE_HOME nor HOME is set")?;
    write(&path, key.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
}
