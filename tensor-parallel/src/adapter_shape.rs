//! Ranks, factors and linears of low-rank adapters.

/// The adapters of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdapterShape {
    /// r: rows of a, columns of b.
    pub rank: usize,
    /// s: factor of the adapter's output.
    pub scale: f64,
    /// The linears that have an adapter.
    pub targets: AdapterTargets,
}

/// The linears of a block that have an adapter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names are those of the linears")]
#[expect(clippy::struct_excessive_bools, reason = "each linear is chosen alone")]
pub struct AdapterTargets {
    /// Queries; of a model with joined q, k and v their one linear.
    pub query: bool,
    pub key: bool,
    pub value: bool,
    /// The projection back from the heads.
    pub output: bool,
    pub gate: bool,
    /// The linear from the hidden channels to the inner width of an MLP.
    pub up: bool,
    /// The linear back from the inner width of an MLP.
    pub down: bool,
    /// Gate and up of each expert.
    pub experts_gate_up: bool,
    /// The matrix back from the inner width of each expert.
    pub experts_down: bool,
}

impl AdapterTargets {
    /// All linears of attention and of the MLP, and the matrices of experts.
    pub const ALL: Self = Self {
        query: true,
        key: true,
        value: true,
        output: true,
        gate: true,
        up: true,
        down: true,
        experts_gate_up: true,
        experts_down: true,
    };

    /// Whether the linear with the name `part` has an adapter.
    pub(crate) fn has(self, part: &str) -> bool {
        match part {
            "attn.q" | "attn.qkv" => self.query,
            "attn.k" => self.key,
            "attn.v" => self.value,
            "attn.proj" => self.output,
            "mlp.gate" => self.gate,
            "mlp.up" | "mlp.fc" => self.up,
            "mlp.proj" => self.down,
            "moe.experts.gate_up" => self.experts_gate_up,
            "moe.experts.proj" => self.experts_down,
            _ => unreachable!("{part} is a linear of a block"),
        }
    }
}

/// Last parts of the factors' names: a, then b.
pub const FACTORS: [&str; 2] = ["lora_a", "lora_b"];

/// Whether a parameter with this global name is a factor of an adapter.
pub(crate) fn is_factor(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| FACTORS.contains(&last))
}
