//! The gated delta rule in chunks (arXiv 2412.06464, section 3.3): in a chunk of n rows from state S,
//! G = running sum of g, M_ij = e^(G_i - G_j), A = 1 + the part of b_i (k_i k_j) M_ij below the
//! diagonal, A V = b (v - e^G k S), out = e^G q S + (q k' M) V, and S becomes e^(G_n) S +
//! (e^(G_n - G) k)' V. A unit of work is a head, or backward the heads that share keys.

use super::super::documents::Starts;
use super::super::math::{dot, exp, vectorised};
use super::super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use super::cut;
use crate::cpu::gemm::{self, Gemm, Matrix, MatrixMut};
use crate::cpu::workers::{Scratch, Workers, delta_floats};
use crate::op::{DELTA_CHUNK, DeltaHeads, Op};
use crate::{View, ViewMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

mod backward;

/// Rows of a chunk, at most.
const CHUNK: usize = DELTA_CHUNK;
/// Added to the sums of squares of q and k.
const EPSILON: f32 = 1e-6;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::DeltaRule { qkv, gates, out, states, initial, heads, starts } => {
            workers.need(delta_floats(heads))?;
            let (rows, starts) = (qkv.shape().0, Starts::new(m, starts, 0, heads.seq_len)?);
            let (qkv, gates) = (values(m, qkv)?, slice::<f32>(m, gates)?);
            let initial = initial.map(|initial| slice::<f32>(m, initial)).transpose()?;
            let shape = Shape { heads, starts, qkv, gates };
            let results = Mutex::new((values_mut(m, out)?, slice_mut::<f32>(m, states)?));
            let (units, work) = (rows / heads.seq_len * heads.values, rows * heads.state_len());
            workers.split(units, work, (), &|units, (), scratch| {
                for unit in units {
                    let head = Head::new(shape, unit / heads.values, unit % heads.values);
                    forward(head, initial, scratch, &results);
                }
            });
            Ok(())
        }
        Op::DeltaRuleBackward { .. } => backward::run(op, m, workers),
        _ => not_a_kernel(),
    }
}

/// What all heads share.
#[derive(Clone, Copy)]
struct Shape<'a> {
    heads: DeltaHeads,
    starts: Starts<'a>,
    qkv: View<'a>,
    gates: &'a [f32],
}

/// A head of values of a sample.
#[derive(Clone, Copy)]
struct Head<'a> {
    shape: Shape<'a>,
    sample: usize,
    number: usize,
}

/// Rows of a chunk.
#[derive(Clone, Copy)]
struct Chunk {
    /// Position of the first row in the sample.
    first: usize,
    rows: usize,
    /// Whether the chunk is the first of its document.
    is_first: bool,
    /// Whether it is the last one.
    is_last: bool,
}

impl<'a> Head<'a> {
    const fn new(shape: Shape<'a>, sample: usize, number: usize) -> Self {
        Self { shape, sample, number }
    }

    /// The row of a position in the sample.
    const fn row(self, position: usize) -> usize {
        self.sample * self.shape.heads.seq_len + position
    }

    /// The chunk that ends before position `end` of the sample; `None` at its start.
    fn chunk_before(self, end: usize) -> Option<Chunk> {
        let last = end.checked_sub(1)?;
        let document = self.shape.starts.of(self.row(last));
        let first = last - (last - document) % CHUNK;
        let t = self.shape.heads.seq_len;
        let is_last = end == t || self.shape.starts.of(self.row(end)) != document;
        Some(Chunk { first, rows: end - first, is_first: first == document, is_last })
    }

    /// The chunk from position `first` of the sample on; `None` at its end.
    fn chunk_from(self, first: usize) -> Option<Chunk> {
        let (t, starts) = (self.shape.heads.seq_len, self.shape.starts);
        let document = (first < t).then(|| starts.of(self.row(first)))?;
        let most = CHUNK.min(t - first);
        let same = |rows: &usize| starts.of(self.row(first + rows)) == document;
        let rows = (1..most).take_while(same).count() + 1;
        let is_last = first + rows == t || starts.of(self.row(first + rows)) != document;
        Some(Chunk { first, rows, is_first: first == document, is_last })
    }

    /// Index of the head's value at a position in `out`, and in `qkv`.
    const fn at_value(self, position: usize) -> [usize; 2] {
        let DeltaHeads { keys, values, key_dim, value_dim, .. } = self.shape.heads;
        let (row, column) = (self.row(position), self.number * value_dim);
        let columns = self.shape.heads.columns();
        [row * values * value_dim + column, row * columns + 2 * keys * key_dim + column]
    }

    /// Index in `qkv` of the query (0) or the key (1) of the head at a position.
    const fn at_key(self, position: usize, part: usize) -> usize {
        let DeltaHeads { keys, key_dim, .. } = self.shape.heads;
        let head = part * keys + self.number / self.shape.heads.group();
        self.row(position) * self.shape.heads.columns() + head * key_dim
    }

    /// Index of the head's gate b (0) or g (1) at a position.
    const fn at_gate(self, position: usize, part: usize) -> usize {
        let values = self.shape.heads.values;
        (self.row(position) * 2 + part) * values + self.number
    }

    /// Index of the state before the chunk that starts at a position.
    const fn at_state(self, position: usize) -> usize {
        let heads = self.shape.heads;
        let place = self.sample * heads.places() + position / CHUNK;
        (place * heads.values + self.number) * heads.key_dim * heads.value_dim
    }

    /// Index of the state before the sample.
    const fn at_initial(self) -> usize {
        let heads = self.shape.heads;
        (self.sample * heads.values + self.number) * heads.key_dim * heads.value_dim
    }

    /// Queries or keys of a chunk as the rule has them, and 1 / their lengths.
    fn load_keys(self, chunk: Chunk, part: usize, to: &mut [f32], inverses: &mut [f32; CHUNK]) {
        let dim = self.shape.heads.key_dim;
        let scale = if part == 0 { 1.0 / (dim as f32).sqrt() } else { 1.0 };
        for (row, x) in to.chunks_exact_mut(dim).take(chunk.rows).enumerate() {
            self.shape.qkv.load(self.at_key(chunk.first + row, part), x);
            inverses[row] = 1.0 / (dot(x, x) + EPSILON).sqrt();
            x.iter_mut().for_each(|x| *x = *x * inverses[row] * scale);
        }
    }

    fn gates(self, chunk: Chunk) -> GatesOfChunk {
        let mut gates = GatesOfChunk { beta: [0.0; CHUNK], sums: [0.0; CHUNK], last: 0.0 };
        for row in 0..chunk.rows {
            let at = |part| self.shape.gates[self.at_gate(chunk.first + row, part)];
            gates.beta[row] = at(0);
            gates.last += at(1);
            gates.sums[row] = gates.last;
        }
        gates
    }
}

/// The gates of a chunk's rows.
struct GatesOfChunk {
    beta: [f32; CHUNK],
    /// G: running sums of g.
    sums: [f32; CHUNK],
    /// G of the last row.
    last: f32,
}

impl GatesOfChunk {
    /// e^(G_i - G_j), for i >= j.
    #[inline(always)]
    const fn between(&self, i: usize, j: usize) -> f32 {
        exp(self.sums[i] - self.sums[j])
    }

    /// e^G, by row.
    #[inline(always)]
    const fn since_start(&self, row: usize) -> f32 {
        exp(self.sums[row])
    }

    /// e^(G_n - G), by row.
    #[inline(always)]
    const fn to_end(&self, row: usize) -> f32 {
        exp(self.last - self.sums[row])
    }

    /// Turns products (rows, rows) of keys into A, whose diagonal of 1 is not stored.
    fn weigh_keys(&self, products: &mut [f32], rows: usize) {
        for (i, row) in products.chunks_exact_mut(rows).enumerate() {
            let (below, others) = row.split_at_mut(i);
            others.fill(0.0);
            for (j, x) in below.iter_mut().enumerate() {
                *x *= self.beta[i] * self.between(i, j);
            }
        }
    }

    /// Multiplies the lower triangle of products (rows, rows), with the diagonal, by M. The rest
    /// becomes 0.
    fn weigh_queries(&self, products: &mut [f32], rows: usize) {
        for (i, row) in products.chunks_exact_mut(rows).enumerate() {
            let (seen, others) = row.split_at_mut(i + 1);
            others.fill(0.0);
            seen.iter_mut().enumerate().for_each(|(j, x)| *x *= self.between(i, j));
        }
    }
}

/// c (m, n) = scale a (m, k) b (k, n) + beta c, all by rows without gaps in c.
struct ChunkProduct<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix<'a>,
    b: Matrix<'a>,
}

impl ChunkProduct<'_> {
    fn write(self, c: &mut [f32], beta: f32, scratch: &mut gemm::Scratch) {
        let Self { m, n, k, a, b } = self;
        let c = MatrixMut { data: ViewMut::F32(&mut c[..m * n]), row_stride: n };
        Gemm { m, n, k, a, b, c, scale: 1.0, beta, bias: None }.serial(scratch);
    }
}

/// A matrix without gaps between rows of `width` elements.
fn rows_of(x: &[f32], width: usize) -> Matrix<'_> {
    Matrix::by_rows(View::F32(x), width)
}

/// Its transpose.
fn columns_of(x: &[f32], width: usize) -> Matrix<'_> {
    Matrix::transposed(View::F32(x), width)
}

/// Replaces x (rows, width) by the solution of A y = x, where `a` has A below the diagonal.
fn solve(a: &[f32], x: &mut [f32], rows: usize, width: usize) {
    vectorised(
        #[inline(always)]
        || {
            for i in 1..rows {
                let (solved, rest) = x.split_at_mut(i * width);
                for (weight, y) in a[i * rows..].iter().zip(solved.chunks_exact(width)) {
                    rest.iter_mut().zip(y).for_each(|(x, y)| *x = (-weight).mul_add(*y, *x));
                }
            }
        },
    );
}

/// Computes V of a chunk from `state` into `v`, and leaves A in `a`.
fn values_of_chunk(
    head: Head<'_>,
    chunk: Chunk,
    gates: &GatesOfChunk,
    [keys, state]: [&[f32]; 2],
    [a, v]: [&mut [f32]; 2],
    gemm: &mut gemm::Scratch,
) {
    let DeltaHeads { key_dim, value_dim, .. } = head.shape.heads;
    let n = chunk.rows;
    ChunkProduct { m: n, n, k: key_dim, a: rows_of(keys, key_dim), b: columns_of(keys, key_dim) }
        .write(a, 0.0, gemm);
    gates.weigh_keys(&mut a[..n * n], n);
    let (keys, state) = (rows_of(keys, key_dim), rows_of(state, value_dim));
    ChunkProduct { m: n, n: value_dim, k: key_dim, a: keys, b: state }.write(v, 0.0, gemm);
    let mut own = [0.0; CHUNK];
    for (row, v) in v.chunks_exact_mut(value_dim).take(n).enumerate() {
        let (beta, decay) = (gates.beta[row], gates.since_start(row));
        let at = head.at_value(chunk.first + row)[1];
        for (part, v) in v.chunks_mut(CHUNK).enumerate() {
            let own = &mut own[..v.len()];
            head.shape.qkv.load(at + part * CHUNK, own);
            v.iter_mut().zip(own).for_each(|(v, own)| *v = beta * (-decay).mul_add(*v, *own));
        }
    }
    solve(a, v, n, value_dim);
}

type Results<'a, T> = Mutex<(ViewMut<'a>, T)>;

fn lock<T>(results: &Mutex<T>) -> MutexGuard<'_, T> {
    results.lock().unwrap_or_else(PoisonError::into_inner)
}

fn forward(
    head: Head<'_>,
    initial: Option<&[f32]>,
    scratch: &mut Scratch,
    results: &Results<'_, &mut [f32]>,
) {
    let heads @ DeltaHeads { key_dim, value_dim, .. } = head.shape.heads;
    let (of_keys, of_values, state_len) = (CHUNK * key_dim, CHUNK * value_dim, key_dim * value_dim);
    let Scratch { gemm, floats } = scratch;
    let lengths = [state_len, of_keys, of_keys, of_values, of_values, CHUNK * CHUNK, CHUNK * CHUNK];
    let [state, q, k, v, out, a, p] = cut(floats, lengths);
    let mut inverses = [0.0; CHUNK];
    for place in 0..heads.places() {
        lock(results).1[head.at_state(place * CHUNK)..][..state_len].fill(0.0);
    }
    let mut next = 0;
    while let Some(chunk) = head.chunk_from(next) {
        let n = chunk.rows;
        next += n;
        if chunk.is_first {
            match initial.filter(|_| chunk.first == 0) {
                Some(initial) => state.copy_from_slice(&initial[head.at_initial()..][..state_len]),
                None => state.fill(0.0),
            }
        } else {
            lock(results).1[head.at_state(chunk.first)..][..state_len].copy_from_slice(state);
        }
        head.load_keys(chunk, 0, q, &mut inverses);
        head.load_keys(chunk, 1, k, &mut inverses);
        let gates = head.gates(chunk);
        values_of_chunk(head, chunk, &gates, [k, state], [a, v], gemm);
        let rows = rows_of(state, value_dim);
        ChunkProduct { m: n, n: value_dim, k: key_dim, a: rows_of(q, key_dim), b: rows }
            .write(out, 0.0, gemm);
        for (row, out) in out.chunks_exact_mut(value_dim).take(n).enumerate() {
            let decay = gates.since_start(row);
            out.iter_mut().for_each(|x| *x *= decay);
        }
        ChunkProduct { m: n, n, k: key_dim, a: rows_of(q, key_dim), b: columns_of(k, key_dim) }
            .write(p, 0.0, gemm);
        gates.weigh_queries(&mut p[..n * n], n);
        ChunkProduct { m: n, n: value_dim, k: n, a: rows_of(p, n), b: rows_of(v, value_dim) }
            .write(out, 1.0, gemm);
        {
            let mut results = lock(results);
            for (row, out) in out.chunks_exact(value_dim).take(n).enumerate() {
                results.0.store(head.at_value(chunk.first + row)[0], out);
            }
        }
        if !chunk.is_last {
            advance(state, &gates, k, v, chunk.rows, [key_dim, value_dim], gemm);
        }
    }
}

/// S = e^(G_n) S + (e^(G_n - G) k)' V. Scales V.
fn advance(
    state: &mut [f32],
    gates: &GatesOfChunk,
    k: &[f32],
    v: &mut [f32],
    rows: usize,
    [key_dim, value_dim]: [usize; 2],
    gemm: &mut gemm::Scratch,
) {
    for (row, v) in v.chunks_exact_mut(value_dim).take(rows).enumerate() {
        let decay = gates.to_end(row);
        v.iter_mut().for_each(|x| *x *= decay);
    }
    let (a, b) = (columns_of(k, key_dim), rows_of(v, value_dim));
    ChunkProduct { m: key_dim, n: value_dim, k: rows, a, b }.write(state, exp(gates.last), gemm);
}
