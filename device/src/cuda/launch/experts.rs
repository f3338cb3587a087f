//! Launches of mixture of experts.

use super::{Args, Dtype, Launch, Launcher, Op, Tensor, is, no_kernel, values};
use crate::op::{ExpertWeights, GroupedForm, ScoreRule};

/// Rows of logits of a block of the router's kernels: one for each warp.
const ROUTED: usize = 4;

/// Rows of logits that a block of `expert_shares` reads at a time: one for each warp.
const SHARED_ROWS: usize = 8;
/// Largest number of blocks of `expert_shares`.
const SHARE_BLOCKS: usize = 128;

/// Smallest number of threads, and largest number of blocks, of the kernels of the sort. Each block
/// reads the counts of all blocks.
const SORT_THREADS: usize = 128;
const SORT_BLOCKS: usize = 128;

/// Threads of the only block of `balance_loss`, and of a block of `expert_load`. The shared memory of
/// both kernels has room for the sums of this number of threads.
const BALANCE_THREADS: u32 = 256;
const LOAD_THREADS: u32 = 256;

/// Largest number of blocks by the second or third dimension of a grid.
const MOST_ACROSS: usize = u16::MAX as usize;

/// The kernels of a grouped matmul, of one kind of GPUs and types.
#[derive(Clone, Copy)]
struct GroupedKernels {
    /// By form: forward, input gradient, weight gradient.
    names: [&'static str; 3],
    /// Rows and columns of a block's square.
    side: usize,
    block: u32,
    /// Bytes of dynamic shared memory, by form: two slabs of each operand.
    shared_bytes: [u32; 3],
}

/// Bytes of two slabs of 32 terms of two operands of 128 rows. `by_terms`: number of operands whose
/// slabs have a row for each term. A row has 8 elements more than it needs.
const fn slab_bytes(by_terms: u32) -> u32 {
    2 * 2 * (by_terms * 32 * (128 + 8) + (2 - by_terms) * 128 * (32 + 8))
}

/// Kernels on tensor cores, from compute capability 8.0 on.
const AMPERE: GroupedKernels = GroupedKernels {
    names: ["grouped_mma_forward", "grouped_mma_input", "grouped_mma_weight"],
    side: 128,
    block: 128,
    shared_bytes: [slab_bytes(0), slab_bytes(1), slab_bytes(2)],
};

/// Kernels on tensor cores of compute capabilities 7.0 and 7.2, for f16.
const VOLTA: GroupedKernels = GroupedKernels {
    names: ["grouped_volta_forward", "grouped_volta_input", "grouped_volta_weight"],
    shared_bytes: [slab_bytes(0), slab_bytes(1), slab_bytes(1)],
    ..AMPERE
};

/// Kernels in fp32 arithmetic.
const PLAIN: GroupedKernels = GroupedKernels {
    names: ["grouped_forward", "grouped_input", "grouped_weight"],
    side: 64,
    block: 256,
    shared_bytes: [0; 3],
};

/// The kernels of a compute capability for operands a and b of these types.
fn kernels_for(sm: u32, a: Dtype, b: Dtype) -> GroupedKernels {
    match (sm, a) {
        (80.., Dtype::F16 | Dtype::Bf16) if a == b => AMPERE,
        (70..=72, Dtype::F16) if a == b => VOLTA,
        _ => PLAIN,
    }
}

/// Bytes of scratch for the sums of the experts' shares.
pub(crate) const fn shares_scratch_bytes(rows: usize, experts: usize) -> u64 {
    (share_blocks(rows) * experts * 8) as u64
}

/// Number of blocks that sum the experts' shares over rows.
const fn share_blocks(rows: usize) -> usize {
    let blocks = rows.div_ceil(SHARED_ROWS);
    if blocks < SHARE_BLOCKS { blocks } else { SHARE_BLOCKS }
}

impl Launcher<'_> {
    pub(super) fn experts(&mut self, op: &Op, sm: u32) -> Result<(), String> {
        match *op {
            Op::Route { logits, weights, choices, scoring } => {
                is(weights, Dtype::F32)?;
                let args = self.args(&[logits, weights, choices]);
                match scoring {
                    ScoreRule::Softmax { normalize } => {
                        self.by_router("route", logits, choices, args, normalize)?;
                    }
                    ScoreRule::Sigmoid(of) => {
                        is(of.correction, Dtype::F32)?;
                        let groups = [of.groups as u64, of.kept_groups as u64];
                        let args = args.with(&[(self.at)(of.correction)]).with(&groups);
                        let (kernel, args) = ("route_sigmoid", args.float(of.scale));
                        self.by_router(kernel, logits, choices, args, of.normalize)?;
                    }
                }
            }
            Op::RouteBackward {
                logits,
                choices,
                d_weights,
                scoring: ScoreRule::Sigmoid(of),
                balance: None,
            } => {
                is(d_weights, Dtype::F32)?;
                let args = self.args(&[logits, choices, d_weights]).float(of.scale);
                let kernel = "route_sigmoid_backward";
                self.by_router(kernel, logits, choices, args, of.normalize)?;
            }
            Op::RouteBackward {
                logits,
                choices,
                d_weights,
                scoring: ScoreRule::Softmax { normalize },
                balance,
            } => {
                is(d_weights, Dtype::F32)?;
                let of_experts = balance.map(|balance| balance.of_experts);
                let targets = balance.map(|balance| balance.targets);
                of_experts.map_or(Ok(()), |t| is(t, Dtype::F32))?;
                targets.map_or(Ok(()), |t| is(t, Dtype::I32))?;
                let args = self.args(&[logits, choices, d_weights]);
                let args = args.with(&[self.at_or_null(of_experts), self.at_or_null(targets)]);
                self.by_router("route_backward", logits, choices, args, normalize)?;
            }
            Op::SortByExpert { choices, offsets, order, places, scratch } => {
                let all = [choices, offsets, order, places, scratch];
                all.into_iter().try_for_each(|t| is(t, Dtype::I32))?;
                self.sort_by_expert(choices, offsets, order, places, scratch)?;
            }
            Op::GatherRows { x, order, y } => {
                is(order, Dtype::I32)?;
                let (rows, cols) = y.shape();
                let k = per_token(rows, x.shape().0)?;
                let args = self.args(&[x, order, y]).with(&[values(&[x, y])?, k as u64]);
                let args = args.with(&[rows as u64, cols as u64]);
                self.launch(Launch::by_rows("gather_rows", rows, cols, 256, args));
            }
            Op::GroupedGemm { form, a, b, c, experts, offsets, add } => {
                is(offsets, Dtype::I32)?;
                let (index, b, c) = match (form, b, c) {
                    (GroupedForm::Forward, None, Some(c)) => (0, experts.all, c),
                    (GroupedForm::InputGradient, None, Some(c)) => (1, experts.all, c),
                    (GroupedForm::WeightGradient, Some(b), None) => (2, b, experts.all),
                    _ => return Err(format!("operands that are not those of {form:?}")),
                };
                self.grouped(index, [a, b, c], experts, offsets, add, sm)?;
            }
            Op::AddExpertBiases { x, biases, offsets } => {
                is(offsets, Dtype::I32)?;
                let (rows, cols) = x.shape();
                let args = self.args(&[x, biases, offsets]).with(&[values(&[x, biases])?]);
                let args = args.with(&[biases.shape().0, rows, cols].map(|n| n as u64));
                self.launch(Launch::by_rows("add_expert_biases", rows, cols, 256, args));
            }
            Op::ExpertBiasesBackward { d_y, offsets, d_biases } => {
                is(offsets, Dtype::I32)?;
                let (experts, cols) = d_biases.shape();
                let args = self.args(&[d_y, offsets, d_biases]);
                let args = args.with(&[values(&[d_y, d_biases])?, cols as u64]);
                let grid = [cols.div_ceil(32), experts, 1];
                self.launch(Launch::new("expert_biases_backward", grid, 1024, args));
            }
            Op::CombineExperts { y, places, weights, out } => {
                is(places, Dtype::I32)?;
                weights.map_or(Ok(()), |weights| is(weights, Dtype::F32))?;
                let (rows, cols) = out.shape();
                let k = places.shape().1;
                let args = self.args(&[y, places]);
                let args = args.with(&[self.at_or_null(weights), (self.at)(out)]);
                let args = args.with(&[values(&[y, out])?, k as u64, rows as u64, cols as u64]);
                self.launch(Launch::by_rows("combine_experts", rows, cols, 256, args));
            }
            Op::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights } => {
                is(places, Dtype::I32)?;
                [weights, d_weights].into_iter().try_for_each(|t| is(t, Dtype::F32))?;
                let (rows, cols) = d_out.shape();
                let k = places.shape().1;
                let args = self.args(&[d_out, y, places, weights, d_y, d_weights]);
                let args = args.with(&[values(&[d_out, y, d_y])?, k as u64]);
                let args = args.with(&[rows as u64, cols as u64]);
                self.launch(Launch::by_rows("combine_experts_backward", rows, cols, 256, args));
            }
            Op::ExpertLoad { offsets, order, targets, logits, load, shares } => {
                [offsets, order, targets].into_iter().try_for_each(|t| is(t, Dtype::I32))?;
                is(load, Dtype::F64)?;
                let k = per_token(order.len(), targets.len())?;
                let args = self.args(&[offsets, order, targets, load]).with(&[k as u64]);
                self.launch(Launch::new("expert_load", [load.len(), 1, 1], LOAD_THREADS, args));
                if let Some(shares) = shares {
                    self.expert_shares(logits, targets, shares)?;
                }
            }
            Op::BalanceLoss { counts, shares, value, grads, per_token, scale, factor } => {
                [counts, shares, value].into_iter().try_for_each(|t| is(t, Dtype::F64))?;
                is(grads, Dtype::F32)?;
                let (rows, experts) = counts.shape();
                let args = self.args(&[counts, shares, value, grads]);
                let args = args.with(&[rows as u64, experts as u64, per_token as u64]);
                let args = args.with(&[scale.to_bits(), factor.to_bits()]);
                self.launch(Launch::new("balance_loss", [1, 1, 1], BALANCE_THREADS, args));
            }
            _ => return no_kernel(op),
        }
        Ok(())
    }

    /// Launches a kernel that has a warp for each row of `logits` (rows, experts). `args`: those before
    /// the sizes.
    fn by_router(
        &mut self,
        kernel: &'static str,
        logits: Tensor,
        choices: Tensor,
        args: Args,
        normalize: bool,
    ) -> Result<(), String> {
        is(logits, Dtype::F32)?;
        is(choices, Dtype::I32)?;
        let ((rows, experts), k) = (logits.shape(), choices.shape().1);
        let args = args.with(&[experts as u64, k as u64, u64::from(normalize), rows as u64]);
        let launch = Launch::new(kernel, [rows.div_ceil(ROUTED), 1, 1], 32 * ROUTED as u32, args);
        self.launch(Launch { shared_bytes: (4 * ROUTED * experts) as u32, ..launch });
        Ok(())
    }

    fn sort_by_expert(
        &mut self,
        choices: Tensor,
        offsets: Tensor,
        order: Tensor,
        places: Tensor,
        scratch: Tensor,
    ) -> Result<(), String> {
        let (pairs, experts) = (choices.len(), offsets.len().saturating_sub(1));
        // The scratch has counts for more blocks, if there are many pairs.
        let blocks = (scratch.len() / experts.max(1)).min(SORT_BLOCKS);
        if blocks == 0 {
            return Err(format!("{} counts for {experts} experts", scratch.len()));
        }
        let sizes = [pairs, pairs.div_ceil(blocks), experts].map(|n| n as u64);
        // A thread for each expert, and enough of them to read the choices.
        let threads = experts.next_multiple_of(32).max(SORT_THREADS) as u32;
        let args = self.args(&[choices, scratch]).with(&sizes);
        self.launch(Launch::new("expert_counts", [blocks, 1, 1], threads, args));
        let args = self.args(&[choices, scratch, offsets, order, places]).with(&sizes);
        self.launch(Launch::new("expert_rows", [blocks, 1, 1], threads, args));
        Ok(())
    }

    /// Launches a grouped matmul. `form`: its index in [`GroupedKernels::names`].
    fn grouped(
        &mut self,
        form: usize,
        [a, b, c]: [Tensor; 3],
        experts: ExpertWeights,
        offsets: Tensor,
        add: bool,
        sm: u32,
    ) -> Result<(), String> {
        let ExpertWeights { shape: (n, k), count, stride, .. } = experts;
        let types = values(&[a, b, c])?;
        let GroupedKernels { names, side, block, shared_bytes } =
            kernels_for(sm, a.dtype(), b.dtype());
        // Each expert may have one tile of rows that is not full, and the kernels count one more for
        // it in any case.
        let row_tiles = a.shape().0 / side + count;
        let grid = match form {
            0 => [n.div_ceil(side), row_tiles, 1],
            1 => [k.div_ceil(side), row_tiles, 1],
            _ => [k.div_ceil(side), n.div_ceil(side), count],
        };
        if grid[1] > MOST_ACROSS {
            let tiles = grid[1];
            return Err(format!("{tiles} tiles of {side} rows; a grid has at most {MOST_ACROSS}"));
        }
        let args = self.args(&[a, b, c, offsets]).with(&[types, u64::from(add), count as u64]);
        let args = args.with(&[stride as u64, n as u64, k as u64]);
        let launch = Launch::new(names[form], grid, block, args);
        self.launch(Launch { shared_bytes: shared_bytes[form], ..launch });
        Ok(())
    }

    fn expert_shares(
        &mut self,
        logits: Tensor,
        targets: Tensor,
        shares: Tensor,
    ) -> Result<(), String> {
        is(logits, Dtype::F32)?;
        is(shares, Dtype::F64)?;
        let (rows, experts) = logits.shape();
        let blocks = share_blocks(rows);
        let args = self.args(&[logits, targets]);
        let args = args.with(&[self.scratch, experts as u64, rows as u64]);
        let launch = Launch::new("expert_shares", [blocks, 1, 1], 32 * SHARED_ROWS as u32, args);
        self.launch(Launch { shared_bytes: (4 * SHARED_ROWS * experts) as u32, ..launch });
        let args = Args::default().with(&[self.scratch, (self.at)(shares)]);
        let args = args.with(&[blocks as u64, experts as u64]);
        self.launch(Launch::flat("add_expert_shares", experts, args));
        Ok(())
    }
}

/// Number of choices of a token, of `rows` rows of `tokens` tokens.
fn per_token(rows: usize, tokens: usize) -> Result<usize, String> {
    if tokens == 0 || !rows.is_multiple_of(tokens) {
        return Err(format!("{rows} rows of {tokens} tokens"));
    }
    Ok(rows / tokens)
}
