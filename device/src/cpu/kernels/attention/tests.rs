use super::super::testing::{
    NO_DROPOUT, Rig, TYPES, assert_close, differences, dropout_factor, inner, noise, starts,
};
use super::*;
use crate::Dtype;

const DROPOUT: Dropout = Dropout { p: 0.3, key: 17, first_row: 0 };

/// Number of samples, head dimension, and heads.
type Size = (usize, usize, Heads);

fn size(samples: usize, seq_len: usize, count: usize, head_dim: usize) -> Size {
    grouped(samples, seq_len, count, count, head_dim)
}

/// `count` heads of queries share `kv_count` heads of keys and values.
fn grouped(samples: usize, seq_len: usize, count: usize, kv_count: usize, head_dim: usize) -> Size {
    (samples, head_dim, Heads { count, kv_count, first: 1, total: count + 2, seq_len })
}

/// The keys that a query sees, and their scores.
#[derive(Clone, Copy, Default)]
struct Visibility<'a> {
    /// Start of each token's document, in samples of several documents.
    starts: Option<&'a [i32]>,
    /// `None`: [`Scores::of`] the heads.
    scores: Option<Scores>,
}

/// Samples of one document.
const WHOLE: Visibility<'static> = Visibility { starts: None, scores: None };

const fn documents(starts: &[i32]) -> Visibility<'_> {
    Visibility { starts: Some(starts), scores: None }
}

/// out and lse by the plain formula.
fn attention_f64(
    qkv: &[f64],
    (samples, d, heads): Size,
    visible: Visibility<'_>,
    dropout: Dropout,
) -> (Vec<f64>, Vec<f64>) {
    let Heads { count, kv_count, first, total, seq_len: t } = heads;
    let width = count * d;
    let (mut out, mut lse) = (vec![0.0; samples * t * width], vec![0.0; samples * count * t]);
    let at = |b: usize, token: usize, part: usize, h: usize| {
        let (all, shared) = (count + 2 * kv_count, h * kv_count / count);
        let head = [h, count + shared, count + kv_count + shared][part];
        &qkv[((b * t + token) * all + head) * d..][..d]
    };
    for (b, h, q) in (0..samples * count * t).map(|i| (i / t / count, i / t % count, i % t)) {
        let scores = visible.scores.unwrap_or_else(|| Scores::of(d));
        let scale = visible.scores.map_or(1.0 / (d as f64).sqrt(), |s| f64::from(s.scale));
        let cap = |s: f64| scores.cap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh());
        let score = |k| cap(inner(at(b, q, 0, h), at(b, k, 1, h)) * scale);
        let document = visible.starts.map_or(0, |starts| starts[b * t + q] as usize);
        let window = scores.window.map_or(0, |window| (q + 1).saturating_sub(window));
        let from = document.max(window);
        let sum: f64 = (from..=q).map(|k| f64::exp(score(k))).sum();
        lse[(b * count + h) * t + q] = sum.ln();
        let sample = dropout.first_row as usize / t + b;
        for k in from..=q {
            let index = ((sample * total + first + h) * t + q) * t + k;
            let weight = score(k).exp() / sum * dropout_factor(dropout, index);
            let row = &mut out[(b * t + q) * width + h * d..][..d];
            row.iter_mut().zip(at(b, k, 2, h)).for_each(|(o, v)| *o += weight * v);
        }
    }
    (out, lse)
}

fn inputs((samples, d, heads): Size) -> (Vec<f64>, Vec<f64>) {
    let n = samples * heads.seq_len * d;
    let all = heads.count + 2 * heads.kv_count;
    (noise(1, all * n).iter().map(|x| 2.0 * x).collect(), noise(2, heads.count * n))
}

/// out, lse and d_qkv by the ops.
fn run_ops(
    threads: usize,
    dtype: Dtype,
    size: Size,
    visible: Visibility<'_>,
    dropout: Dropout,
    qkv: &[f64],
    d_out: &[f64],
) -> [Vec<f64>; 3] {
    let (samples, d, heads) = size;
    let (rows, width) = (samples * heads.seq_len, heads.count * d);
    let mut rig = Rig::new(threads);
    let qkv_width = (heads.count + 2 * heads.kv_count) * d;
    let (qkv, d_out) =
        (rig.put(dtype, (rows, qkv_width), qkv), rig.put(dtype, (rows, width), d_out));
    let (out, d_qkv) = (rig.out(dtype, (rows, width)), rig.out(dtype, (rows, qkv_width)));
    let lse = rig.out(Dtype::F32, (samples * heads.count, heads.seq_len));
    let starts = visible.starts.map(|starts| rig.put_ints(starts));
    let scores = visible.scores.unwrap_or_else(|| Scores::of(d));
    rig.run(&Op::Attention { qkv, out, lse, heads, starts, dropout, scores });
    rig.run(&Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores });
    [out, lse, d_qkv].map(|t| rig.get(t))
}

#[test]
fn forward_is_the_formula_in_every_type_and_shape() {
    for (dtype, ulp) in TYPES {
        for dropout in [NO_DROPOUT, DROPOUT] {
            for size in [
                size(1, 2, 1, 2),
                size(2, 65, 2, 3),
                size(1, 130, 3, 16),
                size(2, 31, 1, 80),
                size(1, 300, 1, 7),
                grouped(2, 65, 6, 2, 4),
                grouped(1, 40, 3, 1, 6),
            ] {
                let dropout = Dropout { first_row: 3 * size.2.seq_len as u64, ..dropout };
                let (qkv, d_out) = inputs(size);
                let [out, lse, _] = run_ops(1, dtype, size, WHOLE, dropout, &qkv, &d_out);
                let (want, want_lse) = attention_f64(&qkv, size, WHOLE, dropout);
                assert_close(&out, &want, 4e-6, ulp);
                assert_close(&lse, &want_lse, 2e-6, 1e-6);
            }
        }
    }
}

#[test]
fn gradients_are_central_differences_of_the_formula() {
    for (dtype, ulp) in TYPES {
        for dropout in [NO_DROPOUT, DROPOUT] {
            for size in [
                size(2, 2, 1, 2),
                size(2, 7, 2, 5),
                size(1, 67, 1, 3),
                grouped(2, 5, 6, 2, 2),
                grouped(1, 35, 3, 1, 2),
            ] {
                let dropout = Dropout { first_row: size.2.seq_len as u64, ..dropout };
                let (qkv, d_out) = inputs(size);
                let [_, _, got] = run_ops(1, dtype, size, WHOLE, dropout, &qkv, &d_out);
                let loss = |qkv: &[f64]| inner(&attention_f64(qkv, size, WHOLE, dropout).0, &d_out);
                // The stored output gives delta, so its rounding changes d_q and d_k.
                assert_close(&got, &differences(&qkv, loss), 1e-5 + 3.0 * ulp, 2.0 * ulp);
            }
        }
    }
}

#[test]
fn gradients_over_several_blocks_of_queries_are_right() {
    let size = size(1, 200, 1, 4);
    let (qkv, d_out) = inputs(size);
    let [_, _, got] = run_ops(1, Dtype::F32, size, WHOLE, DROPOUT, &qkv, &d_out);
    let loss = |qkv: &[f64]| inner(&attention_f64(qkv, size, WHOLE, DROPOUT).0, &d_out);
    for i in (0..qkv.len()).step_by(97) {
        let mut near = qkv.clone();
        near[i] += 1e-5;
        let above = loss(&near);
        near[i] -= 2e-5;
        assert_close(&[got[i]], &[(above - loss(&near)) / 2e-5], 1e-5, 1e-5);
    }
}

#[test]
fn a_sample_does_not_depend_on_the_others_nor_on_threads() {
    for dropout in [NO_DROPOUT, DROPOUT] {
        let (all, one) = (size(3, 70, 2, 10), size(1, 70, 2, 10));
        let (qkv, d_out) = inputs(all);
        let whole = run_ops(1, Dtype::Bf16, all, WHOLE, dropout, &qkv, &d_out);
        assert_eq!(whole, run_ops(3, Dtype::Bf16, all, WHOLE, dropout, &qkv, &d_out));
        let dropout = Dropout { first_row: 70, ..dropout };
        let (qkv, d_out) = (&qkv[70 * 60..140 * 60], &d_out[70 * 20..140 * 20]);
        let part = run_ops(1, Dtype::Bf16, one, WHOLE, dropout, qkv, d_out);
        assert_eq!(part[0], whole[0][70 * 20..140 * 20]);
        assert_eq!(part[1], whole[1][140..280]);
        assert_eq!(part[2], whole[2][70 * 60..140 * 60]);
    }
}

#[test]
fn heads_on_other_ranks_drop_what_they_would_drop_on_one() {
    let (both, d) = (size(2, 33, 2, 4), 4);
    let (qkv, d_out) = inputs(both);
    let whole = run_ops(1, Dtype::F32, both, WHOLE, DROPOUT, &qkv, &d_out)[0].clone();
    for head in 0..2 {
        let of_head = |x: &Vec<f64>| -> Vec<f64> {
            x.chunks(2 * d).flat_map(|row| row[head * d..][..d].to_vec()).collect()
        };
        let one = (2, d, Heads { count: 1, kv_count: 1, first: 1 + head, ..both.2 });
        let [out, ..] =
            run_ops(1, Dtype::F32, one, WHOLE, DROPOUT, &of_head(&qkv), &of_head(&d_out));
        assert_eq!(out, of_head(&whole));
    }
}

/// Sizes with the documents of their samples: some in one block of queries, some over several.
fn packed() -> Vec<(Size, Vec<i32>)> {
    let of = |size: Size, lengths: &[usize]| (size, starts(size.2.seq_len, lengths));
    vec![
        of(size(2, 7, 2, 5), &[3, 1, 3, 1, 6]),
        of(grouped(2, 5, 6, 2, 2), &[5, 2, 3]),
        of(size(1, 67, 1, 3), &[20, 13, 1, 33]),
        of(grouped(1, 70, 3, 1, 2), &[40, 30]),
    ]
}

#[test]
fn documents_of_a_sample_are_the_formula_forward_and_backward() {
    for (dtype, ulp) in TYPES {
        for ((size, starts), dropout) in
            packed().into_iter().flat_map(|p| [(p.clone(), NO_DROPOUT), (p, DROPOUT)])
        {
            let dropout = Dropout { first_row: 2 * size.2.seq_len as u64, ..dropout };
            let (qkv, d_out) = inputs(size);
            let visible = documents(&starts);
            let [out, lse, got] = run_ops(1, dtype, size, visible, dropout, &qkv, &d_out);
            let formula = |qkv: &[f64]| attention_f64(qkv, size, visible, dropout);
            let (want, want_lse) = formula(&qkv);
            assert_close(&out, &want, 4e-6, ulp);
            assert_close(&lse, &want_lse, 2e-6, 1e-6);
            let loss = |qkv: &[f64]| inner(&formula(qkv).0, &d_out);
            assert_close(&got, &differences(&qkv, loss), 1e-5 + 3.0 * ulp, 2.0 * ulp);
        }
    }
}

#[test]
fn a_document_changes_no_bit_of_another() {
    let size = grouped(1, 200, 4, 2, 6);
    let starts = starts(200, &[50, 3, 90, 57]);
    let (qkv, d_out) = inputs(size);
    let run = |qkv: &[f64], d_out: &[f64]| {
        run_ops(1, Dtype::F32, size, documents(&starts), DROPOUT, qkv, d_out)
    };
    let whole = run(&qkv, &d_out);
    // The third document, rows 53 to 142, is changed.
    let (all, width) = (8 * 6, 4 * 6);
    let (mut other, mut d_other) = (qkv, d_out);
    other[53 * all..143 * all].iter_mut().for_each(|x| *x = 9.0 - *x);
    d_other[53 * width..143 * width].iter_mut().for_each(|x| *x += 1.0);
    let changed = run(&other, &d_other);
    for (part, row) in [(0, width), (2, all)] {
        assert_eq!(whole[part][..53 * row], changed[part][..53 * row]);
        assert_eq!(whole[part][143 * row..], changed[part][143 * row..]);
        assert_ne!(whole[part][53 * row..143 * row], changed[part][53 * row..143 * row]);
    }
}

/// Scores of heads of `dim` elements with another scale than usual, which a cap of 1 bends.
fn scores(dim: usize, cap: Option<f32>, window: Option<usize>) -> Scores {
    Scores { scale: 1.5 * Scores::of(dim).scale, cap, window }
}

/// Sizes with windows of one key, of less than a block of queries, over several blocks, and longer
/// than the sample.
fn windows() -> Vec<(Size, usize)> {
    vec![
        (size(2, 7, 2, 5), 1),
        (size(2, 7, 2, 5), 3),
        (size(2, 7, 2, 5), 7),
        (grouped(2, 5, 6, 2, 2), 100),
        (size(1, 67, 1, 3), 20),
        (grouped(1, 70, 3, 1, 2), 33),
        (size(1, 99, 1, 2), 64),
    ]
}

#[test]
fn windows_and_caps_are_the_formula_forward_and_backward() {
    for (dtype, ulp) in TYPES {
        for (size, window) in windows() {
            for (cap, dropout) in [(None, DROPOUT), (Some(1.0), NO_DROPOUT), (Some(50.0), DROPOUT)]
            {
                let visible = Visibility {
                    scores: Some(scores(size.1, cap, Some(window))),
                    ..Visibility::default()
                };
                let (qkv, d_out) = inputs(size);
                let [out, lse, got] = run_ops(1, dtype, size, visible, dropout, &qkv, &d_out);
                let formula = |qkv: &[f64]| attention_f64(qkv, size, visible, dropout);
                let (want, want_lse) = formula(&qkv);
                assert_close(&out, &want, 4e-6, ulp);
                assert_close(&lse, &want_lse, 2e-6, 1e-6);
                let loss = |qkv: &[f64]| inner(&formula(qkv).0, &d_out);
                // The scale is 1.5 times as large as elsewhere, and so is the rounding of out.
                assert_close(&got, &differences(&qkv, loss), 1e-5 + 5.0 * ulp, 2.0 * ulp);
            }
        }
    }
}

#[test]
fn a_window_ends_at_the_start_of_a_document() {
    for (size, starts) in packed() {
        for window in [2, 5, 34] {
            let scores = Some(scores(size.1, Some(2.0), Some(window)));
            let visible = Visibility { starts: Some(&starts), scores };
            let (qkv, d_out) = inputs(size);
            let [out, lse, got] = run_ops(1, Dtype::F32, size, visible, DROPOUT, &qkv, &d_out);
            let formula = |qkv: &[f64]| attention_f64(qkv, size, visible, DROPOUT);
            let (want, want_lse) = formula(&qkv);
            assert_close(&out, &want, 4e-6, 1e-7);
            assert_close(&lse, &want_lse, 2e-6, 1e-6);
            let loss = |qkv: &[f64]| inner(&formula(qkv).0, &d_out);
            assert_close(&got, &differences(&qkv, loss), 1e-5, 1e-6);
        }
    }
}

#[test]
fn a_window_of_the_whole_sample_changes_no_bit() {
    for window in [70, 71, 1000] {
        let (size, dropout) = (size(2, 70, 2, 10), DROPOUT);
        let (qkv, d_out) = inputs(size);
        let wide = Scores { window: Some(window), ..Scores::of(10) };
        let visible = Visibility { scores: Some(wide), ..Visibility::default() };
        let want = run_ops(1, Dtype::Bf16, size, WHOLE, dropout, &qkv, &d_out);
        assert_eq!(run_ops(1, Dtype::Bf16, size, visible, dropout, &qkv, &d_out), want);
    }
}

#[test]
fn a_key_before_the_window_changes_no_bit() {
    let (size, window) = (grouped(1, 200, 4, 2, 6), 50);
    let visible =
        Visibility { scores: Some(scores(6, Some(3.0), Some(window))), ..Visibility::default() };
    let (qkv, d_out) = inputs(size);
    let whole = run_ops(1, Dtype::F32, size, visible, DROPOUT, &qkv, &d_out);
    let mut other = qkv.clone();
    let (all, width) = (8 * 6, 4 * 6);
    // Token 98 is the last that sees token 49, which is changed.
    other[49 * all..50 * all].iter_mut().for_each(|x| *x = 9.0 - *x);
    let changed = run_ops(1, Dtype::F32, size, visible, DROPOUT, &other, &d_out);
    assert_eq!(whole[0][..49 * width], changed[0][..49 * width]);
    assert_eq!(whole[0][99 * width..], changed[0][99 * width..]);
    assert_ne!(whole[0][98 * width..99 * width], changed[0][98 * width..99 * width]);
    assert_eq!(whole[2][99 * all..], changed[2][99 * all..]);
}
