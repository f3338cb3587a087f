//! Operations as data. The ranges that an op reads and writes decide its hazards, its bytes, its
//! cost and its trace. Only [`Op::accesses`] names these ranges.

mod access;
mod check;
mod collective;
mod delta;
mod dropout;
mod experts;
mod family;
mod flops;
mod heads;
pub(crate) mod lane;
mod name;
mod product;
mod scoring;
pub(crate) mod task;
mod tolerance;

pub use access::Mode;
pub use delta::{DELTA_CHUNK, DeltaHeads, MOST_TAPS, WIDEST_DELTA_KEY};
pub use dropout::{ColumnShard, Dropout};
pub use experts::{BalanceGradient, ExpertWeights, GroupedForm};
pub use experts::{MOST_EXPERTS, PADDING, expert_sort_scratch};
pub use heads::{HeadNorm, HeadNormGrads, Heads, Scores, WidthNorm};
pub use product::Epilogue;
pub(crate) use scoring::LEAST_SUM;
pub use scoring::{MOST_CHOICES, ScoreRule, SigmoidRule};

pub(crate) use collective::{CollectiveKind, CollectiveOp};
pub(crate) use family::Family;
pub(crate) use product::Product;
use task::{DeviceOp, HostOp};

use crate::Tensor;
use crate::numerics::CountedRange;
use std::sync::Arc;

/// The ranks of a collective.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Group {
    /// Ranks that share a model replica.
    Tp,
    /// Ranks that hold the same part of different replicas.
    Dp,
    /// All ranks.
    World,
}

/// How a collective combines values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reduction {
    /// Sum in rank order, in fp32 (fp64 for F64), rounded once.
    Sum,
    /// Elementwise maximum.
    Max,
}

/// The activation of a gate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Gate {
    /// silu(z) = z / (1 + e^-z).
    Silu,
    /// gelu(z), tanh form.
    Gelu,
    /// g / (1 + e^-(slope g)) with g = min(z, limit). The values of the gate are 1 + up, with up
    /// between -limit and limit (gpt-oss, arXiv 2508.10925, section 2.2).
    ClampedSilu {
        /// Factor in the exponent.
        slope: f32,
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
}

/// The columns of vocabulary-parallel logits that a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VocabShard {
    /// Global number of the first column.
    pub first: usize,
    /// Number of columns of real tokens. The other columns are padding and are ignored.
    pub valid: usize,
}

/// Compute capability of the first GPUs with fp8 matmuls.
pub const FP8_SINCE: u32 = 89;

/// Number of runs into which [`Op::Maxima`] divides a tensor; each block of a GPU reads one run.
pub const MAXIMA: usize = 256;

/// Elements of each run of a tensor of `len` elements; the last runs may be shorter or empty.
pub(crate) const fn run_of_maxima(len: usize) -> usize {
    len.div_ceil(MAXIMA).next_multiple_of(8)
}

/// The operations of lanes. Shapes are (rows, columns); B samples, T tokens each, C hidden.
/// `starts` (rows) I32 is for samples of several documents: the start of each row's document in its
/// sample. Positions count from this start, and a row sees no other document. `None`: a sample is
/// one document.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each variant's formula names its fields")]
pub enum Op {
    /// c (m, n) = (add ? c : 0) + a (m, k) b (k, n) + bias (n); fp32 inside, one rounding. Then the
    /// epilogue.
    Gemm { a: Tensor, b: Tensor, c: Tensor, bias: Option<Tensor>, add: bool, epilogue: Epilogue },
    /// `c (m, n) = scales[0] scales[1] a (m, k) b (k, n) + bias (n)`. The operands are fp8 and lie
    /// along k, so b is a transposed view. At most one operand is E5m2. Each scale is (1) F32. fp32
    /// inside (tensor cores keep fewer bits in parts of a sum), one rounding.
    ScaledGemm { a: Tensor, b: Tensor, c: Tensor, bias: Option<Tensor>, scales: [Tensor; 2] },
    /// maxima ([`MAXIMA`]) F32 = the largest magnitude in each of [`MAXIMA`] runs of x; NaN or
    /// infinity if a value of the run is not finite.
    Maxima { x: Tensor, maxima: Tensor },
    /// scale (1) F32 = [`numerics::fp8_scale`](crate::numerics::fp8_scale) of the largest of
    /// `maxima`; y (m, n) = x (m, n) / scale; `transposed` (n, m) = the transpose of y. Both have
    /// one fp8 format.
    Quantize {
        x: Tensor,
        maxima: Tensor,
        y: Option<Tensor>,
        transposed: Option<Tensor>,
        scale: Tensor,
    },
    /// y (B T, C) = scale times rows of the table (V/tp, C), rounded once. A row is zero if another
    /// rank has its token, or if the token is negative.
    Embedding { tokens: Tensor, table: Tensor, shard: VocabShard, scale: f32, y: Tensor },
    /// d_table += scale times the sums of the rows of d_y by token. `order`: positions sorted by
    /// token (stable).
    EmbeddingBackward {
        tokens: Tensor,
        order: Tensor,
        d_y: Tensor,
        shard: VocabShard,
        scale: f32,
        d_table: Tensor,
    },
    /// x (rows, C) += row (first_row + r) mod T of the table (T, C), minus the row's start.
    AddPositions { x: Tensor, table: Tensor, first_row: usize, starts: Option<Tensor> },
    /// d_table (T, C) = sums of d_y (rows, C) by position; positions without a row become zero.
    PositionsBackward { d_y: Tensor, first_row: usize, starts: Option<Tensor>, d_table: Tensor },
    /// y = (x - mean) / sqrt(variance + epsilon) gain + bias by row; stats (rows, 2) F32 = mean,
    /// 1/deviation.
    LayerNorm { x: Tensor, gain: Tensor, bias: Tensor, y: Tensor, stats: Tensor, epsilon: f32 },
    /// d_x = (add ? d_x : 0) + the gradient with respect to x; overwrites d_gain and d_bias.
    LayerNormBackward {
        x: Tensor,
        gain: Tensor,
        stats: Tensor,
        d_y: Tensor,
        d_x: Tensor,
        add: bool,
        d_gain: Tensor,
        d_bias: Tensor,
    },
    /// y = x / sqrt(mean(x^2) + epsilon) (gain + offset) by row; stats (rows) F32 = 1/root (RMSNorm,
    /// arXiv 1910.07467). `offset` is 0, or 1 if the gains are stored as differences from 1. x and y
    /// may have different storage types.
    RmsNorm { x: Tensor, gain: Tensor, offset: f32, y: Tensor, stats: Tensor, epsilon: f32 },
    /// d_x = (add ? d_x : 0) + the gradient with respect to x; overwrites d_gain. d_x and d_y may
    /// have different storage types.
    RmsNormBackward {
        x: Tensor,
        gain: Tensor,
        offset: f32,
        stats: Tensor,
        d_y: Tensor,
        d_x: Tensor,
        add: bool,
        d_gain: Tensor,
    },
    /// Applies `norm`, if any, to each head of q and k, and rotates the first d <= D elements of the
    /// head by its position, in place (arXiv 2104.09864); d and D are even. With x1 and x2 the halves
    /// of these elements and a = angles of the position: (x1, x2) = (x1 cos a - x2 sin a, x2 cos a +
    /// x1 sin a). `table` (T, d) F32 = cosines of d/2 angles, then their sines. Row r of `qkv` has
    /// position r mod T, minus its start.
    Rotary {
        qkv: Tensor,
        table: Tensor,
        heads: Heads,
        starts: Option<Tensor>,
        norm: Option<HeadNorm>,
    },
    /// Turns d_qkv, the gradient with respect to the rotated q and k, into the gradient with
    /// respect to the inputs of [`Rotary`](Self::Rotary). Overwrites the gradients of gains.
    RotaryBackward {
        d_qkv: Tensor,
        table: Tensor,
        heads: Heads,
        starts: Option<Tensor>,
        norm: Option<(HeadNorm, HeadNormGrads)>,
    },
    /// Copies q and k of qkv (B T, (H + 2 K) D) to raw (B T, (H + K) D). sums (B T, 2) F32 = sums of
    /// squares of q's and of k's columns of this rank.
    WidthNormSums { qkv: Tensor, raw: Tensor, heads: Heads, sums: Tensor },
    /// q and k of qkv (B T, (H + 2 K) D) = raw (B T, (H + K) D) / sqrt(sums / widths + epsilon) gain.
    WidthNorm { qkv: Tensor, raw: Tensor, norm: WidthNorm },
    /// dots (B T, 2) F32 = sums of d_qkv gain raw over q's and over k's columns of this rank.
    WidthNormBackwardSums { d_qkv: Tensor, raw: Tensor, norm: WidthNorm, dots: Tensor },
    /// Replaces the gradients of q and k in d_qkv by the gradients of q and k before the norm. `dots`
    /// (B T, 2) F32 are sums over the columns of all ranks. Overwrites d_gain (1, (H + K) D), summed
    /// over the rows in a fixed order.
    WidthNormBackward { d_qkv: Tensor, raw: Tensor, norm: WidthNorm, dots: Tensor, d_gain: Tensor },
    /// y (rows, F) = gate(z) up, where x (rows, 2 F) = z, then up (arXiv 2002.05202).
    SwiGlu { x: Tensor, y: Tensor, gate: Gate },
    /// Replaces x (rows, 2 F) by its gradient, computed from d (rows, F).
    SwiGluBackward { x: Tensor, d: Tensor, gate: Gate },
    /// y = gelu(x), tanh form.
    Gelu { x: Tensor, y: Tensor },
    /// d = d gelu'(x), in place.
    GeluBackward { x: Tensor, d: Tensor },
    /// y (n) = sums over the rows of x (m, n), in an order that depends on m alone.
    ColumnSum { x: Tensor, y: Tensor },
    /// out (B T, H D) = causal softmax(scores) v with dropout of the weights; lse (B, H, T) F32 = log
    /// of the sums. [`Scores`] says how scores follow from q k', and which keys a query sees.
    Attention {
        qkv: Tensor,
        out: Tensor,
        lse: Tensor,
        heads: Heads,
        starts: Option<Tensor>,
        dropout: Dropout,
        scores: Scores,
    },
    /// d_qkv from d_out. Recomputes the weights from qkv and lse.
    AttentionBackward {
        qkv: Tensor,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_qkv: Tensor,
        heads: Heads,
        starts: Option<Tensor>,
        dropout: Dropout,
        scores: Scores,
    },
    /// Adds a key without a value to the softmax of each head h, with the score `sinks` (H) of the
    /// head (arXiv 2309.17453, section 3.2). out and lse are those of [`Attention`](Self::Attention):
    /// out /= 1 + e^(sink - lse), and lse = ln(e^lse + e^sink), in place.
    AttentionSinks { out: Tensor, lse: Tensor, sinks: Tensor, heads: Heads },
    /// d_sinks (H) = the gradient with respect to the sinks: minus the sum over the rows of
    /// e^(sink - lse) times the product of a head's d_out and out, in an order that depends on the
    /// shape alone. out and lse are those of [`AttentionSinks`](Self::AttentionSinks).
    AttentionSinksBackward {
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        sinks: Tensor,
        d_sinks: Tensor,
        heads: Heads,
    },
    /// out (1, H D) = softmax(scores) v of one new token with queries q (1, H D). Each row of the KV
    /// cache `cache` (n, 2 K D) has the keys and then the values of K heads of one token. The last
    /// row is the new token's. The token sees all rows: with a window, `cache` has the rows of the
    /// window alone, and `scores` has no window. `sinks` (H): see
    /// [`AttentionSinks`](Self::AttentionSinks).
    CachedAttention {
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        heads: Heads,
        scores: Scores,
        sinks: Option<Tensor>,
    },
    /// y (n, w) = the last w columns of x (n, m): keys and values for the KV cache.
    LastColumns { x: Tensor, y: Tensor },
    /// y = residual + scale dropout(x + bias).
    BiasDropoutAdd {
        x: Tensor,
        bias: Option<Tensor>,
        residual: Tensor,
        y: Tensor,
        dropout: Dropout,
        scale: f32,
    },
    /// y = scale dropout(x). x and y may be the same. The backward pass is the same op on gradients.
    Dropout { x: Tensor, y: Tensor, dropout: Dropout, scale: f32 },
    /// y (rows, n) = dropout(x), or with `add` y += dropout(x), of the n columns `columns` of a wider
    /// tensor. It drops the elements that dropout of the whole tensor drops.
    ColumnDropout { x: Tensor, y: Tensor, add: bool, dropout: Dropout, columns: ColumnShard },
    /// logits = z, where z = scale logits; with a cap c, logits = c tanh(z / c). In place.
    CapLogits { logits: Tensor, scale: f32, cap: Option<f32> },
    /// y (rows) F32 = maximum over the valid columns of x (rows, V/tp).
    RowMax { x: Tensor, y: Tensor, shard: VocabShard },
    /// sums (2, rows) F32 = [sum of exp(logit - max), logit of the target - max (0 if another rank
    /// has it)].
    CrossEntropyStats {
        logits: Tensor,
        max: Tensor,
        targets: Tensor,
        shard: VocabShard,
        sums: Tensor,
    },
    /// loss (1) F64 = sum over rows of log(sum of exp) - target logit. Rows with a negative target
    /// count 0.
    CrossEntropyLoss { sums: Tensor, targets: Tensor, loss: Tensor },
    /// Replaces logits by their gradient: (softmax - one-hot) times `scale` (1, F64, on the device)
    /// times factor; 0 in padded columns and in rows with a negative target. With a cap c, the logits
    /// are those that [`CapLogits`](Self::CapLogits) capped: the gradient is also multiplied by the
    /// slope 1 - (logit / c)^2. The scale of `CapLogits` belongs into `factor`.
    CrossEntropyBackward {
        logits: Tensor,
        max: Tensor,
        sums: Tensor,
        targets: Tensor,
        shard: VocabShard,
        scale: Tensor,
        factor: f32,
        cap: Option<f32>,
    },
    /// weights (N, k) F32 and choices (N, k) I32 = the k experts that `scoring` chooses by row from
    /// logits (N, E) F32, in descending order of what decides. Of equal numbers the lower index comes
    /// first, and NaN counts as -inf. All in fp32.
    Route { logits: Tensor, weights: Tensor, choices: Tensor, scoring: ScoreRule },
    /// Replaces logits (N, E) F32 by the gradient with respect to them, from d_weights (N, k) F32.
    /// `balance` is added to the gradient with respect to p of every row that a document holds; it
    /// needs [`ScoreRule::Softmax`].
    RouteBackward {
        logits: Tensor,
        choices: Tensor,
        d_weights: Tensor,
        scoring: ScoreRule,
        balance: Option<BalanceGradient>,
    },
    /// Stable counting sort of the R = N k pairs of a token and a slot by expert. offsets (E + 1) I32:
    /// the first row of each expert, then R. order (R) I32: the pair token k + slot of each row; rows
    /// of an expert stand in the order of their pairs. places (N, k) I32: the row of each pair.
    /// `scratch` I32 (at least [`expert_sort_scratch`]) has arbitrary values afterwards.
    SortByExpert {
        choices: Tensor,
        offsets: Tensor,
        order: Tensor,
        places: Tensor,
        scratch: Tensor,
    },
    /// y (R, C) = rows of x (N, C): row r is row order(r) / k of x.
    GatherRows { x: Tensor, order: Tensor, y: Tensor },
    /// A matmul for each expert e, of its rows offsets(e) to offsets(e + 1), with its matrix W_e
    /// (n, k). fp32 inside, one rounding; a sum does not depend on the place of the expert's rows.
    /// `Forward`: c (R, n) = a (R, k) W_e'. `InputGradient`: c (R, k) = a (R, n) W_e.
    /// `WeightGradient`: W_e = a' b over the rows of the expert, with a (R, n) and b (R, k); without
    /// rows it is 0. `add`: the result is added to the old values instead.
    GroupedGemm {
        form: GroupedForm,
        a: Tensor,
        b: Option<Tensor>,
        c: Option<Tensor>,
        experts: ExpertWeights,
        offsets: Tensor,
        add: bool,
    },
    /// Row r of x (R, n) += row e of `biases` (E, n), where e is the expert of row r.
    AddExpertBiases { x: Tensor, biases: Tensor, offsets: Tensor },
    /// Row e of d_biases (E, n) = sum over the rows of d_y (R, n) of expert e, in an order that
    /// depends on their number alone; 0 without rows.
    ExpertBiasesBackward { d_y: Tensor, offsets: Tensor, d_biases: Tensor },
    /// out (N, C) = sum over the slots of a token, in order and in fp32, of weights (N, k) F32 times
    /// rows places (N, k) of y (R, C). Without weights the factors are 1.
    CombineExperts { y: Tensor, places: Tensor, weights: Option<Tensor>, out: Tensor },
    /// Row places(t, j) of d_y (R, C) = weights(t, j) d_out(t); d_weights (N, k) F32 = products of
    /// d_out(t) and row places(t, j) of y over the C columns of this rank. d_y may be y.
    CombineExpertsBackward {
        d_out: Tensor,
        y: Tensor,
        places: Tensor,
        weights: Tensor,
        d_y: Tensor,
        d_weights: Tensor,
    },
    /// load (E) F64 += number of rows of each expert; shares (E) F64 += sums of p by expert in fp64,
    /// in the order of the rows of logits (N, E) F32. Tokens whose target (N) I32 is [`PADDING`] count
    /// 0.
    ExpertLoad {
        offsets: Tensor,
        order: Tensor,
        targets: Tensor,
        logits: Tensor,
        load: Tensor,
        shares: Option<Tensor>,
    },
    /// L = `scale` times the sum over the rows of sum(c s) / n^2, in fp64, where c is a row of
    /// counts (rows, E) F64, s a row of shares (rows, E) F64, and n = sum(c) / `per_token` the tokens
    /// of a row. value (1) F64 += L; grads (rows, E) F32 = `factor` times the gradient of L with
    /// respect to s, `factor scale c / n^2`. A row without tokens counts 0.
    BalanceLoss {
        counts: Tensor,
        shares: Tensor,
        value: Tensor,
        grads: Tensor,
        per_token: usize,
        scale: f64,
        factor: f64,
    },
    /// y (B T, C) = silu(c): row t of c is the sum over j of column j of `weight` (C, n) times row
    /// t - n + 1 + j of x. Rows before the row's document count 0.
    Convolution { x: Tensor, weight: Tensor, y: Tensor, seq_len: usize, starts: Option<Tensor> },
    /// The gradients of [`Convolution`](Self::Convolution). Sums of `d_weight` have a fixed order.
    ConvolutionBackward {
        x: Tensor,
        weight: Tensor,
        d_y: Tensor,
        d_x: Tensor,
        d_weight: Tensor,
        seq_len: usize,
        starts: Option<Tensor>,
    },
    /// gates (B T, 2 H) F32: in the first H columns 1 / (1 + e^-x) of the first of x (B T, 2 H), in the
    /// others -e^decay ln(1 + e^(x + bias)) of the others, with `decay` (H) and `bias` (H).
    DeltaGates { x: Tensor, decay: Tensor, bias: Tensor, gates: Tensor },
    /// The gradients of [`DeltaGates`](Self::DeltaGates). `d_gates` (B T, 2 H) F32.
    DeltaGatesBackward {
        x: Tensor,
        decay: Tensor,
        bias: Tensor,
        d_gates: Tensor,
        d_x: Tensor,
        d_decay: Tensor,
        d_bias: Tensor,
    },
    /// The gated delta rule (arXiv 2412.06464) of rows with the gates b and g: a head's state S (d, e),
    /// at the start of a document 0 or that of `initial`, becomes e^g S + b k (v - e^g S' k)', and a row of `out` (B T, H e)
    /// is S' q. Here q and k are q / sqrt(sum(q^2) + 1e-6) / sqrt(d) and k / sqrt(sum(k^2) + 1e-6) of
    /// `qkv`. Computed in chunks in fp32. `states` (B places, H d e) F32: the state before each chunk
    /// that continues a document, and 0 in other places ([`DeltaHeads::places`]). `initial` (B, H d e)
    /// F32: the states before the first row of each sample; there is no gradient of them.
    DeltaRule {
        qkv: Tensor,
        gates: Tensor,
        out: Tensor,
        states: Tensor,
        initial: Option<Tensor>,
        heads: DeltaHeads,
        starts: Option<Tensor>,
    },
    /// d_qkv and d_gates (B T, 2 H) F32 from d_out. Computes everything but `states` again.
    DeltaRuleBackward {
        qkv: Tensor,
        gates: Tensor,
        states: Tensor,
        d_out: Tensor,
        d_qkv: Tensor,
        d_gates: Tensor,
        heads: DeltaHeads,
        starts: Option<Tensor>,
    },
    /// y = x / sqrt(mean(x^2) + epsilon) gain silu(gate). The mean is over each run of D columns, with
    /// `gain` (D).
    GatedNorm { x: Tensor, gate: Tensor, gain: Tensor, y: Tensor, epsilon: f32 },
    /// The gradients of [`GatedNorm`](Self::GatedNorm). Sums of `d_gain` have a fixed order.
    GatedNormBackward {
        x: Tensor,
        gate: Tensor,
        gain: Tensor,
        d_y: Tensor,
        d_x: Tensor,
        d_gate: Tensor,
        d_gain: Tensor,
        epsilon: f32,
    },
    /// y = x / (1 + e^-gate).
    SigmoidGate { x: Tensor, gate: Tensor, y: Tensor },
    /// Replaces d, the gradient with respect to y, by the gradient with respect to x. d_gate is the
    /// gradient with respect to the gate.
    SigmoidGateBackward { x: Tensor, gate: Tensor, d: Tensor, d_gate: Tensor },
    /// into += x.
    Add { x: Tensor, into: Tensor },
    /// y = x in y's storage type.
    Cast { x: Tensor, y: Tensor },
    /// x = 0.
    Zero { x: Tensor },
    /// partials (chunks) F64 = sum of squares, in fp64, of each run of `chunk` elements of x. Only
    /// the elements in `counted` count. A sum is not finite if one of its elements is not finite.
    ChunkSquares { x: Tensor, partials: Tensor, chunk: usize, counted: CountedRange },
    /// Copies between the arenas, or inside the device.
    Copy { src: Tensor, dst: Tensor },
    /// Every rank's x becomes the combination of all x.
    AllReduce { x: Tensor, group: Group, reduce: Reduction },
    /// In place: rank i gets the sum in `x.shard(i, n)`; the other parts are undefined.
    ReduceScatter { x: Tensor, group: Group },
    /// In place: rank i contributes `x.shard(i, n)`, and all ranks get all parts.
    AllGather { x: Tensor, group: Group },
    /// Every rank's x becomes the x of the group's rank `root`.
    Broadcast { x: Tensor, group: Group, root: usize },
    /// Work for the host's CPUs, written outside this crate. `arg` changes from step to step.
    Host { task: Arc<HostOp>, arg: u64 },
    /// Work for a GPU, written outside this crate.
    Task { task: Arc<DeviceOp> },
}
