//! Upper limits of sizes, so that their products fit into 64 bits. `checks` applies these rules.

use super::DeviceConfig;
use super::checks::Checks;
use super::reading::{Violation, grouped};
use topology::counted;

/// Most parameters of a model: 2^50. Sums of the bytes of all parameters stay far below 2^64.
const MOST_PARAMETERS: u128 = 1 << 50;

/// Most elements of an activation.
const MOST_ELEMENTS: u128 = 1 << 50;
/// Most tokens of a run.
const MOST_TOKENS: u128 = 1 << 62;

/// Most bytes of all virtual GPUs.
const MOST_MEMORY: u128 = 1 << 62;

impl Checks<'_> {
    pub(super) fn memory(&self) -> Option<Violation> {
        let DeviceConfig::Cpu { count, memory, .. } = self.config.device else { return None };
        let total = count as u128 * u128::from(memory);
        (total > MOST_MEMORY).then(|| Violation {
            message: format!("{count} x {memory} = {total} bytes, more than 2^62"),
            help: "use fewer devices or less memory".into(),
            values: vec![
                ("device.memory", format!("{memory} bytes")),
                ("device.count", counted(count, "device")),
            ],
        })
    }

    pub(super) fn parameters(&self) -> Option<Violation> {
        let m = &self.config.model;
        let [l, c, t, v, f] =
            [m.layers, m.hidden, m.seq_len, m.vocab, m.ffn_hidden].map(|n| n as u128);
        let [h, k, d] = [m.heads, m.kv_heads, m.head_dim].map(|n| n as u128);
        // Upper bound for all families: a gated MLP, norms of heads, biases and an untied output
        // projection.
        let experts = m
            .experts
            .as_ref()
            .map_or(0, |experts| experts.count as u128 * c * (3 * experts.ffn_hidden as u128 + 1));
        let block = 2 * (h + k) * d * c + 3 * c * f + 9 * c + (h + 2 * k + 2) * d + f + experts;
        let total = (2 * v + t) * c + l * block + 2 * c;
        (total > MOST_PARAMETERS).then(|| Violation {
            message: format!(
                "a model of up to {total} parameters, more than 2^50: (2 vocab {v} + seq_len {t}) x {c} + \
                 {l} layers x {block}"
            ),
            help: "use fewer layers or a smaller `hidden`".into(),
            values: vec![
                ("model.hidden", counted(c, "channel")),
                ("model.layers", counted(l, "layer")),
                ("model.ffn_hidden", counted(f, "channel")),
            ],
        })
    }

    pub(super) fn activations(&self) -> Option<Violation> {
        let (m, micro) = (&self.config.model, self.config.batch.micro as u128);
        let t = m.seq_len as u128;
        let of_experts = m.experts.as_ref().map_or(0, |experts| {
            let width = m.hidden.max(2 * experts.ffn_hidden) as u128;
            (experts.per_token as u128 * width).max(experts.count as u128)
        });
        let (wide, width) = [
            ("model.experts.per_token", of_experts),
            ("model.hidden", m.hidden as u128),
            ("model.head_dim", (m.heads + 2 * m.kv_heads) as u128 * m.head_dim as u128),
            ("model.ffn_hidden", 2 * m.ffn_hidden as u128),
            ("model.vocab", m.vocab as u128),
            ("model.heads", m.heads as u128 * t),
        ]
        .into_iter()
        .max_by_key(|(_, width)| *width)?;
        let total = micro * t * width;
        (total > MOST_ELEMENTS).then(|| Violation {
            message: format!(
                "an activation of {total} elements, more than 2^50: micro {micro} x seq_len {t} x \
                 {width}"
            ),
            help: "use a smaller `batch.micro` or `model.seq_len`".into(),
            values: vec![
                ("batch.micro", counted(micro, "sample")),
                ("model.seq_len", format!("{} each", counted(t, "token"))),
                (wide, format!("a width of {width}")),
            ],
        })
    }

    pub(super) fn tokens_of_run(&self) -> Option<Violation> {
        let (steps, global) = (self.config.train.steps, self.config.batch.global as u64);
        let seq_len = self.config.model.seq_len as u64;
        let tokens = u128::from(steps) * u128::from(global) * u128::from(seq_len);
        (tokens > MOST_TOKENS).then(|| Violation {
            message: format!(
                "a run of {tokens} tokens, more than 2^62: {} steps x global {} x seq_len {}",
                grouped(steps),
                grouped(global),
                grouped(seq_len)
            ),
            help: "use fewer steps or a smaller batch".into(),
            values: vec![
                ("train.steps", counted(steps, "step")),
                ("batch.global", counted(global, "sample")),
                ("model.seq_len", format!("{} each", counted(seq_len, "token"))),
            ],
        })
    }
}
