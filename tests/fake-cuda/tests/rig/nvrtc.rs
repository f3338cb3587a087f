//! The parts of the real NVRTC that tests need: compilation of a text to PTX.

use libloading::Library;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock};

type Handle = *mut c_void;

/// The library that ONEBOX_NVRTC names.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = std::env::var("ONEBOX_NVRTC").expect("ONEBOX_NVRTC");
        // SAFETY: NVIDIA's library, which the user named.
        unsafe { Library::new(&path) }.unwrap_or_else(|e| panic!("{path}: {e}"))
    })
}

macro_rules! call {
    ($name:expr, ( $($arg:expr => $ty:ty),* )) => {{
        // SAFETY: the function has these parameters in every version 12, and the pointers live during the call.
        unsafe {
            let f = library().get::<unsafe extern "C" fn($($ty),*) -> c_int>($name).expect("a function");
            f($($arg),*)
        }
    }};
}

/// An output text of NVRTC, by a function for its size and a function for the text.
fn text(program: Handle, sizes: &[u8], texts: &[u8]) -> String {
    let mut size = 0_usize;
    let get = |size: *mut usize| call!(sizes, (program => Handle, size => *mut usize));
    assert_eq!(get(&raw mut size), 0);
    let mut bytes = vec![0_u8; size];
    assert_eq!(call!(texts, (program => Handle, bytes.as_mut_ptr().cast() => *mut c_char)), 0);
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string()
}

/// The compute capability for which a kernel that a GPU of `sm` launches is compiled to run here: few, since
/// each takes seconds. Kernels for small shared memory are empty for 8.0.
pub(crate) fn compiled_for(kernel: &str, sm: u32) -> u32 {
    match sm {
        ..80 => 70,
        _ if kernel.contains("_small_") => 89,
        _ => 80,
    }
}

/// The PTX of a program for a compute capability, with lines.
pub(crate) fn ptx(name: &str, source: &str, sm: u32) -> String {
    // One compilation at a time: each needs all the time of a core.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let (name, source) = [name, source].map(|text| CString::new(text).expect("no zero")).into();
    let mut options = vec![format!("--gpu-architecture=compute_{sm}"), "-lineinfo".into()];
    options.extend(device::cuda::testing::OPTIONS.iter().map(|option| (*option).to_string()));
    let options: Vec<CString> =
        options.into_iter().map(|option| CString::new(option).expect("no zero")).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program: Handle = null_mut();
    let made = call!(b"nvrtcCreateProgram", (
        &raw mut program => *mut Handle, source.as_ptr() => *const c_char, name.as_ptr() => *const c_char,
        0 => c_int, null() => *const c_void, null() => *const c_void));
    assert_eq!(made, 0);
    let status = call!(b"nvrtcCompileProgram", (
        program => Handle, pointers.len() as c_int => c_int, pointers.as_ptr() => *const *const c_char));
    assert_eq!(status, 0, "{}", text(program, b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog"));
    let ptx = text(program, b"nvrtcGetPTXSize", b"nvrtcGetPTX");
    call!(b"nvrtcDestroyProgram", (&raw mut program => *mut Handle));
    ptx
}
