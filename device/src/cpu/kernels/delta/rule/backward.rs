//! The gradients of the gated delta rule, chunk by chunk from the last to the first. With the
//! gradient D of the state after a chunk, r = b (v - e^G k S) and P = q k' M:
//!
//! - d_V = P' d_out + e^(G_n - G) k D; A' d_r = d_V; d_v = b d_r;
//! - d_q = e^G d_out S' + F k with F = (d_out V') M;
//! - d_k = b c + F' q + (b E)' k + e^(G_n - G) V D' with c = E k - e^G d_r S' and E = -(d_r V') M
//!   below the diagonal;
//! - d_b = k c + v d_r; d_G = q d_q + b k c - k (the other terms of d_k), and what S after the chunk
//!   adds to the last row;
//! - D becomes e^(G_n) D + (e^G q)' d_out - (b e^G k)' d_r.
//!
//! What a row adds to itself, and what the last row adds to the state, does not depend on G. It would
//! be added to d_G and subtracted again, and is left out of d_G: with strong decay its rounding errors
//! would be larger than the gradient.

use super::{
    CHUNK, Chunk, ChunkProduct, GatesOfChunk, Head, Shape, columns_of, lock, not_a_kernel, rows_of,
    values_of_chunk,
};
use crate::cpu::gemm;
use crate::cpu::kernels::delta::cut;
use crate::cpu::kernels::documents::Starts;
use crate::cpu::kernels::math::{dot, vectorised};
use crate::cpu::kernels::{Memory, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Scratch, Workers, delta_floats};
use crate::numerics::view::ViewMut;
use crate::op::{DeltaHeads, Op};
use crate::{View, cpu::kernels::math::exp};
use std::sync::Mutex;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    let Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts } = *op
    else {
        return not_a_kernel();
    };
    workers.need(delta_floats(heads))?;
    let (rows, starts) = (qkv.shape().0, Starts::new(m, starts, 0, heads.seq_len)?);
    let (qkv, gates) = (values(m, qkv)?, slice::<f32>(m, gates)?);
    let shape = Shape { heads, starts, qkv, gates };
    let saved = SavedStates { states: slice::<f32>(m, states)?, d_out: values(m, d_out)? };
    let results = Mutex::new((values_mut(m, d_qkv)?, slice_mut::<f32>(m, d_gates)?));
    let (units, work) = (rows / heads.seq_len * heads.keys, rows * heads.state_len());
    workers.split(units, work, (), &|units, (), scratch| {
        for unit in units {
            let first = unit % heads.keys * heads.group();
            let head = Head::new(shape, unit / heads.keys, first);
            backward(head, saved, scratch, &results);
        }
    });
    Ok(())
}

/// States of the forward pass, and the incoming gradient.
#[derive(Clone, Copy)]
struct SavedStates<'a> {
    states: &'a [f32],
    d_out: View<'a>,
}

type Results<'a> = Mutex<(ViewMut<'a>, &'a mut [f32])>;

/// Computes the heads that share the keys of `first`, beginning with `first`.
fn backward(first: Head<'_>, saved: SavedStates<'_>, scratch: &mut Scratch, results: &Results<'_>) {
    let heads @ DeltaHeads { key_dim, value_dim, seq_len, .. } = first.shape.heads;
    let (of_keys, state_len) = (CHUNK * key_dim, key_dim * value_dim);
    let Scratch { gemm, floats } = scratch;
    let lengths = [heads.group() * state_len, of_keys, of_keys, of_keys, of_keys];
    let total = lengths.iter().sum();
    let (shared, floats) = floats.split_at_mut(total);
    let [d_states, q, k, d_q, d_k] = cut(shared, lengths);
    let mut inverses = [[0.0; CHUNK]; 2];
    let mut end = seq_len;
    while let Some(chunk) = first.chunk_before(end) {
        end = chunk.first;
        first.load_keys(chunk, 0, q, &mut inverses[0]);
        first.load_keys(chunk, 1, k, &mut inverses[1]);
        d_q.fill(0.0);
        d_k.fill(0.0);
        for (i, d_state) in d_states.chunks_exact_mut(state_len).enumerate() {
            let head = Head { number: first.number + i, ..first };
            if chunk.is_last {
                d_state.fill(0.0);
            }
            let grads = [&mut *d_q, &mut *d_k, d_state];
            of_head(head, chunk, saved, [q, k], grads, floats, gemm, results);
        }
        for (part, (x, d)) in [(q as &[f32], &mut *d_q), (k, &mut *d_k)].into_iter().enumerate() {
            let scale = if part == 0 { 1.0 / (key_dim as f32).sqrt() } else { 1.0 };
            let rows = x.chunks_exact(key_dim).zip(d.chunks_exact_mut(key_dim)).take(chunk.rows);
            let mut results = lock(results);
            for (row, (x, d)) in rows.enumerate() {
                length_backward(x, scale, inverses[part][row], d);
                results.0.store(first.at_key(chunk.first + row, part), d);
            }
        }
    }
}

/// Turns d, the gradient of x = scale y / |y|, into the gradient of y, with 1 / |y|.
fn length_backward(x: &[f32], scale: f32, inverse: f32, d: &mut [f32]) {
    let along = dot(x, d) / (scale * scale);
    for (d, x) in d.iter_mut().zip(x) {
        *d = (-along).mul_add(*x, *d) * (scale * inverse);
    }
}

/// Multiplies the rows of x (rows, width) by f(row).
fn scale_rows(x: &mut [f32], width: usize, rows: usize, f: impl Fn(usize) -> f32) {
    for (row, x) in x.chunks_exact_mut(width).take(rows).enumerate() {
        let factor = f(row);
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Adds the gradients of a head's chunk to d_q and d_k, turns the gradient of the state after the
/// chunk into the gradient of the state before it, and stores the others.
#[expect(clippy::too_many_arguments, reason = "buffers of the caller")]
fn of_head(
    head: Head<'_>,
    chunk: Chunk,
    saved: SavedStates<'_>,
    [q, k]: [&[f32]; 2],
    [d_q, d_k, d_state]: [&mut [f32]; 3],
    floats: &mut [f32],
    gemm: &mut gemm::Scratch,
    results: &Results<'_>,
) {
    let DeltaHeads { key_dim, value_dim, .. } = head.shape.heads;
    let (n, square, of_values) = (chunk.rows, CHUNK * CHUNK, CHUNK * value_dim);
    let lengths = [
        key_dim * value_dim,
        CHUNK * key_dim,
        of_values,
        of_values,
        of_values,
        square,
        square,
        square,
    ];
    let [state, terms, v, d_r, d_out, a, p, e] = cut(floats, lengths);
    if chunk.is_first {
        state.fill(0.0);
    } else {
        state.copy_from_slice(&saved.states[head.at_state(chunk.first)..][..state.len()]);
    }
    let gates = head.gates(chunk);
    values_of_chunk(head, chunk, &gates, [k, state], [a, v], gemm);
    for (row, d) in d_out.chunks_exact_mut(value_dim).take(n).enumerate() {
        saved.d_out.load(head.at_value(chunk.first + row)[0], d);
    }
    let (q_rows, k_rows) = (rows_of(q, key_dim), rows_of(k, key_dim));
    ChunkProduct { m: n, n, k: key_dim, a: q_rows, b: columns_of(k, key_dim) }.write(p, 0.0, gemm);
    gates.weigh_queries(&mut p[..n * n], n);
    ChunkProduct { m: n, n: value_dim, k: key_dim, a: k_rows, b: rows_of(d_state, value_dim) }
        .write(d_r, 0.0, gemm);
    scale_rows(d_r, value_dim, n, |row| gates.to_end(row));
    ChunkProduct { m: n, n: value_dim, k: n, a: columns_of(p, n), b: rows_of(d_out, value_dim) }
        .write(d_r, 1.0, gemm);
    solve_transposed(a, d_r, n, value_dim);
    let f = p;
    let v_columns = columns_of(v, value_dim);
    ChunkProduct { m: n, n, k: value_dim, a: rows_of(d_out, value_dim), b: v_columns }
        .write(f, 0.0, gemm);
    gates.weigh_queries(&mut f[..n * n], n);
    let mut own = [0.0; CHUNK];
    for (row, own) in own.iter_mut().take(n).enumerate() {
        *own = std::mem::take(&mut f[row * n + row]);
    }
    ChunkProduct { m: n, n, k: value_dim, a: rows_of(d_r, value_dim), b: v_columns }
        .write(e, 0.0, gemm);
    weigh_errors(&gates, &mut e[..n * n], n);
    let mut d = GatesOfChunk { beta: [0.0; CHUNK], sums: [0.0; CHUNK], last: 0.0 };
    let add = |terms: &[f32], to: &mut [f32], x: &[f32], factor: &dyn Fn(usize) -> f32| {
        let mut dots = [0.0; CHUNK];
        let rows = terms.chunks_exact(key_dim).zip(to.chunks_exact_mut(key_dim)).take(n);
        for (row, ((terms, to), x)) in rows.zip(x.chunks_exact(key_dim)).enumerate() {
            dots[row] = dot(terms, x);
            let factor = factor(row);
            to.iter_mut().zip(terms).for_each(|(to, term)| *to = factor.mul_add(*term, *to));
        }
        dots
    };
    // d_q.
    let s_columns = columns_of(state, value_dim);
    ChunkProduct { m: n, n: key_dim, k: value_dim, a: rows_of(d_out, value_dim), b: s_columns }
        .write(terms, 0.0, gemm);
    scale_rows(terms, key_dim, n, |row| gates.since_start(row));
    ChunkProduct { m: n, n: key_dim, k: n, a: rows_of(f, n), b: k_rows }.write(terms, 1.0, gemm);
    d.sums = add(terms, d_q, q, &|_| 1.0);
    // d_k, as far as it is b c.
    ChunkProduct { m: n, n: key_dim, k: value_dim, a: rows_of(d_r, value_dim), b: s_columns }
        .write(terms, 0.0, gemm);
    scale_rows(terms, key_dim, n, |row| -gates.since_start(row));
    ChunkProduct { m: n, n: key_dim, k: n, a: rows_of(e, n), b: k_rows }.write(terms, 1.0, gemm);
    d.beta = add(terms, d_k, k, &|row| gates.beta[row]);
    for row in 0..n {
        d.sums[row] = gates.beta[row].mul_add(d.beta[row], d.sums[row]);
    }
    // The other terms of d_k.
    let d_columns = columns_of(d_state, value_dim);
    ChunkProduct { m: n, n: key_dim, k: value_dim, a: rows_of(v, value_dim), b: d_columns }
        .write(terms, 0.0, gemm);
    scale_rows(terms, key_dim, n, |row| gates.to_end(row));
    let last = (n - 1) * key_dim..n * key_dim;
    d_k[last.clone()].iter_mut().zip(&terms[last.clone()]).for_each(|(d, term)| *d += term);
    terms[last].fill(0.0);
    let of_rows = terms.chunks_exact(key_dim).zip(k.chunks_exact(key_dim)).take(n - 1);
    let after = of_rows.fold(0.0, |sum, (terms, k)| sum + dot(terms, k));
    scale_rows(e, n, n, |row| gates.beta[row]);
    ChunkProduct { m: n, n: key_dim, k: n, a: columns_of(f, n), b: q_rows }.write(terms, 1.0, gemm);
    ChunkProduct { m: n, n: key_dim, k: n, a: columns_of(e, n), b: k_rows }.write(terms, 1.0, gemm);
    let dots = add(terms, d_k, k, &|_| 1.0);
    d.sums.iter_mut().zip(dots).for_each(|(sum, dot)| *sum -= dot);
    d.sums[n - 1] += exp(gates.last).mul_add(dot(state, d_state), after);
    for (row, own) in own.iter().take(n).enumerate() {
        let of_row = row * key_dim..(row + 1) * key_dim;
        let (q, k) = (&q[of_row.clone()], &k[of_row.clone()]);
        d_q[of_row.clone()].iter_mut().zip(k).for_each(|(d, k)| *d = own.mul_add(*k, *d));
        d_k[of_row].iter_mut().zip(q).for_each(|(d, q)| *d = own.mul_add(*q, *d));
    }
    store_of_head(head, chunk, &gates, &mut d, d_r, results);
    // The state before the chunk.
    scale_rows(d_out, value_dim, n, |row| gates.since_start(row));
    scale_rows(d_r, value_dim, n, |row| -gates.since_start(row));
    let b = rows_of(d_out, value_dim);
    ChunkProduct { m: key_dim, n: value_dim, k: n, a: columns_of(q, key_dim), b }.write(
        d_state,
        exp(gates.last),
        gemm,
    );
    let b = rows_of(d_r, value_dim);
    ChunkProduct { m: key_dim, n: value_dim, k: n, a: columns_of(k, key_dim), b }
        .write(d_state, 1.0, gemm);
}

/// Stores the gradients of a head's values and gates. `d.sums` are of G. Multiplies d_r by b.
fn store_of_head(
    head: Head<'_>,
    chunk: Chunk,
    gates: &GatesOfChunk,
    d: &mut GatesOfChunk,
    d_r: &mut [f32],
    results: &Results<'_>,
) {
    let value_dim = head.shape.heads.value_dim;
    let mut own = [0.0; CHUNK];
    for (row, d_r) in d_r.chunks_exact_mut(value_dim).take(chunk.rows).enumerate() {
        let at = head.at_value(chunk.first + row)[1];
        for (part, d_r) in d_r.chunks_mut(CHUNK).enumerate() {
            let own = &mut own[..d_r.len()];
            head.shape.qkv.load(at + part * CHUNK, own);
            d.beta[row] += dot(own, d_r);
            d_r.iter_mut().for_each(|d| *d *= gates.beta[row]);
        }
    }
    for row in (1..chunk.rows).rev() {
        d.sums[row - 1] += d.sums[row];
    }
    let mut results = lock(results);
    for (row, d_v) in d_r.chunks_exact(value_dim).take(chunk.rows).enumerate() {
        let position = chunk.first + row;
        results.0.store(head.at_value(position)[1], d_v);
        results.1[head.at_gate(position, 0)] = d.beta[row];
        results.1[head.at_gate(position, 1)] = d.sums[row];
    }
}

/// Turns products (rows, rows) of d_r and V into E.
fn weigh_errors(gates: &GatesOfChunk, products: &mut [f32], rows: usize) {
    for (i, row) in products.chunks_exact_mut(rows).enumerate() {
        let (below, others) = row.split_at_mut(i);
        others.fill(0.0);
        below.iter_mut().enumerate().for_each(|(j, x)| *x *= -gates.between(i, j));
    }
}

/// Replaces x (rows, width) by the solution of A' y = x, where `a` has A below the diagonal.
fn solve_transposed(a: &[f32], x: &mut [f32], rows: usize, width: usize) {
    vectorised(
        #[inline(always)]
        || {
            for i in (1..rows).rev() {
                let (rest, solved) = x.split_at_mut(i * width);
                let y = &solved[..width];
                for (weight, rest) in a[i * rows..].iter().zip(rest.chunks_exact_mut(width)) {
                    rest.iter_mut().zip(y).for_each(|(x, y)| *x = (-weight).mul_add(*y, *x));
                }
            }
        },
    );
}
