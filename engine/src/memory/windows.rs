//! The windows in which the end of a run puts the tensors together: one is filled while the other is hashed and written.

use tensor_parallel::{Decoder, Param, SegmentLayout};

/// Elements that are put together at a time, at most.
pub(crate) const WINDOW: usize = 1 << 23;
/// One is put together while the other is hashed.
pub(crate) const WINDOWS: usize = 2;

/// Bytes that the end of a run takes on the host besides the plan.
pub(crate) fn window_bytes(decoder: &Decoder) -> u64 {
    (WINDOWS * window_elements(decoder.segments()) * size_of::<f32>()) as u64
}

/// Elements of a window: of the largest tensor, if that is smaller than [`WINDOW`].
pub(crate) fn window_elements(segments: &[SegmentLayout]) -> usize {
    let params = segments.iter().flat_map(|segment| &segment.params);
    params.map(Param::global_len).max().unwrap_or(0).min(WINDOW)
}
