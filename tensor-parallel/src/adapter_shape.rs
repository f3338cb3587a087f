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
    /// Probability of dropping an element of an adapter's input in training, in [0, 1).
    pub dropout: f32,
}

/// The linears of a block that have an adapter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names are those of the linears")]
#[expect(clippy::struct_excessive_bools, reason = "each linear is chosen alone")]
pub struct AdapterTargets {
    /// Queries, and the gate of attention's output, if it has one; of a model with joined q, k and v
    /// their one linear.
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
    /// Queries, keys and values of gated delta nets.
    pub delta_qkv: bool,
    /// The gate of a gated delta net's output.
    pub delta_gate: bool,
    /// The step sizes of gated delta nets.
    pub delta_steps: bool,
    /// The decays of gated delta nets.
    pub delta_decays: bool,
    /// The projection back from the heads of gated delta nets.
    pub delta_output: bool,
}

impl AdapterTargets {
    /// All linears of attention, of gated delta nets and of the MLP, and the matrices of experts.
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
        delta_qkv: true,
        delta_gate: true,
        delta_steps: true,
        delta_decays: true,
        delta_output: true,
    };

    /// Whether the linear with the name `part` has an adapter.
    pub(crate) fn has(self, part: &str) -> bool {
        match part {
            "attn.q" | "attn.qkv" | "attn.gate" => self.query,
            "attn.k" => self.key,
            "attn.v" => self.value,
            "attn.proj" => self.output,
            "mlp.gate" => self.gate,
            "mlp.up" | "mlp.fc" => self.up,
            "mlp.proj" => self.down,
            "moe.experts.gate_up" => self.experts_gate_up,
            "moe.experts.proj" => self.experts_down,
            "delta.q" | "delta.k" | "delta.v" => self.delta_qkv,
            "delta.z" => self.delta_gate,
            "delta.b" => self.delta_steps,
            "delta.a" => self.delta_decays,
            "delta.proj" => self.delta_output,
            _ => unreachable!("{part} is a linear of a block"),
        }
    }
}

/// Last parts of the factors' names: a, then b.
pub const FACTORS: [&str; 2] = ["lora_a", "lora_b"];

/// Linears that have one first factor, since they are one tensor in a Qwen3.5. The factor has the
/// name of the first of them.
const ONE_FIRST_FACTOR: [&[&str]; 3] = [
    &[".attn.q", ".attn.gate"],
    &[".delta.q", ".delta.k", ".delta.v"],
    // The linears of an expert; the factor has a name of its own.
    &[".gate_up", ".gate", ".up"],
];

/// Names of the linears whose adapters may have the factor with the global name `name`, the first or
/// the second as `which` says: `h.0.attn.q` and `h.0.attn.gate` for `h.0.attn.q.lora_a`.
pub fn linears_of_factor(name: &str, which: usize) -> Vec<String> {
    let linear = name.strip_suffix(FACTORS[which]).and_then(|name| name.strip_suffix('.'));
    let Some(linear) = linear else { return Vec::new() };
    let shared = ONE_FIRST_FACTOR.iter().filter(|_| which == 0);
    let owner = shared.filter_map(|all| Some((linear.strip_suffix(all[0])?, *all))).next();
    match owner {
        Some((layer, all)) => all.iter().map(|own| format!("{layer}{own}")).collect(),
        None => vec![linear.to_owned()],
    }
}

/// Whether a parameter with this global name is a factor of an adapter.
pub(crate) fn is_factor(name: &str) -> bool {
    name.rsplit('.').next().is_some_and(|last| FACTORS.contains(&last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linears_of_one_tensor_have_one_first_factor() {
        for (factor, which, linears) in [
            ("h.0.attn.q.lora_a", 0, &["h.0.attn.q", "h.0.attn.gate"][..]),
            ("h.0.attn.q.lora_b", 1, &["h.0.attn.q"]),
            ("h.0.attn.q.lora_a", 1, &[]),
            ("h.1.delta.q.lora_a", 0, &["h.1.delta.q", "h.1.delta.k", "h.1.delta.v"]),
            ("h.1.delta.z.lora_a", 0, &["h.1.delta.z"]),
            (
                "h.0.moe.experts.3.gate_up.lora_a",
                0,
                &["h.0.moe.experts.3.gate_up", "h.0.moe.experts.3.gate", "h.0.moe.experts.3.up"],
            ),
            ("h.0.mlp.gate.lora_a", 0, &["h.0.mlp.gate"]),
            ("h.0.attn.q.weight", 0, &[]),
        ] {
            assert_eq!(linears_of_factor(factor, which), linears, "{factor}");
        }
    }
}
