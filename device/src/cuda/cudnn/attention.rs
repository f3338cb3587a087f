//! Attention as a graph of cuDNN: softmax(scale q k' + causal mask) v, and its gradients
//! (FlashAttention-2, arXiv 2307.08691). The operations and their order are those that the
//! library's fused kernels recognise ("cuDNN backend", section "Supported graph patterns").

use super::{Data, ExecutionPlan, Fold, Graph, Handle, Layout, Mode, Node, Storage};
use crate::cuda::blas::Workspace;
use crate::cuda::driver::Stream;
use crate::op::{Heads, Scores};
use crate::{Dropout, Dtype, Op, Tensor};
use std::collections::HashMap;

/// Bytes to which the address of every head is aligned.
pub(super) const ALIGNMENT: u64 = 16;

/// Elements of the widest head of the library's kernels for both passes.
const WIDEST_HEAD: usize = 128;

/// Compute capabilities where the library's attention is faster than onebox's kernels: measured on
/// sm_90; on sm_100 and sm_103 others measured it.
pub const FASTER_ON: [u32; 3] = [90, 100, 103];

/// Rows to which the library rounds up the matrix of a head's weights, as cuDNN 9.19 does on sm_90.
const ROWS: u64 = 128;

/// Bytes of a plan's workspace beside its arrays.
const OTHER_BYTES: u64 = 4096;

/// The properties of an attention op that decide its plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Shape {
    dtype: Dtype,
    samples: usize,
    heads: usize,
    kv_heads: usize,
    seq_len: usize,
    dim: usize,
}

/// An op of attention that the library can compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionOp {
    shape: Shape,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    /// d_out and d_qkv, of a backward pass.
    gradients: Option<[Tensor; 2]>,
}

impl AttentionOp {
    /// `op` as an op of the library: attention in 16 bits without documents, dropout, window and
    /// cap, with scores divided by the root of a head's elements, on heads of whole 16 bytes.
    pub(crate) fn of(op: &Op) -> Option<Self> {
        let (qkv, out, lse, heads, gradients, scores, plain) = match *op {
            Op::Attention { qkv, out, lse, heads, starts, dropout, scores } => {
                (qkv, out, lse, heads, None, scores, is_plain(starts, dropout))
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
            } => (qkv, out, lse, heads, Some([d_out, d_qkv]), scores, is_plain(starts, dropout)),
            _ => return None,
        };
        let Heads { count, kv_count, seq_len, .. } = heads;
        let (rows, columns) = qkv.shape();
        let dim = heads.dim(columns);
        let plain = plain && scores == Scores::of(dim);
        let dtype = qkv.dtype();
        let gradients_fit = gradients.iter().flatten().all(|t| t.dtype() == dtype);
        let types_fit = out.dtype() == dtype && lse.dtype() == Dtype::F32 && gradients_fit;
        let half = matches!(dtype, Dtype::F16 | Dtype::Bf16);
        let whole = dim.is_multiple_of(8) && dim <= WIDEST_HEAD;
        let samples = rows / seq_len;
        let shape = Shape { dtype, samples, heads: count, kv_heads: kv_count, seq_len, dim };
        (plain && types_fit && half && whole).then_some(Self { shape, qkv, out, lse, gradients })
    }
}

fn is_plain(starts: Option<Tensor>, dropout: Dropout) -> bool {
    starts.is_none() && dropout.p == 0.0
}

/// Most bytes of workspace that attention over `samples` of `seq_len` tokens needs, by heads of
/// queries and of keys, and elements of a head. The backward pass whose bits do not depend on the
/// order of blocks keeps the weights' gradients of all heads in 16 bits until cuDNN 9.25; it sums
/// the gradients of shared keys and values from those of each head.
pub(crate) fn workspace_bytes(
    samples: usize,
    heads: usize,
    kv_heads: usize,
    seq_len: usize,
    dim: usize,
) -> u64 {
    let [all, tokens, dim] = [samples * heads, seq_len, dim].map(|n| n as u64);
    let side = tokens.next_multiple_of(ROWS);
    let weights = all * side * side * 2;
    let shared = if heads == kv_heads { 0 } else { 2 * all * side * dim * 2 };
    weights + shared + all * side * 4 + OTHER_BYTES
}

/// The graph of a pass, with its tensors that are not virtual.
#[derive(Debug)]
struct Pass {
    plan: ExecutionPlan,
    qkv: [Node; 3],
    out: Node,
    lse: Node,
    numbers: Vec<(Node, f32)>,
    backward: Option<BackwardNodes>,
}

#[derive(Clone, Copy, Debug)]
struct BackwardNodes {
    d_out: Node,
    d_qkv: [Node; 3],
    /// Dot products of the rows of out and d_out, F32 (samples, heads, rows, 1), in the workspace.
    deltas: Node,
}

/// The library's attention on a GPU, with a plan for each shape.
#[derive(Debug)]
pub(crate) struct Attention {
    // Declared first, so that they are destroyed before the handle.
    passes: HashMap<(Shape, bool), Pass>,
    handle: Handle,
}

impl Attention {
    /// Opens the library on the bound context of a GPU of compute capability `sm`.
    ///
    /// # Errors
    /// The library is missing, too old, or slower than onebox's own kernels on such a GPU.
    pub(crate) fn new(sm: u32) -> Result<Self, String> {
        if !FASTER_ON.contains(&sm) {
            return Err(format!(
                "`attention: Cudnn` is for GPUs of sm_90, sm_100 and sm_103, and this one is sm_{sm}: no \
                 measurement shows a gain there; set `attention: Own`"
            ));
        }
        super::version().map_err(|why| {
            format!("{why}; install onebox's extra `cuda12` or `cuda13` with pip, or set `attention: Own`")
        })?;
        let handle = Handle::new().map_err(|why| format!("{why}; or set `attention: Own`"))?;
        Ok(Self { passes: HashMap::new(), handle })
    }

    /// Enqueues `op`. `at` gives a tensor's address.
    ///
    /// # Errors
    /// The library has no plan for the shape, or its plan needs more workspace.
    pub(crate) fn run(
        &mut self,
        stream: &Stream,
        op: &AttentionOp,
        at: &dyn Fn(Tensor) -> u64,
        memory: Workspace,
    ) -> Result<(), String> {
        let key = (op.shape, op.gradients.is_some());
        let pass = match self.passes.get(&key) {
            Some(pass) => pass,
            None => {
                let pass = if key.1 {
                    backward(&self.handle, &op.shape)
                } else {
                    forward(&self.handle, &op.shape)
                };
                let pass = pass.map_err(|why| {
                    format!(
                        "cuDNN has no plan for attention of {:?}: {why}; set `attention: Own`",
                        op.shape
                    )
                })?;
                self.passes.entry(key).or_insert(pass)
            }
        };
        let Shape { samples, heads, kv_heads, seq_len, dim, dtype } = op.shape;
        // Parts of a row: heads of q, of k, of v.
        let parts = [0, heads, heads + kv_heads].map(|first| (first * dim) as u64 * dtype.bytes());
        let own = |nodes: [Node; 3], t: Tensor| {
            let start = at(t);
            nodes.into_iter().zip(parts).map(move |(node, part)| (node, start + part))
        };
        let mut tensors: Vec<(Node, u64)> = own(pass.qkv, op.qkv).collect();
        tensors.extend([(pass.out, at(op.out)), (pass.lse, at(op.lse))]);
        let Workspace { address, bytes: room } = memory;
        let mut workspace = address;
        if let (Some(nodes), Some([d_out, d_qkv])) = (pass.backward, op.gradients) {
            tensors.extend(own(nodes.d_qkv, d_qkv));
            tensors.extend([(nodes.d_out, at(d_out)), (nodes.deltas, address)]);
            workspace += ((samples * heads * seq_len) as u64 * 4).next_multiple_of(256);
        }
        if let Some((_, odd)) = tensors.iter().find(|(_, at)| !at.is_multiple_of(ALIGNMENT)) {
            return Err(format!(
                "an address of attention, {odd:#x}, is no multiple of {ALIGNMENT}"
            ));
        }
        tensors.extend(
            pass.numbers.iter().map(|(node, number)| (*node, std::ptr::from_ref(number) as u64)),
        );
        let needed = workspace - address + pass.plan.workspace;
        if needed > room {
            return Err(format!(
                "cuDNN needs {needed} bytes of workspace, {room} are there: set `attention: Own`"
            ));
        }
        pass.plan.run(&self.handle, stream, &tensors, workspace)
    }
}

/// The graph of a pass while it is built. Intermediate results are F32, unless said.
struct Builder {
    graph: Graph,
    shape: Shape,
    data: Data,
    numbers: Vec<(Node, f32)>,
}

impl Builder {
    fn new(shape: &Shape) -> Self {
        let data = if shape.dtype == Dtype::F16 {
            Data::CUDNN_DATA_HALF
        } else {
            Data::CUDNN_DATA_BFLOAT16
        };
        Self { graph: Graph::default(), shape: *shape, data, numbers: Vec::new() }
    }

    /// Layout of `heads` heads within rows of `width` elements.
    fn heads(&self, heads: usize, width: usize) -> Layout {
        let Shape { samples, seq_len, dim, .. } = self.shape;
        let sizes = [samples, heads, seq_len, dim].map(|n| n as i64);
        let strides = [seq_len * width, dim, width, 1].map(|n| n as i64);
        Layout { sizes, strides }
    }

    /// Layout of the scores: a row for each query, a column for each key.
    fn scores(&self) -> Layout {
        let Shape { samples, heads, seq_len, .. } = self.shape;
        Layout::packed([samples, heads, seq_len, seq_len].map(|n| n as i64))
    }

    /// Layout of one number for each query.
    fn rows(&self) -> Layout {
        let Shape { samples, heads, seq_len, .. } = self.shape;
        Layout::packed([samples, heads, seq_len, 1].map(|n| n as i64))
    }

    fn memory(&mut self, layout: Layout) -> Result<Node, String> {
        self.graph.tensor(self.data, layout, Storage::Memory)
    }

    /// q, k and v, or their gradients, with the given layouts of keys and of values.
    fn qkv(
        &mut self,
        keys: fn(Layout) -> Layout,
        values: fn(Layout) -> Layout,
    ) -> Result<[Node; 3], String> {
        let Shape { heads, kv_heads, dim, .. } = self.shape;
        let width = (heads + 2 * kv_heads) * dim;
        let (queries, shared) = (self.heads(heads, width), self.heads(kv_heads, width));
        Ok([self.memory(queries)?, self.memory(keys(shared))?, self.memory(values(shared))?])
    }

    fn number(&mut self, number: f32) -> Result<Node, String> {
        let node = self.graph.tensor(Data::CUDNN_DATA_FLOAT, Layout::ONE, Storage::Value)?;
        self.numbers.push((node, number));
        Ok(node)
    }

    fn intermediate(&mut self, layout: Layout) -> Result<Node, String> {
        self.graph.tensor(Data::CUDNN_DATA_FLOAT, layout, Storage::Virtual)
    }

    fn pointwise(&mut self, mode: Mode, inputs: &[Node], layout: Layout) -> Result<Node, String> {
        let y = self.intermediate(layout)?;
        self.graph.pointwise(mode, Data::CUDNN_DATA_FLOAT, None, inputs, y)?;
        Ok(y)
    }

    fn matmul(&mut self, a: Node, b: Node, layout: Layout) -> Result<Node, String> {
        let c = self.intermediate(layout)?;
        self.graph.matmul(a, b, c)?;
        Ok(c)
    }

    /// The scores, and minus infinity where a key follows its query.
    fn masked(&mut self, scores: Node) -> Result<Node, String> {
        let (layout, least) = (self.scores(), self.number(f32::NEG_INFINITY)?);
        let mut index = |axis| {
            let y = self.graph.tensor(Data::CUDNN_DATA_INT32, layout, Storage::Virtual)?;
            let (mode, float) = (Mode::CUDNN_POINTWISE_GEN_INDEX, Data::CUDNN_DATA_FLOAT);
            self.graph.pointwise(mode, float, Some(axis), &[scores], y)?;
            Ok::<_, String>(y)
        };
        let (row, column) = (index(2)?, index(3)?);
        let seen = self.graph.tensor(Data::CUDNN_DATA_BOOLEAN, layout, Storage::Virtual)?;
        let (mode, boolean) = (Mode::CUDNN_POINTWISE_CMP_GE, Data::CUDNN_DATA_BOOLEAN);
        self.graph.pointwise(mode, boolean, None, &[row, column], seen)?;
        self.pointwise(Mode::CUDNN_POINTWISE_BINARY_SELECT, &[scores, least, seen], layout)
    }

    fn scale(&mut self) -> Result<Node, String> {
        self.number(1.0 / (self.shape.dim as f32).sqrt())
    }
}

fn forward(handle: &Handle, shape: &Shape) -> Result<Pass, String> {
    let mut b = Builder::new(shape);
    let (scores, rows) = (b.scores(), b.rows());
    let qkv = b.qkv(Layout::transposed, |layout| layout)?;
    let out = b.heads(shape.heads, shape.heads * shape.dim);
    let out = b.memory(out)?;
    let lse = b.graph.tensor(Data::CUDNN_DATA_FLOAT, rows, Storage::Memory)?;
    let [q, k, v] = qkv;
    let scale = b.scale()?;
    let products = b.matmul(q, k, scores)?;
    let scaled = b.pointwise(Mode::CUDNN_POINTWISE_MUL, &[products, scale], scores)?;
    let masked = b.masked(scaled)?;
    let largest = b.intermediate(rows)?;
    b.graph.reduce(Fold::CUDNN_REDUCE_TENSOR_MAX, masked, largest)?;
    let moved = b.pointwise(Mode::CUDNN_POINTWISE_SUB, &[masked, largest], scores)?;
    let powers = b.pointwise(Mode::CUDNN_POINTWISE_EXP, &[moved], scores)?;
    let sums = b.intermediate(rows)?;
    b.graph.reduce(Fold::CUDNN_REDUCE_TENSOR_ADD, powers, sums)?;
    let logs = b.pointwise(Mode::CUDNN_POINTWISE_LOG, &[sums], rows)?;
    let float = Data::CUDNN_DATA_FLOAT;
    b.graph.pointwise(Mode::CUDNN_POINTWISE_ADD, float, None, &[largest, logs], lse)?;
    // The matmul takes weights of the type of v.
    let weights = b.graph.tensor(b.data, scores, Storage::Virtual)?;
    b.graph.pointwise(Mode::CUDNN_POINTWISE_DIV, float, None, &[powers, sums], weights)?;
    b.graph.matmul(weights, v, out)?;
    let (plan, numbers) = (b.graph.plan(handle)?, b.numbers);
    Ok(Pass { plan, qkv, out, lse, numbers, backward: None })
}

/// The backward pass. dq is a matmul's result, and no sum in the order in which blocks end, so
/// that its bits are the same in each run.
fn backward(handle: &Handle, shape: &Shape) -> Result<Pass, String> {
    let mut b = Builder::new(shape);
    let (scores, rows) = (b.scores(), b.rows());
    let qkv = b.qkv(Layout::transposed, Layout::transposed)?;
    let d_qkv = b.qkv(|layout| layout, |layout| layout)?;
    let whole = b.heads(shape.heads, shape.heads * shape.dim);
    let (out, d_out) = (b.memory(whole)?, b.memory(whole)?);
    let lse = b.graph.tensor(Data::CUDNN_DATA_FLOAT, rows, Storage::Memory)?;
    let ([q, k, v], [dq, dk, dv]) = (qkv, d_qkv);
    let (scale, one) = (b.scale()?, b.number(1.0)?);
    // deltas = the sums of d_out out over each head's elements.
    let products =
        b.pointwise(Mode::CUDNN_POINTWISE_MUL, &[d_out, out], Layout::packed(whole.sizes))?;
    let sums = b.intermediate(rows)?;
    b.graph.reduce(Fold::CUDNN_REDUCE_TENSOR_ADD, products, sums)?;
    let deltas = b.graph.tensor(Data::CUDNN_DATA_FLOAT, rows, Storage::Memory)?;
    let float = Data::CUDNN_DATA_FLOAT;
    b.graph.pointwise(Mode::CUDNN_POINTWISE_MUL, float, None, &[sums, one], deltas)?;
    // The weights, from the scores and the logarithms of their sums.
    let products = b.matmul(q, k, scores)?;
    let scaled = b.pointwise(Mode::CUDNN_POINTWISE_MUL, &[products, scale], scores)?;
    let logs = b.pointwise(Mode::CUDNN_POINTWISE_SUB, &[scaled, lse], scores)?;
    let masked = b.masked(logs)?;
    let weights = b.pointwise(Mode::CUDNN_POINTWISE_EXP, &[masked], scores)?;
    let by_key = scores.transposed();
    let columns = b.graph.tensor(b.data, by_key, Storage::Virtual)?;
    b.graph.reshape(weights, columns)?;
    shared_gradient(&mut b, columns, d_out, dv)?;
    // Gradients of the scores.
    let d_weights = b.matmul(d_out, v, scores)?;
    let moved = b.pointwise(Mode::CUDNN_POINTWISE_SUB, &[d_weights, deltas], scores)?;
    let d_scores = b.pointwise(Mode::CUDNN_POINTWISE_MUL, &[moved, weights], scores)?;
    let d_scores = b.pointwise(Mode::CUDNN_POINTWISE_MUL, &[d_scores, scale], scores)?;
    let columns = b.graph.tensor(b.data, by_key, Storage::Virtual)?;
    b.graph.reshape(d_scores, columns)?;
    shared_gradient(&mut b, columns, q, dk)?;
    let width = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    let keys = b.heads(shape.kv_heads, width);
    let keys = b.intermediate(keys)?;
    b.graph.reshape(k, keys)?;
    b.graph.matmul(d_scores, keys, dq)?;
    let (plan, numbers) = (b.graph.plan(handle)?, b.numbers);
    let backward = Some(BackwardNodes { d_out, d_qkv, deltas });
    Ok(Pass { plan, qkv, out, lse, numbers, backward })
}

/// gradient = columns rows, summed over the heads of queries that share a head of keys.
fn shared_gradient(
    b: &mut Builder,
    columns: Node,
    rows: Node,
    gradient: Node,
) -> Result<(), String> {
    let Shape { samples, heads, kv_heads, seq_len, dim, .. } = b.shape;
    if heads == kv_heads {
        return b.graph.matmul(columns, rows, gradient);
    }
    let layout = Layout::packed([samples, heads, seq_len, dim].map(|n| n as i64));
    let each = b.graph.tensor(b.data, layout, Storage::Virtual)?;
    b.graph.matmul(columns, rows, each)?;
    b.graph.reduce(Fold::CUDNN_REDUCE_TENSOR_ADD, each, gradient)
}
