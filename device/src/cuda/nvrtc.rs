//! NVRTC as safe functions: they compile CUDA C to a cubin for one architecture.
#![expect(unsafe_code, reason = "NVRTC's C interface")]

use cudarc::nvrtc::sys::{self, nvrtcResult};
use std::ffi::CString;

/// Whether the library can be loaded.
pub(super) fn is_present() -> bool {
    // SAFETY: loads a library by name.
    unsafe { sys::is_culib_present() }
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        // SAFETY: the program is alive; out-pointers are to locals or buffers of sufficient length.
        check(stringify!($f), unsafe { sys::$f($($arg),*) })
    };
}

fn check(call: &str, code: nvrtcResult) -> Result<(), String> {
    if code == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(format!("{call}: {code:?}")) }
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
struct Program(sys::nvrtcProgram);

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
