//! The ops of a step at the shapes of configs, per GPU and micro-batch.

use crate::experts::ExpertSizes;
use crate::{Case, OpMaker, Tensors, delta};
use device::{DeltaHeads, Dropout, Dtype, FP8_SINCE, Gate, Heads, MAXIMA, Op, Scores, VocabShard};

/// The ops of a config that are counted.
#[derive(Clone, Copy, PartialEq)]
enum Blocks {
    Gpt,
    Llama,
    /// Attention alone.
    Attention,
    /// Mixture of experts alone.
    Experts(ExpertSizes),
    /// The gated delta rule alone.
    Delta(DeltaHeads),
}

/// A config's sizes on one GPU.
pub(crate) struct Config {
    /// Name of the config's file in configs/, or of a model and a GPU.
    pub(crate) name: &'static str,
    pub(crate) sm: u32,
    value: Dtype,
    blocks: Blocks,
    /// Tokens of a micro-batch, and the number of them that a rank norms.
    tokens: usize,
    normed: usize,
    hidden: usize,
    /// Query heads, and key-value heads, of this rank.
    heads: (usize, usize),
    /// Elements of a head.
    dim: usize,
    /// Cap of the scores of attention.
    cap: Option<f32>,
    /// Columns of the feed-forward layer, and of the vocabulary, on this rank.
    ffn: usize,
    vocab: usize,
    seq_len: usize,
}

pub(crate) fn configs() -> [Config; 15] {
    let (value, blocks) = (Dtype::Bf16, Blocks::Gpt);
    let h100 = Config {
        name: "h100-1.3b",
        sm: 90,
        value,
        blocks,
        tokens: 8192,
        normed: 8192,
        hidden: 2048,
        heads: (16, 16),
        dim: 128,
        cap: None,
        ffn: 8192,
        vocab: 50304,
        seq_len: 1024,
    };
    let llama3 = Config {
        name: "llama3-8b",
        blocks: Blocks::Llama,
        hidden: 4096,
        heads: (32, 8),
        ffn: 14336,
        vocab: 128_256,
        seq_len: 4096,
        ..h100
    };
    let qwen3_14b = Config {
        name: "qwen3-14b 4090",
        sm: 89,
        blocks: Blocks::Attention,
        hidden: 5120,
        heads: (40, 8),
        ffn: 17408,
        vocab: 151_936,
        ..llama3
    };
    let gemma3 = Config {
        name: "gemma3-12b",
        blocks: Blocks::Attention,
        hidden: 3840,
        heads: (16, 8),
        dim: 256,
        ffn: 15360,
        vocab: 262_208,
        seq_len: 4096,
        ..h100
    };
    let gemma2_9b = Config {
        name: "gemma2-9b",
        hidden: 3584,
        cap: Some(50.0),
        ffn: 14336,
        vocab: 256_000,
        ..gemma3
    };
    let gemma2_27b = Config {
        name: "gemma2-27b",
        hidden: 4608,
        heads: (32, 16),
        dim: 128,
        ffn: 36864,
        ..gemma2_9b
    };
    let gemma2_27b_4090 = Config { name: "gemma2-27b 4090", sm: 89, ..gemma2_27b };
    let dgx2 = Config {
        name: "dgx2-70b",
        sm: 70,
        value: Dtype::F16,
        normed: 1024,
        hidden: 9216,
        heads: (9, 9),
        ffn: 4608,
        vocab: 6288,
        ..h100
    };
    let qwen3 = ExpertSizes { hidden: 2048, ffn: 768, count: 128, per_token: 8 };
    let gpt_oss = ExpertSizes { hidden: 2880, ffn: 2880, count: 32, per_token: 4 };
    let of_experts = |name, sm, sizes| Config { name, sm, blocks: Blocks::Experts(sizes), ..h100 };
    let of_models = [
        of_experts("qwen3-30b-a3b a100", 80, qwen3),
        of_experts("qwen3-30b-a3b 4090", 89, qwen3),
        of_experts("qwen3-30b-a3b 5090", 120, qwen3),
        of_experts("qwen3-30b-a3b h100", 90, qwen3),
        of_experts("gpt-oss-20b a100", 80, gpt_oss),
    ];
    let qwen35 = DeltaHeads { keys: 16, values: 32, key_dim: 128, value_dim: 128, seq_len: 4096 };
    let blocks = Blocks::Delta(qwen35);
    let qwen35_h100 = Config { name: "qwen3.5-9b h100", blocks, ..h100 };
    let qwen35_4090 = Config { name: "qwen3.5-9b 4090", sm: 89, blocks, ..h100 };
    let [qwen3_a100, qwen3_4090, qwen3_5090, qwen3_h100, gpt_oss_a100] = of_models;
    [
        h100,
        llama3,
        qwen3_14b,
        gemma3,
        gemma2_9b,
        gemma2_27b,
        gemma2_27b_4090,
        dgx2,
        qwen3_a100,
        qwen3_4090,
        qwen3_5090,
        qwen3_h100,
        gpt_oss_a100,
        qwen35_h100,
        qwen35_4090,
    ]
}

/// Tokens of the longest sample that runs; longer samples have more pairs of tiles.
const LONGEST: usize = 1024;
const NO_DROPOUT: Dropout = Dropout { p: 0.0, key: 0, first_row: 0 };

impl Config {
    pub(crate) fn cases(&self) -> Vec<Case> {
        let mut cases = match self.blocks {
            Blocks::Attention => return self.attention().into(),
            Blocks::Experts(sizes) => return sizes.cases(self.value, self.tokens),
            Blocks::Delta(heads) => return delta::cases(heads, self.value),
            Blocks::Gpt => self.of_gpt(),
            Blocks::Llama => self.of_llama(),
        };
        cases.extend(self.attention());
        cases.extend(self.loss());
        if self.sm >= FP8_SINCE {
            cases.extend(self.of_fp8());
        }
        let (value, cols) = (self.value, self.ffn);
        cases.push(self.rows("accumulate", self.hidden, 16, move |t, rows| {
            let [x, into] = [value, Dtype::F32].map(|dtype| t.make(dtype, (rows, cols)));
            Op::Add { x, into }
        }));
        cases
    }

    fn rows(
        &self,
        name: &'static str,
        whole: usize,
        part: usize,
        make: impl Fn(&mut Tensors, usize) -> Op + 'static,
    ) -> Case {
        Case { name, make: Box::new(make), whole, part, times: 1.0 }
    }

    fn of_gpt(&self) -> Vec<Case> {
        let (value, cols, ffn) = (self.value, self.hidden, self.ffn);
        let norm = move |t: &mut Tensors, rows| {
            let [x, y, d] = [(); 3].map(|()| t.make(value, (rows, cols)));
            let [gain, bias] = [(); 2].map(|()| t.make(value, (1, cols)));
            (x, y, d, gain, bias, t.make(Dtype::F32, (rows, 2)))
        };
        let add = move |t: &mut Tensors, rows| {
            let [x, residual, y] = [(); 3].map(|()| t.make(value, (rows, cols)));
            let bias = Some(t.make(value, (1, cols)));
            Op::BiasDropoutAdd { x, bias, residual, y, dropout: NO_DROPOUT, scale: 1.0 }
        };
        vec![
            self.rows("layer_norm", self.normed, 32, move |t, rows| {
                let (x, y, _, gain, bias, stats) = norm(t, rows);
                Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 }
            }),
            self.rows("layer_norm_backward", self.normed, self.normed.min(2048), move |t, rows| {
                let (x, d_y, d_x, d_gain, d_bias, stats) = norm(t, rows);
                let gain = t.make(value, (1, cols));
                Op::LayerNormBackward { x, gain, stats, d_y, d_x, add: true, d_gain, d_bias }
            }),
            self.rows("gelu", self.tokens, 16, move |t, rows| {
                let [x, y] = [(); 2].map(|()| t.make(value, (rows, ffn)));
                Op::Gelu { x, y }
            }),
            self.rows("gelu_backward", self.tokens, 16, move |t, rows| {
                let [x, d] = [(); 2].map(|()| t.make(value, (rows, ffn)));
                Op::GeluBackward { x, d }
            }),
            self.rows("bias_dropout_add", self.normed, 32, add),
            self.rows("column_sum", self.tokens, 256, move |t, rows| {
                let (x, y) = (t.make(value, (rows, ffn)), t.make(value, (1, ffn)));
                Op::ColumnSum { x, y }
            }),
        ]
    }

    /// Conversions to fp8: the widest input of a linear in its own layout, and its gradient in both
    /// layouts.
    fn of_fp8(&self) -> [Case; 3] {
        let (value, ffn) = (self.value, self.ffn);
        let quantize = move |t: &mut Tensors, rows, format: Dtype, both: bool| {
            let (x, maxima) = (t.make(value, (rows, ffn)), t.make(Dtype::F32, (1, MAXIMA)));
            let (y, scale) = (Some(t.make(format, (rows, ffn))), t.make(Dtype::F32, (1, 1)));
            let transposed = both.then(|| t.make(format, (ffn, rows)));
            Op::Quantize { x, maxima, y, transposed, scale }
        };
        [
            self.rows("maxima", self.tokens, 512, move |t, rows| {
                let (x, maxima) = (t.make(value, (rows, ffn)), t.make(Dtype::F32, (1, MAXIMA)));
                Op::Maxima { x, maxima }
            }),
            self.rows("quantize", self.tokens, 128, move |t, rows| {
                quantize(t, rows, Dtype::E4m3, false)
            }),
            self.rows("quantize, both ways", self.tokens, 128, move |t, rows| {
                quantize(t, rows, Dtype::E5m2, true)
            }),
        ]
    }

    fn of_llama(&self) -> Vec<Case> {
        let (value, cols, ffn) = (self.value, self.hidden, self.ffn);
        let (heads, dim, seq_len) = (self.heads, self.dim, self.seq_len);
        let rotary_tensors = move |t: &mut Tensors, rows| {
            let (count, kv_count) = heads;
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
            let qkv = t.make(value, (rows, (count + 2 * kv_count) * dim));
            (qkv, t.make(Dtype::F32, (seq_len, dim)), heads)
        };
        vec![
            self.rows("rms_norm", self.normed, 32, move |t, rows| {
                let [x, y] = [(); 2].map(|()| t.make(value, (rows, cols)));
                let (gain, stats) = (t.make(value, (1, cols)), t.make(Dtype::F32, (rows, 1)));
                Op::RmsNorm { x, gain, y, stats, epsilon: 1e-5, offset: 0.0 }
            }),
            self.rows("rms_norm_backward", self.normed, self.normed.min(2048), move |t, rows| {
                let [x, d_y, d_x] = [(); 3].map(|()| t.make(value, (rows, cols)));
                let [gain, d_gain] = [(); 2].map(|()| t.make(value, (1, cols)));
                let stats = t.make(Dtype::F32, (rows, 1));
                Op::RmsNormBackward { x, gain, stats, d_y, d_x, add: true, d_gain, offset: 0.0 }
            }),
            self.rows("rotary", self.tokens, 32, move |t, rows| {
                let (qkv, table, heads) = rotary_tensors(t, rows);
                Op::Rotary { qkv, table, heads, starts: None, norm: None }
            }),
            self.rows("swiglu", self.tokens, 8, move |t, rows| {
                let (x, y) = (t.make(value, (rows, 2 * ffn)), t.make(value, (rows, ffn)));
                Op::SwiGlu { x, y, gate: Gate::Silu }
            }),
            self.rows("swiglu_backward", self.tokens, 8, move |t, rows| {
                let (x, d) = (t.make(value, (rows, 2 * ffn)), t.make(value, (rows, ffn)));
                Op::SwiGluBackward { x, d, gate: Gate::Silu }
            }),
            self.rows("add", self.tokens, 32, move |t, rows| {
                let [x, into] = [(); 2].map(|()| t.make(value, (rows, cols)));
                Op::Add { x, into }
            }),
        ]
    }

    fn attention(&self) -> [Case; 2] {
        let (value, dim, group) = (self.value, self.dim, self.heads.0 / self.heads.1);
        let scores = Scores { cap: self.cap, ..Scores::of(dim) };
        let (seq_len, samples) = (self.seq_len, self.tokens / self.seq_len);
        // The part is one key-value head of a sample with LONGEST tokens.
        let pairs = |tokens: usize| (tokens / 64 * (tokens / 64 + 1)) as f64;
        let make = move |backward: bool| -> OpMaker {
            Box::new(move |t, shared| {
                // The whole op has all heads of all samples; its part has one key-value head.
                let (tokens, samples) = if shared == 1 { (LONGEST, 1) } else { (seq_len, samples) };
                let kv_count = shared / samples;
                let count = kv_count * group;
                let heads = Heads { count, kv_count, first: 0, total: count, seq_len: tokens };
                let rows = tokens * samples;
                let qkv = t.make(value, (rows, (count + 2 * kv_count) * dim));
                let out = t.make(value, (rows, count * dim));
                let lse = t.make(Dtype::F32, (samples * count, tokens));
                let (starts, dropout) = (None, NO_DROPOUT);
                if !backward {
                    return Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
                }
                let d_out = t.make(value, (rows, count * dim));
                let d_qkv = t.make(value, (rows, (count + 2 * kv_count) * dim));
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
                }
            })
        };
        [("attention", false), ("attention_backward", true)].map(|(name, backward)| Case {
            name,
            make: make(backward),
            whole: self.heads.1 * samples,
            part: 1,
            times: pairs(seq_len) / pairs(LONGEST),
        })
    }

    fn loss(&self) -> Vec<Case> {
        let (value, cols) = (self.value, self.vocab);
        let pass = |name, number: usize| {
            self.rows(name, self.tokens, 4, move |t, rows| {
                let (logits, shard) =
                    (t.make(value, (rows, cols)), VocabShard { first: 0, valid: cols });
                let [max, sums] = [1, 2].map(|parts| t.make(Dtype::F32, (parts, rows)));
                if number == 0 {
                    return Op::RowMax { x: logits, y: max, shard };
                }
                let targets = t.make(Dtype::I32, (1, rows));
                if number == 1 {
                    return Op::CrossEntropyStats { logits, max, targets, shard, sums };
                }
                let scale = t.make(Dtype::F64, (1, 1));
                Op::CrossEntropyBackward {
                    logits,
                    max,
                    sums,
                    targets,
                    shard,
                    scale,
                    factor: 1.0,
                    cap: None,
                }
            })
        };
        vec![pass("row_max", 0), pass("cross_entropy_stats", 1), pass("cross_entropy_backward", 2)]
    }
}
