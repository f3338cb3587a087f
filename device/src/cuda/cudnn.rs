//! cuDNN's backend interface as safe types: the graph of an operation, its execution plan, and the
//! call that enqueues it (NVIDIA's reference "cuDNN backend", chapter "Graph API").
#![expect(unsafe_code, reason = "cuDNN's C interface")]

mod attention;

pub use attention::FASTER_ON;
pub(super) use attention::{Attention, AttentionOp, workspace_bytes};

use super::driver::Stream;
use super::libraries::{LibraryFile, LoadedLibrary, dotted, library_functions, load};
use cudarc::cudnn::sys;
use std::ffi::{c_char, c_uint, c_void};
use std::sync::OnceLock;
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendAttributeType_t as Type;
use sys::cudnnBackendDescriptorType_t as Kind;
use sys::{cudnnDataType_t as Data, cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Fold};

/// File names of the library, in the order of attempts.
const NAMES: [&str; 1] = ["libcudnn.so.9"];

/// Oldest version whose attention accepts minus infinity in its mask: 9.10.
const OLDEST: usize = 91_000;

type RawDescriptor = *mut c_void;

// A status is read as a number, since a later library may have more of them.
library_functions!(Functions {
    cudnnGetVersion: fn() -> usize;
    cudnnGetCudartVersion: fn() -> usize;
    cudnnGetLastErrorString: fn(*mut c_char, usize) -> ();
    cudnnCreate: fn(*mut sys::cudnnHandle_t) -> c_uint;
    cudnnDestroy: fn(sys::cudnnHandle_t) -> c_uint;
    cudnnSetStream: fn(sys::cudnnHandle_t, sys::cudaStream_t) -> c_uint;
    cudnnBackendCreateDescriptor: fn(Kind, *mut RawDescriptor) -> c_uint;
    cudnnBackendDestroyDescriptor: fn(RawDescriptor) -> c_uint;
    cudnnBackendFinalize: fn(RawDescriptor) -> c_uint;
    cudnnBackendSetAttribute: fn(RawDescriptor, Name, Type, i64, *const c_void) -> c_uint;
    cudnnBackendGetAttribute:
        fn(RawDescriptor, Name, Type, i64, *mut i64, *mut c_void) -> c_uint;
    cudnnBackendExecute: fn(sys::cudnnHandle_t, RawDescriptor, RawDescriptor) -> c_uint;
});

/// The library, loaded once, or the reason why it cannot be used.
fn functions() -> Result<&'static Functions, String> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    let accept = |loaded: LoadedLibrary| {
        let functions = Functions::of(loaded)?;
        // SAFETY: the function has no arguments.
        let version = unsafe { (functions.cudnnGetVersion)() };
        if version < OLDEST {
            let path = functions.loaded.file.path.display();
            return Err(format!(
                "{path} is cuDNN {}: it is too old, 9.10 is needed",
                dotted(version)
            ));
        }
        Ok(functions)
    };
    let find = || load(&NAMES, c"cudnnGetVersion", accept);
    LOADED.get_or_init(find).as_ref().map_err(Clone::clone)
}

/// The library's version, such as 9.19.0.
pub(super) fn version() -> Result<String, String> {
    // SAFETY: the function has no arguments.
    functions().map(|functions| dotted(unsafe { (functions.cudnnGetVersion)() }))
}

/// The major version of CUDA for which the library was built.
pub(super) fn cuda() -> Result<u32, String> {
    // SAFETY: the function has no arguments.
    let version = functions().map(|functions| unsafe { (functions.cudnnGetCudartVersion)() })?;
    u32::try_from(version / 1000).map_err(|_| format!("cudnnGetCudartVersion: {version}"))
}

/// The file of the library.
pub(super) fn file() -> Result<LibraryFile, String> {
    functions().map(|functions| functions.loaded.file.clone())
}

/// The error of a call with status `status`, with the library's explanation of it.
fn check(functions: &Functions, call: &str, status: c_uint) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let mut reason = [0u8; 512];
    // SAFETY: the library writes at most so many bytes, the last of which is zero.
    unsafe { (functions.cudnnGetLastErrorString)(reason.as_mut_ptr().cast(), reason.len()) };
    let length = reason.iter().position(|byte| *byte == 0).unwrap_or(reason.len());
    let reason = String::from_utf8_lossy(&reason[..length]);
    // The names of two statuses, which a shortage of memory is known by.
    let name = match status {
        4003 => " CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        4004 => " CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        _ => "",
    };
    Err(format!("{call}: status {status}{name}: {}", reason.trim()))
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        functions().and_then(|functions| {
            // SAFETY: descriptors are those that this file made, and `Drop` alone destroys them;
            // attributes are read from and written to slices of the given length and type. The
            // addresses of a run are those of the plan's memory, which outlives the streams, and
            // the rank's thread has its context bound.
            check(functions, stringify!($f), unsafe { (functions.$f)($($arg),*) })
        })
    };
}

/// The library on the context that was bound at its construction.
#[derive(Debug)]
pub(super) struct Handle(sys::cudnnHandle_t);

impl Handle {
    /// Opens the library on the bound context.
    ///
    /// # Errors
    /// The library is missing, too old, or does not start.
    pub(super) fn new() -> Result<Self, String> {
        let mut raw = std::ptr::null_mut();
        call!(cudnnCreate(&raw mut raw))?;
        Ok(Self(raw))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let _ = call!(cudnnDestroy(self.0));
    }
}

/// Values that the library accepts for attributes of a type.
trait Attribute: Copy {
    const TYPE: Type;
}

macro_rules! attributes {
    ($($rust:ty: $name:ident),* $(,)?) => {
        $(impl Attribute for $rust { const TYPE: Type = Type::$name; })*
    };
}

attributes! {
    i64: CUDNN_TYPE_INT64,
    bool: CUDNN_TYPE_BOOLEAN,
    RawDescriptor: CUDNN_TYPE_BACKEND_DESCRIPTOR,
    Data: CUDNN_TYPE_DATA_TYPE,
    Mode: CUDNN_TYPE_POINTWISE_MODE,
    Fold: CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    sys::cudnnBackendHeurMode_t: CUDNN_TYPE_HEUR_MODE,
    sys::cudnnHandle_t: CUDNN_TYPE_HANDLE,
    u64: CUDNN_TYPE_VOID_PTR,
}

/// A descriptor of the library.
#[derive(Debug)]
struct Descriptor(RawDescriptor);

impl Descriptor {
    fn new(kind: Kind) -> Result<Self, String> {
        let mut raw = std::ptr::null_mut();
        call!(cudnnBackendCreateDescriptor(kind, &raw mut raw))?;
        Ok(Self(raw))
    }

    fn set<T: Attribute>(&self, name: Name, values: &[T]) -> Result<(), String> {
        let (count, at) = (values.len() as i64, values.as_ptr().cast());
        call!(cudnnBackendSetAttribute(self.0, name, T::TYPE, count, at))
            .map_err(|why| format!("{name:?}: {why}"))
    }

    fn finalize(self) -> Result<Self, String> {
        call!(cudnnBackendFinalize(self.0))?;
        Ok(self)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let _ = call!(cudnnBackendDestroyDescriptor(self.0));
    }
}

/// A tensor of a graph. Its number in variant packs is its place in the graph plus one.
#[derive(Clone, Copy, Debug)]
struct Node(usize);

impl Node {
    const fn number(self) -> i64 {
        self.0 as i64 + 1
    }
}

/// Where the numbers of a graph's tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// Nowhere: an intermediate result.
    Virtual,
    /// Memory of the GPU, or of the plan's workspace.
    Memory,
    /// One number of the host, passed by value.
    Value,
}

/// Sizes and strides of a tensor in elements: samples, heads, rows, columns.
#[derive(Clone, Copy, Debug)]
struct Layout {
    sizes: [i64; 4],
    strides: [i64; 4],
}

impl Layout {
    /// A layout without gaps, the last size innermost.
    const fn packed(sizes: [i64; 4]) -> Self {
        let [_, b, c, d] = sizes;
        Self { sizes, strides: [b * c * d, c * d, d, 1] }
    }

    /// The layout with rows and columns exchanged.
    const fn transposed(self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.sizes, self.strides);
        Self { sizes: [a, b, d, c], strides: [e, f, h, g] }
    }

    const ONE: Self = Self { sizes: [1; 4], strides: [1; 4] };
}

/// A graph of operations that the library runs as few kernels.
#[derive(Debug, Default)]
struct Graph {
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// Descriptions that the operations refer to.
    descriptions: Vec<Descriptor>,
}

impl Graph {
    fn tensor(&mut self, data: Data, layout: Layout, storage: Storage) -> Result<Node, String> {
        let node = Node(self.tensors.len());
        let tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, &[data])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &layout.sizes)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_STRIDES, &layout.strides)?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[node.number()])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[attention::ALIGNMENT as i64])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL, &[storage == Storage::Virtual])?;
        tensor.set(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[storage == Storage::Value])?;
        self.tensors.push(tensor.finalize()?);
        Ok(node)
    }

    fn raw(&self, node: Node) -> RawDescriptor {
        self.tensors[node.0].0
    }

    /// An operation with its tensors by attribute.
    fn operation(&self, kind: Kind, tensors: &[(Name, Node)]) -> Result<Descriptor, String> {
        let operation = Descriptor::new(kind)?;
        for &(name, node) in tensors {
            operation.set(name, &[self.raw(node)])?;
        }
        Ok(operation)
    }

    /// Adds an operation that attribute `name` describes further.
    fn add(
        &mut self,
        operation: Descriptor,
        name: Name,
        description: Descriptor,
    ) -> Result<(), String> {
        let description = description.finalize()?;
        operation.set(name, &[description.0])?;
        self.descriptions.push(description);
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// y = `mode` of the inputs, element by element: one, two, or two and the condition that
    /// chooses between them. `axis`: the axis of a mode that gives indices.
    fn pointwise(
        &mut self,
        mode: Mode,
        precision: Data,
        axis: Option<i64>,
        inputs: &[Node],
        y: Node,
    ) -> Result<(), String> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_POINTWISE_MODE, &[mode])?;
        how.set(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, &[precision])?;
        if let Some(axis) = axis {
            how.set(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        assert!(inputs.len() <= names.len(), "an operation has at most three inputs");
        let mut tensors: Vec<_> = names.into_iter().zip(inputs.iter().copied()).collect();
        tensors.push((Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y));
        let operation =
            self.operation(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, &tensors)?;
        self.add(operation, Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how)
    }

    /// c = a b for each sample and head.
    fn matmul(&mut self, a: Node, b: Node, c: Node) -> Result<(), String> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        let tensors = [
            (Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, a),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, b),
            (Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, c),
        ];
        let operation =
            self.operation(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, &tensors)?;
        self.add(operation, Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, how)
    }

    /// y = x summed, or its largest elements, over the axes that y lacks.
    fn reduce(&mut self, fold: Fold, x: Node, y: Node) -> Result<(), String> {
        let how = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        how.set(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, &[Data::CUDNN_DATA_FLOAT])?;
        how.set(Name::CUDNN_ATTR_REDUCTION_OPERATOR, &[fold])?;
        let tensors = [
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x),
            (Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y),
        ];
        let operation =
            self.operation(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, &tensors)?;
        self.add(operation, Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)
    }

    /// y = x in another layout.
    fn reshape(&mut self, x: Node, y: Node) -> Result<(), String> {
        let tensors = [
            (Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x),
            (Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y),
        ];
        let operation =
            self.operation(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, &tensors)?;
        self.operations.push(operation.finalize()?);
        Ok(())
    }

    /// The first plan of the library's heuristics that it can build on this GPU.
    fn plan(self, handle: &Handle) -> Result<ExecutionPlan, String> {
        use sys::cudnnBackendHeurMode_t::{CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
        let graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operations: Vec<_> = self.operations.iter().map(|operation| operation.0).collect();
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        graph.set(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[handle.0])?;
        let graph = graph.finalize()?;
        let mut problems = Vec::new();
        for mode in [CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK] {
            let found = Descriptor::new(Kind::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
            found.set(Name::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph.0])?;
            found.set(Name::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
            let configs = match found.finalize().and_then(|found| configs(&found)) {
                Ok(configs) => configs,
                Err(why) => {
                    problems.push(why);
                    continue;
                }
            };
            for config in configs {
                match plan(handle, &config) {
                    Ok((plan, workspace)) => return Ok(ExecutionPlan { plan, workspace }),
                    Err(why) => problems.push(why),
                }
            }
        }
        problems.dedup();
        Err(format!("the library proposes no plan that fits: {}", problems.join("; ")))
    }
}

/// Most engines that are asked for.
const CONFIGS: usize = 16;

/// The configurations of engines that the heuristics `found`, best first.
fn configs(found: &Descriptor) -> Result<Vec<Descriptor>, String> {
    let empty = || Descriptor::new(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    let mut configs = (0..CONFIGS).map(|_| empty()).collect::<Result<Vec<_>, _>>()?;
    let mut raw: Vec<RawDescriptor> = configs.iter().map(|config| config.0).collect();
    let (name, of, mut count) = (Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, RawDescriptor::TYPE, 0);
    let most = CONFIGS as i64;
    let at = raw.as_mut_ptr().cast();
    call!(cudnnBackendGetAttribute(found.0, name, of, most, &raw mut count, at))?;
    configs.truncate(count.clamp(0, most) as usize);
    Ok(configs)
}

/// The plan of an engine's configuration, and the bytes of its workspace.
fn plan(handle: &Handle, config: &Descriptor) -> Result<(Descriptor, u64), String> {
    if !is_deterministic(config)? {
        return Err("the bits of the plan depend on the order in which blocks end".into());
    }
    let plan = Descriptor::new(Kind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
    plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[handle.0])?;
    plan.set(Name::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config.0])?;
    let plan = plan.finalize()?;
    let (name, of) = (Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, i64::TYPE);
    let (mut bytes, mut count) = (0i64, 0);
    let at = (&raw mut bytes).cast();
    call!(cudnnBackendGetAttribute(plan.0, name, of, 1, &raw mut count, at))?;
    let bytes = u64::try_from(bytes).map_err(|_| format!("a workspace of {bytes} bytes"))?;
    Ok((plan, bytes))
}

/// Whether an engine's results have the same bits in each run, as the library's notes say.
fn is_deterministic(config: &Descriptor) -> Result<bool, String> {
    const MOST: usize = 32;
    let engine = Descriptor::new(Kind::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?;
    let (mut raw, mut count) = (engine.0, 0);
    let (name, of) = (Name::CUDNN_ATTR_ENGINECFG_ENGINE, RawDescriptor::TYPE);
    let at = (&raw mut raw).cast();
    call!(cudnnBackendGetAttribute(config.0, name, of, 1, &raw mut count, at))?;
    let mut notes = [0u32; MOST];
    let (name, of) = (Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, Type::CUDNN_TYPE_NUMERICAL_NOTE);
    let at = notes.as_mut_ptr().cast();
    call!(cudnnBackendGetAttribute(engine.0, name, of, MOST as i64, &raw mut count, at))?;
    let unordered = sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC as u32;
    assert!(
        (0..=MOST as i64).contains(&count),
        "an engine with {count} notes: the library has seven kinds"
    );
    let notes = notes.iter().take(count as usize);
    Ok(notes.copied().all(|note| note != unordered))
}

/// A graph that the library has made ready for a GPU.
#[derive(Debug)]
struct ExecutionPlan {
    plan: Descriptor,
    /// Bytes of workspace.
    workspace: u64,
}

impl ExecutionPlan {
    /// Enqueues the graph. `tensors`: the address of each tensor that is not virtual; that of a
    /// number passed by value is on the host.
    fn run(
        &self,
        handle: &Handle,
        stream: &Stream,
        tensors: &[(Node, u64)],
        workspace: u64,
    ) -> Result<(), String> {
        let (numbers, addresses): (Vec<i64>, Vec<u64>) =
            tensors.iter().map(|(node, at)| (node.number(), *at)).unzip();
        let pack = Descriptor::new(Kind::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, &addresses)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &numbers)?;
        pack.set(Name::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace])?;
        let pack = pack.finalize()?;
        call!(cudnnSetStream(handle.0, stream.raw().cast()))?;
        call!(cudnnBackendExecute(handle.0, self.plan.0, pack.0))
    }
}
