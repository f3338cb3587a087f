//! The shape of the experts of a layer.

/// Prefix of the parameters of experts in a block; the number of the expert follows.
pub(crate) const EXPERTS: &str = "moe.experts.";

/// The experts of a layer: E MLPs with a gate, of which a router chooses k for each token. The
/// layer's output is the sum of the chosen outputs, each times a weight. No token is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsShape {
    /// E: number of experts of a layer.
    pub count: usize,
    /// k: number of experts of a token.
    pub per_token: usize,
    /// I: inner width of an expert; a multiple of the ranks.
    pub ffn_hidden: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalize: bool,
    /// Choice and weights by sigmoid. `None`: by softmax over all experts.
    pub sigmoid: Option<SigmoidShape>,
    /// Inner width of an MLP with a gate that all tokens pass beside their experts, and whose output
    /// is added to theirs; a multiple of the ranks. `None`: there is none.
    pub shared_hidden: Option<usize>,
    /// Whether each token has a factor of that MLP's output: the sigmoid of a linear with one row.
    pub shared_gate: bool,
    /// Whether the router and the linears of experts have biases.
    pub biases: bool,
    /// Loss that spreads the tokens evenly over the experts. `None`: there is no such loss.
    pub balance: Option<Balance>,
}

/// Scores by sigmoid: see [`device::SigmoidRule`]. Each layer has a correction of the scores, a
/// parameter without a gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SigmoidShape {
    /// Number of groups of equally many experts.
    pub groups: usize,
    /// Number of groups whose experts a token may choose.
    pub kept_groups: usize,
    /// Factor of the weights of a token's experts.
    pub scale: f64,
}

/// A loss that is small if a router spreads the tokens evenly, times the given factor. c: number of
/// tokens of a micro-batch that chose an expert. P: mean over the tokens of the expert's
/// probability. T: number of tokens of a micro-batch. Tokens of padding do not count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Balance {
    /// E times the sum over the experts of c / T times P, both averaged over all layers with
    /// experts before the product (transformers).
    HuggingFace(f64),
    /// E / (k T) times the sum over the experts of c P, added up over the layers with experts
    /// (Megatron-LM).
    Megatron(f64),
}

impl Balance {
    /// Factor of the loss in the loss of the training.
    pub(crate) const fn factor(self) -> f64 {
        match self {
            Self::HuggingFace(factor) | Self::Megatron(factor) => factor,
        }
    }
}

impl ExpertsShape {
    /// The scale of [`Op::BalanceLoss`](device::Op::BalanceLoss) for a loss without its factor. Its
    /// rows are layers, or their sum.
    pub(crate) const fn balance_scale(&self, balance: Balance) -> f64 {
        let (experts, chosen) = (self.count as f64, self.per_token as f64);
        match balance {
            Balance::HuggingFace(_) => experts,
            Balance::Megatron(_) => experts / chosen,
        }
    }
}
