//! The kernels: what each [`Op`] computes. One file per family, each written once for all storage types:
//! values are widened to f32, computed, and rounded once where they are stored.
//!
//! A row's result depends on that row alone, and no result depends on the number of threads: so neither
//! sharding tokens over ranks nor more workers change a bit.

mod attention;
mod dense;
mod elementwise;
mod embedding;
mod loss;
mod math;
mod norm;
mod rotary;
mod squares;
#[cfg(test)]
mod testing;

use super::workers::Workers;
use crate::op::Op;
use crate::{Dtype, Element, Tensor, View, ViewMut};

/// Where an op's tensors lie. An op forms each view at most once, and reads nothing that it also writes.
pub(crate) trait Memory {
    /// A range that the running op reads.
    fn read(&self, t: Tensor) -> View<'_>;
    /// A range that the running op writes or updates.
    fn write(&self, t: Tensor) -> ViewMut<'_>;
}

impl Memory for crate::ranks::memory::Memory {
    fn read(&self, t: Tensor) -> View<'_> {
        self.view(t)
    }
    fn write(&self, t: Tensor) -> ViewMut<'_> {
        self.view_mut(t)
    }
}

/// Computes `op`.
///
/// # Errors
/// A tensor's type is none that the op takes, the scratch is too small, or the op is no kernel.
pub(crate) fn run(op: &Op, memory: &impl Memory, workers: &Workers) -> Result<(), String> {
    match op {
        Op::Gemm { .. } => dense::run(op, memory, workers),
        Op::Embedding { .. }
        | Op::EmbeddingBackward { .. }
        | Op::AddPositions { .. }
        | Op::PositionsBackward { .. } => embedding::run(op, memory, workers),
        Op::LayerNorm { .. }
        | Op::LayerNormBackward { .. }
        | Op::RmsNorm { .. }
        | Op::RmsNormBackward { .. } => norm::run(op, memory, workers),
        Op::Rotary { .. } | Op::RotaryBackward { .. } => rotary::run(op, memory, workers),
        Op::Attention { .. } | Op::AttentionBackward { .. } => attention::run(op, memory, workers),
        Op::RowMax { .. }
        | Op::CrossEntropyStats { .. }
        | Op::CrossEntropyLoss { .. }
        | Op::CrossEntropyBackward { .. } => loss::run(op, memory, workers),
        Op::Gelu { .. }
        | Op::GeluBackward { .. }
        | Op::SwiGlu { .. }
        | Op::SwiGluBackward { .. }
        | Op::ColumnSum { .. }
        | Op::BiasDropoutAdd { .. }
        | Op::Dropout { .. }
        | Op::Add { .. }
        | Op::Cast { .. }
        | Op::Zero { .. } => elementwise::run(op, memory, workers),
        Op::ChunkSquares { .. } => squares::run(op, memory, workers),
        Op::Copy { .. }
        | Op::AllReduce { .. }
        | Op::ReduceScatter { .. }
        | Op::AllGather { .. }
        | Op::Broadcast { .. }
        | Op::Host { .. }
        | Op::Task { .. } => not_a_kernel(),
    }
}

fn not_a_kernel() -> Result<(), String> {
    Err("not a kernel".into())
}

fn is_values(t: Tensor) -> Result<(), String> {
    match t.dtype() {
        Dtype::F16 | Dtype::Bf16 | Dtype::F32 => Ok(()),
        other => Err(format!("{other:?} where F16, Bf16 or F32 belongs")),
    }
}

/// A tensor of values to read: F16, Bf16 or F32.
fn values(memory: &impl Memory, t: Tensor) -> Result<View<'_>, String> {
    is_values(t).map(|()| memory.read(t))
}

/// A tensor of values to write.
fn values_mut(memory: &impl Memory, t: Tensor) -> Result<ViewMut<'_>, String> {
    is_values(t).map(|()| memory.write(t))
}

/// A tensor of known type to read.
fn slice<T: Element>(memory: &impl Memory, t: Tensor) -> Result<&[T], String> {
    memory.read(t).as_slice().ok_or_else(|| wrong::<T>(t))
}

/// A tensor of known type to write.
fn slice_mut<T: Element>(memory: &impl Memory, t: Tensor) -> Result<&mut [T], String> {
    memory.write(t).into_slice().ok_or_else(|| wrong::<T>(t))
}

fn wrong<T>(t: Tensor) -> String {
    format!("{:?} where {} belongs", t.dtype(), std::any::type_name::<T>())
}
