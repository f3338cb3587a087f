//! NVRTC as safe functions: they compile CUDA C to a cubin for one architecture.
#![expect(unsafe_code, reason = "NVRTC's C interface")]

use super::libraries::{LibraryFile, LoadedLibrary, library_functions, load, load_beforehand};
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

/// File names of the library, in the order of attempts.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

type Texts = *const *const c_char;

library_functions!(Functions {
    nvrtcVersion: fn(*mut c_int, *mut c_int) -> nvrtcResult;
    nvrtcGetNumSupportedArchs: fn(*mut c_int) -> nvrtcResult;
    nvrtcGetSupportedArchs: fn(*mut c_int) -> nvrtcResult;
    nvrtcCreateProgram:
        fn(*mut nvrtcProgram, *const c_char, *const c_char, c_int, Texts, Texts) -> nvrtcResult;
    nvrtcDestroyProgram: fn(*mut nvrtcProgram) -> nvrtcResult;
    nvrtcCompileProgram: fn(nvrtcProgram, c_int, Texts) -> nvrtcResult;
    nvrtcGetProgramLogSize: fn(nvrtcProgram, *mut usize) -> nvrtcResult;
    nvrtcGetProgramLog: fn(nvrtcProgram, *mut c_char) -> nvrtcResult;
    nvrtcGetCUBINSize: fn(nvrtcProgram, *mut usize) -> nvrtcResult;
    nvrtcGetCUBIN: fn(nvrtcProgram, *mut c_char) -> nvrtcResult;
});

/// The library, loaded once, or the reason why it is missing.
fn functions() -> Result<&'static Functions, String> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    let find = || load(&NAMES, c"nvrtcVersion", Functions::of);
    LOADED.get_or_init(find).as_ref().map_err(Clone::clone)
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        functions().and_then(|functions| {
            // SAFETY: the program is alive; out-pointers are to locals or buffers of sufficient
            // length.
            check(stringify!($f), unsafe { (functions.$f)($($arg),*) })
        })
    };
}

fn check(call: &str, code: nvrtcResult) -> Result<(), String> {
    if code == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(format!("{call}: {code:?}")) }
}

/// The file of the library.
pub(super) fn file() -> Result<LibraryFile, String> {
    functions().map(|functions| functions.loaded.file.clone())
}

/// The file of the compiler's built-in functions next to the library, loaded once. NVRTC opens it
/// by its bare name, and the dynamic linker looks for that name in no wheel. `None`: the folder
/// does not have it, and NVRTC finds it or says that it is missing.
pub(super) fn builtins() -> Result<Option<PathBuf>, String> {
    static LOADED: OnceLock<Option<PathBuf>> = OnceLock::new();
    let (major, minor) = version()?;
    let path = file()?.path.with_file_name(format!("libnvrtc-builtins.so.{major}.{minor}"));
    let load = || (path.exists() && load_beforehand(&path)).then_some(path);
    Ok(LOADED.get_or_init(load).clone())
}

/// The library's version (major, minor).
pub(super) fn version() -> Result<(i32, i32), String> {
    let (mut major, mut minor) = (0, 0);
    call!(nvrtcVersion(&raw mut major, &raw mut minor))?;
    Ok((major, minor))
}

/// Compute capabilities for which the library compiles: 70 for V100, 90 for H100.
pub(super) fn architectures() -> Result<Vec<u32>, String> {
    let mut count = 0;
    call!(nvrtcGetNumSupportedArchs(&raw mut count))?;
    let wrong = |number: i32| format!("nvrtcGetSupportedArchs: {number}");
    let mut all = vec![0; usize::try_from(count).map_err(|_| wrong(count))?];
    call!(nvrtcGetSupportedArchs(all.as_mut_ptr()))?;
    all.into_iter().map(|sm| u32::try_from(sm).map_err(|_| wrong(sm))).collect()
}

/// A program. Drop destroys it.
struct Program(nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = call!(nvrtcDestroyProgram(&raw mut self.0));
    }
}

impl Program {
    fn log(&self) -> Result<String, String> {
        let mut size = 0;
        call!(nvrtcGetProgramLogSize(self.0, &raw mut size))?;
        let mut text = vec![0u8; size];
        call!(nvrtcGetProgramLog(self.0, text.as_mut_ptr().cast()))?;
        Ok(String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned())
    }
}

/// Compiles `source` to a cubin.
///
/// # Errors
/// The compiler's message.
pub(super) fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    builtins()?;
    let text = |s: &str| CString::new(s).map_err(|_| format!("{name} holds a zero byte"));
    let (c_name, c_source) = (text(name)?, text(source)?);
    let options = options.iter().map(|o| text(o)).collect::<Result<Vec<_>, _>>()?;
    let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let (mut raw, none, no_names) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
    call!(nvrtcCreateProgram(&raw mut raw, c_source.as_ptr(), c_name.as_ptr(), 0, none, no_names))?;
    let program = Program(raw);
    call!(nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr())).map_err(
        |error| {
            let log = program.log().unwrap_or_else(|e| e);
            format!("{name} does not compile ({error}):\n{log}")
        },
    )?;
    let mut size = 0;
    call!(nvrtcGetCUBINSize(program.0, &raw mut size))?;
    let mut cubin = vec![0u8; size];
    call!(nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()))?;
    Ok(cubin)
}
