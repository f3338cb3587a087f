//! The kernels of an [`Op`]: names, grids and arguments, as data. This file calls no CUDA function,
//! so tests run the same launches on an emulator. Each kernel computes the same as [`crate::cpu`].

use crate::op::{Dropout, Family, HeadNorm, Heads, Op, Reduction, Scores, VocabShard};
use crate::random::keep_threshold;
use crate::{Dtype, KernelArg, Tensor};

mod attention;
mod delta;
mod dense;
mod experts;
mod fp8;
mod rotary;

/// A program of kernels for NVRTC. `kernels/prelude.cuh` precedes its source and declares
/// everything that kernels may use.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The name of the program's file, for messages and for the cache.
    pub name: &'static str,
    /// The program's source code. Names of kernels are unique among all programs of a device.
    pub source: &'static str,
}

impl Program {
    /// The text that NVRTC compiles: the prelude, then the source with its included files.
    pub fn text(&self) -> String {
        let Self { name, source } = self;
        let prelude = include_str!("kernels/prelude.cuh");
        format!("{prelude}#line 1 \"{name}\"\n{}", with_includes(name, source))
    }
}

/// The files that programs include: names and source codes.
const INCLUDED: [(&str, &str); 4] = [
    ("attention_mma.cuh", include_str!("kernels/attention_mma.cuh")),
    ("delta.cuh", include_str!("kernels/delta.cuh")),
    ("delta_mma.cuh", include_str!("kernels/delta_mma.cuh")),
    ("tensor_cores.cuh", include_str!("kernels/tensor_cores.cuh")),
];

/// The source code of a file with its included files, and theirs, in the places of their lines.
fn with_includes(name: &str, source: &str) -> String {
    let included = |line: &str| {
        let file = line.strip_prefix("#include \"")?.strip_suffix('"')?;
        INCLUDED.iter().find(|(name, _)| *name == file)
    };
    let texts = source.lines().enumerate().map(|(i, line)| match included(line) {
        Some((file, source)) => {
            let text = with_includes(file, source);
            format!("#line 1 \"{file}\"\n{text}#line {} \"{name}\"\n", i + 2)
        }
        None => format!("{line}\n"),
    });
    texts.collect()
}

macro_rules! program {
    ($name:literal) => {
        Program { name: $name, source: include_str!(concat!("kernels/", $name)) }
    };
}

/// The kernels of ops. Tasks have [`CudaOptions::programs`](super::CudaOptions::programs).
pub const PROGRAMS: &[Program] = &[
    program!("attention.cu"),
    program!("attention_mma.cu"),
    program!("attention_mma_capped.cu"),
    program!("delta.cu"),
    program!("delta_gates.cu"),
    program!("delta_mma.cu"),
    program!("delta_mma_gradients.cu"),
    program!("elementwise.cu"),
    program!("embedding.cu"),
    program!("experts.cu"),
    program!("fp8.cu"),
    program!("grouped_gemm.cu"),
    program!("loss.cu"),
    program!("norm.cu"),
    program!("rotary.cu"),
];

/// Options of NVRTC, without the architecture. As on the cpu backend, only explicit fma is fused.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--device-as-default-execution-space"];

/// Largest number of ranks whose parts one launch combines.
pub const MAX_PEERS: usize = 16;

/// Arguments of a kernel. cuLaunchKernel gets a pointer to each slot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Args {
    slots: [u64; 24],
    count: usize,
}

impl Args {
    /// The arguments in order. An argument shorter than 8 bytes uses the low bytes.
    pub fn slots(&self) -> &[u64] {
        &self.slots[..self.count]
    }

    fn with(mut self, slots: &[u64]) -> Self {
        let end = self.count + slots.len();
        debug_assert!(end <= self.slots.len());
        self.slots[self.count..end].copy_from_slice(slots);
        self.count = end;
        self
    }

    fn float(self, x: f32) -> Self {
        self.with(&[u64::from(x.to_bits())])
    }

    /// Adds key, threshold and scale.
    fn mask(self, dropout: Dropout) -> Self {
        let scale = 1.0 / (1.0 - dropout.p);
        self.with(&[dropout.key, u64::from(keep_threshold(dropout.p))]).float(scale)
    }
}

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Name of the kernel in the source.
    pub kernel: &'static str,
    /// Number of blocks by dimension.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Arguments of the kernel.
    pub args: Args,
}

/// Largest number of blocks. If there is more work, each block strides over it.
const MAX_BLOCKS: usize = 1 << 16;
/// Number of elements that a thread processes at a time.
const RUN: usize = 8;

impl Launch {
    fn new(kernel: &'static str, grid: [usize; 3], block: u32, args: Args) -> Self {
        Self { kernel, grid: grid.map(|x| x as u32), block, shared_bytes: 0, args }
    }

    /// A launch with one thread per unit of `n` units, up to [`MAX_BLOCKS`] blocks.
    fn flat(kernel: &'static str, n: usize, args: Args) -> Self {
        let blocks = n.div_ceil(256).min(MAX_BLOCKS);
        Self::new(kernel, [blocks, 1, 1], 256, args)
    }

    /// A launch with one block of up to `most` threads per row; a thread processes runs of columns.
    fn by_rows(kernel: &'static str, rows: usize, cols: usize, most: usize, args: Args) -> Self {
        let threads = cols.div_ceil(RUN).next_multiple_of(32).clamp(32, most);
        Self::new(kernel, [rows.min(1 << 20), 1, 1], threads as u32, args)
    }

    /// A launch with one block of 1024 threads per 32 columns.
    fn by_columns(kernel: &'static str, cols: usize, args: Args) -> Self {
        Self::new(kernel, [cols.div_ceil(32), 1, 1], 1024, args)
    }

    /// A launch with one block per row and 256 columns.
    fn by_tiles(kernel: &'static str, rows: usize, cols: usize, args: Args) -> Self {
        let threads = cols.next_multiple_of(32).clamp(32, 256);
        Self::new(kernel, [rows, cols.div_ceil(threads), 1], threads as u32, args)
    }
}

/// Largest number of launches of an op.
const MAX_LAUNCHES: usize = 3;

/// The launches of an op, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launches([Option<Launch>; MAX_LAUNCHES]);

impl Launches {
    /// Iterates over the launches.
    pub fn iter(&self) -> impl Iterator<Item = &Launch> {
        self.0.iter().flatten()
    }

    fn push(&mut self, launch: Launch) {
        let free = self.0.iter_mut().find(|slot| slot.is_none());
        let Some(free) = free else {
            unreachable!("no op makes more than {MAX_LAUNCHES} launches")
        };
        *free = Some(launch);
    }
}

/// Elements in the memory of a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceElements {
    /// Address of the first element.
    pub at: u64,
    /// Number of elements.
    pub len: usize,
    /// Type of the elements.
    pub dtype: Dtype,
}

/// Looks up tensors and collects launches, except those without blocks.
struct Launcher<'a> {
    at: &'a dyn Fn(Tensor) -> u64,
    scratch: u64,
    launches: Launches,
}

impl Launcher<'_> {
    /// Addresses of `tensors`.
    fn args(&self, tensors: &[Tensor]) -> Args {
        tensors.iter().fold(Args::default(), |args, t| args.with(&[(self.at)(*t)]))
    }

    /// Address of an optional tensor; 0 for `None`.
    fn at_or_null(&self, tensor: Option<Tensor>) -> u64 {
        tensor.map_or(0, |t| (self.at)(t))
    }

    fn task(&mut self, op: &Op) -> Result<(), String> {
        let Op::Task { task } = op else { return no_kernel(op) };
        let call = task.kernel();
        let args = call.args.iter().fold(Args::default(), |args, arg| match arg {
            KernelArg::At(t) => args.with(&[(self.at)(*t)]),
            KernelArg::Types(tensors) => args.with(&[types(tensors)]),
            KernelArg::Int(x) => args.with(&[*x]),
            KernelArg::Float(x) => args.float(*x),
        });
        self.launch(Launch::flat(call.name, call.elements.div_ceil(RUN), args));
        Ok(())
    }

    fn launch(&mut self, launch: Launch) {
        if !launch.grid.contains(&0) {
            self.launches.push(launch);
        }
    }
}

/// Number of a storage type, as `type_of` in the prelude reads it.
const fn type_number(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::F16 => 0,
        Dtype::Bf16 => 1,
        Dtype::F32 => 2,
        Dtype::F64 => 3,
        Dtype::I32 => 4,
        Dtype::U16 => 5,
        Dtype::E4m3 => 6,
        Dtype::E5m2 => 7,
    }
}

/// Numbers of the tensors' storage types, 4 bits per tensor.
fn types(tensors: &[Tensor]) -> u64 {
    tensors.iter().rev().fold(0, |all, t| all << 4 | type_number(t.dtype()))
}

/// [`types`] of tensors with values: F16, Bf16 or F32.
fn values(tensors: &[Tensor]) -> Result<u64, String> {
    match tensors.iter().find(|t| !t.dtype().is_value()) {
        Some(t) => Err(format!("{:?} where F16, Bf16 or F32 belongs", t.dtype())),
        None => Ok(types(tensors)),
    }
}

/// The number that a kernel adds to the gains of a norm: -0 for an offset of 0, since x + -0 has the
/// bits of x.
const fn added(offset: f32) -> f32 {
    if offset == 0.0 { -0.0 } else { offset }
}

fn is(t: Tensor, dtype: Dtype) -> Result<(), String> {
    if t.dtype() == dtype {
        Ok(())
    } else {
        Err(format!("{:?} where {dtype:?} belongs", t.dtype()))
    }
}

pub use attention::{WIDEST_HEAD, is_small_attention};
pub(crate) use delta::delta_net_scratch_bytes;
pub(crate) use dense::norm_scratch_bytes;
pub(crate) use experts::shares_scratch_bytes;
pub(crate) use rotary::rotary_scratch_bytes;

/// Bytes of scratch that `op` needs.
pub const fn scratch_bytes(op: &Op) -> u64 {
    match op {
        Op::AttentionBackward { lse, .. } => lse.bytes(),
        Op::RmsNormBackward { x, .. } => norm_scratch_bytes(x.shape(), 1),
        Op::LayerNormBackward { x, .. } => norm_scratch_bytes(x.shape(), 2),
        Op::WidthNormBackward { raw, .. } => norm_scratch_bytes(raw.shape(), 1),
        Op::RotaryBackward { d_qkv, heads, norm: Some(_), .. } => {
            rotary_scratch_bytes(heads.dim(d_qkv.shape().1))
        }
        Op::ConvolutionBackward { x, weight, .. } => {
            delta::convolution_scratch_bytes(x.shape().0, weight.len())
        }
        Op::GatedNormBackward { x, gain, .. } => {
            delta::gated_norm_scratch_bytes(x.len() / gain.len(), gain.len())
        }
        Op::DeltaRuleBackward { qkv, heads, .. } => {
            delta::delta_scratch_bytes(qkv.shape().0, *heads)
        }
        Op::ExpertLoad { logits, shares: Some(_), .. } => {
            shares_scratch_bytes(logits.shape().0, logits.shape().1)
        }
        _ => 0,
    }
}

/// The launches of `op`, in order. `at` gives a tensor's address on the device; `scratch` is the
/// address of [`scratch_bytes`]; `sm` is the compute capability, 70 to 90.
///
/// # Errors
/// A tensor has a type that the op does not accept, a size has no kernel, or the op has no kernel.
pub fn launches(
    op: &Op,
    at: &dyn Fn(Tensor) -> u64,
    scratch: u64,
    sm: u32,
) -> Result<Launches, String> {
    let mut to = Launcher { at, scratch, launches: Launches::default() };
    match op.family() {
        Family::Embedding => to.embedding(op),
        Family::Norm => to.norm(op, sm),
        Family::Rotary => to.rotary(op),
        Family::Attention => to.attention(op, sm),
        Family::Cache => to.cache(op),
        Family::Loss => to.loss(op),
        Family::Elementwise => to.elementwise(op),
        Family::Squares => to.squares(op),
        Family::Fp8 => to.fp8(op),
        Family::Experts => to.experts(op, sm),
        Family::Delta => to.delta(op, sm),
        Family::Task => to.task(op),
        Family::Product | Family::Transfer => no_kernel(op),
    }?;
    Ok(to.launches)
}

fn no_kernel(op: &Op) -> Result<(), String> {
    Err(format!("{} is not a kernel", op.name()))
}

/// The launch that sets `into` to the combination of the parts at `peers`, in rank order. All parts
/// have the length of `into`, which may be one of them. `None` without elements.
///
/// # Errors
/// There are no ranks or too many ranks, or the type cannot be summed.
pub fn combine_peers(
    into: DeviceElements,
    peers: &[u64],
    reduce: Reduction,
) -> Result<Option<Launch>, String> {
    let DeviceElements { at, len: n, dtype } = into;
    if peers.is_empty() || peers.len() > MAX_PEERS {
        return Err(format!("{} ranks, not 1 to {MAX_PEERS}", peers.len()));
    }
    let largest = u64::from(reduce == Reduction::Max);
    let mut all = [0; MAX_PEERS];
    all[..peers.len()].copy_from_slice(peers);
    let rest = |args: Args| args.with(&[n as u64, peers.len() as u64, largest]).with(&all);
    let args = Args::default().with(&[at]);
    let launch = match dtype {
        Dtype::F64 => Launch::flat("combine_peers_f64", n, rest(args)),
        Dtype::I32 | Dtype::U16 | Dtype::E4m3 | Dtype::E5m2 => {
            return Err("only values add up".into());
        }
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 => {
            let args = args.with(&[type_number(dtype)]);
            Launch::flat("combine_peers", n.div_ceil(RUN), rest(args))
        }
    };
    Ok((n > 0).then_some(launch))
}

/// The launch of c (rows, cols) += bias (cols), if the library adds no bias. `None` without
/// elements.
///
/// # Errors
/// The tensors do not hold values.
pub fn add_bias(
    c: Tensor,
    bias: Tensor,
    at: &dyn Fn(Tensor) -> u64,
) -> Result<Option<Launch>, String> {
    let (rows, cols) = c.shape();
    let args = Args::default().with(&[at(c), at(bias), values(&[c, bias])?]);
    let launch =
        Launch::by_rows("add_bias", rows, cols, 256, args.with(&[rows as u64, cols as u64]));
    Ok((rows * cols > 0).then_some(launch))
}
