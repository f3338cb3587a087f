//! The shape of a matmul, for which cuBLASLt chooses an algorithm, and the addresses of its operands.

use crate::Dtype;
use std::fmt;

/// A stored matrix of a matmul in the library's order, columns first. A row-major (rows, cols)
/// matrix is a columns-first (cols, rows) matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::cuda) struct Operand {
    pub(in crate::cuda) dtype: Dtype,
    pub(in crate::cuda) rows: usize,
    pub(in crate::cuda) cols: usize,
    /// Elements from the start of a column to the start of the next.
    pub(in crate::cuda) stride: usize,
    pub(in crate::cuda) transposed: bool,
    /// The largest power of two up to 256 that divides its address.
    pub(in crate::cuda) align: u32,
}

/// A step of the library after a matmul. Its auxiliary matrix stores the columns of d without gaps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::cuda) enum Step {
    None,
    /// Stores d in the auxiliary matrix, then d = gelu(d).
    Gelu,
    /// d = d gelu'(auxiliary matrix).
    GeluBackward,
    /// Writes the sums of b's columns to the address of the bias.
    SumsOfB,
}

impl Step {
    /// Whether the step has an auxiliary matrix. Only then may the library get its address.
    pub(in crate::cuda) const fn has_aux(self) -> bool {
        matches!(self, Self::Gelu | Self::GeluBackward)
    }
}

/// The properties of a matmul that decide the best algorithm: d = a b (+ bias of d's rows), then
/// the step. fp8 operands have scales.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(in crate::cuda) struct MatmulShape {
    pub(in crate::cuda) a: Operand,
    pub(in crate::cuda) b: Operand,
    pub(in crate::cuda) d: Operand,
    pub(in crate::cuda) bias: Option<Dtype>,
    pub(in crate::cuda) step: Step,
    /// Number of multiprocessors for which the library chooses; `None`: all.
    pub(in crate::cuda) processors: Option<u32>,
}

impl MatmulShape {
    /// Whether its operands have scales.
    pub(in crate::cuda) const fn is_fp8(&self) -> bool {
        self.a.dtype.is_fp8()
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, rows, cols, stride, transposed, align } = self;
        let suffix = if *transposed { "t" } else { "" };
        write!(f, "{dtype:?} {rows}x{cols}{suffix} {align}")?;
        if stride == rows { Ok(()) } else { write!(f, " by {stride}") }
    }
}

/// Types, rows x columns (`t`: transposed) and alignments of a, b and d, with the strides of windows,
/// then bias and step. Stored
/// choices have this text: if it changes, runs choose anew.
impl fmt::Display for MatmulShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { a, b, d, bias, step, processors } = self;
        write!(f, "{a}, {b}, {d}")?;
        if let Some(bias) = bias {
            write!(f, ", bias {bias:?}")?;
        }
        if *step != Step::None {
            write!(f, ", {step:?}")?;
        }
        processors.map_or(Ok(()), |number| write!(f, ", {number} multiprocessors"))
    }
}

/// Addresses of a matmul's operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Addresses {
    pub(in crate::cuda) a: u64,
    pub(in crate::cuda) b: u64,
    pub(in crate::cuda) d: u64,
    pub(in crate::cuda) bias: Option<u64>,
    /// Scales of a and b, (1) F32 each on the device.
    pub(in crate::cuda) scales: Option<[u64; 2]>,
    /// The auxiliary matrix of the step, of d's type.
    pub(in crate::cuda) aux: Option<u64>,
    /// Whether the result is added to the old values at `d`.
    pub(in crate::cuda) add: bool,
}
