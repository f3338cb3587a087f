//! cuBLASLt as one safe type: a matmul with its algorithm, and the call that enqueues it.
#![expect(unsafe_code, reason = "cuBLASLt's C interface")]

mod shape;

pub(super) use self::shape::{Addresses, MatmulShape, Operand, Step};
use super::driver::Stream;
use super::libraries::{LibraryFile, LoadedLibrary, library_functions, load};
use crate::Dtype;
use cudarc::cublaslt::sys::{self, cublasStatus_t, cudaDataType_t};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::rc::Rc;
use std::sync::OnceLock;

/// File names of the library, in the order of attempts.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

type RawHandle = sys::cublasLtHandle_t;
type RawLayout = sys::cublasLtMatrixLayout_t;
type RawDescription = sys::cublasLtMatmulDesc_t;
type RawPreference = sys::cublasLtMatmulPreference_t;

library_functions!(Functions {
    cublasLtGetVersion: fn() -> usize;
    cublasLtCreate: fn(*mut RawHandle) -> cublasStatus_t;
    cublasLtDestroy: fn(RawHandle) -> cublasStatus_t;
    cublasLtMatrixLayoutCreate: fn(*mut RawLayout, cudaDataType_t, u64, u64, i64) -> cublasStatus_t;
    cublasLtMatrixLayoutDestroy: fn(RawLayout) -> cublasStatus_t;
    cublasLtMatmulDescCreate:
        fn(*mut RawDescription, sys::cublasComputeType_t, cudaDataType_t) -> cublasStatus_t;
    cublasLtMatmulDescDestroy: fn(RawDescription) -> cublasStatus_t;
    cublasLtMatmulDescSetAttribute: fn(
        RawDescription,
        sys::cublasLtMatmulDescAttributes_t,
        *const c_void,
        usize,
    ) -> cublasStatus_t;
    cublasLtMatmulPreferenceCreate: fn(*mut RawPreference) -> cublasStatus_t;
    cublasLtMatmulPreferenceDestroy: fn(RawPreference) -> cublasStatus_t;
    cublasLtMatmulPreferenceSetAttribute: fn(
        RawPreference,
        sys::cublasLtMatmulPreferenceAttributes_t,
        *const c_void,
        usize,
    ) -> cublasStatus_t;
    cublasLtMatmulAlgoGetHeuristic: fn(
        RawHandle,
        RawDescription,
        RawLayout,
        RawLayout,
        RawLayout,
        RawLayout,
        RawPreference,
        c_int,
        *mut sys::cublasLtMatmulHeuristicResult_t,
        *mut c_int,
    ) -> cublasStatus_t;
    cublasLtMatmulAlgoCheck: fn(
        RawHandle,
        RawDescription,
        RawLayout,
        RawLayout,
        RawLayout,
        RawLayout,
        *const sys::cublasLtMatmulAlgo_t,
        *mut sys::cublasLtMatmulHeuristicResult_t,
    ) -> cublasStatus_t;
    cublasLtMatmul: fn(
        RawHandle,
        RawDescription,
        *const c_void,
        *const c_void,
        RawLayout,
        *const c_void,
        RawLayout,
        *const c_void,
        *const c_void,
        RawLayout,
        *mut c_void,
        RawLayout,
        *const sys::cublasLtMatmulAlgo_t,
        *mut c_void,
        usize,
        sys::cudaStream_t,
    ) -> cublasStatus_t;
});

/// The library, loaded once, or the reason why it is missing.
fn functions() -> Result<&'static Functions, String> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    let find = || load(&NAMES, c"cublasLtGetVersion", Functions::of);
    LOADED.get_or_init(find).as_ref().map_err(Clone::clone)
}

/// The library's version, such as 120403 for 12.4.3.
pub(super) fn version() -> Result<usize, String> {
    // SAFETY: the function has no arguments.
    functions().map(|functions| unsafe { (functions.cublasLtGetVersion)() })
}

/// The file of the library.
pub(super) fn file() -> Result<LibraryFile, String> {
    functions().map(|functions| functions.loaded.file.clone())
}

fn check(call: &str, status: cublasStatus_t) -> Result<(), String> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        _ => Err(format!("{call}: {status:?}")),
    }
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        functions().and_then(|functions| {
            // SAFETY: the constructors of this file make the descriptors and `Drop` alone destroys
            // them; attributes are read from locals of the given size.
            check(stringify!($f), unsafe { (functions.$f)($($arg),*) })
        })
    };
}

/// The library on the context that was bound at its construction.
#[derive(Debug)]
pub(super) struct Handle(sys::cublasLtHandle_t);

impl Handle {
    pub(super) fn new() -> Result<Self, String> {
        let mut raw = std::ptr::null_mut();
        call!(cublasLtCreate(&raw mut raw))?;
        Ok(Self(raw))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = call!(cublasLtDestroy(self.0));
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(operand: &Operand) -> Result<Self, String> {
        let (rows, cols) = (operand.rows as u64, operand.cols as u64);
        let (mut raw, ld) = (std::ptr::null_mut(), operand.stride.max(1) as i64);
        call!(cublasLtMatrixLayoutCreate(&raw mut raw, data_type(operand.dtype)?, rows, cols, ld))?;
        Ok(Self(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatrixLayoutDestroy(self.0));
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatmulPreferenceDestroy(self.0));
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), String> {
        let (at, size) = (std::ptr::from_ref(value).cast::<c_void>(), size_of::<T>());
        call!(cublasLtMatmulDescSetAttribute(self.0, attribute, at, size))
    }

    fn set_addresses(&self, at: Addresses) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(bias) = at.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        if let Some(aux) = at.aux {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &aux)?;
        }
        if let Some([a, b]) = at.scales {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &a)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &b)?;
        }
        Ok(())
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        let _ = call!(cublasLtMatmulDescDestroy(self.0));
    }
}

/// A matmul as the library describes it.
struct Problem {
    description: Description,
    a: Layout,
    b: Layout,
    d: Layout,
}

/// A shape with its algorithm.
pub(super) struct Product {
    problem: Rc<Problem>,
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

/// Most algorithms that a search returns.
pub(super) const MOST_ALGORITHMS: usize = 8;

/// An algorithm of the library as numbers, for the same version of the library on the same GPU.
pub(super) type AlgorithmWords = [u64; 8];

/// A result that the library fills. Zero is a valid value of every field.
const UNFILLED: sys::cublasLtMatmulHeuristicResult_t = sys::cublasLtMatmulHeuristicResult_t {
    algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
    wavesCount: 0.0,
    reserved: [0; 4],
};

impl fmt::Debug for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Product").field("workspace", &self.workspace).finish_non_exhaustive()
    }
}

fn data_type(dtype: Dtype) -> Result<cudaDataType_t, String> {
    match dtype {
        Dtype::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        Dtype::Bf16 => Ok(cudaDataType_t::CUDA_R_16BF),
        Dtype::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        Dtype::E4m3 => Ok(cudaDataType_t::CUDA_R_8F_E4M3),
        Dtype::E5m2 => Ok(cudaDataType_t::CUDA_R_8F_E5M2),
        Dtype::F64 | Dtype::I32 | Dtype::U16 => Err(format!("no products of {dtype:?}")),
    }
}

impl Problem {
    /// Describes the matmul of a shape. `at` has example addresses: searches depend on alignments.
    fn new(shape: &MatmulShape, at: Addresses) -> Result<Self, String> {
        use sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let mut raw = std::ptr::null_mut();
        let scale = cudaDataType_t::CUDA_R_32F;
        // Uses full fp32, not the 19 bits of TF32.
        call!(cublasLtMatmulDescCreate(&raw mut raw, CUBLAS_COMPUTE_32F, scale))?;
        let description = Description(raw);
        let transposed = |operand: &Operand| i32::from(operand.transposed);
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed(&shape.a))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposed(&shape.b))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue(shape))?;
        description.set_addresses(at)?;
        if shape.is_fp8() {
            // Moves sums to fp32 registers at intervals; otherwise Hopper keeps about 14 bits.
            description.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &0i8)?;
        }
        if shape.step.has_aux() {
            let stride = shape.d.rows as i64;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride)?;
        }
        if let Some(bias) = shape.bias {
            let dtype = data_type(bias)? as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &dtype)?;
        }
        if let Some(processors) = shape.processors {
            let processors = processors as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &processors)?;
        }
        let (a, b, d) = (Layout::new(&shape.a)?, Layout::new(&shape.b)?, Layout::new(&shape.d)?);
        Ok(Self { description, a, b, d })
    }
}

impl Product {
    /// Looks for the library's first `most` algorithms that need at most `workspace` bytes, in the
    /// order of its heuristic. The list is empty if the library has none. `at` has example
    /// addresses.
    pub(super) fn search(
        handle: &Handle,
        shape: &MatmulShape,
        at: Addresses,
        workspace: usize,
        most: usize,
    ) -> Result<Vec<Self>, String> {
        const CALL: &str = "cublasLtMatmulAlgoGetHeuristic";
        let problem = Rc::new(Problem::new(shape, at)?);
        let preference = preference(shape, workspace)?;
        let (mut found, mut count) = ([UNFILLED; MOST_ALGORITHMS], 0);
        let most = most.min(found.len());
        let functions = functions()?;
        // SAFETY: all arguments are alive, and the library writes at most `most` results.
        let status = unsafe {
            (functions.cublasLtMatmulAlgoGetHeuristic)(
                handle.0,
                problem.description.0,
                problem.a.0,
                problem.b.0,
                problem.d.0,
                problem.d.0,
                preference.0,
                most as c_int,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check(CALL, status)?;
        let given = usize::try_from(count).ok().and_then(|count| found.get(..count));
        let found = given.ok_or_else(|| format!("{CALL} found {count} of {most} algorithms"))?;
        let is_usable = |result: &&sys::cublasLtMatmulHeuristicResult_t| {
            result.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
        };
        let product = |result: &sys::cublasLtMatmulHeuristicResult_t| Self {
            problem: Rc::clone(&problem),
            algorithm: result.algo,
            workspace: result.workspaceSize,
        };
        let products: Vec<Self> = found.iter().filter(is_usable).map(product).collect();
        match found.first() {
            Some(first) if products.is_empty() => check(CALL, first.state).map(|()| products),
            _ => Ok(products),
        }
    }

    /// The matmul of a shape by an algorithm that an earlier search has found. `at` has example
    /// addresses.
    ///
    /// # Errors
    /// The library cannot use the algorithm for the shape, or it needs more than `workspace` bytes.
    pub(super) fn stored(
        handle: &Handle,
        shape: &MatmulShape,
        at: Addresses,
        workspace: usize,
        words: AlgorithmWords,
    ) -> Result<Self, String> {
        let problem = Rc::new(Problem::new(shape, at)?);
        let algorithm = sys::cublasLtMatmulAlgo_t { data: words };
        let mut found = UNFILLED;
        call!(cublasLtMatmulAlgoCheck(
            handle.0,
            problem.description.0,
            problem.a.0,
            problem.b.0,
            problem.d.0,
            problem.d.0,
            &raw const algorithm,
            &raw mut found,
        ))?;
        check("cublasLtMatmulAlgoCheck", found.state)?;
        let needed = found.workspaceSize;
        if needed > workspace {
            return Err(format!("it needs {needed} bytes of workspace, {workspace} are there"));
        }
        Ok(Self { problem, algorithm, workspace: needed })
    }

    /// The algorithm as numbers.
    pub(super) const fn words(&self) -> AlgorithmWords {
        self.algorithm.data
    }

    /// Enqueues the matmul.
    pub(super) fn run(
        &self,
        handle: &Handle,
        stream: &Stream,
        at: Addresses,
        workspace: u64,
    ) -> Result<(), String> {
        let Problem { description, a, b, d } = &*self.problem;
        description.set_addresses(at)?;
        let (alpha, beta) = (1.0f32, f32::from(u8::from(at.add)));
        call!(cublasLtMatmul(
            handle.0,
            description.0,
            (&raw const alpha).cast(),
            at.a as *const c_void,
            a.0,
            at.b as *const c_void,
            b.0,
            (&raw const beta).cast(),
            at.d as *const c_void,
            d.0,
            at.d as *mut c_void,
            d.0,
            &raw const self.algorithm,
            workspace as *mut c_void,
            self.workspace,
            stream.raw().cast(),
        ))
    }
}

fn epilogue(shape: &MatmulShape) -> u32 {
    use sys::cublasLtEpilogue_t::*;
    let epilogue = match (shape.step, shape.bias) {
        (Step::None, None) => CUBLASLT_EPILOGUE_DEFAULT,
        (Step::None, Some(_)) => CUBLASLT_EPILOGUE_BIAS,
        (Step::Gelu, None) => CUBLASLT_EPILOGUE_GELU_AUX,
        (Step::Gelu, Some(_)) => CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        (Step::GeluBackward, _) => CUBLASLT_EPILOGUE_DGELU,
        (Step::SumsOfB, _) => CUBLASLT_EPILOGUE_BGRADB,
    };
    epilogue as u32
}

fn preference(shape: &MatmulShape, workspace: usize) -> Result<Preference, String> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let mut raw = std::ptr::null_mut();
    call!(cublasLtMatmulPreferenceCreate(&raw mut raw))?;
    let preference = Preference(raw);
    let set = |attribute, at: *const c_void, size| {
        call!(cublasLtMatmulPreferenceSetAttribute(preference.0, attribute, at, size))
    };
    let bytes = (&raw const workspace).cast();
    set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes, size_of::<usize>())?;
    // Partial sums of a matmul that is split along k stay in fp32 and are added in a fixed order.
    let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let bytes = (&raw const scheme).cast();
    set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, bytes, 4)?;
    // The library's default is 256 bytes, but tensors inside a segment may be aligned to less.
    for (attribute, align) in [
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape.a.align),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.b.align),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.d.align),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.d.align),
    ] {
        set(attribute, (&raw const align).cast(), 4)?;
    }
    Ok(preference)
}
