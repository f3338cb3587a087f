//! Launches of the gated delta rule, and of the ops around it.

use super::{Args, Dtype, Launch, Launcher, Op, RUN, Tensor, is, no_kernel, values};
use crate::op::{DELTA_CHUNK, DeltaHeads, WIDEST_DELTA_KEY};

/// Columns of values of a block of the rule, columns of keys that it reads at a time, and threads.
const COLUMNS: usize = 32;
const STRIP: usize = 16;
const THREADS: u32 = 256;

/// Bytes of shared memory of the rule's kernels besides a state: gates and lengths of the rows, tiles
/// of queries and keys, and pairs of rows; then V, V and d, or the tiles of gradients.
const RULE: usize = 4 * (4 * DELTA_CHUNK + 2 * DELTA_CHUNK * (STRIP + 1));
const PAIRS: usize = 4 * DELTA_CHUNK * (DELTA_CHUNK + 1);
const OF_VALUES: usize = 4 * DELTA_CHUNK * (COLUMNS + 1);
const GRADIENTS: usize =
    4 * (3 * DELTA_CHUNK * (STRIP + 1) + 2 * STRIP * (STRIP + 1) + 2 * DELTA_CHUNK + 2 * 32);

/// Bytes of shared memory of the kernels on tensor cores: gates and lengths of the rows; queries and
/// keys; pairs of rows; V; two tiles of a state. A row of a tile has 8 elements more than it needs.
const ON_CORES: usize = 4 * 4 * DELTA_CHUNK
    + 2 * of_tile(DELTA_CHUNK, WIDEST_DELTA_KEY)
    + PAIRS
    + OF_VALUES
    + 2 * of_tile(WIDEST_DELTA_KEY, COLUMNS);
/// Bytes of shared memory of the gradients of gates and keys on tensor cores: numbers of the rows;
/// nine tiles of 16 columns of values and two of 64 columns of keys; four of pairs of rows.
const GRADIENTS_ON_CORES: usize = 4 * (13 * DELTA_CHUNK + 2 * 32)
    + 9 * of_tile(DELTA_CHUNK, 16)
    + 2 * of_tile(DELTA_CHUNK, 64)
    + 4 * of_tile(DELTA_CHUNK, DELTA_CHUNK);

/// Bytes of a tile of elements of 16 bits.
const fn of_tile(rows: usize, columns: usize) -> usize {
    2 * rows * (columns + 8)
}

/// Channels of a block of the convolution.
const CHANNELS: usize = 128;
/// Largest number of runs of rows whose gradients of weights are summed apart, and least rows of a run.
const MOST_RUNS: usize = 64;
const LEAST_RUN: usize = 16;

/// Largest number of blocks of the backward pass of the gated norm, which have 8 heads at a time.
const NORM_BLOCKS: usize = 512;

/// Rows of a run of the convolution's backward pass, and the number of runs.
const fn runs(rows: usize) -> (usize, usize) {
    let each = rows.div_ceil(MOST_RUNS);
    let each = if each > LEAST_RUN { each } else { LEAST_RUN };
    (each, rows.div_ceil(each))
}

/// Bytes of scratch for the gradients of a convolution's `weights` weights over `rows` rows.
pub(super) const fn convolution_scratch_bytes(rows: usize, weights: usize) -> u64 {
    (runs(rows).1 * weights * 4) as u64
}

/// Number of blocks that sum over heads for the gradient of a gated norm's gain.
const fn norm_blocks(heads: usize) -> usize {
    let blocks = heads.div_ceil(8);
    if blocks < NORM_BLOCKS { blocks } else { NORM_BLOCKS }
}

/// Bytes of scratch for the gradient of a gated norm's gain (dim) over `heads` heads of all rows.
pub(super) const fn gated_norm_scratch_bytes(heads: usize, dim: usize) -> u64 {
    (norm_blocks(heads) * dim * 4) as u64
}

/// Elements of the parts of the rule's scratch: V and d_r, gradients of states, gradients of keys.
const fn parts_of_scratch(rows: usize, heads: DeltaHeads) -> [usize; 4] {
    let of_values = rows * heads.values * heads.value_dim;
    let of_states = rows / heads.seq_len * heads.places() * heads.state_len();
    [of_values, of_values, of_states, rows * heads.values * 2 * heads.key_dim]
}

/// Bytes of scratch for the gradients of the rule over `rows` rows.
pub(super) const fn delta_scratch_bytes(rows: usize, heads: DeltaHeads) -> u64 {
    let [v, d_r, states, keys] = parts_of_scratch(rows, heads);
    4 * (v + d_r + states + keys) as u64
}

/// Largest scratch of the gradients of a gated delta net over `rows` rows, in bytes.
pub(crate) fn delta_net_scratch_bytes(rows: usize, heads: DeltaHeads, taps: usize) -> u64 {
    delta_scratch_bytes(rows, heads)
        .max(convolution_scratch_bytes(rows, heads.columns() * taps))
        .max(gated_norm_scratch_bytes(rows * heads.values, heads.value_dim))
}

/// Adds the arguments `DELTA_PARAMETERS` of delta.cu.
fn delta_parameters(args: Args, heads: DeltaHeads, starts: u64) -> Args {
    let DeltaHeads { keys, values, key_dim, value_dim, seq_len } = heads;
    args.with(&[keys, values, key_dim, value_dim, seq_len].map(|n| n as u64)).with(&[starts])
}

impl Launcher<'_> {
    pub(super) fn delta(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        match *op {
            Op::DeltaRule { qkv, gates, out, states, initial, heads, starts } => {
                [gates, states].into_iter().chain(initial).try_for_each(|t| is(t, Dtype::F32))?;
                let args = self.args(&[qkv, gates, out, states]).with(&[self.at_or_null(initial)]);
                let args = args.with(&[values(&[qkv, out])?]);
                let args = delta_parameters(args, heads, self.at_or_null(starts));
                let samples = qkv.shape().0 / heads.seq_len;
                self.launch(if on_tensor_cores(sm, &[qkv, out]) {
                    of_columns("delta_rule_mma", heads, samples, ON_CORES, args)
                } else {
                    of_columns("delta_rule", heads, samples, in_fp32(heads, OF_VALUES), args)
                });
            }
            Op::DeltaRuleBackward { .. } => self.delta_backward(op, sm)?,
            Op::Convolution { .. } | Op::ConvolutionBackward { .. } => self.convolution(op)?,
            Op::DeltaGates { x, decay, bias, gates } => {
                is(gates, Dtype::F32)?;
                let sizes = [x.len() as u64, decay.len() as u64];
                let args = self.args(&[x, decay, bias, gates]);
                let args = args.with(&[values(&[x, decay, bias])?]).with(&sizes);
                self.launch(Launch::flat("delta_gates", x.len(), args));
            }
            Op::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias } => {
                is(d_gates, Dtype::F32)?;
                let args = self.args(&[x, decay, bias, d_gates, d_x, d_decay, d_bias]);
                let args = args.with(&[values(&[x, decay, bias, d_x, d_decay, d_bias])?]);
                let args = args.with(&[x.shape().0 as u64, decay.len() as u64]);
                self.launch(Launch::by_columns("delta_gates_backward", decay.len(), args));
            }
            Op::GatedNorm { x, gate, gain, y, epsilon } => {
                let (heads, dim) = (x.len() / gain.len(), gain.len());
                let args = self.args(&[x, gate, gain, y]).with(&[values(&[x, gate, gain, y])?]);
                let args = args.with(&[heads as u64, dim as u64]).float(epsilon);
                let grid = [heads.div_ceil(8).min(1 << 20), 1, 1];
                self.launch(Launch::new("gated_norm", grid, THREADS, args));
            }
            Op::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, epsilon } => {
                let (heads, dim) = (x.len() / gain.len(), gain.len());
                let (blocks, shared) = (norm_blocks(heads), 8 * 4 * dim);
                if shared > 48 << 10 {
                    return Err(format!("a norm of heads of {dim} elements; at most 1536"));
                }
                let args = self.args(&[x, gate, gain, d_y, d_x, d_gate]).with(&[self.scratch]);
                let args = args.with(&[values(&[x, gate, gain, d_y, d_x, d_gate])?]);
                let args = args.with(&[heads as u64, dim as u64]).float(epsilon);
                let grid = [blocks, 1, 1];
                let launch = Launch::new("gated_norm_backward", grid, THREADS, args);
                self.launch(Launch { shared_bytes: shared as u32, ..launch });
                self.sum_parts(d_gain, blocks)?;
            }
            Op::SigmoidGate { x, gate, y } => {
                let args = self.args(&[x, gate, y]).with(&[values(&[x, gate, y])?, x.len() as u64]);
                self.launch(Launch::flat("sigmoid_gate", x.len().div_ceil(RUN), args));
            }
            Op::SigmoidGateBackward { x, gate, d, d_gate } => {
                let args = self.args(&[x, gate, d, d_gate]);
                let args = args.with(&[values(&[x, gate, d, d_gate])?, x.len() as u64]);
                self.launch(Launch::flat("sigmoid_gate_backward", x.len().div_ceil(RUN), args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    fn convolution(&mut self, op: &Op) -> Result<(), String> {
        let sizes = |x: Tensor, weight: Tensor, seq_len: usize| {
            let ((rows, count), taps) = (x.shape(), weight.shape().1);
            [rows, count, taps, seq_len].map(|n| n as u64)
        };
        let blocks = |x: Tensor| x.shape().1.div_ceil(CHANNELS);
        match *op {
            Op::Convolution { x, weight, y, seq_len, starts } => {
                let args = self.args(&[x, weight, y]).with(&[self.at_or_null(starts)]);
                let args = args.with(&[values(&[x, weight, y])?]);
                let args = args.with(&sizes(x, weight, seq_len));
                let grid = [blocks(x), x.shape().0.min(1 << 12), 1];
                self.launch(Launch::new("convolution", grid, CHANNELS as u32, args));
            }
            Op::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts } => {
                let (each, runs) = runs(x.shape().0);
                let args = self.args(&[x, weight, d_y, d_x]);
                let args = args.with(&[self.at_or_null(starts), self.scratch]);
                let args = args.with(&[values(&[x, weight, d_y, d_x])?]);
                let args = args.with(&sizes(x, weight, seq_len)).with(&[each as u64]);
                let grid = [blocks(x), runs, 1];
                self.launch(Launch::new("convolution_backward", grid, CHANNELS as u32, args));
                self.sum_parts(d_weight, runs)?;
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Launches the sum of `parts` rows of scratch, each of the length of `to`.
    fn sum_parts(&mut self, to: Tensor, parts: usize) -> Result<(), String> {
        let args = Args::default().with(&[self.scratch, (self.at)(to), (self.at)(to)]);
        let args = args.with(&[values(&[to, to])?, parts as u64, to.len() as u64]);
        self.launch(Launch::by_columns("norm_gradients", to.len(), args));
        Ok(())
    }

    fn delta_backward(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        let Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts } =
            *op
        else {
            return no_kernel(op);
        };
        [gates, states, d_gates].into_iter().try_for_each(|t| is(t, Dtype::F32))?;
        let (rows, starts) = (qkv.shape().0, self.at_or_null(starts));
        let on_cores = on_tensor_cores(sm, &[qkv, d_out, d_qkv]);
        let samples = rows / heads.seq_len;
        let mut at = self.scratch;
        let [v, d_r, d_states, d_keys] = parts_of_scratch(rows, heads).map(|elements| {
            let part = at;
            at += 4 * elements as u64;
            part
        });
        let args = self.args(&[qkv, gates, states, d_out, d_qkv]).with(&[v, d_r, d_states]);
        let args = args.with(&[values(&[qkv, d_out, d_qkv])?]);
        let args = delta_parameters(args, heads, starts);
        self.launch(if on_cores {
            let shared = ON_CORES + of_tile(DELTA_CHUNK, COLUMNS);
            of_columns("delta_rule_states_mma", heads, samples, shared, args)
        } else {
            let shared = in_fp32(heads, 2 * OF_VALUES);
            of_columns("delta_rule_states", heads, samples, shared, args)
        });
        let args = self.args(&[qkv, gates, states, d_out]).with(&[v, d_r, d_states]);
        let args = args.with(&[(self.at)(d_gates), d_keys, values(&[qkv, d_out])?]);
        let args = delta_parameters(args, heads, starts);
        let grid = [heads.places(), heads.values, samples];
        let (kernel, shared) = if on_cores {
            ("delta_rule_gradients_mma", GRADIENTS_ON_CORES)
        } else {
            ("delta_rule_gradients", RULE + 2 * PAIRS + GRADIENTS)
        };
        let launch = Launch::new(kernel, grid, THREADS, args);
        self.launch(Launch { shared_bytes: shared as u32, ..launch });
        let DeltaHeads { keys, values: of_values, key_dim, value_dim, .. } = heads;
        let args = self.args(&[qkv]).with(&[d_keys, (self.at)(d_qkv), values(&[qkv, d_qkv])?]);
        let sizes = [rows, keys, of_values, key_dim, value_dim];
        let args = args.with(&sizes.map(|n| n as u64));
        let grid = [(rows * 2 * keys).div_ceil(8), 1, 1];
        self.launch(Launch::new("delta_rule_keys", grid, THREADS, args));
        Ok(())
    }
}

/// Whether the rule runs on tensor cores: products of bf16, from compute capability 8.0 on.
fn on_tensor_cores(sm: u32, tensors: &[Tensor]) -> bool {
    sm >= 80 && tensors.iter().all(|t| t.dtype() == Dtype::Bf16)
}

/// Bytes of shared memory of a kernel without tensor cores. `more`: those besides the rule, the
/// pairs and a state.
const fn in_fp32(heads: DeltaHeads, more: usize) -> usize {
    RULE + PAIRS + more + 4 * heads.key_dim.next_multiple_of(STRIP) * COLUMNS
}

/// A launch with a block for each run of columns of values, head of values and sample.
fn of_columns(
    kernel: &'static str,
    heads: DeltaHeads,
    samples: usize,
    shared_bytes: usize,
    args: Args,
) -> Launch {
    let grid = [heads.value_dim.div_ceil(COLUMNS), heads.values, samples];
    let launch = Launch::new(kernel, grid, THREADS, args);
    Launch { shared_bytes: shared_bytes as u32, ..launch }
}
