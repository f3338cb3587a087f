//! The families of ops, by the file of kernels that computes an op.

use super::Op;

/// A family of ops: one file of kernels computes them, on the cpu as on CUDA.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Family {
    Product,
    Fp8,
    Embedding,
    Norm,
    Rotary,
    Attention,
    Cache,
    Loss,
    Experts,
    Delta,
    Elementwise,
    Squares,
    /// Copies, collectives and host tasks, which have no kernel.
    Transfer,
    /// A task of another crate, which supplies its own kernel.
    Task,
}

impl Op {
    /// The family whose kernels compute the op.
    pub(crate) const fn family(&self) -> Family {
        match self {
            Self::Gemm { .. } | Self::ScaledGemm { .. } => Family::Product,
            Self::Maxima { .. } | Self::Quantize { .. } => Family::Fp8,
            Self::Embedding { .. }
            | Self::EmbeddingBackward { .. }
            | Self::AddPositions { .. }
            | Self::PositionsBackward { .. } => Family::Embedding,
            Self::LayerNorm { .. }
            | Self::LayerNormBackward { .. }
            | Self::RmsNorm { .. }
            | Self::RmsNormBackward { .. }
            | Self::WidthNormSums { .. }
            | Self::WidthNorm { .. }
            | Self::WidthNormBackwardSums { .. }
            | Self::WidthNormBackward { .. } => Family::Norm,
            Self::Rotary { .. } | Self::RotaryBackward { .. } => Family::Rotary,
            Self::Attention { .. }
            | Self::AttentionBackward { .. }
            | Self::AttentionSinks { .. }
            | Self::AttentionSinksBackward { .. } => Family::Attention,
            Self::CachedAttention { .. } | Self::LastColumns { .. } => Family::Cache,
            Self::CapLogits { .. }
            | Self::RowMax { .. }
            | Self::CrossEntropyStats { .. }
            | Self::CrossEntropyLoss { .. }
            | Self::CrossEntropyBackward { .. } => Family::Loss,
            Self::Route { .. }
            | Self::RouteBackward { .. }
            | Self::SortByExpert { .. }
            | Self::GatherRows { .. }
            | Self::GroupedGemm { .. }
            | Self::AddExpertBiases { .. }
            | Self::ExpertBiasesBackward { .. }
            | Self::CombineExperts { .. }
            | Self::CombineExpertsBackward { .. }
            | Self::ExpertLoad { .. }
            | Self::BalanceLoss { .. } => Family::Experts,
            Self::Convolution { .. }
            | Self::ConvolutionBackward { .. }
            | Self::DeltaGates { .. }
            | Self::DeltaGatesBackward { .. }
            | Self::DeltaRule { .. }
            | Self::DeltaRuleBackward { .. }
            | Self::GatedNorm { .. }
            | Self::GatedNormBackward { .. }
            | Self::SigmoidGate { .. }
            | Self::SigmoidGateBackward { .. } => Family::Delta,
            Self::Gelu { .. }
            | Self::GeluBackward { .. }
            | Self::SwiGlu { .. }
            | Self::SwiGluBackward { .. }
            | Self::ColumnSum { .. }
            | Self::BiasDropoutAdd { .. }
            | Self::Dropout { .. }
            | Self::ColumnDropout { .. }
            | Self::Add { .. }
            | Self::Cast { .. }
            | Self::Zero { .. } => Family::Elementwise,
            Self::ChunkSquares { .. } => Family::Squares,
            Self::Copy { .. }
            | Self::AllReduce { .. }
            | Self::ReduceScatter { .. }
            | Self::AllGather { .. }
            | Self::Broadcast { .. }
            | Self::Host { .. } => Family::Transfer,
            Self::Task { .. } => Family::Task,
        }
    }
}
