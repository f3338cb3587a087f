//! Launches of largest magnitudes and of conversions to fp8.

use super::{Dtype, Launch, Launcher, Op, no_kernel, types, values};
use crate::numerics::{E4m3, E5m2};
use crate::op::{MAXIMA, run_of_maxima};

/// Rows and columns of a block's tile.
const TILE: (usize, usize) = (128, 64);

impl Launcher<'_> {
    pub(super) fn fp8(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Maxima { x, maxima } => {
                let run = run_of_maxima(x.len());
                let sizes = [values(&[x])?, x.len() as u64, run as u64];
                let args = self.args(&[x, maxima]).with(&sizes);
                // A thread reads 8 elements at a time. Threads without elements would only wait.
                let threads = (run / 8).next_multiple_of(32).clamp(32, 512) as u32;
                self.launch(Launch::new("maxima", [MAXIMA, 1, 1], threads, args));
            }
            Op::Quantize { x, maxima, y, transposed, scale } => {
                let ((rows, cols), Some(to)) = (x.shape(), y.or(transposed)) else {
                    return Err("fp8 that goes nowhere".into());
                };
                values(&[x])?;
                let limit = if to.dtype() == Dtype::E5m2 { E5m2::MAX } else { E4m3::MAX };
                let outputs = [self.at_or_null(y), self.at_or_null(transposed), (self.at)(scale)];
                let sizes = [types(&[x, to]), rows as u64, cols as u64];
                let args = self.args(&[x, maxima]).with(&outputs).with(&sizes).float(limit);
                let grid = [cols.div_ceil(TILE.1), rows.div_ceil(TILE.0), 1];
                self.launch(Launch::new("quantize", grid, 256, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }
}
