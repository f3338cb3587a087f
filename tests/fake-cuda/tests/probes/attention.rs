//! Attention by onebox's kernels and by cuDNN: how far their results are apart, and their times.

use crate::rates::{open_with, seconds, tensor};
use crate::small;
use device::cuda::{AttentionLibrary, attention_workspace};
use device::{Device, Dropout, Dtype, Heads, Op, Plan, Scores, Tensor, random};

/// A shape of attention.
#[derive(Clone, Copy)]
struct Shape {
    samples: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    /// Elements of a head.
    dim: usize,
}

impl Shape {
    const fn new([samples, heads, kv_heads, tokens, dim]: [usize; 5]) -> Self {
        Self { samples, heads, kv_heads, tokens, dim }
    }

    const fn heads(self) -> Heads {
        let Self { heads: count, kv_heads: kv_count, tokens: seq_len, .. } = self;
        Heads { count, kv_count, first: 0, total: count, seq_len }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { samples, heads, kv_heads, tokens, dim } = self;
        write!(f, "{samples}x{heads}/{kv_heads}x{tokens}x{dim}")
    }
}

/// The tensors of both passes.
#[derive(Clone, Copy)]
struct Passes {
    heads: Heads,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    d_qkv: Tensor,
}

impl Passes {
    fn new(plan: &mut Plan, dtype: Dtype, shape: Shape) -> Self {
        let heads = shape.heads();
        let Shape { samples, dim, .. } = shape;
        let Heads { count, kv_count, seq_len, .. } = heads;
        let rows = samples * seq_len;
        let (row, all) = ((rows, count * dim), (rows, (count + 2 * kv_count) * dim));
        Self {
            heads,
            qkv: tensor(plan, dtype, all),
            out: tensor(plan, dtype, row),
            lse: tensor(plan, Dtype::F32, (samples * count, seq_len)),
            d_out: tensor(plan, dtype, row),
            d_qkv: tensor(plan, dtype, all),
        }
    }

    fn op(&self, backward: bool) -> Op {
        let Self { heads, qkv, out, lse, d_out, d_qkv } = *self;
        let (starts, dropout) = (None, Dropout::NONE);
        let scores = Scores::of(heads.dim(qkv.shape().1));
        if backward {
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores }
        } else {
            Op::Attention { qkv, out, lse, heads, starts, dropout, scores }
        }
    }

    fn fill(&self, dev: &Device) {
        for (key, t) in [(7, self.qkv), (8, self.d_out)] {
            let value = |i| random::below(key, i as u64, 4001) as f64 / 1000.0 - 2.0;
            dev.write(t, &value).unwrap();
        }
    }

    /// out, lse and d_qkv after both passes.
    fn results(&self, dev: &Device) -> Result<[Vec<f64>; 3], String> {
        for backward in [false, true] {
            dev.submit(device::Lane::Compute, self.op(backward));
        }
        dev.sync_all().map_err(|e| e.to_string())?;
        Ok([self.out, self.lse, self.d_qkv].map(|t| {
            let mut read = vec![0.0; t.len()];
            dev.read(t, &mut read).unwrap();
            read
        }))
    }
}

/// The largest difference, as a share of the largest number.
fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    let largest = a.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let pairs = a.iter().zip(b);
    let differences =
        pairs.map(|(a, b)| if (a - b).is_nan() { f64::INFINITY } else { (a - b).abs() });
    differences.fold(0.0, f64::max) / largest
}

fn device(plan: Plan, library: AttentionLibrary, shape: Shape) -> Device {
    open_with(plan, library, attention_workspace(shape.samples, shape.heads(), shape.dim))
}

fn compare(dtype: Dtype, shape: Shape) {
    let mut results = Vec::new();
    for library in [AttentionLibrary::Own, AttentionLibrary::Cudnn] {
        let mut plan = Plan::default();
        let passes = Passes::new(&mut plan, dtype, shape);
        let dev = device(plan, library, shape);
        passes.fill(&dev);
        let (first, again) = (passes.results(&dev), passes.results(&dev));
        let same = first == again;
        match first {
            Ok(first) => results.push((first, same)),
            Err(why) => {
                return eprintln!(
                    "figure attention-apart {shape} {dtype:?} {library:?} note={why}"
                );
            }
        }
    }
    let [(own, _), (library, same)] = [results[0].clone(), results[1].clone()];
    let [out, lse, d_qkv] = [0, 1, 2].map(|i| largest_difference(&own[i], &library[i]));
    eprintln!(
        "figure attention-apart shape={shape} dtype={dtype:?} out={out:.1e} \
         lse={lse:.1e} d_qkv={d_qkv:.1e} same-bits={same}"
    );
}

fn time(library: AttentionLibrary, shape: Shape) {
    let mut plan = Plan::default();
    let passes = Passes::new(&mut plan, Dtype::Bf16, shape);
    let dev = device(plan, library, shape);
    passes.fill(&dev);
    let runs = if small() { 1 } else { 30 };
    let us = |backward| seconds(&dev, runs, &|_| passes.op(backward)).map(|s| 1e6 * s);
    match (us(false), us(true)) {
        (Ok(forward), Ok(backward)) => eprintln!(
            "figure attention-time shape={shape} library={library:?} forward-us={forward:.1} backward-us={backward:.1}"
        ),
        (forward, backward) => {
            eprintln!("figure attention-time shape={shape} note={forward:?} {backward:?}");
        }
    }
}

pub(crate) fn measure() {
    if small() {
        return time(AttentionLibrary::Own, Shape::new([1, 2, 1, 8, 8]));
    }
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for shape in [[2, 8, 2, 512, 128], [3, 4, 4, 200, 64], [1, 6, 2, 1030, 96]] {
            compare(dtype, Shape::new(shape));
        }
    }
    for shape in [[8, 16, 16, 1024, 128], [2, 32, 8, 4096, 128], [1, 32, 8, 8192, 128]] {
        for library in [AttentionLibrary::Own, AttentionLibrary::Cudnn] {
            time(library, Shape::new(shape));
        }
    }
}
