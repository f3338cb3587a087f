//! Kernels for one architecture, from the cache on disk or from NVRTC, which fills the cache.

use super::driver::{Failure, Function, Module, Stream};
use super::launch::{Launch, OPTIONS, PROGRAMS, Program};
use super::nvrtc;
use std::collections::{BTreeMap, HashMap};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, ScopedJoinHandle};
use xxhash_rust::xxh3::xxh3_128;

/// The cubins of the ops' programs and of `programs`, compiled for `sm`. One rank compiles all
/// programs at the same time while the other ranks wait.
pub fn cubins(sm: u32, programs: &[Program]) -> Result<Vec<Arc<[u8]>>, String> {
    /// Cubins by architecture and source.
    type CompiledPrograms = BTreeMap<(u32, &'static str), Arc<[u8]>>;
    static DONE: Mutex<CompiledPrograms> = Mutex::new(BTreeMap::new());
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (wanted, folder) = (|| PROGRAMS.iter().chain(programs), cache_folder());
    let is_missing = |program: &&Program| !done.contains_key(&(sm, program.source));
    let missing: Vec<&Program> = wanted().filter(is_missing).collect();
    let cubins: Vec<Result<Vec<u8>, String>> = std::thread::scope(|scope| {
        let compile = |program| compiled(program, sm, folder.as_deref());
        let start = |program| Builder::new().spawn_scoped(scope, move || compile(program));
        let threads: Vec<_> = missing.iter().map(|program| start(*program)).collect();
        let end = |thread: std::io::Result<ScopedJoinHandle<'_, _>>| match thread
            .map(ScopedJoinHandle::join)
        {
            Ok(Ok(cubin)) => cubin,
            Ok(Err(_)) => Err("NVRTC's thread panicked".into()),
            Err(error) => Err(format!("a thread for NVRTC: {error}")),
        };
        threads.into_iter().map(end).collect()
    });
    for (program, cubin) in missing.into_iter().zip(cubins) {
        done.insert((sm, program.source), cubin?.into());
    }
    Ok(wanted().map(|program| Arc::clone(&done[&(sm, program.source)])).collect())
}

fn compiled(program: &Program, sm: u32, folder: Option<&Path>) -> Result<Vec<u8>, String> {
    let (name, source) = (program.name, program.text());
    let mut options: Vec<String> = OPTIONS.iter().map(|&option| option.to_owned()).collect();
    options.push(format!("--gpu-architecture=sm_{sm}"));
    let (major, minor) = nvrtc::version()?;
    let key = format!("{source}\0{options:?}\0{major}.{minor}");
    let path = folder.map(|f| f.join(format!("{name}-{:032x}.cubin", xxh3_128(key.as_bytes()))));
    if let Some(cubin) = path.as_deref().and_then(read) {
        return Ok(cubin);
    }
    let started = std::time::Instant::now();
    let cubin = nvrtc::compile(name, &source, &options)?;
    tracing::info!("compiled {name} for sm_{sm} in {:.1} s", started.elapsed().as_secs_f64());
    if let Some(path) = path
        && let Err(error) = write(&path, &cubin)
    {
        tracing::warn!("kernels are compiled at every start: {}: {error}", path.display());
    }
    Ok(cubin)
}

/// The folder of compiled kernels.
pub(super) fn cache_folder() -> Option<PathBuf> {
    let given = |key| std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache =
        given("XDG_CACHE_HOME").or_else(|| given("HOME").map(|home| home.join(".cache")))?;
    cache.is_absolute().then(|| cache.join("onebox"))
}

/// Whether only the user of this process could have written the file: its contents run on the GPU.
fn is_our_own(owner: u32, mode: u32) -> bool {
    // Linux gives this folder to the user of the process.
    let user = std::fs::metadata("/proc/self").map(|process| process.uid());
    user.is_ok_and(|user| user == owner) && mode & 0o022 == 0
}

/// Largest number of bytes read from a file of kernels. A longer file fails the check of its hash.
const LARGEST_CUBIN: u64 = 256 << 20;

/// Reads a file that ends with the hash of its contents. A file without its hash, or of another
/// user, is not used.
#[expect(clippy::disallowed_methods, reason = "the cache of kernels is below the crate `files`")]
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    // Opening a pipe would block until a process writes to it.
    if !std::fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    let file = File::open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || !is_our_own(about.uid(), about.mode()) {
        tracing::warn!("{}: not used, others than you may write it", path.display());
        return None;
    }
    let mut bytes = Vec::new();
    file.take(LARGEST_CUBIN).read_to_end(&mut bytes).ok()?;
    let hash = bytes.split_off(bytes.len().checked_sub(16)?);
    (hash == xxh3_128(&bytes).to_le_bytes()).then_some(bytes)
}

/// Writes a file with the hash of its contents. It writes under another name first, so that a
/// reader sees the whole file or none.
#[expect(clippy::disallowed_methods, reason = "the cache of kernels is below the crate `files`")]
pub(super) fn write(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let unfinished = path.with_extension(format!("tmp{}", std::process::id()));
    // A leftover belongs to a process that ended. A link at this name is removed, not followed.
    let _ = std::fs::remove_file(&unfinished);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    file.write_all(cubin)?;
    file.write_all(&xxh3_128(cubin).to_le_bytes())?;
    std::fs::rename(&unfinished, path)
}

/// Whether a program's source defines a kernel. To ask a module for a kernel that it lacks is an error of the driver, which
/// NVIDIA's compute-sanitizer reports.
fn defines(source: &str, kernel: &str) -> bool {
    source.lines().any(|line| {
        let head = line.strip_prefix("KERNEL(").and_then(|line| line.split_once(") "));
        head.and_then(|(_, signature)| signature.split_once('('))
            .is_some_and(|(name, _)| name == kernel)
    })
}

/// The kernels of a GPU by name.
#[derive(Debug)]
pub(super) struct Kernels {
    /// The loaded programs, each with its source.
    modules: Vec<(Module, &'static str)>,
    /// The functions by name, each with its limit of dynamic shared memory in bytes.
    functions: HashMap<&'static str, (Function, u32)>,
}

/// The reason why a kernel did not start.
pub(super) enum LaunchError {
    Missing,
    Failed(Failure),
}

impl Kernels {
    /// Loads the kernels of ops and of `programs` on the bound context.
    pub(super) fn load(sm: u32, programs: &[Program]) -> Result<Self, String> {
        let mut kernels = Self { modules: Vec::new(), functions: HashMap::with_capacity(256) };
        for (cubin, program) in cubins(sm, programs)?.iter().zip(PROGRAMS.iter().chain(programs)) {
            kernels.modules.push((Module::load(cubin)?, program.source));
        }
        Ok(kernels)
    }

    /// Launches a kernel. The first launch looks it up by name; later launches allocate nothing.
    pub(super) fn launch(&mut self, stream: &Stream, launch: &Launch) -> Result<(), LaunchError> {
        const NEED_NOT_ASK: u32 = 48 << 10;
        let Launch { kernel, grid, block, shared_bytes, args } = *launch;
        let (function, shared) = match self.functions.get_mut(kernel) {
            Some(found) => found,
            None => {
                let module = self.modules.iter().find(|(_, source)| defines(source, kernel));
                let found = module.and_then(|(module, _)| module.function(kernel));
                let function = found.ok_or(LaunchError::Missing)?;
                self.functions.entry(kernel).or_insert((function, NEED_NOT_ASK))
            }
        };
        if shared_bytes > *shared {
            function.allow_shared(shared_bytes).map_err(LaunchError::Failed)?;
            *shared = shared_bytes;
        }
        let mut slots = [0; 48];
        let count = args.slots().len();
        slots[..count].copy_from_slice(args.slots());
        stream
            .launch(*function, grid, block, shared_bytes, &mut slots[..count])
            .map_err(LaunchError::Failed)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.modules.drain(..).for_each(|(module, _)| module.unload());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_kernel_is_looked_up_in_the_program_that_defines_it() {
        let programs_of = |kernel| {
            PROGRAMS
                .iter()
                .filter(|program| defines(program.source, kernel))
                .map(|program| program.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(programs_of("add"), ["elementwise.cu"]);
        assert_eq!(programs_of("layer_norm"), ["norm.cu"]);
        assert_eq!(programs_of("attention_mma_queries_128"), ["attention_mma.cu"]);
        assert!(programs_of("layer").is_empty() && programs_of("load8").is_empty());
    }

    #[test]
    fn a_damaged_cache_file_is_not_used() {
        let folder = std::env::temp_dir().join(format!("onebox-cubins-{}", std::process::id()));
        let path = folder.join("a.cubin");
        write(&path, b"some kernel").unwrap();
        assert_eq!(read(&path).unwrap(), b"some kernel");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[3] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_cache_file_that_others_could_have_written_is_not_used() {
        let folder = std::env::temp_dir().join(format!("onebox-cubins-of-{}", std::process::id()));
        let path = folder.join("a.cubin");
        write(&path, b"some kernel").unwrap();
        assert!(read(&path).is_some());
        let owner = std::fs::metadata(&path).unwrap().uid();
        assert!(is_our_own(owner, 0o100_644) && !is_our_own(owner + 1, 0o100_644));
        for (mode, used) in [(0o620, false), (0o602, false), (0o644, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(read(&path).is_some(), used, "{mode:o}");
        }
        // A file or link at the unfinished name is replaced, not followed.
        let (victim, unfinished) = (folder.join("victim"), format!("tmp{}", std::process::id()));
        std::fs::write(&victim, b"of another").unwrap();
        std::os::unix::fs::symlink(&victim, path.with_extension(unfinished)).unwrap();
        write(&path, b"another kernel").unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"of another");
        assert_eq!(read(&path).unwrap(), b"another kernel");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
