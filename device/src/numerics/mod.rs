//! Arithmetic that host and device share bit for bit: sums, sums of squares, initial values. Also
//! vectors of several widths for loops of other crates, and typed views of storage.
//!
//! All operations are elementwise with explicit fma, IEEE square root and division, or fp64 sums in
//! a fixed order. Neither threads, tiles nor SIMD width change a bit.

mod bounds;
mod fp8;
pub mod lanes;
mod normals;
mod path;
mod round;
mod simd;
mod sums;
pub(crate) mod view;

pub use bounds::{Pass, multiply_add, sweep, triad};
pub use fp8::{E4m3, E5m2, scale as fp8_scale};
pub use normals::normals;
pub(crate) use path::InlinedClosure;
pub use path::SimdPath;
pub(crate) use round::round_f16;
pub(crate) use simd::ask;
pub use sums::{CountedRange, accumulate, accumulate_chunks, chunk_squares, sum_of_squares};

#[cfg(test)]
mod tests;
