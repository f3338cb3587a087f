//! The kernels, which compute each [`Op`]. There is one file per family. Each kernel is written
//! once for all storage types: it widens values to f32, computes, and rounds once when it stores.
//!
//! A row's result depends on that row alone, and no result depends on the number of threads.
//! Neither sharding tokens over ranks nor more kernel threads change a bit.

mod attention;
mod cached;
mod delta;
mod dense;
mod documents;
mod elementwise;
mod embedding;
mod experts;
mod fp8;
mod loss;
mod math;
mod norm;
mod rotary;
mod squares;
#[cfg(test)]
mod testing;

use super::workers::Workers;
use crate::op::{Family, Op};
use crate::{Element, Tensor, View, ViewMut};

/// Access to an op's tensors. An op forms each view at most once, and reads no range that it also
/// writes.
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
/// A tensor has a type that the op does not accept, the scratch is too small, or the op has no
/// kernel.
pub(crate) fn run(op: &Op, memory: &impl Memory, workers: &Workers) -> Result<(), String> {
    match op.family() {
        Family::Product => dense::run(op, memory, workers),
        Family::Fp8 => fp8::run(op, memory, workers),
        Family::Embedding => embedding::run(op, memory, workers),
        Family::Norm => norm::run(op, memory, workers),
        Family::Rotary => rotary::run(op, memory, workers),
        Family::Attention => attention::run(op, memory, workers),
        Family::Cache => cached::run(op, memory, workers),
        Family::Loss => loss::run(op, memory, workers),
        Family::Experts => experts::run(op, memory, workers),
        Family::Delta => delta::run(op, memory, workers),
        Family::Elementwise => elementwise::run(op, memory, workers),
        Family::Squares => squares::run(op, memory, workers),
        Family::Transfer | Family::Task => not_a_kernel(),
    }
}

fn not_a_kernel() -> Result<(), String> {
    Err("not a kernel".into())
}

fn is_values(t: Tensor) -> Result<(), String> {
    match t.dtype() {
        value if value.is_value() => Ok(()),
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

/// Element `index` of a tensor of values.
fn number(view: View<'_>, index: usize) -> f32 {
    let mut one = [0.0];
    view.load(index, &mut one);
    one[0]
}

/// The elements of a tensor, to read. An error if the tensor's type is not `T`.
fn slice<T: Element>(memory: &impl Memory, t: Tensor) -> Result<&[T], String> {
    memory.read(t).as_slice().ok_or_else(|| wrong::<T>(t))
}

/// The elements of a tensor, to write. An error if the tensor's type is not `T`.
fn slice_mut<T: Element>(memory: &impl Memory, t: Tensor) -> Result<&mut [T], String> {
    memory.write(t).into_slice().ok_or_else(|| wrong::<T>(t))
}

fn wrong<T>(t: Tensor) -> String {
    format!("{:?} where {} belongs", t.dtype(), std::any::type_name::<T>())
}
