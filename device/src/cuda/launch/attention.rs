//! Launches of attention.

use super::dense::or_zero;
use super::{
    Args, Dropout, Dtype, Heads, Launch, Launcher, Op, RUN, Scores, Tensor, is, no_kernel, values,
};

/// Rows per tile: queries or keys of a block. Ampere's forward kernels have twice as many queries,
/// except those named small.
const TILE: usize = 64;

/// Elements of the widest head that has kernels.
pub const WIDEST_HEAD: usize = 256;

/// Kernels by head dimension: forward, backward by queries, backward by keys.
const BY_HEAD_DIM: [(usize, [&str; 3]); 3] = [
    (64, ["attention_64", "attention_queries_64", "attention_keys_64"]),
    (128, ["attention_128", "attention_queries_128", "attention_keys_128"]),
    (WIDEST_HEAD, ["attention_256", "attention_queries_256", "attention_keys_256"]),
];

/// Kernels on tensor cores for scores without a cap, from compute capability 8.0 on.
const AMPERE: [(usize, [&str; 3]); 3] = [
    (64, ["attention_mma_64", "attention_mma_queries_64", "attention_mma_keys_64"]),
    (128, ["attention_mma_128", "attention_mma_queries_128", "attention_mma_keys_128"]),
    (WIDEST_HEAD, ["attention_mma_256", "attention_mma_queries_256", "attention_mma_keys_256"]),
];

/// Kernels on tensor cores for scores with a cap, from compute capability 8.0 on.
const AMPERE_CAPPED: [(usize, [&str; 3]); 3] = [
    (
        64,
        [
            "attention_mma_capped_64",
            "attention_mma_capped_queries_64",
            "attention_mma_capped_keys_64",
        ],
    ),
    (
        128,
        [
            "attention_mma_capped_128",
            "attention_mma_capped_queries_128",
            "attention_mma_capped_keys_128",
        ],
    ),
    (
        WIDEST_HEAD,
        [
            "attention_mma_capped_256",
            "attention_mma_capped_queries_256",
            "attention_mma_capped_keys_256",
        ],
    ),
];

/// Kernels on tensor cores for heads of 65 to 128 elements if a multiprocessor has 100 KiB of shared
/// memory: for scores without a cap, and with one.
const AMPERE_SMALL: [[&str; 3]; 2] = [
    ["attention_mma_small_128", "attention_mma_queries_128", "attention_mma_small_keys_128"],
    [
        "attention_mma_capped_small_128",
        "attention_mma_capped_queries_128",
        "attention_mma_capped_small_keys_128",
    ],
];

/// Whether 16-bit attention with heads of `head_dim` elements has the kernels for small shared memory:
/// if a multiprocessor has 100 KiB. From compute capability 8.0 on, the others have at least 164.
#[must_use]
pub const fn is_small_attention(sm: u32, head_dim: usize) -> bool {
    (matches!(sm, 86 | 88 | 89) || sm >= 120) && head_dim > 64 && head_dim <= 128
}

/// Kernels on tensor cores of compute capabilities 7.0 and 7.2, for f16 and scores without a
/// cap. Later GPUs run their instruction slowly.
const VOLTA: [(usize, [&str; 3]); 2] = [
    (64, ["attention_volta_64", "attention_volta_queries_64", "attention_volta_keys_64"]),
    (128, ["attention_volta_128", "attention_volta_queries_128", "attention_volta_keys_128"]),
];

/// The kernels on tensor cores of a compute capability, for tensors of one type.
fn on_tensor_cores(sm: u32, dtype: Dtype, capped: bool) -> &'static [(usize, [&'static str; 3])] {
    match (sm, dtype) {
        (80.., Dtype::F16 | Dtype::Bf16) if capped => &AMPERE_CAPPED,
        (80.., Dtype::F16 | Dtype::Bf16) => &AMPERE,
        (70..=72, Dtype::F16) if !capped => &VOLTA,
        _ => &[],
    }
}

/// Sizes that all attention kernels use.
struct AttentionSizes {
    heads: Heads,
    scores: Scores,
    /// Address of the documents' starts, or 0 without documents.
    starts: u64,
    head_dim: usize,
    samples: usize,
    /// Queries per block of the forward kernel.
    queries: usize,
    kernels: [&'static str; 3],
    block: u32,
    /// Bytes of dynamic shared memory, by kernel.
    shared_bytes: [u32; 3],
}

impl AttentionSizes {
    /// The sizes of an op. `tensors`: its tensors of variable type, first one with the shape of
    /// `out`.
    fn new(
        tensors: &[Tensor],
        heads: Heads,
        scores: Scores,
        starts: u64,
        sm: u32,
    ) -> Result<Self, String> {
        let out = tensors[0];
        let (rows, width) = out.shape();
        if heads.count == 0 || heads.kv_count == 0 || heads.seq_len == 0 {
            return Err("no heads, or samples without tokens".into());
        }
        let head_dim = width / heads.count;
        let one_type = tensors.iter().all(|t| t.dtype() == out.dtype());
        let capped = scores.cap.is_some();
        let tensor_cores = if one_type { on_tensor_cores(sm, out.dtype(), capped) } else { &[] };
        let mma = tensor_cores.iter().find(|(most, _)| head_dim <= *most).copied();
        let small = mma.is_some() && is_small_attention(sm, head_dim);
        let mma = if small { Some((128, AMPERE_SMALL[usize::from(capped)])) } else { mma };
        let fits = mma.or_else(|| BY_HEAD_DIM.into_iter().find(|(most, _)| head_dim <= *most));
        let Some((most, kernels)) = fits else {
            return Err(format!("heads of {head_dim}; at most {WIDEST_HEAD}"));
        };
        // A tile has 64 rows. On Ampere, the forward kernel holds two tiles of queries, and one
        // tile each for two slabs of keys and of values. The backward kernel by queries holds only
        // the slabs. The backward kernel by keys holds slabs of queries, three numbers per row of
        // the slabs, and a tile of values. On Volta, a slab has 16 rows, so four slabs fill one
        // tile. The forward kernel holds only slabs, and the backward kernel by queries also holds
        // a tile of d_out. On Ampere, kernels for heads wider than 128 have 8 warps and slabs of 16
        // rows, which take the memory of two tiles once these are in registers. Backward each warp
        // hands over 256 products of four bytes. If shared memory is small, the forward kernel for
        // heads of 65 to 128 holds the slabs of keys and values alone, and the kernel by keys has
        // slabs of 16 rows.
        let tile = TILE as u32 * 2 * (most as u32 + 8);
        let handed_over = 8 * 256 * 4;
        let (block, queries, shared_bytes) = match mma {
            Some(_) if sm >= 80 && most > 128 => {
                let backward = 2 * tile + handed_over;
                (256, 2 * TILE, [2 * tile, backward, backward + 2 * 16 * 12])
            }
            Some(_) if small => (128, TILE, [2 * tile, 2 * tile, 2 * tile + 2 * 16 * 12]),
            Some(_) if sm >= 80 => (128, 2 * TILE, [4 * tile, 2 * tile, 3 * tile + 2 * 32 * 12]),
            Some(_) => (128, TILE, [tile, 2 * tile, 2 * tile + 2 * 16 * 12]),
            None => (256, TILE, [0; 3]),
        };
        let samples = rows / heads.seq_len;
        if heads.count.max(samples) > usize::from(u16::MAX) {
            return Err(format!("{} heads of {samples} samples; at most 65535", heads.count));
        }
        let sizes = Self {
            heads,
            scores,
            starts,
            head_dim,
            samples,
            queries,
            kernels,
            block,
            shared_bytes,
        };
        Ok(sizes)
    }

    fn launch(&self, kernel: usize, args: Args) -> Launch {
        // The backward kernel by keys processes the heads that share keys one after another.
        let heads = if kernel == 2 { self.heads.kv_count } else { self.heads.count };
        let rows = if kernel == 0 { self.queries } else { TILE };
        let grid = [self.heads.seq_len.div_ceil(rows), heads, self.samples];
        let launch = Launch::new(self.kernels[kernel], grid, self.block, args);
        Launch { shared_bytes: self.shared_bytes[kernel], ..launch }
    }

    /// Adds the arguments `HEAD_PARAMETERS` of the prelude.
    fn head(&self, args: Args, dropout: Dropout) -> Args {
        let Heads { count, kv_count, first, total, seq_len } = self.heads;
        let first_sample = dropout.first_row / seq_len as u64;
        let window = self.scores.window_in(seq_len).unwrap_or(seq_len);
        let first_mask_head = first_sample * total as u64 + first as u64;
        args.with(&[count, seq_len, self.head_dim].map(|n| n as u64))
            .float(self.scores.scale)
            .with(&[first_mask_head, total as u64])
            .mask(dropout)
            .with(&[kv_count as u64, self.starts, window as u64])
            .float(or_zero(self.scores.cap))
    }
}

/// Heads, tokens of a sample, elements of a head and tokens, of `out` (B T, H D).
fn sink_sizes(out: Tensor, heads: Heads) -> [u64; 4] {
    let (tokens, width) = out.shape();
    [heads.count, heads.seq_len, width / heads.count, tokens].map(|n| n as u64)
}

impl Launcher<'_> {
    pub(super) fn attention(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        match *op {
            Op::Attention { qkv, out, lse, heads, starts, dropout, scores } => {
                is(lse, Dtype::F32)?;
                let starts = self.at_or_null(starts);
                let shape = AttentionSizes::new(&[out, qkv], heads, scores, starts, sm)?;
                let args = self.args(&[qkv, out, lse]).with(&[values(&[qkv, out])?]);
                let args = shape.head(args, dropout);
                self.launch(shape.launch(0, args));
                Ok(())
            }
            Op::AttentionBackward {
                qkv,
                out,
                lse,
                d_out,
                d_qkv,
                heads,
                starts,
                dropout,
                scores,
            } => {
                is(lse, Dtype::F32)?;
                let (all, starts) = ([out, qkv, d_out, d_qkv], self.at_or_null(starts));
                let shape = AttentionSizes::new(&all, heads, scores, starts, sm)?;
                let types = values(&[qkv, out, d_out, d_qkv])?;
                self.launch_delta(&shape, out, d_out, types);
                let args = self.args(&[qkv, out, lse, d_out, d_qkv]);
                let args = shape.head(args.with(&[self.scratch, types]), dropout);
                self.launch(shape.launch(1, args));
                self.launch(shape.launch(2, args));
                Ok(())
            }
            Op::AttentionSinks { out, lse, sinks, heads } => {
                is(lse, Dtype::F32)?;
                let args = self.args(&[out, lse, sinks]).with(&[values(&[out, sinks])?]);
                let args = args.with(&sink_sizes(out, heads));
                let blocks = (out.shape().0 * heads.count).div_ceil(8);
                self.launch(Launch::new("attention_sinks", [blocks, 1, 1], 256, args));
                Ok(())
            }
            Op::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads } => {
                is(lse, Dtype::F32)?;
                let args = self.args(&[out, lse, d_out, sinks, d_sinks]);
                let args = args.with(&[values(&[out, d_out, sinks, d_sinks])?]);
                let args = args.with(&sink_sizes(out, heads));
                let kernel = "attention_sinks_backward";
                self.launch(Launch::new(kernel, [heads.count, 1, 1], 1024, args));
                Ok(())
            }
            _ => no_kernel(op),
        }
    }

    pub(super) fn cache(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::CachedAttention { q, cache, out, heads, scores, sinks } => {
                let dim = q.len() / heads.count;
                if dim > WIDEST_HEAD {
                    return Err(format!("heads of {dim}; at most {WIDEST_HEAD}"));
                }
                let sizes = [cache.shape().0, dim, heads.group(), heads.kv_count];
                let types = values(&[q, cache, out, sinks.unwrap_or(out)])?;
                let args = self.args(&[q, cache, out]).with(&[self.at_or_null(sinks), types]);
                let args = args.with(&sizes.map(|n| n as u64)).float(scores.scale);
                let args = args.float(or_zero(scores.cap));
                self.launch(Launch::new("cached_attention", [heads.count, 1, 1], 256, args));
            }
            Op::LastColumns { x, y } => {
                let ((rows, of), (_, width)) = (x.shape(), y.shape());
                let sizes = [rows, of, width].map(|n| n as u64);
                let args = self.args(&[x, y]).with(&[values(&[x, y])?]).with(&sizes);
                self.launch(Launch::flat("last_columns", rows * width.div_ceil(RUN), args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Launches the kernel that writes the dot products of the rows of out and d_out to the
    /// scratch. Each warp computes one dot product.
    fn launch_delta(&mut self, shape: &AttentionSizes, out: Tensor, d_out: Tensor, types: u64) {
        let (heads, tokens) = (shape.heads, out.shape().0);
        let sizes = [heads.count, heads.seq_len, shape.head_dim, tokens].map(|n| n as u64);
        let args = self.args(&[out, d_out]).with(&[self.scratch, types]).with(&sizes);
        let blocks = (tokens * heads.count).div_ceil(8);
        self.launch(Launch::new("attention_delta", [blocks, 1, 1], 256, args));
    }
}
