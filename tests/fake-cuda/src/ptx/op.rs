//! Instructions as the interpreter runs them.

use crate::fp8::Fp8;

/// Number of a register. Constants, parameters and special registers are registers that nothing writes.
pub(super) type Reg = usize;

/// Meaning of a value's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned,
    Signed,
    /// IEEE 754 number of the type's width.
    Float,
    /// bf16, the upper half of an f32.
    Brain,
}

/// Type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) kind: Kind,
    /// Width in bits.
    pub(super) bits: u32,
}

impl Type {
    pub(super) fn bytes(self) -> usize {
        self.bits.div_ceil(8) as usize
    }
}

/// Operations on values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alu {
    Move,
    Add,
    Sub,
    Mul,
    /// Multiplication with a result of twice the width.
    MulWide,
    /// a b + c
    Mad,
    /// a b + c, rounded once.
    Fma,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Not,
    Neg,
    ShiftLeft,
    ShiftRight,
    /// c ? a : b
    Select,
    /// Value b, with d bits at position c replaced by the lower bits of a.
    Insert,
    /// Four bytes of a (0 to 3) and b (4 to 7), selected by the four digits of c.
    Permute,
    Reciprocal,
    Root,
    Exp2,
    /// a in the lower half, b in the upper half.
    Pack,
    /// Lower half.
    Low,
    /// Upper half.
    High,
}

/// Comparisons. `Unordered` also holds for NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Unordered(&'static Self),
}

/// Rounding of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Memory space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    Shared,
    /// The address decides the space.
    Generic,
}

/// An address: a register and an offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Reg,
    pub(super) offset: i64,
}

/// Lane from which a shuffle reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shuffle {
    Up,
    Down,
    Xor,
    Index,
}

/// Operation of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    Alu {
        f: Alu,
        ty: Type,
        approx: bool,
        d: Reg,
        of: [Reg; 4],
    },
    /// Comparison; the result is a predicate.
    Set {
        compare: Comparison,
        ty: Type,
        d: Reg,
        a: Reg,
        b: Reg,
    },
    Convert {
        to: Type,
        from: Type,
        round: Round,
        integral: bool,
        d: Reg,
        a: Reg,
    },
    /// Converts two fp32 values to fp8; `low` is in the lower byte.
    ToFp8 {
        format: Fp8,
        d: Reg,
        high: Reg,
        low: Reg,
    },
    /// Converts an address of shared memory into a generic address, or back.
    Window {
        to_generic: bool,
        d: Reg,
        a: Reg,
    },
    Load {
        space: Space,
        ty: Type,
        d: Vec<Reg>,
        at: Address,
    },
    Store {
        space: Space,
        ty: Type,
        a: Vec<Reg>,
        at: Address,
    },
    /// Starts a copy from global to shared memory; bytes after `valid` become 0.
    CopyAsync {
        to: Address,
        from: Address,
        bytes: usize,
        valid: Option<Reg>,
    },
    /// Closes a group of copies.
    CloseCopies,
    /// Waits for all copies except the last `most` groups; `None`: for all, in a group or not.
    WaitCopies {
        most: Option<u64>,
    },
    Shuffle {
        how: Shuffle,
        d: Reg,
        valid: Option<Reg>,
        a: Reg,
        b: Reg,
        clamp: Reg,
        lanes: Reg,
    },
    /// Loads four (or fewer) 8 x 8 matrices of 16-bit elements.
    LoadMatrices {
        transposed: bool,
        d: Vec<Reg>,
        at: Address,
    },
    /// d (16, 8) = a (16, 16) b (16, 8) + c
    Multiply {
        ty: Type,
        d: [Reg; 4],
        a: [Reg; 4],
        b: [Reg; 2],
        c: [Reg; 4],
    },
    /// d (8, 8) = a (8, 4) b (4, 8) + c for each quarter of the lanes; a and b are f16.
    MultiplyQuarters {
        /// Whether a lane has a row of b, else a column.
        rows: bool,
        d: [Reg; 8],
        a: [Reg; 2],
        b: [Reg; 2],
        c: [Reg; 8],
    },
    /// Barrier of the block.
    Barrier,
    WarpBarrier {
        lanes: Reg,
    },
    /// Fence, which needs no work here.
    Fence,
    Branch {
        to: usize,
    },
    Return,
}

/// An instruction and its lines in the texts.
#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) op: Op,
    /// Predicate and its value in the lanes that run the instruction; `None`: all lanes run it.
    pub(super) guard: Option<(Reg, bool)>,
    /// Line of the PTX text, from 1.
    pub(super) line: usize,
    /// Line of the source; empty without line information.
    pub(super) source: String,
}

/// Registers that hold numbers of the thread, the block and the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpecialRegister {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
    Lane,
    Warp,
}
