//! Instructions as the interpreter runs them.

use crate::fp8::Fp8;

/// Number of a register. Constants, parameters and special registers are registers that nothing writes.
pub(super) type Reg = usize;

/// How the bits of a value are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned,
    Signed,
    /// IEEE 754 of the type's width.
    Float,
    /// The upper half of an f32.
    Brain,
}

/// Type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) kind: Kind,
    /// Width.
    pub(super) bits: u32,
}

impl Type {
    pub(super) fn bytes(self) -> usize {
        self.bits.div_ceil(8) as usize
    }
}

/// Operations of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Alu {
    Move,
    Add,
    Sub,
    Mul,
    /// The product has twice the width.
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
    /// Bits of a in b, at position c, as many as d says.
    Insert,
    /// Bytes of a (0 to 3) and b (4 to 7), by the four digits of c.
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

/// Comparisons. The unordered ones hold for NaN, too.
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

/// How a conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

/// Where an address points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    Shared,
    /// Decided by the address.
    Generic,
}

/// An address: a register and an offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) base: Reg,
    pub(super) offset: i64,
}

/// Lane of which a shuffle takes the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shuffle {
    Up,
    Down,
    Xor,
    Index,
}

/// What an instruction does.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    Alu {
        f: Alu,
        ty: Type,
        approx: bool,
        d: Reg,
        of: [Reg; 4],
    },
    /// The result is a predicate.
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
    /// Two fp32 as fp8, the second in the lower byte.
    ToFp8 {
        format: Fp8,
        d: Reg,
        high: Reg,
        low: Reg,
    },
    /// Turns an address of shared memory into a generic one, or back.
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
    /// Begins a copy from global to shared memory; bytes after `valid` become 0.
    CopyAsync {
        to: Address,
        from: Address,
        bytes: usize,
        valid: Option<Reg>,
    },
    /// Closes a group of copies.
    CloseCopies,
    /// Waits for copies but those of the last so many groups; `None`: for all, in a group or not.
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
    /// Four (or fewer) 8 x 8 matrices of 16-bit elements.
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
    /// d (8, 8) = a (8, 4) b (4, 8) + c of each quarter of the lanes, in f16.
    MultiplyQuarters {
        /// A lane has a row of b, else a column.
        rows: bool,
        d: [Reg; 8],
        a: [Reg; 2],
        b: [Reg; 2],
        c: [Reg; 8],
    },
    /// Of the block.
    Barrier,
    WarpBarrier {
        lanes: Reg,
    },
    /// Nothing to do here.
    Fence,
    Branch {
        to: usize,
    },
    Return,
}

/// An instruction and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) op: Op,
    /// It runs only in lanes where this predicate has this value.
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
