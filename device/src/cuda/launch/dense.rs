//! Launches of element-wise ops, tables, norms, the loss and sums of squares.

use super::{
    Args, Dtype, Heads, Launch, Launcher, Op, RUN, Tensor, VocabShard, added, is, no_kernel, types,
    values,
};
use crate::op::{Gate, WidthNorm};

/// Bytes of dynamic shared memory that every GPU of a compute capability grants a block.
const fn most_shared(sm: u32) -> usize {
    if sm == 75 { 64 << 10 } else { 96 << 10 }
}

/// Number of blocks that sum over rows for the gradients of a norm's gain and bias: one per 16
/// rows, but 128 to 512, and at most one per row.
const fn norm_parts(rows: usize) -> usize {
    let parts = if rows < 16 * 128 { 128 } else { rows / 16 };
    let parts = if parts < 512 { parts } else { 512 };
    if parts < rows { parts } else { rows }
}

/// Bytes of scratch for the gradients of a norm's gain and bias.
pub(crate) const fn norm_scratch_bytes((rows, cols): (usize, usize), gradients: usize) -> u64 {
    (gradients * norm_parts(rows) * cols * 4) as u64
}

impl Launcher<'_> {
    pub(super) fn elementwise(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Gelu { x, y } => self.map("gelu", x, y)?,
            Op::GeluBackward { x, d } => self.map("gelu_backward", x, d)?,
            Op::Add { x, into } if (x.dtype(), into.dtype()) == (Dtype::F64, Dtype::F64) => {
                let args = self.args(&[x, into]).with(&[x.len() as u64]);
                self.launch(Launch::flat("add_f64", x.len(), args));
            }
            Op::Add { x, into } => self.map("add", x, into)?,
            Op::Cast { x, y } if x.dtype() == y.dtype() => {
                let args = self.args(&[x, y]).with(&[x.bytes()]);
                self.launch(Launch::flat("copy_bytes", bytes_units(x.bytes()), args));
            }
            Op::Cast { x, y } if values(&[x, y]).is_err() => {
                let args = self.args(&[x, y]).with(&[types(&[x, y]), x.len() as u64]);
                self.launch(Launch::flat("cast_exact", x.len(), args));
            }
            Op::Cast { x, y } => self.map("cast", x, y)?,
            Op::Zero { x } => {
                let args = self.args(&[x]).with(&[x.bytes()]);
                self.launch(Launch::flat("zero", bytes_units(x.bytes()), args));
            }
            Op::SwiGlu { x, y, gate } => {
                let kernel = match gate {
                    Gate::Silu => "swiglu",
                    Gate::Gelu => "geglu",
                    Gate::ClampedSilu { .. } => "clamped_swiglu",
                };
                self.gated(kernel, [x, y], gate)?;
            }
            Op::SwiGluBackward { x, d, gate } => {
                let kernel = match gate {
                    Gate::Silu => "swiglu_backward",
                    Gate::Gelu => "geglu_backward",
                    Gate::ClampedSilu { .. } => "clamped_swiglu_backward",
                };
                self.gated(kernel, [x, d], gate)?;
            }
            Op::ColumnSum { x, y } => {
                let (rows, cols) = x.shape();
                let args = self.args(&[x, y]).with(&[values(&[x, y])?, rows as u64, cols as u64]);
                self.launch(Launch::by_columns("column_sum", cols, args));
            }
            Op::BiasDropoutAdd { x, bias, residual, y, dropout, scale } => {
                let (rows, cols) = x.shape();
                let sizes = [rows as u64, cols as u64, dropout.first_row.wrapping_mul(cols as u64)];
                let bias_at = bias.map_or(0, |bias| (self.at)(bias));
                let args = self.args(&[x]).with(&[bias_at, (self.at)(residual), (self.at)(y)]);
                let types = values(&[x, bias.unwrap_or(x), residual, y])?;
                let args = args.with(&[types]).with(&sizes).float(scale).mask(dropout);
                self.launch(Launch::by_rows("bias_dropout_add", rows, cols, 256, args));
            }
            Op::Dropout { x, y, dropout, scale } if x == y && dropout.p == 0.0 && scale == 1.0 => {
                values(&[x])?;
            }
            Op::Dropout { x, y, dropout, scale } => {
                let first = dropout.first_row.wrapping_mul(x.shape().1 as u64);
                let args = self.args(&[x, y]).with(&[values(&[x, y])?, x.len() as u64, first]);
                let args = args.float(scale).mask(dropout);
                self.launch(Launch::flat("dropout", x.len().div_ceil(RUN), args));
            }
            Op::ColumnDropout { x, y, add, dropout, columns } => {
                let ((rows, cols), all) = (x.shape(), columns.all as u64);
                let first = dropout.first_row.wrapping_mul(all) + columns.first as u64;
                let args = self.args(&[x, y]).with(&[values(&[x, y])?]);
                let args = args.with(&[rows as u64, cols as u64, first, all, u64::from(add)]);
                let args = args.mask(dropout);
                self.launch(Launch::by_rows("column_dropout", rows, cols, 256, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Launches a kernel on gates and values x (rows, 2 width) and on y (rows, width).
    fn gated(
        &mut self,
        kernel: &'static str,
        [x, y]: [Tensor; 2],
        gate: Gate,
    ) -> Result<(), String> {
        let (rows, width) = y.shape();
        let args = self.args(&[x, y]).with(&[values(&[x, y])?, rows as u64, width as u64]);
        let args = match gate {
            Gate::Silu | Gate::Gelu => args,
            Gate::ClampedSilu { slope, limit } => args.float(slope).float(limit),
        };
        self.launch(Launch::by_rows(kernel, rows, width, 256, args));
        Ok(())
    }

    /// Launches a kernel that reads x and writes or updates y, element by element.
    fn map(&mut self, kernel: &'static str, x: Tensor, y: Tensor) -> Result<(), String> {
        let args = self.args(&[x, y]).with(&[values(&[x, y])?, x.len() as u64]);
        self.launch(Launch::flat(kernel, x.len().div_ceil(RUN), args));
        Ok(())
    }

    pub(super) fn embedding(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Embedding { tokens, table, shard, scale, y } => {
                is(tokens, Dtype::I32)?;
                let (n, (rows, cols)) = (tokens.len(), table.shape());
                let args = self.args(&[tokens, table, y]).with(&[values(&[table, y])?, n as u64]);
                let args = args.with(&[cols as u64]).with(&owned(shard, rows)).float(scale);
                self.launch(Launch::by_rows("embedding", n, cols, 256, args));
            }
            Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table } => {
                is(tokens, Dtype::I32)?;
                is(order, Dtype::I32)?;
                let (n, (rows, cols)) = (tokens.len(), d_table.shape());
                let args = self.args(&[tokens, order, d_y, d_table]);
                let args = args.with(&[values(&[d_y, d_table])?, n as u64, cols as u64]);
                let args = args.with(&owned(shard, rows)).float(scale);
                self.launch(Launch::by_tiles("embedding_backward", n, cols, args));
            }
            Op::AddPositions { x, table, first_row, starts } => {
                let ((rows, cols), seq_len) = (x.shape(), table.shape().0.max(1));
                let sizes = [rows, cols, first_row, seq_len].map(|n| n as u64);
                let args = self.args(&[x, table]).with(&[self.at_or_null(starts)]);
                let args = args.with(&[values(&[x, table])?]).with(&sizes);
                self.launch(Launch::by_rows("add_positions", rows, cols, 256, args));
            }
            Op::PositionsBackward { d_y, first_row, starts, d_table } => {
                let ((rows, cols), seq_len) = (d_y.shape(), d_table.shape().0);
                let sizes = [rows, cols, first_row, seq_len].map(|n| n as u64);
                let args = self.args(&[d_y]).with(&[self.at_or_null(starts), (self.at)(d_table)]);
                let args = args.with(&[values(&[d_y, d_table])?]).with(&sizes);
                self.launch(Launch::by_tiles("positions_backward", seq_len, cols, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    pub(super) fn norm(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        match *op {
            Op::LayerNorm { x, gain, bias, y, stats, epsilon } => {
                self.norm_forward("layer_norm", &[x, gain, bias, y], stats, &[epsilon])?;
            }
            Op::RmsNorm { x, gain, offset, y, stats, epsilon } => {
                let numbers = [epsilon, added(offset)];
                self.norm_forward("rms_norm", &[x, gain, y], stats, &numbers)?;
            }
            Op::RmsNormBackward { x, gain, offset, stats, d_y, d_x, add, d_gain } => {
                let args = self.args(&[x, gain, stats, d_y, d_x]).with(&[self.scratch]);
                let args = args.with(&[values(&[x, gain, d_y, d_x])?, u64::from(add)]);
                let args = args.float(added(offset));
                self.norm_backward("rms_norm_backward", x, stats, args, sm, &[d_gain])?;
            }
            Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias } => {
                let args = self.args(&[x, gain, stats, d_y, d_x]).with(&[self.scratch]);
                let args = args.with(&[values(&[x, gain, d_y, d_x])?, u64::from(add)]);
                // If rows are too wide for two sums per column, a separate kernel sums d_y.
                let both = norm_shared(x.shape().1, 2) <= most_shared(sm);
                let grads: &[Tensor] = if both { &[d_gain, d_bias] } else { &[d_gain] };
                let args = args.with(&[u64::from(both)]);
                self.norm_backward("layer_norm_backward", x, stats, args, sm, grads)?;
                if !both {
                    self.elementwise(&Op::ColumnSum { x: d_y, y: d_bias })?;
                }
            }
            _ => return self.width_norm(op, sm),
        }
        Ok(())
    }

    fn width_norm(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        match *op {
            Op::WidthNormSums { qkv, raw, heads, sums } => {
                let args = self.args(&[qkv, raw, sums]).with(&[values(&[qkv, raw])?]);
                self.sum_width("width_norm_sums", [qkv, raw, sums], heads, args)?;
            }
            Op::WidthNorm { qkv, raw, norm } => {
                let WidthNorm { heads, gain, sums, .. } = norm;
                is(sums, Dtype::F32)?;
                let (rows, cols) = raw.shape();
                let args = self.args(&[qkv, raw, gain, sums]);
                let args = args.with(&[values(&[qkv, raw, gain])?]).with(&columns_of(qkv, heads));
                let args = root_terms(args, norm).with(&[rows as u64, cols as u64]);
                self.launch(Launch::by_rows("width_norm", rows, cols, 256, args));
            }
            Op::WidthNormBackwardSums { d_qkv, raw, norm: WidthNorm { heads, gain, .. }, dots } => {
                let args = self.args(&[d_qkv, raw, gain, dots]);
                let args = args.with(&[values(&[d_qkv, raw, gain])?]);
                let kernel = "width_norm_backward_sums";
                self.sum_width(kernel, [d_qkv, raw, dots], heads, args)?;
            }
            Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain } => {
                let WidthNorm { heads, gain, sums, .. } = norm;
                is(dots, Dtype::F32)?;
                let args = self.args(&[d_qkv, raw, gain, sums, dots]).with(&[self.scratch]);
                let args = args.with(&[values(&[d_qkv, raw, gain])?]);
                let args = root_terms(args.with(&columns_of(d_qkv, heads)), norm);
                self.norm_backward("width_norm_backward", raw, sums, args, sm, &[d_gain])?;
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Launches a kernel that sums over q's and over k's columns of each row.
    fn sum_width(
        &mut self,
        kernel: &'static str,
        [qkv, raw, sums]: [Tensor; 3],
        heads: Heads,
        args: Args,
    ) -> Result<(), String> {
        is(sums, Dtype::F32)?;
        let (rows, cols) = raw.shape();
        let args = args.with(&columns_of(qkv, heads)).with(&[rows as u64, cols as u64]);
        self.launch(Launch::by_rows(kernel, rows, cols, 256, args));
        Ok(())
    }

    /// Launches the forward pass of a norm. `tensors`: x, parameters, y. `numbers`: the kernel's last
    /// arguments.
    fn norm_forward(
        &mut self,
        kernel: &'static str,
        tensors: &[Tensor],
        stats: Tensor,
        numbers: &[f32],
    ) -> Result<(), String> {
        is(stats, Dtype::F32)?;
        let (rows, cols) = tensors[0].shape();
        let args = self.args(tensors).with(&[(self.at)(stats), values(tensors)?]);
        let args = args.with(&[rows as u64, cols as u64]);
        let args = numbers.iter().fold(args, |args, number| args.float(*number));
        self.launch(Launch::by_rows(kernel, rows, cols, 256, args));
        Ok(())
    }

    /// Launches the backward pass of a norm, and the sum of its blocks' shares of `grads`.
    fn norm_backward(
        &mut self,
        kernel: &'static str,
        x: Tensor,
        stats: Tensor,
        args: Args,
        sm: u32,
        grads: &[Tensor],
    ) -> Result<(), String> {
        is(stats, Dtype::F32)?;
        let (rows, cols) = x.shape();
        let parts = norm_parts(rows);
        let (shared, most) = (norm_shared(cols, grads.len()), most_shared(sm));
        if shared > most {
            return Err(format!(
                "sums of {cols} columns take {shared} bytes of shared memory, and sm_{sm} grants {most}"
            ));
        }
        let args = args.with(&[rows as u64, cols as u64]);
        let launch = Launch::new(kernel, [parts, 1, 1], norm_threads(cols) as u32, args);
        self.launch(Launch { shared_bytes: shared as u32, ..launch });
        let (first, last) = (grads[0], grads[grads.len() - 1]);
        let args = Args::default().with(&[self.scratch, (self.at)(first), (self.at)(last)]);
        let args = args.with(&[values(&[first, last])?, parts as u64, cols as u64]);
        let launch = Launch::by_columns("norm_gradients", cols, args);
        self.launch(Launch { grid: [launch.grid[0], grads.len() as u32, 1], ..launch });
        Ok(())
    }

    pub(super) fn loss(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::CapLogits { logits, scale, cap } => {
                let args = self.args(&[logits]).with(&[values(&[logits])?, logits.len() as u64]);
                let args = args.float(cap.map_or(scale, |cap| scale / cap)).float(or_zero(cap));
                self.launch(Launch::flat("cap_logits", logits.len().div_ceil(RUN), args));
            }
            Op::RowMax { x, y, shard } => {
                is(y, Dtype::F32)?;
                let (rows, cols) = x.shape();
                let sizes = [rows, cols, shard.valid.min(cols)].map(|n| n as u64);
                let args = self.args(&[x, y]).with(&[values(&[x])?]).with(&sizes);
                self.launch(Launch::by_rows("row_max", rows, cols, 512, args));
            }
            Op::CrossEntropyStats { logits, max, targets, shard, sums } => {
                [max, sums].into_iter().try_for_each(|t| is(t, Dtype::F32))?;
                is(targets, Dtype::I32)?;
                let (rows, cols) = logits.shape();
                let sizes = [rows, cols, shard.first, shard.valid.min(cols)].map(|n| n as u64);
                let args = self.args(&[logits, max, targets, sums]);
                let args = args.with(&[values(&[logits])?]).with(&sizes);
                self.launch(Launch::by_rows("cross_entropy_stats", rows, cols, 512, args));
            }
            Op::CrossEntropyLoss { sums, targets, loss } => {
                is(sums, Dtype::F32)?;
                is(targets, Dtype::I32)?;
                is(loss, Dtype::F64)?;
                let args = self.args(&[sums, targets, loss]).with(&[targets.len() as u64]);
                self.launch(Launch::new("cross_entropy_loss", [1, 1, 1], 512, args));
            }
            Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap } => {
                [max, sums].into_iter().try_for_each(|t| is(t, Dtype::F32))?;
                is(targets, Dtype::I32)?;
                is(scale, Dtype::F64)?;
                let (rows, cols) = logits.shape();
                let sizes = [rows, cols, shard.first, shard.valid.min(cols)].map(|n| n as u64);
                let args = self.args(&[logits, max, sums, targets, scale]).float(factor);
                let args = args.float(or_zero(cap));
                let args = args.with(&[values(&[logits])?]).with(&sizes);
                self.launch(Launch::by_rows("cross_entropy_backward", rows, cols, 512, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    pub(super) fn squares(&mut self, op: &Op) -> Result<(), String> {
        let Op::ChunkSquares { x, partials, chunk, counted } = *op else { return no_kernel(op) };
        is(partials, Dtype::F64)?;
        let (hole, hole_end) = counted.hole;
        let sizes = [x.len(), chunk.max(1), counted.end, hole, hole_end, partials.len()];
        let sizes = sizes.map(|n| n as u64);
        let args = self.args(&[x, partials]).with(&[values(&[x])?]).with(&sizes);
        // 16 threads for each partial sum.
        let blocks = partials.len().div_ceil(4);
        self.launch(Launch::new("chunk_squares", [blocks, 1, 1], 64, args));
        Ok(())
    }
}

/// Threads of the backward pass of a norm: up to 1024, with equal numbers of runs of a row.
const fn norm_threads(cols: usize) -> usize {
    let runs = if cols == 0 { 1 } else { cols.div_ceil(RUN) };
    runs.div_ceil(runs.div_ceil(1024)).next_multiple_of(32)
}

/// Bytes of shared memory of the backward pass of a norm: `sums` numbers for each column of whole
/// runs, and two for each warp that a block may have.
const fn norm_shared(cols: usize, sums: usize) -> usize {
    (sums * cols.next_multiple_of(RUN * norm_threads(cols)) + 64) * 4
}

/// Number of q's columns, and of all columns, of a row of qkv.
const fn columns_of(qkv: Tensor, heads: Heads) -> [u64; 2] {
    let all = qkv.shape().1;
    [(heads.count * heads.dim(all)) as u64, all as u64]
}

/// Adds the widths of q and k, and epsilon.
fn root_terms(args: Args, WidthNorm { widths: [of_q, of_k], epsilon, .. }: WidthNorm) -> Args {
    args.float(of_q).float(of_k).float(epsilon)
}

/// A cap as kernels take it: 0 for none.
pub(super) fn or_zero(cap: Option<f32>) -> f32 {
    cap.unwrap_or(0.0)
}

/// Number of threads for a range of bytes.
const fn bytes_units(bytes: u64) -> usize {
    bytes.div_ceil(16) as usize
}

/// The first token of the table, and the number of its real rows.
fn owned(shard: VocabShard, rows: usize) -> [u64; 2] {
    [shard.first as u64, shard.valid.min(rows) as u64]
}
