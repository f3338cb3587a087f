//! Tensors, and the plan that lays them out in memory.
//!
//! A [`Tensor`] is an address, not memory: `Copy`, no lifetime, no reference count. The device owns
//! the memory for the whole run, so an op in a queue cannot outlive its operands. A [`Plan`] lays
//! out every byte before step 1; a step allocates and frees nothing.

use std::fmt;
use std::ops::Range;

/// Storage type of an element. Arithmetic is fp32 for every storage type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Dtype {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single.
    F32,
    /// IEEE double, for partial sums of norms and losses, and for decisions.
    F64,
    /// Tokens.
    I32,
    /// Lower halves of fp32 values, on the host. Their upper halves are bf16.
    U16,
    /// fp8 with 3 bits of mantissa, for values and weights of scaled matmuls.
    E4m3,
    /// fp8 with 2 bits of mantissa, for gradients in scaled matmuls.
    E5m2,
}

impl Dtype {
    /// All types.
    pub(crate) const ALL: [Self; 8] =
        [Self::F16, Self::Bf16, Self::F32, Self::F64, Self::I32, Self::U16, Self::E4m3, Self::E5m2];

    /// Whether kernels compute with elements of this type: F16, Bf16 or F32.
    pub const fn is_value(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32)
    }

    /// Whether the type is an fp8 format.
    pub(crate) const fn is_fp8(self) -> bool {
        matches!(self, Self::E4m3 | Self::E5m2)
    }

    /// Size of one element in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::E4m3 | Self::E5m2 => 1,
            Self::F16 | Self::Bf16 | Self::U16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 => 8,
        }
    }
}

/// The two memories of a rank. The memory of a range decides which lanes may access it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Arena {
    /// The GPU's memory.
    Device,
    /// The host's pinned memory, on the GPU's NUMA node.
    Pinned,
}

impl Arena {
    /// Both arenas.
    pub const ALL: [Self; 2] = [Self::Device, Self::Pinned];
}

/// A typed, shaped, row-major range of an arena. A flat range is one row. [`Plan::tensor`] makes
/// one. A window of columns ([`columns`](Self::columns)) has gaps between its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tensor {
    pub(crate) entry: u32,
    pub(crate) arena: Arena,
    dtype: Dtype,
    transposed: bool,
    start: u64,
    rows: usize,
    cols: usize,
    /// Elements from the start of a row to the start of the next: `cols`, or more for a window.
    stride: usize,
}

impl Tensor {
    /// A tensor without elements that belongs to no plan.
    pub(crate) const NONE: Self = Self {
        entry: u32::MAX,
        arena: Arena::Device,
        dtype: Dtype::F32,
        transposed: false,
        start: 0,
        rows: 0,
        cols: 0,
        stride: 0,
    };

    /// Logical (rows, cols): swapped for a transposed view.
    pub const fn shape(self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// Number of elements.
    pub const fn len(self) -> usize {
        self.rows * self.cols
    }

    /// Whether the tensor has no elements.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether the two tensors share a byte.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let (a, b) = (self.range(), other.range());
        self.arena == other.arena && a.start < b.end && b.start < a.end
    }

    /// The arena that holds the tensor.
    pub const fn arena(self) -> Arena {
        self.arena
    }

    /// The storage type of the elements.
    pub const fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Whether the tensor is a transposed view.
    pub const fn is_transposed(self) -> bool {
        self.transposed
    }

    /// Size of the elements in bytes.
    pub const fn bytes(self) -> u64 {
        self.len() as u64 * self.dtype.bytes()
    }

    /// The range of bytes in the arena that the tensor covers, with the gaps of a window.
    pub const fn range(self) -> Range<u64> {
        self.start..self.start + self.spanned() as u64 * self.dtype.bytes()
    }

    /// Number of elements from the first to the last, with the gaps of a window.
    const fn spanned(self) -> usize {
        if self.is_empty() { 0 } else { (self.rows - 1) * self.stride + self.cols }
    }

    /// Elements from the start of a stored row to the start of the next.
    pub(crate) const fn stride(self) -> usize {
        self.stride
    }

    /// Whether the tensor is a window of columns, with gaps between its rows.
    pub const fn is_window(self) -> bool {
        self.stride != self.cols && self.rows > 1
    }

    /// A window of the stored (untransposed) matrix: the columns `range` of all rows. Only matmuls
    /// read and write windows.
    pub const fn columns(self, range: Range<usize>) -> Self {
        let start = self.start + range.start as u64 * self.dtype.bytes();
        Self { start, cols: range.end.saturating_sub(range.start), transposed: false, ..self }
    }

    /// All elements from the first to the last as one row, with the gaps of a window.
    pub(crate) const fn span(self) -> Self {
        let len = self.spanned();
        Self { rows: 1, cols: len, stride: len, transposed: false, ..self }
    }

    /// The transposed view of the tensor. Only matmuls read transposed views.
    pub const fn t(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Elements `range` as one row. Never panics: `submit` refuses a range outside the plan.
    pub const fn slice(self, range: Range<usize>) -> Self {
        let start = self.start + range.start as u64 * self.dtype.bytes();
        let cols = range.end.saturating_sub(range.start);
        Self { start, rows: 1, cols, stride: cols, transposed: false, ..self }
    }

    /// Rows `range` of the stored (untransposed) matrix.
    pub const fn rows(self, range: Range<usize>) -> Self {
        let start = self.start + (range.start * self.stride) as u64 * self.dtype.bytes();
        Self { start, rows: range.end.saturating_sub(range.start), transposed: false, ..self }
    }

    /// Part `index` of `count` equal runs of rows. A single row is divided by elements.
    pub const fn shard(self, index: usize, count: usize) -> Self {
        if self.rows == 1 {
            let n = self.cols / count;
            self.slice(index * n..(index + 1) * n)
        } else {
            let n = self.rows / count;
            self.rows(index * n..(index + 1) * n)
        }
    }

    /// The tensor as numbers, for another process with the same plan.
    pub(crate) const fn words(self) -> [u64; 6] {
        let kinds = (self.arena as u64) | (self.dtype as u64) << 8 | (self.transposed as u64) << 16;
        let (rows, cols) = (self.rows as u64, self.cols as u64);
        [self.entry as u64, kinds, self.start, rows, cols, self.stride as u64]
    }

    /// The tensor from another process's numbers. `None` if they are invalid.
    pub(crate) fn from_words([entry, kinds, start, rows, cols, stride]: [u64; 6]) -> Option<Self> {
        let [arena, dtype, transposed, ..] = kinds.to_le_bytes();
        let arena = Arena::ALL.into_iter().find(|known| *known as u8 == arena)?;
        let dtype = Dtype::ALL.into_iter().find(|known| *known as u8 == dtype)?;
        Some(Self {
            entry: u32::try_from(entry).ok()?,
            arena,
            dtype,
            transposed: transposed != 0,
            start,
            rows: usize::try_from(rows).ok()?,
            cols: usize::try_from(cols).ok()?,
            stride: usize::try_from(stride).ok()?,
        })
    }

    /// The same elements with another shape.
    pub const fn reshape(self, rows: usize, cols: usize) -> Self {
        Self { rows, cols, stride: cols, transposed: false, ..self }
    }
}

/// The purpose of a memory range. Reports list memory by pool, and the pool says how copies between
/// host and GPU use host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pool {
    /// Name of the pool, such as `parameters` or `activations`.
    pub name: &'static str,
    /// How copies use the pool's host memory.
    pub copies: Copies,
    /// The data that copies carry.
    pub cargo: Cargo,
}

/// How copies between host and GPU use host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copies {
    /// Copies read or write the memory, so a driver must pin it.
    Touch,
    /// Copies use the memory in bulk, and other uses are short. It belongs on the GPU's NUMA node.
    Stage,
    /// Copies never access the memory. Only the host uses it.
    Avoid,
}

/// The kind of data in a copy between host and GPU. The copy's speed may depend on the kind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub enum Cargo {
    /// Activations of blocks that are kept on the host.
    Activation,
    /// Activation checkpoints: inputs of blocks that are kept on the host.
    Checkpoint,
    /// Gradients, and their sums on the way back.
    Gradient,
    /// Any other data.
    #[default]
    Other,
}

impl Pool {
    /// A pool that copies may access.
    pub const fn new(name: &'static str) -> Self {
        Self { name, copies: Copies::Touch, cargo: Cargo::Other }
    }

    /// A staging pool, which copies read or write in bulk.
    pub const fn staging(name: &'static str) -> Self {
        Self { copies: Copies::Stage, ..Self::new(name) }
    }

    /// A pool that copies never access.
    pub const fn of_the_host(name: &'static str) -> Self {
        Self { copies: Copies::Avoid, ..Self::new(name) }
    }

    /// The same pool, with `cargo` as the data that its copies carry.
    pub const fn carrying(self, cargo: Cargo) -> Self {
        Self { cargo, ..self }
    }
}

impl From<&'static str> for Pool {
    fn from(name: &'static str) -> Self {
        Self::new(name)
    }
}

/// One named range of a plan.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name of the range, such as `block.3.params`. By convention it is unique in its arena.
    pub name: String,
    /// Pool of the range.
    pub pool: Pool,
    /// Arena of the range.
    pub arena: Arena,
    /// Bytes of the range in the arena.
    pub range: Range<u64>,
    /// Storage type of the elements.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: (usize, usize),
}

impl Entry {
    /// Whether the range is host memory of [`Copies::Stage`], which copies use in bulk.
    pub fn is_staging(&self) -> bool {
        self.arena == Arena::Pinned && self.pool.copies == Copies::Stage
    }

    /// Whether the range is host memory that copies use, so that a driver must pin it.
    pub fn is_copied(&self) -> bool {
        self.arena == Arena::Pinned && self.pool.copies != Copies::Avoid
    }
}

/// The layout of every byte of a rank, computed before step 1. All ranks share one plan, so a
/// tensor is valid on each rank.
#[derive(Clone, Default, Debug)]
pub struct Plan {
    entries: Vec<Entry>,
    top: [u64; 2],
}

/// Alignment of tensors in bytes. It is a multiple of a cache line and of a GPU's widest load.
const ALIGNMENT: u64 = 256;

impl Plan {
    /// Lays out a (rows, cols) tensor after everything planned so far.
    pub fn tensor(
        &mut self,
        (arena, pool): (Arena, impl Into<Pool>),
        name: impl Into<String>,
        dtype: Dtype,
        (rows, cols): (usize, usize),
    ) -> Tensor {
        let start = self.top[arena as usize].next_multiple_of(ALIGNMENT);
        let range = start..start + rows as u64 * cols as u64 * dtype.bytes();
        self.top[arena as usize] = range.end;
        let entry = self.entries.len() as u32;
        self.entries.push(Entry {
            name: name.into(),
            pool: pool.into(),
            arena,
            range,
            dtype,
            shape: (rows, cols),
        });
        Tensor { entry, arena, dtype, transposed: false, start, rows, cols, stride: cols }
    }

    /// Assigns the ranges after the first `count` ranges to `pool`.
    pub fn assign_pool(&mut self, count: usize, pool: impl Into<Pool>) {
        let pool = pool.into();
        self.entries.iter_mut().skip(count).for_each(|entry| entry.pool = pool);
    }

    /// Whether copies between host and device carry `cargo`.
    pub fn carries(&self, cargo: Cargo) -> bool {
        self.entries.iter().any(|entry| entry.arena == Arena::Pinned && entry.pool.cargo == cargo)
    }

    /// Size of an arena in bytes. `onebox plan` prints it, and the device allocates it.
    pub const fn bytes(&self, arena: Arena) -> u64 {
        self.top[arena as usize]
    }

    /// All planned ranges, in order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Bytes by pool, in order of first appearance. Padding between tensors counts for the tensor
    /// after it.
    pub fn pools(&self, arena: Arena) -> Vec<(&'static str, u64)> {
        let mut pools: Vec<(&'static str, u64)> = Vec::new();
        let mut end = 0;
        for entry in self.entries.iter().filter(|e| e.arena == arena) {
            let bytes = entry.range.end - end;
            end = entry.range.end;
            match pools.iter_mut().find(|(pool, _)| *pool == entry.pool.name) {
                Some((_, sum)) => *sum += bytes,
                None => pools.push((entry.pool.name, bytes)),
            }
        }
        pools
    }

    /// The planned name of `t`.
    pub fn name(&self, t: Tensor) -> &str {
        self.entries.get(t.entry as usize).map_or("?", |e| &e.name)
    }

    /// Whether `t` lies within its planned entry.
    pub(crate) fn contains(&self, t: Tensor) -> bool {
        let Some(e) = self.entries.get(t.entry as usize) else { return false };
        let r = t.range();
        e.arena == t.arena && e.range.start <= r.start && r.end <= e.range.end
    }
}

impl fmt::Display for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Pinned => "host",
        })
    }
}
