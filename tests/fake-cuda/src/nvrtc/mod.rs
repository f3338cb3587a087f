//! `libnvrtc.so.12`: the compiled image is a text that names the kernels of the source.
#![expect(unsafe_code, reason = "exported C functions")]

mod image;

use std::{
    collections::BTreeSet,
    ffi::{CStr, CString, c_char, c_int, c_void},
    sync::{Arc, LazyLock, Mutex},
};

pub(crate) use image::Image;
use image::{kernels_of, without_comments};

use crate::{
    call::put, config::config, counters::STATS, failure::fails, handles::Handles, sync::lock,
};

const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;

#[derive(Debug, Default)]
struct Compilation {
    image: Image,
    virtual_only: bool,
    log: String,
    done: bool,
}

#[derive(Debug)]
struct Program {
    source: String,
    headers: BTreeSet<String>,
    compiled: Mutex<Compilation>,
}

fn programs() -> &'static Handles<Program> {
    static PROGRAMS: LazyLock<Handles<Program>> = LazyLock::new(Handles::default);
    &PROGRAMS
}

impl Program {
    fn compile(&self, options: &[String]) -> c_int {
        STATS.compilations.add(1);
        let mut compiled = lock(&self.compiled);
        *compiled = Compilation::default();
        if let Some(unknown) = options.iter().find(|option| !is_known(option)) {
            compiled.log = format!("nvrtc: error: unrecognized option {unknown} found\n");
            return INVALID_OPTION;
        }
        let architecture = architecture(options).unwrap_or("compute_75");
        let (kind, number) = architecture.split_once('_').unwrap_or_default();
        let Some(sm) = number
            .trim_end_matches(['a', 'f'])
            .parse()
            .ok()
            .filter(|sm| architectures().contains(sm))
        else {
            compiled.log = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n".into();
            return INVALID_OPTION;
        };
        if let Some(error) = self.first_error(options) {
            compiled.log = format!("kernels.cu(1): error: {error}\n\n1 error detected.\n");
            return COMPILATION;
        }
        compiled.virtual_only = kind == "compute";
        compiled.image = Image { sm: Some(sm), ..kernels_of(&self.source) };
        compiled.done = true;
        if options.iter().any(|option| option.contains("ptxas-options=-v")) {
            compiled.log = resource_log(&compiled.image, sm);
        }
        0
    }

    /// The first of the few errors that need no compiler to be found.
    fn first_error(&self, options: &[String]) -> Option<String> {
        if fails("compile", 0) {
            return Some("compilation failed on demand".into());
        }
        let paths = options.iter().any(|o| o.starts_with("-I") || o.starts_with("--include-path"));
        let includes = self.source.lines().filter_map(|line| line.trim().strip_prefix("#include"));
        let missing = includes
            .map(|rest| rest.trim().trim_matches(['<', '>', '"']))
            .find(|name| !paths && !self.headers.contains(*name));
        if let Some(name) = missing {
            return Some(format!("cannot open source file \"{name}\""));
        }
        let code = without_comments(&self.source);
        let balance = |open, close| code.matches(open).count() == code.matches(close).count();
        (!balance('{', '}')).then(|| "unbalanced braces".to_string())
    }
}

/// Compute capabilities, each with the first NVRTC version that compiles for it.
const ARCHITECTURES: [(i32, (i32, i32)); 17] = [
    (50, (0, 0)),
    (52, (0, 0)),
    (53, (0, 0)),
    (60, (0, 0)),
    (61, (0, 0)),
    (62, (0, 0)),
    (70, (0, 0)),
    (72, (0, 0)),
    (75, (0, 0)),
    (80, (11, 0)),
    (86, (11, 1)),
    (87, (11, 4)),
    (89, (11, 8)),
    (90, (11, 8)),
    (100, (12, 8)),
    (120, (12, 8)),
    (121, (12, 9)),
];

/// Compute capabilities for which the library compiles. CUDA 13 dropped all before Turing.
fn architectures() -> Vec<i32> {
    let config = config();
    if let Some(given) = &config.nvrtc_architectures {
        return given.clone();
    }
    let oldest = if config.nvrtc_version.0 >= 13 { 75 } else { 50 };
    let known =
        |&(sm, since): &(i32, _)| (sm >= oldest && since <= config.nvrtc_version).then_some(sm);
    ARCHITECTURES.iter().filter_map(known).collect()
}

fn architecture(options: &[String]) -> Option<&str> {
    let names = ["--gpu-architecture", "-arch"];
    options.iter().enumerate().find_map(|(index, option)| {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        if !names.contains(&name) {
            return None;
        }
        if value.is_empty() { options.get(index + 1).map(String::as_str) } else { Some(value) }
    })
}

fn is_known(option: &str) -> bool {
    const KNOWN: [&str; 36] = [
        "--gpu-architecture",
        "-arch",
        "--use_fast_math",
        "-use_fast_math",
        "--fmad",
        "-fmad",
        "--ftz",
        "-ftz",
        "--prec-div",
        "-prec-div",
        "--prec-sqrt",
        "-prec-sqrt",
        "--std",
        "-std",
        "-I",
        "--include-path",
        "-D",
        "--define-macro",
        "-U",
        "--undefine-macro",
        "--ptxas-options",
        "-Xptxas",
        "-lineinfo",
        "--generate-line-info",
        "-default-device",
        "--device-as-default-execution-space",
        "--restrict",
        "-restrict",
        "--maxrregcount",
        "-maxrregcount",
        "--extra-device-vectorization",
        "-w",
        "--disable-warnings",
        "--diag-",
        "--dopt",
        "--minimal",
    ];
    !option.starts_with('-') || KNOWN.iter().any(|known| option.starts_with(known))
}

/// Output of ptxas with `-v`; the figures are invented.
fn resource_log(image: &Image, sm: i32) -> String {
    let entry = |name: &String| {
        format!(
            "ptxas info    : Compiling entry function '{name}' for 'sm_{sm}'\n\
             ptxas info    : Function properties for {name}\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Used 32 registers, used 1 barriers\n"
        )
    };
    image.kernels.iter().map(entry).collect()
}

/// # Safety
/// `pointers` holds `count` terminated strings.
unsafe fn strings(count: c_int, pointers: *const *const c_char) -> Vec<String> {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: as demanded above.
    let text = |index| unsafe { CStr::from_ptr(*pointers.add(index)) };
    (0..count).map(|index| text(index).to_string_lossy().into_owned()).collect()
}

fn status(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    let (a, b) = config().nvrtc_version;
    status(put(major, a).and_then(|()| put(minor, b)).map_err(|_| INVALID_INPUT))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int {
    status(put(count, architectures().len() as c_int).map_err(|_| INVALID_INPUT))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetSupportedArchs(out: *mut c_int) -> c_int {
    if out.is_null() {
        return INVALID_INPUT;
    }
    let all = architectures();
    // SAFETY: the caller made room for the number that the function above returns.
    unsafe { std::slice::from_raw_parts_mut(out, all.len()) }.copy_from_slice(&all);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    out: *mut *mut c_void,
    source: *const c_char,
    _name: *const c_char,
    num_headers: c_int,
    _headers: *const *const c_char,
    include_names: *const *const c_char,
) -> c_int {
    if source.is_null() || out.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: terminated strings by the C interface.
    let (source, headers) =
        unsafe { (CStr::from_ptr(source), strings(num_headers, include_names)) };
    let program = Program {
        source: source.to_string_lossy().into_owned(),
        headers: headers.into_iter().collect(),
        compiled: Mutex::default(),
    };
    status(put(out, programs().insert(Arc::new(program))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(handle: *mut *mut c_void) -> c_int {
    if handle.is_null() {
        return INVALID_PROGRAM;
    }
    // SAFETY: not null, and a program's handle by the C interface. The handle is only read: cudarc
    // passes the address of an immutable variable.
    let program = unsafe { *handle };
    status(programs().remove(program).map(drop).map_err(|_| INVALID_PROGRAM))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(
    handle: *mut c_void,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    let Ok(program) = programs().get(handle) else { return INVALID_PROGRAM };
    // SAFETY: terminated strings by the C interface.
    program.compile(&unsafe { strings(count, options) })
}

/// An output text of a program, without a terminator.
fn output(handle: *mut c_void, text: fn(&Compilation) -> Option<String>) -> Result<String, c_int> {
    let program = programs().get(handle).map_err(|_| INVALID_PROGRAM)?;
    text(&lock(&program.compiled)).ok_or(INVALID_PROGRAM)
}

/// The program's cubin, which needs a real architecture.
fn cubin(compiled: &Compilation) -> Option<String> {
    let made = compiled.done && !compiled.virtual_only;
    made.then(|| compiled.image.text(compiled.image.sm))
}

fn ptx(compiled: &Compilation) -> Option<String> {
    compiled.done.then(|| compiled.image.text(None))
}

fn log(compiled: &Compilation) -> Option<String> {
    Some(compiled.log.clone())
}

macro_rules! outputs {
    ($($size:ident, $get:ident, $text:ident;)*) => {
        $(
            /// Size of the text in bytes, with the terminator.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $size(handle: *mut c_void, out: *mut usize) -> c_int {
                status(output(handle, $text).and_then(|text| put(out, text.len() + 1)))
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $get(handle: *mut c_void, out: *mut c_char) -> c_int {
                let text = output(handle, $text).map(|text| CString::new(text).unwrap_or_default());
                let Ok(text) = text else { return INVALID_PROGRAM };
                let bytes = text.as_bytes_with_nul();
                // SAFETY: the caller made room for the bytes that the size function returns.
                unsafe { out.cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
                0
            }
        )*
    };
}

outputs! {
    nvrtcGetCUBINSize, nvrtcGetCUBIN, cubin;
    nvrtcGetPTXSize, nvrtcGetPTX, ptx;
    nvrtcGetProgramLogSize, nvrtcGetProgramLog, log;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}
