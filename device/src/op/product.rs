//! The matmul of an op, and the step that may follow inside of it.

use super::Op;
use crate::Tensor;

/// An additional step of a matmul. If the GPU's library has the step, it saves a pass over memory.
/// Otherwise the op of [`separate_op`](Self::separate_op) follows the matmul.
#[derive(Clone, Copy, PartialEq, Debug)]
#[expect(missing_docs, reason = "each variant's formula names its fields")]
pub enum Epilogue {
    /// No additional step.
    None,
    /// y (m, n) = gelu(c).
    Gelu { y: Tensor },
    /// c = c gelu'(x (m, n)).
    GeluBackward { x: Tensor },
    /// sums (m) = sums of the rows of a, a transposed view. If the matmul computes the gradient of
    /// a weight, they are the gradient of its bias.
    RowSums { sums: Tensor },
}

impl Epilogue {
    /// The epilogue that writes row sums to `sums`, or no epilogue if it is `None`.
    pub const fn row_sums(sums: Option<Tensor>) -> Self {
        match sums {
            Some(sums) => Self::RowSums { sums },
            None => Self::None,
        }
    }

    /// The op that does the epilogue's work after a matmul with operand `a` and result `c`.
    pub const fn separate_op(self, a: Tensor, c: Tensor) -> Option<Op> {
        match self {
            Self::None => None,
            Self::Gelu { y } => Some(Op::Gelu { x: c, y }),
            Self::GeluBackward { x } => Some(Op::GeluBackward { x, d: c }),
            Self::RowSums { sums } => Some(Op::ColumnSum { x: a.t(), y: sums }),
        }
    }
}

/// The matmul of an op: [`Op::Gemm`] or [`Op::ScaledGemm`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) c: Tensor,
    pub(crate) bias: Option<Tensor>,
    /// Scales of a and b.
    pub(crate) scales: Option<[Tensor; 2]>,
    /// Whether the result is added to the old c.
    pub(crate) add: bool,
    pub(crate) epilogue: Epilogue,
}

impl Product {
    /// The matmul of `op`, if the op is a matmul.
    pub(crate) const fn of(op: &Op) -> Option<Self> {
        match *op {
            Op::Gemm { a, b, c, bias, add, epilogue } => {
                Some(Self { a, b, c, bias, scales: None, add, epilogue })
            }
            Op::ScaledGemm { a, b, c, bias, scales } => {
                let epilogue = Epilogue::None;
                Some(Self { a, b, c, bias, scales: Some(scales), add: false, epilogue })
            }
            _ => None,
        }
    }
}

impl Op {
    /// c = a b.
    pub const fn product(a: Tensor, b: Tensor, c: Tensor) -> Self {
        Self::product_with(a, b, c, Epilogue::None)
    }

    /// c += a b.
    pub const fn add_product(a: Tensor, b: Tensor, c: Tensor) -> Self {
        Self::Gemm { a, b, c, bias: None, add: true, epilogue: Epilogue::None }
    }

    /// c = a b, and its epilogue.
    pub const fn product_with(a: Tensor, b: Tensor, c: Tensor, epilogue: Epilogue) -> Self {
        Self::Gemm { a, b, c, bias: None, add: false, epilogue }
    }
}
