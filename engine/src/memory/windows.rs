//! Windows that collect the tensors at the end of a run: one is filled while the other is hashed.

use tensor_parallel::{Decoder, Param, SegmentLayout};

/// Largest number of elements in a window.
pub(crate) const WINDOW: usize = 1 << 23;
/// Number of windows: one is filled while the other is hashed.
pub(crate) const WINDOWS: usize = 2;

/// Bytes of host memory that the end of a run needs in addition to the plan.
pub(crate) fn window_bytes(decoder: &Decoder) -> u64 {
    (WINDOWS * window_elements(decoder.segments()) * size_of::<f32>()) as u64
}

/// Number of elements in a window: the elements of the largest tensor, at most [`WINDOW`].
pub(crate) fn window_elements(segments: &[SegmentLayout]) -> usize {
    let params = segments.iter().flat_map(|segment| &segment.params);
    params.map(Param::global_len).max().unwrap_or(0).min(WINDOW)
}
