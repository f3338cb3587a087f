//! The ranges that an op reads and writes.

use crate::{
    BalanceGradient, Epilogue, GroupedForm, HeadNorm, Op, ScoreRule, SigmoidRule, Tensor, WidthNorm,
};

/// How an op accesses a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// The op only reads the range.
    Read,
    /// The op writes every byte; the old contents do not matter.
    Write,
    /// The op reads the range and writes it in place.
    Update,
}

impl Op {
    /// Calls `visit` with the mode and the range of every access of the op.
    pub fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        use Mode::{Read, Update, Write};
        let mut all = |list: &[(Mode, Tensor)]| list.iter().for_each(|&(mode, t)| visit(mode, t));
        match *self {
            Self::Gemm { a, b, c, bias, add, epilogue } => {
                all(&[(Read, a), (Read, b), (if add { Update } else { Write }, c)]);
                bias.into_iter().for_each(|bias| all(&[(Read, bias)]));
                match epilogue {
                    Epilogue::None => {}
                    Epilogue::GeluBackward { x } => all(&[(Read, x)]),
                    Epilogue::Gelu { y } | Epilogue::RowSums { sums: y } => all(&[(Write, y)]),
                }
            }
            Self::ScaledGemm { a, b, c, bias, scales } => {
                all(&[(Read, a), (Read, b), (Read, scales[0]), (Read, scales[1]), (Write, c)]);
                bias.into_iter().for_each(|bias| all(&[(Read, bias)]));
            }
            Self::Maxima { x, maxima } => all(&[(Read, x), (Write, maxima)]),
            Self::Quantize { x, maxima, y, transposed, scale } => {
                all(&[(Read, x), (Read, maxima), (Write, scale)]);
                [y, transposed].into_iter().flatten().for_each(|t| all(&[(Write, t)]));
            }
            Self::Embedding { tokens, table, y, .. } => {
                all(&[(Read, tokens), (Read, table), (Write, y)]);
            }
            Self::EmbeddingBackward { tokens, order, d_y, d_table, .. } => {
                all(&[(Read, tokens), (Read, order), (Read, d_y), (Update, d_table)]);
            }
            Self::AddPositions { x, table, starts, .. } => {
                all(&[(Update, x), (Read, table)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::PositionsBackward { d_y, starts, d_table, .. } => {
                all(&[(Read, d_y), (Write, d_table)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::LayerNorm { x, gain, bias, y, stats, .. } => {
                all(&[(Read, x), (Read, gain), (Read, bias), (Write, y), (Write, stats)]);
            }
            Self::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias } => {
                all(&[(Read, x), (Read, gain), (Read, stats), (Read, d_y)]);
                all(&[(if add { Update } else { Write }, d_x), (Write, d_gain), (Write, d_bias)]);
            }
            Self::RmsNorm { x, gain, y, stats, .. } => {
                all(&[(Read, x), (Read, gain), (Write, y), (Write, stats)]);
            }
            Self::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain, .. } => {
                all(&[(Read, x), (Read, gain), (Read, stats), (Read, d_y)]);
                all(&[(if add { Update } else { Write }, d_x), (Write, d_gain)]);
            }
            Self::CachedAttention { q, cache, out, sinks, .. } => {
                all(&[(Read, q), (Read, cache), (Write, out)]);
                sinks.into_iter().for_each(|sinks| all(&[(Read, sinks)]));
            }
            Self::Rotary { qkv, table, starts, norm, .. } => {
                all(&[(Update, qkv), (Read, table)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
                if let Some(HeadNorm { q_gain, k_gain, raw, .. }) = norm {
                    all(&[(Read, q_gain), (Read, k_gain), (Write, raw)]);
                }
            }
            Self::RotaryBackward { d_qkv, table, starts, norm, .. } => {
                all(&[(Update, d_qkv), (Read, table)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
                if let Some((HeadNorm { q_gain, k_gain, raw, .. }, grads)) = norm {
                    all(&[(Read, q_gain), (Read, k_gain), (Read, raw)]);
                    all(&[(Write, grads.q_gain), (Write, grads.k_gain)]);
                }
            }
            Self::WidthNormSums { qkv, raw, sums, .. } => {
                all(&[(Read, qkv), (Write, raw), (Write, sums)]);
            }
            Self::WidthNorm { qkv, raw, norm: WidthNorm { gain, sums, .. } } => {
                all(&[(Update, qkv), (Read, raw), (Read, gain), (Read, sums)]);
            }
            Self::WidthNormBackwardSums { d_qkv, raw, norm: WidthNorm { gain, .. }, dots } => {
                all(&[(Read, d_qkv), (Read, raw), (Read, gain), (Write, dots)]);
            }
            Self::WidthNormBackward { d_qkv, raw, norm, dots, d_gain } => {
                all(&[(Update, d_qkv), (Read, raw), (Read, norm.gain), (Read, norm.sums)]);
                all(&[(Read, dots), (Write, d_gain)]);
            }
            Self::SwiGlu { x, y, .. } => all(&[(Read, x), (Write, y)]),
            Self::SwiGluBackward { x, d, .. } => all(&[(Update, x), (Read, d)]),
            Self::Gelu { x, y } | Self::ColumnSum { x, y } | Self::Cast { x, y } => {
                all(&[(Read, x), (Write, y)]);
            }
            Self::GeluBackward { x, d } => all(&[(Read, x), (Update, d)]),
            Self::Attention { qkv, out, lse, starts, .. } => {
                all(&[(Read, qkv), (Write, out), (Write, lse)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::AttentionBackward { qkv, out, lse, d_out, d_qkv, starts, .. } => {
                all(&[(Read, qkv), (Read, out), (Read, lse), (Read, d_out), (Write, d_qkv)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::AttentionSinks { out, lse, sinks, .. } => {
                all(&[(Update, out), (Update, lse), (Read, sinks)]);
            }
            Self::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, .. } => {
                all(&[(Read, out), (Read, lse), (Read, d_out), (Read, sinks), (Write, d_sinks)]);
            }
            Self::BiasDropoutAdd { x, bias, residual, y, .. } => {
                all(&[(Read, x), (Read, residual), (Write, y)]);
                bias.into_iter().for_each(|bias| all(&[(Read, bias)]));
            }
            Self::ColumnDropout { x, y, add, .. } => {
                all(&[(Read, x), (if add { Update } else { Write }, y)]);
            }
            Self::Dropout { x, y, .. } if x == y => all(&[(Update, x)]),
            Self::Dropout { x, y, .. } | Self::RowMax { x, y, .. } => all(&[(Read, x), (Write, y)]),
            Self::CapLogits { logits, .. } => all(&[(Update, logits)]),
            Self::CrossEntropyStats { logits, max, targets, sums, .. } => {
                all(&[(Read, logits), (Read, max), (Read, targets), (Write, sums)]);
            }
            Self::CrossEntropyLoss { sums, targets, loss } => {
                all(&[(Read, sums), (Read, targets), (Write, loss)]);
            }
            Self::CrossEntropyBackward { logits, max, sums, targets, scale, .. } => {
                all(&[(Update, logits), (Read, max), (Read, sums), (Read, targets), (Read, scale)]);
            }
            Self::Route { logits, weights, choices, scoring } => {
                all(&[(Read, logits), (Write, weights), (Write, choices)]);
                if let ScoreRule::Sigmoid(SigmoidRule { correction, .. }) = scoring {
                    all(&[(Read, correction)]);
                }
            }
            Self::RouteBackward { logits, choices, d_weights, balance, .. } => {
                all(&[(Update, logits), (Read, choices), (Read, d_weights)]);
                if let Some(BalanceGradient { of_experts, targets }) = balance {
                    all(&[(Read, of_experts), (Read, targets)]);
                }
            }
            Self::SortByExpert { choices, offsets, order, places, scratch } => {
                all(&[(Read, choices), (Write, offsets), (Write, order), (Write, places)]);
                all(&[(Write, scratch)]);
            }
            Self::GatherRows { x, order, y } => all(&[(Read, x), (Read, order), (Write, y)]),
            Self::GroupedGemm { form, a, b, c, experts, offsets, add } => {
                let weights = match form {
                    GroupedForm::Forward | GroupedForm::InputGradient => Read,
                    GroupedForm::WeightGradient if add => Update,
                    GroupedForm::WeightGradient => Write,
                };
                // The rows of an expert are data, so the op accesses all that may be theirs.
                all(&[(Read, a), (Read, offsets), (weights, experts.all)]);
                b.into_iter().for_each(|b| all(&[(Read, b)]));
                c.into_iter().for_each(|c| all(&[(if add { Update } else { Write }, c)]));
            }
            Self::AddExpertBiases { x, biases, offsets } => {
                all(&[(Update, x), (Read, biases), (Read, offsets)]);
            }
            Self::ExpertBiasesBackward { d_y, offsets, d_biases } => {
                all(&[(Read, d_y), (Read, offsets), (Write, d_biases)]);
            }
            Self::CombineExperts { y, places, weights, out } => {
                all(&[(Read, y), (Read, places), (Write, out)]);
                weights.into_iter().for_each(|weights| all(&[(Read, weights)]));
            }
            Self::CombineExpertsBackward { d_out, y, places, weights, d_y, d_weights } => {
                all(&[(Read, d_out), (Read, places), (Read, weights), (Write, d_weights)]);
                if y == d_y {
                    all(&[(Update, y)]);
                } else {
                    all(&[(Read, y), (Write, d_y)]);
                }
            }
            Self::ExpertLoad { offsets, order, targets, logits, load, shares } => {
                all(&[(Read, offsets), (Read, order), (Read, targets), (Update, load)]);
                if let Some(shares) = shares {
                    all(&[(Read, logits), (Update, shares)]);
                }
            }
            Self::BalanceLoss { counts, shares, value, grads, .. } => {
                all(&[(Read, counts), (Read, shares), (Update, value), (Write, grads)]);
            }
            Self::Convolution { x, weight, y, starts, .. } => {
                all(&[(Read, x), (Read, weight), (Write, y)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::ConvolutionBackward { x, weight, d_y, d_x, d_weight, starts, .. } => {
                all(&[(Read, x), (Read, weight), (Read, d_y), (Write, d_x), (Write, d_weight)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::DeltaGates { x, decay, bias, gates } => {
                all(&[(Read, x), (Read, decay), (Read, bias), (Write, gates)]);
            }
            Self::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias } => {
                all(&[(Read, x), (Read, decay), (Read, bias), (Read, d_gates)]);
                all(&[(Write, d_x), (Write, d_decay), (Write, d_bias)]);
            }
            Self::DeltaRule { qkv, gates, out, states, initial, starts, .. } => {
                all(&[(Read, qkv), (Read, gates), (Write, out), (Write, states)]);
                initial.into_iter().for_each(|initial| all(&[(Read, initial)]));
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::DeltaRuleBackward {
                qkv, gates, states, d_out, d_qkv, d_gates, starts, ..
            } => {
                all(&[(Read, qkv), (Read, gates), (Read, states), (Read, d_out)]);
                all(&[(Write, d_qkv), (Write, d_gates)]);
                starts.into_iter().for_each(|starts| all(&[(Read, starts)]));
            }
            Self::GatedNorm { x, gate, gain, y, .. } => {
                all(&[(Read, x), (Read, gate), (Read, gain), (Write, y)]);
            }
            Self::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, .. } => {
                all(&[(Read, x), (Read, gate), (Read, gain), (Read, d_y)]);
                all(&[(Write, d_x), (Write, d_gate), (Write, d_gain)]);
            }
            Self::SigmoidGate { x, gate, y } => all(&[(Read, x), (Read, gate), (Write, y)]),
            Self::SigmoidGateBackward { x, gate, d, d_gate } => {
                all(&[(Read, x), (Read, gate), (Update, d), (Write, d_gate)]);
            }
            Self::Add { x, into } => all(&[(Read, x), (Update, into)]),
            Self::Zero { x } => all(&[(Write, x)]),
            Self::ChunkSquares { x, partials, .. } => all(&[(Read, x), (Write, partials)]),
            Self::LastColumns { x, y } => all(&[(Read, x), (Write, y)]),
            Self::Copy { src, dst } => all(&[(Read, src), (Write, dst)]),
            Self::AllReduce { x, .. } | Self::ReduceScatter { x, .. } => all(&[(Update, x)]),
            // The mode is `Write`, since the parts of peers may be unwritten before the op.
            Self::AllGather { x, .. } | Self::Broadcast { x, .. } => all(&[(Write, x)]),
            Self::Host { ref task, .. } => all(task.accesses()),
            Self::Task { ref task } => all(task.accesses()),
        }
    }

    /// Bytes read plus bytes written.
    pub fn bytes(&self) -> u64 {
        let mut sum = 0;
        self.accesses(&mut |mode, t| sum += t.bytes() * if mode == Mode::Update { 2 } else { 1 });
        if let Self::Host { task, .. } = self { task.bytes(sum) } else { sum }
    }
}
