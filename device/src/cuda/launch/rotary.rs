//! Launches of rotary positions.

use super::{Args, Dtype, HeadNorm, Heads, Launch, Launcher, Op, Tensor, is, no_kernel, values};

/// Blocks of q, and of k, whose sums of the gains' gradients are added up.
const PARTS: usize = 256;
/// Heads of a block at a time.
const WARPS: usize = 8;
/// Elements of the longest head.
const LONGEST: usize = 256;

/// Bytes of scratch for the gradients of gains of heads of `dim` elements.
pub(crate) const fn rotary_scratch_bytes(dim: usize) -> u64 {
    (2 * PARTS * dim * 4) as u64
}

impl Launcher<'_> {
    pub(super) fn rotary(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Rotary { qkv, table, heads, norm } => {
                let (rows, shape) = turned(qkv, table, heads, norm)?;
                let args = self.args(&[qkv, table]).with(&self.norm_at(norm));
                let args = with(args.with(&[rows as u64]), shape, norm);
                let units = rows * (heads.count + heads.kv_count);
                let blocks = units.div_ceil(WARPS).min(1 << 16);
                self.launch(Launch::new("rotary", [blocks, 1, 1], 256, args));
            }
            Op::RotaryBackward { d_qkv, table, heads, norm } => {
                let of = norm.map(|(norm, _)| norm);
                let (rows, shape) = turned(d_qkv, table, heads, of)?;
                let args = self.args(&[d_qkv, table]).with(&self.norm_at(of));
                let args = with(args.with(&[self.scratch, rows as u64]), shape, of);
                let Some((_, grads)) = norm else {
                    let units = rows * (heads.count + heads.kv_count);
                    let blocks = units.div_ceil(WARPS).min(1 << 16);
                    self.launch(Launch::new("rotary_backward", [blocks, 1, 1], 256, args));
                    return Ok(());
                };
                self.launch(Launch::new("rotary_backward", [PARTS, 2, 1], 256, args));
                let gains = [grads.q_gain, grads.k_gain];
                let sizes = [values(&gains)?, PARTS as u64, heads.dim(d_qkv.shape().1) as u64];
                let at = gains.map(|gain| (self.at)(gain));
                let args = Args::default().with(&[self.scratch]).with(&at).with(&sizes);
                self.launch(Launch::new("rotary_gains", [2, 1, 1], 256, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Addresses of the gains and of what is kept; null without a norm.
    fn norm_at(&self, norm: Option<HeadNorm>) -> [u64; 3] {
        norm.map_or([0; 3], |n| [n.q_gain, n.k_gain, n.raw].map(|t| (self.at)(t)))
    }
}

/// Types, heads, tokens and elements of a head.
type Shape = [u64; 5];

/// Rows, and what all kernels are told, but epsilon.
fn turned(
    qkv: Tensor,
    table: Tensor,
    heads: Heads,
    norm: Option<HeadNorm>,
) -> Result<(usize, Shape), String> {
    is(table, Dtype::F32)?;
    let (rows, columns) = qkv.shape();
    let dim = heads.dim(columns);
    if dim > LONGEST {
        return Err(format!("heads of {dim}; at most {LONGEST}"));
    }
    let types = match norm {
        Some(norm) => values(&[qkv, norm.q_gain, norm.k_gain, norm.raw])?,
        None => values(&[qkv])?,
    };
    let sizes = [heads.count, heads.kv_count, heads.seq_len, dim].map(|n| n as u64);
    Ok((rows, [types, sizes[0], sizes[1], sizes[2], sizes[3]]))
}

fn with(args: Args, shape: Shape, norm: Option<HeadNorm>) -> Args {
    args.with(&shape).float(norm.map_or(0.0, |norm| norm.epsilon))
}
