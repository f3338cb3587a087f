//! Sums of squares by chunk: runs [`crate::numerics`] on the kernel threads.

use super::{Memory, not_a_kernel, slice_mut, values};
use crate::cpu::workers::{Slice, Workers};
use crate::numerics;
use crate::op::Op;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    let Op::ChunkSquares { x, partials, chunk, counted } = *op else { return not_a_kernel() };
    let x = values(m, x)?;
    let partials = Slice { data: slice_mut::<f64>(m, partials)?, each: 1 };
    let chunk = chunk.max(1);
    workers.split(partials.data.len(), x.len(), partials, &|chunks, partials, _| {
        let at = (chunks.start * chunk).min(x.len());
        let x = x.slice(at..x.len());
        numerics::chunk_squares(x, partials.data, chunk, counted.from(at));
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, assert_close, noise};
    use super::*;
    use crate::Dtype;
    use crate::numerics::CountedRange;

    #[test]
    fn squares_are_summed_by_chunk_with_any_number_of_threads() {
        let (n, chunk) = (100_000, 4097);
        let counted = CountedRange { end: 70_000, hole: (5000, 13_001) };
        let x = noise(1, n);
        let counts = |i: usize| i < 5000 || (13_001..70_000).contains(&i);
        let square = |i: usize| if counts(i) { x[i] * x[i] } else { 0.0 };
        let want: Vec<f64> = (0..n.div_ceil(chunk))
            .map(|i| (i * chunk..((i + 1) * chunk).min(n)).map(square).sum())
            .collect();
        for threads in [1, 3] {
            let mut rig = Rig::new(threads);
            let x = rig.put(Dtype::F16, (1, n), &x);
            let partials = rig.out(Dtype::F64, (1, want.len()));
            rig.run(&Op::ChunkSquares { x, partials, chunk, counted });
            assert_close(&rig.get(partials), &want, 0.0, 0.0);
        }
    }
}
