//! Which kernels compute an [`Op`]: names, grids and arguments, as data. No CUDA call here, so the tests launch the same
//! on an emulator. What each kernel computes is that of [`crate::cpu`].

use crate::op::{Dropout, HeadNorm, Heads, Op, Reduce, VocabShard};
use crate::random::keep_threshold;
use crate::{DeviceOp, Dtype, KernelArg, Tensor};

mod attention;
mod dense;
mod rotary;

/// A program of kernels for NVRTC. In front of its source stands `kernels/prelude.cuh`, which says what kernels may use.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The name of its file, for messages and for the cache.
    pub name: &'static str,
    /// What is in the file. Names of kernels are unique among all programs of a device.
    pub source: &'static str,
}

impl Program {
    /// What NVRTC compiles.
    pub fn text(&self) -> String {
        let Self { name, source } = self;
        format!("{}#line 1 \"{name}\"\n{source}", include_str!("kernels/prelude.cuh"))
    }
}

macro_rules! program {
    ($name:literal) => {
        Program { name: $name, source: include_str!(concat!("kernels/", $name)) }
    };
}

/// The kernels of ops; those of tasks come from [`CudaOptions::programs`](super::CudaOptions::programs).
pub const PROGRAMS: &[Program] = &[
    program!("attention.cu"),
    program!("attention_mma.cu"),
    program!("elementwise.cu"),
    program!("embedding.cu"),
    program!("loss.cu"),
    program!("norm.cu"),
    program!("rotary.cu"),
];

/// How NVRTC compiles them, besides the architecture. Without fmad: only explicit fma, as on the cpu backend.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--device-as-default-execution-space"];

/// Ranks whose parts one launch combines.
pub const MAX_PEERS: usize = 16;

/// Arguments of a kernel: cuLaunchKernel is given a pointer to each slot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Args {
    slots: [u64; 24],
    count: usize,
}

impl Args {
    /// The arguments in order; of one shorter than 8 bytes the low bytes count.
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

    /// key, threshold, scale
    fn mask(self, dropout: Dropout) -> Self {
        let scale = 1.0 / (1.0 - dropout.p);
        self.with(&[dropout.key, u64::from(keep_threshold(dropout.p))]).float(scale)
    }
}

/// One kernel launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// As in the source.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// Arguments.
    pub args: Args,
}

/// Blocks stride over what is more.
const MAX_BLOCKS: usize = 1 << 16;
/// Elements that a thread takes at once.
const RUN: usize = 8;

impl Launch {
    fn new(kernel: &'static str, grid: [usize; 3], block: u32, args: Args) -> Self {
        Self { kernel, grid: grid.map(|x| x as u32), block, shared_bytes: 0, args }
    }

    /// Threads over `n` units.
    fn flat(kernel: &'static str, n: usize, args: Args) -> Self {
        let blocks = n.div_ceil(256).clamp(1, MAX_BLOCKS);
        Self::new(kernel, [blocks, 1, 1], 256, args)
    }

    /// A block per row, of up to `most` threads with runs of columns.
    fn by_rows(
        kernel: &'static str,
        (rows, cols): (usize, usize),
        most: usize,
        args: Args,
    ) -> Self {
        let threads = cols.div_ceil(RUN).next_multiple_of(32).clamp(32, most);
        Self::new(kernel, [rows.min(1 << 20), 1, 1], threads as u32, args)
    }

    /// A block of 1024 threads per 32 columns.
    fn by_columns(kernel: &'static str, cols: usize, args: Args) -> Self {
        Self::new(kernel, [cols.div_ceil(32), 1, 1], 1024, args)
    }

    /// A block per row and 256 columns.
    fn by_tiles(kernel: &'static str, (rows, cols): (usize, usize), args: Args) -> Self {
        let threads = cols.next_multiple_of(32).clamp(32, 256);
        Self::new(kernel, [rows, cols.div_ceil(threads), 1], threads as u32, args)
    }
}

/// Looks tensors up and hands launches on; those without blocks are left out.
struct Launcher<'a> {
    at: &'a dyn Fn(Tensor) -> u64,
    scratch: u64,
    visit: &'a mut dyn FnMut(&Launch),
}

impl Launcher<'_> {
    /// Addresses of `tensors`.
    fn args(&self, tensors: &[Tensor]) -> Args {
        tensors.iter().fold(Args::default(), |args, t| args.with(&[(self.at)(*t)]))
    }

    fn task(&mut self, task: &DeviceOp) -> Result<(), String> {
        let call = task.kernel();
        let args = call.args.iter().fold(Args::default(), |args, arg| match arg {
            KernelArg::At(t) => args.with(&[(self.at)(*t)]),
            KernelArg::Types(tensors) => args.with(&[types(tensors)]),
            KernelArg::Int(x) => args.with(&[*x]),
            KernelArg::Float(x) => args.float(*x),
        });
        if call.elements > 0 {
            self.launch(Launch::flat(call.name, call.elements.div_ceil(RUN), args));
        }
        Ok(())
    }

    fn launch(&mut self, launch: Launch) {
        if !launch.grid.contains(&0) {
            (self.visit)(&launch);
        }
    }
}

/// [`Dtype::F32`] among [`types`].
const F32: u64 = 2;

/// 4 bits a tensor, as `type_of` in the prelude reads them.
fn types(tensors: &[Tensor]) -> u64 {
    let number = |t: &Tensor| match t.dtype() {
        Dtype::F16 => 0,
        Dtype::Bf16 => 1,
        Dtype::F32 => F32,
        Dtype::F64 => 3,
        Dtype::I32 => 4,
        Dtype::U16 => 5,
    };
    tensors.iter().rev().fold(0, |all, t| all << 4 | number(t))
}

/// [`types`] of tensors of values: F16, Bf16 or F32.
fn values(tensors: &[Tensor]) -> Result<u64, String> {
    match tensors.iter().find(|t| matches!(t.dtype(), Dtype::F64 | Dtype::I32 | Dtype::U16)) {
        Some(t) => Err(format!("{:?} where F16, Bf16 or F32 belongs", t.dtype())),
        None => Ok(types(tensors)),
    }
}

fn is(t: Tensor, dtype: Dtype) -> Result<(), String> {
    if t.dtype() == dtype {
        Ok(())
    } else {
        Err(format!("{:?} where {dtype:?} belongs", t.dtype()))
    }
}

pub(crate) use dense::norm_scratch_bytes;
pub(crate) use rotary::rotary_scratch_bytes;

/// Bytes of scratch that `op` needs.
pub const fn scratch_bytes(op: &Op) -> u64 {
    match op {
        Op::AttentionBackward { lse, .. } => lse.bytes(),
        Op::RmsNormBackward { x, .. } => norm_scratch_bytes(x.shape()),
        Op::RotaryBackward { d_qkv, heads, norm: Some(_), .. } => {
            rotary_scratch_bytes(heads.dim(d_qkv.shape().1))
        }
        _ => 0,
    }
}

/// The launches that compute `op`, in order. `at` gives a tensor's address on the device, `scratch` that of
/// [`scratch_bytes`]; `sm` is the compute capability, 70 to 90.
///
/// # Errors
/// A tensor's type is none that the op takes, a size has no kernel, or the op is none of kernels.
pub fn launches(
    op: &Op,
    at: &dyn Fn(Tensor) -> u64,
    scratch: u64,
    sm: u32,
    visit: &mut dyn FnMut(&Launch),
) -> Result<(), String> {
    let mut to = Launcher { at, scratch, visit };
    match op {
        Op::Embedding { .. }
        | Op::EmbeddingBackward { .. }
        | Op::AddPositions { .. }
        | Op::PositionsBackward { .. } => to.embedding(op),
        Op::LayerNorm { .. }
        | Op::LayerNormBackward { .. }
        | Op::RmsNorm { .. }
        | Op::RmsNormBackward { .. } => to.norm(op),
        Op::Rotary { .. } | Op::RotaryBackward { .. } => to.rotary(op),
        Op::Attention { .. } | Op::AttentionBackward { .. } => to.attention(op, sm),
        Op::RowMax { .. }
        | Op::CrossEntropyStats { .. }
        | Op::CrossEntropyLoss { .. }
        | Op::CrossEntropyBackward { .. } => to.loss(op),
        Op::Gelu { .. }
        | Op::GeluBackward { .. }
        | Op::SwiGlu { .. }
        | Op::SwiGluBackward { .. }
        | Op::ColumnSum { .. }
        | Op::BiasDropoutAdd { .. }
        | Op::Dropout { .. }
        | Op::Add { .. }
        | Op::Cast { .. }
        | Op::Zero { .. } => to.elementwise(op),
        Op::ChunkSquares { .. } => to.squares(op),
        Op::Task { task } => to.task(task),
        Op::Gemm { .. }
        | Op::Copy { .. }
        | Op::AllReduce { .. }
        | Op::ReduceScatter { .. }
        | Op::AllGather { .. }
        | Op::Broadcast { .. }
        | Op::Host { .. } => no_kernel(op),
    }
}

fn no_kernel(op: &Op) -> Result<(), String> {
    Err(format!("{} is not a kernel", op.name()))
}

/// `into` = the combination, in rank order, of the parts at `peers` that are as long; it may be one of them.
///
/// # Errors
/// No ranks or too many, or elements that do not add up.
pub fn combine_peers(
    into: (u64, Dtype, usize),
    peers: &[u64],
    reduce: Reduce,
    visit: &mut dyn FnMut(&Launch),
) -> Result<(), String> {
    let (at, dtype, n) = into;
    if peers.is_empty() || peers.len() > MAX_PEERS {
        return Err(format!("{} ranks, not 1 to {MAX_PEERS}", peers.len()));
    }
    let largest = u64::from(reduce == Reduce::Max);
    let mut all = [0; MAX_PEERS];
    all[..peers.len()].copy_from_slice(peers);
    let rest = |args: Args| args.with(&[n as u64, peers.len() as u64, largest]).with(&all);
    let args = Args::default().with(&[at]);
    let launch = match dtype {
        Dtype::F64 => Launch::flat("combine_peers_f64", n, rest(args)),
        Dtype::I32 | Dtype::U16 => return Err("only values add up".into()),
        Dtype::F16 => Launch::flat("combine_peers", n.div_ceil(RUN), rest(args.with(&[0]))),
        Dtype::Bf16 => Launch::flat("combine_peers", n.div_ceil(RUN), rest(args.with(&[1]))),
        Dtype::F32 => Launch::flat("combine_peers", n.div_ceil(RUN), rest(args.with(&[F32]))),
    };
    if n > 0 {
        visit(&launch);
    }
    Ok(())
}

/// c (rows, cols) += bias (cols), for a product whose library adds none.
///
/// # Errors
/// Not tensors of values.
pub fn add_bias(
    (c, bias): (Tensor, Tensor),
    at: &dyn Fn(Tensor) -> u64,
    visit: &mut dyn FnMut(&Launch),
) -> Result<(), String> {
    let (rows, cols) = c.shape();
    let args = Args::default().with(&[at(c), at(bias), values(&[c, bias])?]);
    let launch =
        Launch::by_rows("add_bias", (rows, cols), 256, args.with(&[rows as u64, cols as u64]));
    if rows * cols > 0 {
        visit(&launch);
    }
    Ok(())
}
