//! Launches of rotary positions.

use super::{
    Args, Dtype, HeadNorm, Heads, Launch, Launcher, Op, Tensor, added, is, no_kernel, values,
};

/// Threads of a block.
const THREADS: usize = 256;
/// Elements of the longest head.
const LONGEST: usize = 256;
/// Elements of a head per lane of a warp: 8 pairs.
const OF_A_LANE: usize = 16;
/// Largest number of blocks that write partial sums of the gains' gradients.
const MOST_PARTS: usize = 1024;
/// Least number of heads per team, since writing a block's sums costs as much as some heads.
const IN_TURN: usize = 4;

/// Bytes of scratch for the gradients of gains of heads of `dim` elements.
pub(crate) const fn rotary_scratch_bytes(dim: usize) -> u64 {
    (MOST_PARTS * dim * 4) as u64
}

impl Launcher<'_> {
    pub(super) fn rotary(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Rotary { qkv, table, heads, starts, norm } => {
                let starts = self.at_or_null(starts);
                let params = RotaryParams::new(qkv, table, heads, starts, norm)?;
                self.turn(qkv, table, &params, norm, false);
            }
            Op::RotaryBackward { d_qkv, table, heads, starts, norm: None } => {
                let starts = self.at_or_null(starts);
                let params = RotaryParams::new(d_qkv, table, heads, starts, None)?;
                self.turn(d_qkv, table, &params, None, true);
            }
            Op::RotaryBackward { d_qkv, table, heads, starts, norm: Some((norm, grads)) } => {
                let starts = self.at_or_null(starts);
                let params = RotaryParams::new(d_qkv, table, heads, starts, Some(norm))?;
                let (each, [of_q, of_k]) = params.parts();
                let args = self.args(&[d_qkv, table, norm.q_gain, norm.k_gain, norm.raw]);
                let args = args.with(&[self.scratch, of_q as u64, each as u64]);
                let grid = [of_q + of_k, 1, 1];
                let launch =
                    Launch::new("rotary_backward", grid, THREADS as u32, params.with(args));
                self.launch(launch);
                let gains = [grads.q_gain, grads.k_gain];
                let sizes = [of_q, of_q + of_k, params.dim].map(|n| n as u64);
                let args = Args::default().with(&[self.scratch]);
                let args = args.with(&gains.map(|gain| (self.at)(gain)));
                let args = args.with(&[values(&gains)?]).with(&sizes);
                let grid = [params.dim.div_ceil(32), 2, 1];
                self.launch(Launch::new("rotary_gains", grid, 1024, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    fn turn(
        &mut self,
        x: Tensor,
        table: Tensor,
        params: &RotaryParams,
        norm: Option<HeadNorm>,
        back: bool,
    ) {
        // The addresses are null without a norm.
        let of_norm = norm.map_or([0; 3], |n| [n.q_gain, n.k_gain, n.raw].map(|t| (self.at)(t)));
        let args = self.args(&[x, table]).with(&of_norm).with(&[u64::from(back)]);
        let blocks = params.heads().div_ceil(params.teams());
        self.launch(Launch::new("rotary", [blocks, 1, 1], THREADS as u32, params.with(args)));
    }
}

/// Parameters of all rotary kernels.
struct RotaryParams {
    types: u64,
    rows: usize,
    heads: Heads,
    /// Address of the documents' starts, or 0 without documents.
    starts: u64,
    dim: usize,
    /// Elements of a head that turn.
    turned: usize,
    epsilon: f32,
    /// Offset of the gains.
    offset: f32,
}

impl RotaryParams {
    fn new(
        qkv: Tensor,
        table: Tensor,
        heads: Heads,
        starts: u64,
        norm: Option<HeadNorm>,
    ) -> Result<Self, String> {
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
        let (epsilon, offset) = norm.map_or((0.0, 0.0), |n| (n.epsilon, n.offset));
        let turned = heads.turned(table);
        let params = Self { types, rows, heads, starts, dim, turned, epsilon, offset };
        // Kernels count heads in 32 bits.
        if params.heads() > i32::MAX as usize {
            let most = i32::MAX;
            return Err(format!("{} heads of q and k in all rows; at most {most}", params.heads()));
        }
        Ok(params)
    }

    /// Number of heads of q and k in all rows.
    const fn heads(&self) -> usize {
        self.rows * (self.heads.count + self.heads.kv_count)
    }

    /// Number of lanes that share a head. A lane has pairs that turn, or other pairs.
    const fn lanes(&self) -> usize {
        let others = (self.dim - self.turned).div_ceil(OF_A_LANE);
        (self.turned.div_ceil(OF_A_LANE) + others).next_power_of_two()
    }

    /// Number of heads that a block processes at a time.
    const fn teams(&self) -> usize {
        THREADS / self.lanes()
    }

    /// Heads per block, and the number of blocks for q and for k: at most [`MOST_PARTS`].
    fn parts(&self) -> (usize, [usize; 2]) {
        let in_turn = self.heads().div_ceil(self.teams() * (MOST_PARTS - 2)).max(IN_TURN);
        let each = self.teams() * in_turn;
        (each, [self.heads.count, self.heads.kv_count].map(|n| (self.rows * n).div_ceil(each)))
    }

    /// Adds the arguments `TURNED_PARAMETERS` of rotary.cu.
    fn with(&self, args: Args) -> Args {
        let Heads { count, kv_count, seq_len, .. } = self.heads;
        let sizes = [self.rows, count, kv_count, seq_len, self.dim, self.turned, self.lanes()];
        args.with(&[self.types])
            .with(&sizes.map(|n| n as u64))
            .float(self.epsilon)
            .float(added(self.offset))
            .with(&[self.starts])
    }
}
