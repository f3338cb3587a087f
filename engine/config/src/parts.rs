//! Rules about the parts of a model, which `checks` applies.

use super::checks::{Checks, Count};
use super::reading::Violation;
use super::{Config, DeviceConfig, Family, RopeScaling};
use device::cuda::WIDEST_HEAD;
use topology::counted;

impl Checks<'_> {
    fn ranks(&self) -> Count {
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
        let RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } =
            self.config.model.rope.scaling
        else {
            return None;
        };
        (low >= high).then(|| Violation {
            message: "low frequencies begin above high ones".into(),
            help: "use a `high_freq_factor` above `low_freq_factor`".into(),
            values: vec![
                ("model.rope.scaling.low_freq_factor", format!("{low} turns")),
                ("model.rope.scaling.high_freq_factor", format!("{high} turns")),
            ],
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
        let ffn = self.config.model.ffn_hidden;
        Count::new("model.ffn_hidden", ffn, "channel").split_over(self.ranks())
    }
}
