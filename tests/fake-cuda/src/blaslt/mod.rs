//! `libcublasLt.so.12`: handles, descriptors, and `cublasLtMatmul` (see [`matmul`]).
#![expect(unsafe_code, reason = "exported C functions; attributes are bytes of the caller")]

mod matmul;
mod tiles;

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::{Arc, LazyLock, Mutex},
};

use crate::{
    call::put,
    config::config,
    fp8::Fp8,
    handles::Handles,
    machine::{current_device, machine, stream},
    number::Float,
    overhead::LoadedCode,
    sync::lock,
};
use matmul::{Operands, Product};

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const ALLOC_FAILED: c_int = 3;
const INVALID_VALUE: c_int = 7;
const ARCH_MISMATCH: c_int = 8;
const EXECUTION_FAILED: c_int = 13;
const NOT_SUPPORTED: c_int = 15;

/// A layout descriptor: type, shape and addressing of a matrix.
#[derive(Debug, Clone, Copy)]
struct Layout {
    data_type: i32,
    rows: u64,
    cols: u64,
    ld: i64,
    /// Order of the elements: 0 column-major, 1 row-major.
    order: i32,
    batch: i32,
    batch_stride: i64,
}

impl Layout {
    fn float(&self) -> Result<Float, c_int> {
        float_of(self.data_type)
    }
}

/// The element type of a number of `cudaDataType`.
fn float_of(data_type: i32) -> Result<Float, c_int> {
    match data_type {
        0 => Ok(Float::F32),
        2 => Ok(Float::F16),
        14 => Ok(Float::Bf16),
        28 => Ok(Float::Fp8(Fp8::E4m3)),
        29 => Ok(Float::Fp8(Fp8::E5m2)),
        _ => Err(NOT_SUPPORTED),
    }
}

/// A matmul descriptor.
#[derive(Debug, Clone, Copy)]
struct Desc {
    compute_type: i32,
    scale_type: i32,
    /// Place of alpha and beta: 0 host, 1 device.
    pointer_mode: i32,
    trans_a: i32,
    trans_b: i32,
    epilogue: u32,
    bias: usize,
    bias_type: i32,
    bias_batch_stride: i64,
    aux: usize,
    aux_type: i32,
    aux_ld: i64,
    aux_batch_stride: i64,
    /// Device addresses of the fp32 scales of A and B; address 0 means a scale of 1.
    scale_a: usize,
    scale_b: usize,
    /// Target number of multiprocessors; 0: all.
    processors: i32,
}

#[derive(Debug, Default)]
struct Tables {
    handles: Handles<()>,
    layouts: Handles<Mutex<Layout>>,
    descs: Handles<Mutex<Desc>>,
    preferences: Handles<Mutex<u64>>,
}

fn tables() -> &'static Tables {
    static TABLES: LazyLock<Tables> = LazyLock::new(Tables::default);
    &TABLES
}

fn status(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(SUCCESS)
}

fn stored<T>(out: *mut *mut c_void, table: &Handles<T>, value: T) -> c_int {
    status(put(out, table.insert(Arc::new(value))).map_err(|_| INVALID_VALUE))
}

fn removed<T>(table: &Handles<T>, handle: *mut c_void) -> c_int {
    status(table.remove(handle).map(drop).map_err(|_| INVALID_VALUE))
}

/// The value in an attribute buffer, whose size must be the size of `T`.
fn value<T: Copy>(buffer: *const c_void, size: usize) -> Result<T, c_int> {
    if buffer.is_null() || size != size_of::<T>() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the buffer holds `size` bytes by the C interface; all `T` here are plain numbers.
    Ok(unsafe { buffer.cast::<T>().read_unaligned() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtCreate(out: *mut *mut c_void) -> c_int {
    let config = config();
    if machine().devices.is_empty() || !config.takes_major(config.cublaslt_version as i32 / 10_000)
    {
        return NOT_INITIALIZED;
    }
    // The current device loads the code, or the first device without a current context.
    let device = current_device().unwrap_or(&machine().devices[0]);
    if device.load_once(LoadedCode::CublasLt).is_err() {
        return ALLOC_FAILED;
    }
    stored(out, &tables().handles, ())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtDestroy(handle: *mut c_void) -> c_int {
    removed(&tables().handles, handle)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtGetVersion() -> usize {
    config().cublaslt_version
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtGetCudartVersion() -> usize {
    12_090
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtGetStatusName(code: c_int) -> *const c_char {
    status_name(code).as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtGetStatusString(code: c_int) -> *const c_char {
    status_name(code).as_ptr()
}

fn status_name(code: c_int) -> &'static CStr {
    match code {
        SUCCESS => c"CUBLAS_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUBLAS_STATUS_NOT_INITIALIZED",
        ALLOC_FAILED => c"CUBLAS_STATUS_ALLOC_FAILED",
        INVALID_VALUE => c"CUBLAS_STATUS_INVALID_VALUE",
        ARCH_MISMATCH => c"CUBLAS_STATUS_ARCH_MISMATCH",
        EXECUTION_FAILED => c"CUBLAS_STATUS_EXECUTION_FAILED",
        NOT_SUPPORTED => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS unknown",
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    out: *mut *mut c_void,
    data_type: c_int,
    rows: u64,
    cols: u64,
    ld: i64,
) -> c_int {
    let layout = Layout { data_type, rows, cols, ld, order: 0, batch: 1, batch_stride: 0 };
    stored(out, &tables().layouts, Mutex::new(layout))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutDestroy(handle: *mut c_void) -> c_int {
    removed(&tables().layouts, handle)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    buffer: *const c_void,
    size: usize,
) -> c_int {
    let Ok(layout) = tables().layouts.get(handle) else { return INVALID_VALUE };
    let mut layout = lock(&layout);
    status(match attribute {
        0 => value(buffer, size).map(|v| layout.data_type = v),
        1 => value(buffer, size).map(|v| layout.order = v),
        2 => value(buffer, size).map(|v| layout.rows = v),
        3 => value(buffer, size).map(|v| layout.cols = v),
        4 => value(buffer, size).map(|v| layout.ld = v),
        5 => value(buffer, size).map(|v| layout.batch = v),
        6 => value(buffer, size).map(|v| layout.batch_stride = v),
        _ => Err(NOT_SUPPORTED),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescCreate(
    out: *mut *mut c_void,
    compute_type: c_int,
    scale_type: c_int,
) -> c_int {
    let desc = Desc {
        compute_type,
        scale_type,
        pointer_mode: 0,
        trans_a: 0,
        trans_b: 0,
        epilogue: 1,
        bias: 0,
        bias_type: -1,
        bias_batch_stride: 0,
        aux: 0,
        aux_type: -1,
        aux_ld: 0,
        aux_batch_stride: 0,
        scale_a: 0,
        scale_b: 0,
        processors: 0,
    };
    stored(out, &tables().descs, Mutex::new(desc))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescDestroy(handle: *mut c_void) -> c_int {
    removed(&tables().descs, handle)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    buffer: *const c_void,
    size: usize,
) -> c_int {
    let Ok(desc) = tables().descs.get(handle) else { return INVALID_VALUE };
    let mut desc = lock(&desc);
    status(match attribute {
        0 => value(buffer, size).map(|v| desc.compute_type = v),
        1 => value(buffer, size).map(|v| desc.scale_type = v),
        2 => value(buffer, size).map(|v| desc.pointer_mode = v),
        3 => value(buffer, size).map(|v| desc.trans_a = v),
        4 => value(buffer, size).map(|v| desc.trans_b = v),
        5 => {
            value(buffer, size).and_then(|v: i32| if v == 0 { Ok(()) } else { Err(NOT_SUPPORTED) })
        }
        7 => value(buffer, size).map(|v| desc.epilogue = v),
        8 => value(buffer, size).map(|v| desc.bias = v),
        10 => value(buffer, size).map(|v| desc.bias_batch_stride = v),
        11 => value(buffer, size).map(|v| desc.aux = v),
        12 => value(buffer, size).map(|v| desc.aux_ld = v),
        13 => value(buffer, size).map(|v| desc.aux_batch_stride = v),
        15 => value(buffer, size).and_then(|v: i32| {
            desc.processors = v;
            if v >= 0 { Ok(()) } else { Err(INVALID_VALUE) }
        }),
        17 => value(buffer, size).map(|v| desc.scale_a = v),
        18 => value(buffer, size).map(|v| desc.scale_b = v),
        22 => value(buffer, size).map(|v| desc.aux_type = v),
        25 => value::<i8>(buffer, size).map(drop), // fast accumulation of fp8
        26 => value(buffer, size).map(|v| desc.bias_type = v),
        _ => Err(NOT_SUPPORTED),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceCreate(out: *mut *mut c_void) -> c_int {
    stored(out, &tables().preferences, Mutex::new(0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(handle: *mut c_void) -> c_int {
    removed(&tables().preferences, handle)
}

/// Sets a preference. Attribute 1 is the largest workspace in bytes; the others have no effect.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    handle: *mut c_void,
    attribute: c_int,
    buffer: *const c_void,
    size: usize,
) -> c_int {
    let Ok(preference) = tables().preferences.get(handle) else { return INVALID_VALUE };
    if attribute != 1 {
        return SUCCESS;
    }
    status(value(buffer, size).map(|v| *lock(&preference) = v))
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Mark of an algorithm from the heuristic below.
const ALGORITHM: u64 = 0xFACE_B1A5;

fn product(desc: *mut c_void, layouts: [*mut c_void; 4]) -> Result<Product, c_int> {
    let desc = *lock(&*tables().descs.get(desc).map_err(|_| INVALID_VALUE)?);
    let layout = |handle| {
        tables().layouts.get(handle).map(|layout| *lock(&layout)).map_err(|_| INVALID_VALUE)
    };
    let [a, b, c, d] = layouts;
    Product::new(desc, layout(a)?, layout(b)?, layout(c)?, layout(d)?)
}

/// Number of algorithms for each supported matmul.
fn num_algorithms() -> usize {
    config().algorithms.len().max(1)
}

/// The place of an algorithm in the heuristic's list; a null pointer means the first.
fn place_of(algorithm: *const u64) -> Result<usize, c_int> {
    if algorithm.is_null() {
        return Ok(0);
    }
    // SAFETY: an algorithm is eight words by the C interface.
    let words = unsafe { algorithm.cast::<[u64; 8]>().read_unaligned() };
    let place = usize::try_from(words[1]).map_err(|_| INVALID_VALUE)?;
    if words[0] != ALGORITHM || words[2..] != [0; 6] {
        return Err(INVALID_VALUE);
    }
    if place < num_algorithms() { Ok(place) } else { Err(NOT_SUPPORTED) }
}

const fn heuristic(place: usize) -> Heuristic {
    Heuristic {
        algorithm: [ALGORITHM, place as u64, 0, 0, 0, 0, 0, 0],
        workspace: 0,
        state: SUCCESS,
        waves: 1.0,
        reserved: [0; 4],
    }
}

/// Returns the algorithms for each supported matmul; they need no workspace.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut c_void,
    desc: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    preference: *mut c_void,
    requested: c_int,
    out: *mut Heuristic,
    found: *mut c_int,
) -> c_int {
    if requested < 1 || tables().preferences.get(preference).is_err() {
        return INVALID_VALUE;
    }
    let refused = match product(desc, [a, b, c, d]) {
        Ok(product) if product.has_step() && !config().epilogues => Some(INVALID_VALUE),
        Ok(_) => None,
        Err(code) => Some(code),
    };
    if let Some(code) = refused {
        return if put(found, 0).is_ok() { code } else { INVALID_VALUE };
    }
    let count = num_algorithms().min(requested as usize);
    let results = (0..count).try_for_each(|i| put(out.wrapping_add(i), heuristic(i)));
    status(results.and_then(|()| put(found, count as c_int)).map_err(|_| INVALID_VALUE))
}

/// Whether an algorithm can run a matmul.
#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    handle: *mut c_void,
    desc: *mut c_void,
    a: *mut c_void,
    b: *mut c_void,
    c: *mut c_void,
    d: *mut c_void,
    algorithm: *const u64,
    out: *mut Heuristic,
) -> c_int {
    if tables().handles.get(handle).is_err() {
        return NOT_INITIALIZED;
    }
    if let Err(code) = product(desc, [a, b, c, d]) {
        return code;
    }
    match place_of(algorithm) {
        Ok(place) => status(put(out, heuristic(place)).map_err(|_| INVALID_VALUE)),
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmul(
    handle: *mut c_void,
    desc: *mut c_void,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *mut c_void,
    b: *const c_void,
    b_layout: *mut c_void,
    beta: *const f32,
    c: *const c_void,
    c_layout: *mut c_void,
    d: *mut c_void,
    d_layout: *mut c_void,
    algorithm: *const u64,
    _workspace: *mut c_void,
    _workspace_size: usize,
    stream_handle: *mut c_void,
) -> c_int {
    if tables().handles.get(handle).is_err() {
        return NOT_INITIALIZED;
    }
    let algorithm = match place_of(algorithm) {
        Ok(place) => place,
        Err(code) => return code,
    };
    if config().algorithms.get(algorithm) == Some(&0) {
        return ALLOC_FAILED;
    }
    let operands = Operands {
        alpha: alpha as usize,
        beta: beta as usize,
        a: a as usize,
        b: b as usize,
        c: c as usize,
        d: d as usize,
    };
    let product = match product(desc, [a_layout, b_layout, c_layout, d_layout]) {
        Ok(product) => product,
        Err(code) => return code,
    };
    let Ok(stream) = stream(stream_handle) else { return EXECUTION_FAILED };
    status(product.enqueue(&stream, operands, algorithm))
}
