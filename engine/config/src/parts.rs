//! Rules about the parts of a model, which `checks` applies.

use super::checks::{Checks, Count};
use super::layer_pattern::{UNROTATED, WINDOWED};
use super::reading::Violation;
use super::{Config, DeviceConfig, Family, Gate, NormPlace, RopeConfig, RopeScaling};
use device::cuda::WIDEST_HEAD;
use topology::counted;

/// Names of the keys of rotary positions.
#[derive(Clone, Copy)]
struct RopeKeys {
    theta: &'static str,
    rotated_share: &'static str,
    scaling: &'static str,
    /// Names of the lower and the higher number of turns.
    llama3: [&'static str; 2],
    yarn: [&'static str; 2],
    short_factors: &'static str,
    long_factors: &'static str,
}

/// Names of the keys in the section `$section`.
macro_rules! rope_keys {
    ($section:literal) => {
        RopeKeys {
            theta: concat!($section, ".theta"),
            rotated_share: concat!($section, ".rotated_share"),
            scaling: concat!($section, ".scaling"),
            llama3: [
                concat!($section, ".scaling.low_freq_factor"),
                concat!($section, ".scaling.high_freq_factor"),
            ],
            yarn: [
                concat!($section, ".scaling.beta_slow"),
                concat!($section, ".scaling.beta_fast"),
            ],
            short_factors: concat!($section, ".scaling.short_factors"),
            long_factors: concat!($section, ".scaling.long_factors"),
        }
    };
}

const ROPE: RopeKeys = rope_keys!("model.rope");
const WINDOW_ROPE: RopeKeys = rope_keys!("model.window_rope");

/// Last part of a dotted key.
fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

impl Checks<'_> {
    pub(super) fn ranks(&self) -> Count {
        Count::new("parallel.tensor", self.config.parallel.tensor, "tensor-parallel rank")
    }

    fn heads(&self) -> Count {
        Count::new("model.heads", self.config.model.heads, "head")
    }

    pub(super) fn heads_over_ranks(&self) -> Option<Violation> {
        self.heads().split_over(self.ranks())
    }

    fn kv_heads(&self) -> Option<Count> {
        let m = &self.config.model;
        let kv_heads = Count::new("model.kv_heads", m.kv_heads, "kv head");
        (m.kv_heads != m.heads).then_some(kv_heads)
    }

    pub(super) fn heads_over_kv_heads(&self) -> Option<Violation> {
        self.heads().split_over(self.kv_heads()?)
    }

    /// Requires that each rank has equally many heads of keys and values, or each such head equally
    /// many ranks.
    pub(super) fn kv_heads_over_ranks(&self) -> Option<Violation> {
        let (heads, ranks) = (self.kv_heads()?, self.ranks());
        if ranks.number > heads.number {
            return ranks.split_over(heads);
        }
        heads.split_over(ranks)
    }

    /// Refuses settings that a GPT-2 cannot have.
    pub(super) fn parts_of_gpt2(&self) -> Option<Violation> {
        let m = &self.config.model;
        let other = [
            ("model.kv_heads", m.kv_heads != m.heads, "shared heads of keys and values"),
            ("model.head_dim", m.head_dim != m.hidden / m.heads.max(1), "not hidden / heads"),
            ("model.tied", !m.tied, "an output projection of its own"),
            ("model.qkv_bias", !m.qkv_bias, "no biases"),
            ("model.proj_bias", !m.proj_bias, "no bias"),
            ("model.qk_norm", m.qk_norm, "a norm of queries and keys"),
            ("model.layer_pattern", m.layer_pattern != "F", "several kinds of layers"),
            ("model.attention_sinks", m.attention_sinks, "sinks of attention"),
            ("model.output_gate", m.output_gate, "a gate of attention's output"),
            ("model.norm_offset", m.norm_offset, "gains around 1"),
            ("model.norm_place", m.norm_place != NormPlace::Before, "norms in other places"),
            ("model.gate", m.gate != Gate::Silu, "a gated MLP"),
            ("model.attention_scale", m.attention_scale.is_some(), "another scale of attention"),
            ("model.score_cap", m.score_cap.is_some(), "a cap of attention scores"),
            ("model.logit_cap", m.logit_cap.is_some(), "a cap of logits"),
            ("model.embedding_scale", m.embedding_scale != 1.0, "a scaled embedding"),
            ("model.residual_scale", m.residual_scale != 1.0, "scaled residual branches"),
            ("model.logit_scale", m.logit_scale != 1.0, "scaled logits"),
            ("model.experts", m.experts.is_some(), "experts"),
        ];
        let (key, _, what) =
            other.into_iter().find(|(_, differs, _)| *differs && m.family == Family::Gpt2)?;
        Some(Violation {
            message: "a GPT-2 is not made like that".into(),
            help: format!("set `model.family` to `Llama`, or leave `{key}` out"),
            values: vec![(key, what.into()), ("model.family", "a GPT-2".into())],
        })
    }

    pub(super) fn halves_of_heads(&self) -> Option<Violation> {
        let m = &self.config.model;
        (m.family == Family::Llama && !m.head_dim.is_multiple_of(2)).then(|| Violation {
            message: format!(
                "a head of {} has no two halves to rotate",
                counted(m.head_dim, "element")
            ),
            help: "use an even `model.head_dim`".into(),
            values: vec![("model.head_dim", "an odd number".into())],
        })
    }

    /// The rotary positions of the model with the keys that have them. Those of windowed layers
    /// count if there are such layers.
    fn ropes(&self) -> impl Iterator<Item = (&RopeConfig, RopeKeys)> {
        let m = &self.config.model;
        let windowed = m.layer_pattern.contains(WINDOWED).then_some((&m.window_rope, WINDOW_ROPE));
        [(&m.rope, ROPE)].into_iter().chain(windowed)
    }

    /// Requires that the rotated elements of a head have two halves.
    pub(super) fn rotated_halves(&self) -> Option<Violation> {
        let m = &self.config.model;
        self.ropes().find_map(|(rope, keys)| {
            let rotated = rope.rotated_elements(m.head_dim);
            // Heads of an odd size have a rule of their own.
            let whole = m.family == Family::Gpt2 || rotated == m.head_dim;
            (!whole && (rotated == 0 || !rotated.is_multiple_of(2))).then(|| Violation {
                message: format!(
                    "{} of a head rotate, which have no two halves",
                    counted(rotated, "element")
                ),
                help: "choose a share with an even number of elements".into(),
                values: vec![
                    (keys.rotated_share, format!("{:?} of a head", rope.rotated_share)),
                    ("model.head_dim", counted(m.head_dim, "element")),
                ],
            })
        })
    }

    /// Requires one factor of LongRoPE for each pair of rotated elements.
    pub(super) fn long_rope_factors(&self) -> Option<Violation> {
        let m = &self.config.model;
        self.ropes().find_map(|(rope, keys)| {
            let RopeScaling::LongRope { short_factors, long_factors, .. } = &rope.scaling else {
                return None;
            };
            let pairs = rope.rotated_elements(m.head_dim) / 2;
            let lists = [(keys.short_factors, short_factors), (keys.long_factors, long_factors)];
            let (key, list) = lists.into_iter().find(|(_, list)| list.len() != pairs)?;
            Some(Violation {
                message: format!(
                    "{} for {} of rotated elements of a head",
                    counted(list.len(), "factor"),
                    counted(pairs, "pair")
                ),
                help: format!("write {}", counted(pairs, "factor")),
                values: vec![
                    (key, counted(list.len(), "factor")),
                    (keys.rotated_share, format!("{:?} of a head", rope.rotated_share)),
                    ("model.head_dim", counted(m.head_dim, "element")),
                ],
            })
        })
    }

    /// Requires that windows and their keys come together.
    pub(super) fn windows_of_layers(&self) -> Option<Violation> {
        let m = &self.config.model;
        let windowed = m.layer_pattern.contains(WINDOWED);
        let pattern = ("model.layer_pattern", format!("{:?}", m.layer_pattern));
        match m.window {
            None if windowed => Some(Violation {
                message: "layers with a window need its length".into(),
                help: "set `model.window` to a number of tokens, or write no `W`".into(),
                values: vec![pattern, ("model.window", "no window".into())],
            }),
            Some(window) if !windowed => Some(Violation {
                message: format!("no layer has the window of {}", counted(window, "token")),
                help: "write `W` in `model.layer_pattern` for layers with a window, or leave `model.window` out".into(),
                values: vec![("model.window", counted(window, "token")), pattern],
            }),
            None if m.window_rope != m.rope => Some(Violation {
                message: "no layer has a window, and `model.window_rope` is for such layers".into(),
                help: "write `W` in `model.layer_pattern` for layers with a window, or leave `model.window_rope` out".into(),
                values: vec![("model.window_rope", "other positions".into()), pattern],
            }),
            _ => None,
        }
    }

    /// Refuses norms of queries and keys that onebox does not compute.
    pub(super) fn norm_of_queries(&self) -> Option<Violation> {
        let m = &self.config.model;
        let whole = ("model.qk_norm_width", "over all heads".to_owned());
        if m.qk_norm_width && !m.qk_norm {
            return Some(Violation {
                message: "`model.qk_norm_width` chooses the width of a norm that is not there"
                    .into(),
                help: "set `model.qk_norm` to `true`, or leave `model.qk_norm_width` out".into(),
                values: vec![whole, ("model.qk_norm", "no norm".into())],
            });
        }
        if m.qk_norm_width && m.norm_offset {
            return Some(Violation {
                message: "a norm over all heads multiplies by its gain alone, without 1".into(),
                help: "leave `model.qk_norm_width` or `model.norm_offset` out".into(),
                values: vec![whole, ("model.norm_offset", "gains around 1".into())],
            });
        }
        let unrotated = m.qk_norm && !m.qk_norm_width && m.layer_pattern.contains(UNROTATED);
        unrotated.then(|| Violation {
            message:
                "onebox norms each head while it rotates the head, and layers `N` do not rotate"
                    .into(),
            help: "leave `model.qk_norm` out, or write no `N` in `model.layer_pattern`".into(),
            values: vec![
                ("model.qk_norm", "a norm of each head".into()),
                ("model.layer_pattern", format!("{:?}", m.layer_pattern)),
            ],
        })
    }

    /// Refuses a bias between the projection back from the heads and a norm.
    pub(super) fn bias_before_norm(&self) -> Option<Violation> {
        let m = &self.config.model;
        let normed = m.family == Family::Llama && m.norm_place != NormPlace::Before;
        (m.proj_bias && normed).then(|| Violation {
            message: "onebox adds no bias before a norm at the end of attention".into(),
            help: "leave `model.proj_bias` out, or set `model.norm_place` to `Before`".into(),
            values: vec![
                ("model.proj_bias", "a bias of the projection back from the heads".into()),
                ("model.norm_place", "a norm after it".into()),
            ],
        })
    }

    /// Refuses heads for which GPUs have no kernels.
    pub(super) fn widest_head(&self) -> Option<Violation> {
        let head_dim = self.config.model.head_dim;
        let on_gpus = match &self.config.device {
            DeviceConfig::Cpu { .. } => false,
            DeviceConfig::Cuda => true,
            DeviceConfig::Sim { box_, .. } => box_.measured.is_none(),
        };
        (on_gpus && head_dim > WIDEST_HEAD).then(|| Violation {
            message: format!(
                "heads of {head_dim} elements: on GPUs they have at most {WIDEST_HEAD}, for which there are kernels"
            ),
            help: format!(
                "use a `model.head_dim` of at most {WIDEST_HEAD}, or virtual GPUs, `device: Cpu`"
            ),
            values: vec![
                ("model.head_dim", counted(head_dim, "element")),
                ("device", "GPUs".into()),
            ],
        })
    }

    pub(super) fn rope_factors(&self) -> Option<Violation> {
        self.ropes().find_map(|(rope, keys)| {
            let (low, high, names) = match rope.scaling {
                RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } => {
                    (low, high, keys.llama3)
                }
                RopeScaling::Yarn { beta_slow: low, beta_fast: high, .. } => (low, high, keys.yarn),
                RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::LongRope { .. } => {
                    return None;
                }
            };
            (low >= high).then(|| Violation {
                message: "low frequencies begin above high ones".into(),
                help: format!("use a `{}` above `{}`", last(names[1]), last(names[0])),
                values: vec![
                    (names[0], format!("{low} turns")),
                    (names[1], format!("{high} turns")),
                ],
            })
        })
    }

    /// Requires a base above 1 for YaRN, which divides by its logarithm.
    pub(super) fn base_of_yarn(&self) -> Option<Violation> {
        self.ropes().find_map(|(rope, keys)| {
            let is_yarn = matches!(rope.scaling, RopeScaling::Yarn { .. });
            (is_yarn && rope.theta <= 1.0).then(|| Violation {
                message: "YaRN needs a base of rotary positions above 1".into(),
                help: format!("set `{}` to the base of the model, such as 10000", keys.theta),
                values: vec![(keys.theta, "1".into()), (keys.scaling, "YaRN".into())],
            })
        })
    }

    /// Requires that all heads together have as many elements as there are hidden channels. A
    /// `Llama` with its own `head_dim` is an exception.
    pub(super) fn hidden_over_heads(&self) -> Option<Violation> {
        let m = &self.config.model;
        if m.family == Family::Llama && m.head_dim != m.hidden / m.heads.max(1) {
            return None;
        }
        Count::new("model.hidden", m.hidden, "hidden channel").split_over(self.heads())
    }

    /// Requires that the ranks can split a block's input into equal shares. Sequence parallelism
    /// splits the input already, and a model of one block keeps no input.
    pub(super) fn shares_over_ranks(&self) -> Option<Violation> {
        let Config { parallel, model, batch, partition_checkpoints, host_checkpoints, .. } =
            self.config;
        let key = match (partition_checkpoints, host_checkpoints) {
            (true, _) => "partition_checkpoints",
            (_, true) => "host_checkpoints",
            (false, false) => return None,
        };
        let ranks = parallel.tensor.max(1) as u128;
        let factors = [batch.micro, model.seq_len, model.hidden];
        let elements: u128 = factors.iter().map(|factor| *factor as u128).product();
        if parallel.sequence || model.layers < 2 || elements.is_multiple_of(ranks) {
            return None;
        }
        let [micro, seq_len, hidden] = factors;
        let (inputs, parts) = (counted(hidden, "channel"), counted(parallel.tensor, "rank"));
        Some(Violation {
            message: format!(
                "micro {micro} x seq_len {seq_len} x hidden {hidden} = {elements} elements of a block's input have no equal \
                 shares for {ranks} tensor-parallel ranks"
            ),
            help: format!("make one of the three a multiple of {ranks}, or leave `{key}` out"),
            values: vec![
                ("model.hidden", inputs),
                ("model.seq_len", counted(seq_len, "token")),
                ("batch.micro", counted(micro, "sample")),
                ("parallel.tensor", parts),
                (key, "each rank keeps its share".into()),
            ],
        })
    }

    pub(super) fn ffn_over_ranks(&self) -> Option<Violation> {
        let m = &self.config.model;
        let ffn = m.ffn_hidden;
        if m.experts.as_ref().is_some_and(|experts| (0..m.layers).all(|l| experts.are_in(l))) {
            return None;
        }
        Count::new("model.ffn_hidden", ffn, "channel").split_over(self.ranks())
    }
}
