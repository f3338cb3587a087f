//! Graphs of operations on tensors of four axes, and which of them are refused.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicU64},
};

use super::{Answer, bad, demand, unsupported};
use crate::number::Float;

/// Sizes, strides or an index: samples, heads, rows, columns.
pub(super) type Axes = [usize; 4];

/// Place in memory of the element at `index`, in elements.
pub(super) fn offset(index: Axes, strides: Axes) -> usize {
    index.iter().zip(strides).map(|(i, stride)| i * stride).sum()
}

/// Strides of an array without gaps, the last axis innermost.
pub(super) fn packed(sizes: Axes) -> Axes {
    let [_, b, c, d] = sizes;
    [b * c * d, c * d, d, 1]
}

/// A type of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    Number(Float),
    Int32,
    Boolean,
}

impl Data {
    pub(super) const FLOAT: Self = Self::Number(Float::F32);

    /// The type of a number of `cudnnDataType_t`.
    pub(super) fn of(number: u64) -> Answer<Self> {
        Ok(match number {
            0 => Self::FLOAT,
            2 => Self::Number(Float::F16),
            4 => Self::Int32,
            9 => Self::Number(Float::Bf16),
            11 => Self::Boolean,
            _ => return unsupported(format!("elements of type {number}")),
        })
    }

    fn has_16_bits(self) -> bool {
        matches!(self, Self::Number(Float::F16 | Float::Bf16))
    }
}

/// Where the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Virtual,
    Memory,
    /// One number of the host.
    Value,
}

/// A tensor of a graph. `sizes` and `strides` are in elements, `alignment` is in bytes.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) number: u64,
    pub(super) data: Data,
    pub(super) sizes: Axes,
    pub(super) strides: Axes,
    pub(super) place: Place,
    pub(super) alignment: usize,
}

impl Tensor {
    /// Elements from the first to the last one in memory.
    pub(super) fn span(&self) -> usize {
        offset(self.sizes.map(|size| size - 1), self.strides) + 1
    }

    pub(super) fn len(&self) -> usize {
        self.sizes.iter().product()
    }

    pub(super) fn check(&self) -> Answer {
        let Self { number, data, sizes, place, alignment, .. } = *self;
        demand(alignment.is_power_of_two(), || format!("an alignment of {alignment} bytes"))?;
        match (place, data) {
            (Place::Virtual, _) | (Place::Memory, Data::Number(_)) => Ok(()),
            (Place::Value, Data::FLOAT) if sizes == [1; 4] => Ok(()),
            _ => unsupported(format!("tensor {number}: {data:?} of {sizes:?} in {place:?}")),
        }
    }
}

/// A function of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Add,
    Multiply,
    Divide,
    Subtract,
    Exponential,
    Logarithm,
    AtLeast,
    /// The index along an axis.
    Index(usize),
    /// The first input where the third one holds, else the second one.
    Select,
}

impl Mode {
    /// The mode of a number of `cudnnPointwiseMode_t`.
    pub(super) fn of(number: u64, axis: Option<usize>) -> Answer<Self> {
        let mode = match number {
            0 => Self::Add,
            1 => Self::Multiply,
            6 => Self::Divide,
            9 => Self::Subtract,
            13 => Self::Exponential,
            15 => Self::Logarithm,
            303 => Self::AtLeast,
            501 => match axis {
                Some(axis) if axis < 4 => return Ok(Self::Index(axis)),
                _ => return bad(format!("indices along axis {axis:?}")),
            },
            601 => Self::Select,
            _ => return unsupported(format!("pointwise mode {number}")),
        };
        demand(axis.is_none(), || format!("{mode:?} along an axis"))?;
        Ok(mode)
    }

    fn inputs(self) -> usize {
        match self {
            Self::Exponential | Self::Logarithm | Self::Index(_) => 1,
            Self::Add | Self::Multiply | Self::Divide | Self::Subtract | Self::AtLeast => 2,
            Self::Select => 3,
        }
    }
}

/// A fold of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Largest,
}

impl Fold {
    /// The fold of a number of `cudnnReduceTensorOp_t`.
    pub(super) fn of(number: u64) -> Answer<Self> {
        match number {
            0 => Ok(Self::Sum),
            3 => Ok(Self::Largest),
            _ => unsupported(format!("reductions by operator {number}")),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// y = mode(x, b, t), element by element. An axis of size 1 is repeated.
    Pointwise(Mode),
    /// c = a b for each sample and head. Consecutive heads of c share one of a or b that has fewer.
    Matmul,
    /// y = x folded over groups of as many consecutive elements as the sizes of an axis differ.
    Reduction(Fold),
    /// y = the memory of x in the layout of y.
    Reshape,
}

/// An operation of a graph, with its tensors.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) action: Action,
    pub(super) inputs: Vec<Arc<Tensor>>,
    pub(super) output: Arc<Tensor>,
}

impl Operation {
    pub(super) fn check(&self) -> Answer {
        let Self { action, inputs, output } = self;
        let sizes: Vec<Axes> = inputs.iter().map(|tensor| tensor.sizes).collect();
        let all = |holds: &dyn Fn(usize, usize) -> bool| {
            sizes.iter().all(|of| of.iter().zip(output.sizes).all(|(size, y)| holds(*size, y)))
        };
        let fits = match action {
            Action::Pointwise(mode) => {
                let count = inputs.len();
                demand(count == mode.inputs(), || format!("{mode:?} of {count} tensors"))?;
                all(&|size, y| size == y || size == 1)
            }
            Action::Matmul => {
                let ([a, b], c) = ([sizes[0], sizes[1]], output.sizes);
                let batches = [a, b].iter().all(|of| of[0] == c[0] && c[1].is_multiple_of(of[1]));
                batches && [a[2], b[3]] == [c[2], c[3]] && a[3] == b[2]
            }
            Action::Reduction(_) => all(&|size, y| size.is_multiple_of(y)),
            Action::Reshape => inputs[0].len() == output.len() && inputs[0].span() == output.span(),
        };
        demand(fits, || format!("{action:?} of {sizes:?} gives no {:?}", output.sizes))?;
        self.check_types()
    }

    fn check_types(&self) -> Answer {
        let Self { action, inputs, output } = self;
        let expected = match action {
            Action::Pointwise(Mode::AtLeast) => output.data == Data::Boolean,
            Action::Pointwise(Mode::Index(_)) => output.data == Data::Int32,
            Action::Pointwise(Mode::Select) => inputs[2].data == Data::Boolean,
            _ => inputs.iter().chain([output]).all(|t| matches!(t.data, Data::Number(_))),
        };
        if expected {
            return Ok(());
        }
        let types: Vec<Data> = inputs.iter().map(|tensor| tensor.data).collect();
        unsupported(format!("{action:?} of {types:?} to {:?}", output.data))
    }
}

/// Rows and columns to which the workspace of a matrix is rounded up.
const TILE: usize = 128;

/// Bytes of every workspace.
const OTHER_BYTES: usize = 256;

/// Operations in the order of their computation.
#[derive(Debug)]
pub(super) struct Graph {
    pub(super) operations: Vec<Arc<Operation>>,
    /// The tensors in memory and the numbers of the host, by number.
    pub(super) given: BTreeMap<u64, Arc<Tensor>>,
    /// Number of times that the graph was computed.
    pub(super) runs: AtomicU64,
}

impl Graph {
    pub(super) fn new(operations: Vec<Arc<Operation>>) -> Answer<Self> {
        let mut tensors: BTreeMap<u64, Arc<Tensor>> = BTreeMap::new();
        let mut computed: BTreeMap<u64, Arc<Tensor>> = BTreeMap::new();
        for operation in &operations {
            for tensor in operation.inputs.iter().chain([&operation.output]) {
                let known = tensors.entry(tensor.number).or_insert_with(|| tensor.clone());
                let number = tensor.number;
                demand(Arc::ptr_eq(known, tensor), || format!("two tensors of number {number}"))?;
            }
            for Tensor { number, place, .. } in operation.inputs.iter().map(|tensor| &**tensor) {
                let ready = *place != Place::Virtual || computed.contains_key(number);
                demand(ready, || format!("no operation before has computed tensor {number}"))?;
            }
            let output = &operation.output;
            let number = output.number;
            demand(output.place != Place::Value, || format!("a value, {number}, is computed"))?;
            let earlier = computed.insert(number, output.clone());
            demand(earlier.is_none(), || format!("tensor {number} is computed twice"))?;
        }
        tensors.retain(|_, tensor| tensor.place != Place::Virtual);
        Ok(Self { operations, given: tensors, runs: AtomicU64::new(0) })
    }

    /// Bytes of workspace: one matrix of 16 bits that is reshaped, and each array of 16 bits that
    /// is folded.
    pub(super) fn workspace(&self) -> usize {
        let bytes = |tensor: &Tensor, columns: usize| {
            let [samples, heads, rows, _] = tensor.sizes;
            samples * heads * rows.next_multiple_of(TILE) * columns * 2
        };
        let kept = |tensor: &Tensor| tensor.place == Place::Virtual && tensor.data.has_16_bits();
        let (mut matrix, mut folded) = (0, 0);
        for Operation { action, inputs, output } in self.operations.iter().map(|op| &**op) {
            match action {
                Action::Reshape if kept(output) => {
                    let columns = output.sizes[3].next_multiple_of(TILE);
                    matrix = matrix.max(bytes(output, columns));
                }
                Action::Reduction(_) if kept(&inputs[0]) => {
                    folded += bytes(&inputs[0], inputs[0].sizes[3]);
                }
                _ => {}
            }
        }
        matrix + folded + OTHER_BYTES
    }
}
