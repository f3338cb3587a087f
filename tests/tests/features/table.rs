//! The features of a run, and how the tests cover each pair of them.

use super::feature_names::{ADAPTERS, DELTA, FROZEN, GATED, SIGMOID, SINKS};
use super::named_tests::TESTS;
use Effect::{Command, Experiment, Library, Order, Place, Rounding};
use std::collections::BTreeMap;
use tests::compare::RunDistance;

/// Effect of a feature on the numbers of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Effect {
    /// The feature moves work to another place or time. No bit changes.
    Place,
    /// The feature changes the order of sums.
    Order,
    /// The feature stores numbers in fewer bits: the run without it is within this distance.
    Rounding(RunDistance),
    /// The feature changes the model, the samples, or the parameters that a step uses.
    Experiment,
    /// The feature is a command that uses the results of the run.
    Command,
    /// The feature chooses a library of GPUs. Virtual GPUs do not use it.
    Library,
}

/// A feature: settings of a config, or a command.
#[derive(Debug)]
pub(super) struct Feature {
    /// Name in messages and on the page.
    pub(super) name: &'static str,
    /// Settings that are the feature.
    pub(super) sets: &'static [&'static str],
    /// Settings that the feature needs. The run without the feature has them too. Settings of the
    /// other feature of a pair replace them.
    pub(super) needs: &'static [&'static str],
    /// Effect on the numbers of a run.
    pub(super) effect: Effect,
}

const fn feature(
    name: &'static str,
    sets: &'static [&'static str],
    needs: &'static [&'static str],
    effect: Effect,
) -> Feature {
    Feature { name, sets, needs, effect }
}

/// Settings of every run on top of `TINY`. Each value that no feature sets is the default.
const BASE: &[&str] = &[
    "batch.micro=8",
    "data.format=Megatron",
    "optimizer.kind=Sgd",
    "optimizer.lr=0.3",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_batches=1",
];

/// Largest effect of the order of fp32 sums. Measured over all pairs: 6e-8, 8e-8 and 2e-7.
pub(super) const FP32: RunDistance = RunDistance { loss: 5e-7, norm: 1e-6, weights: 2e-6 };
/// Largest effects of fewer bits. Measured over all pairs in fp16: 8e-4, 5e-4 and 1.2e-3, the last
/// with experts, of which a token chooses others; in bf16: 2.1e-3, 1.5e-3 and 1.2e-3 without
/// experts; in fp8: 2.5e-2, 3e-2 and 1e-2. The layer kinds change the loss by 3e-2 and the weights by
/// 3.2e-2.
const FP16: RunDistance = RunDistance { loss: 2e-3, norm: 2e-3, weights: 4e-3 };
const BF16: RunDistance = RunDistance { loss: 1e-2, norm: 1e-2, weights: 1e-2 };
const FP8: RunDistance = RunDistance { loss: 3e-2, norm: 9e-2, weights: 2.5e-2 };
/// Of the weights of adapters alone, whose change is all of them: measured 4.3e-2.
const FP8_OF_ADAPTERS: RunDistance = RunDistance { weights: 7e-2, ..FP8 };

/// All features. The features with the effect `Library` are the last.
pub(super) static FEATURES: [Feature; 36] = [
    feature("fp16", &["precision=Fp16"], &["loss_scale.initial=1024.0"], Rounding(FP16)),
    feature("bf16", &["precision=Bf16"], &[], Rounding(BF16)),
    feature("fp8", &["precision=Fp8"], &["model.hidden=64"], Rounding(FP8)),
    feature("packed documents", &[PACKED], &[], Experiment),
    feature("padded documents", &[PADDED], &[], Experiment),
    feature(
        "layer kinds",
        &["model.layer_pattern=WNF", "model.window=5"],
        &["model.family=Llama"],
        Experiment,
    ),
    feature(
        "experts",
        &["model.experts=(count: 4, per_token: 2, ffn_hidden: 32)"],
        &["model.family=Llama"],
        Experiment,
    ),
    feature(
        SIGMOID,
        &["model.experts=(count: 4, per_token: 2, ffn_hidden: 32, shared_hidden: 32, \
           scoring: Sigmoid(groups: 2, kept_groups: 1, scale: 1.5))"],
        &["model.family=Llama"],
        Experiment,
    ),
    feature(
        SINKS,
        &[
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 32, biases: true)",
            "model.gate=ClampedSilu(slope: 1.702, limit: 7.0)",
            "model.attention_sinks=true",
        ],
        &["model.family=Llama"],
        Experiment,
    ),
    feature(
        GATED,
        &[
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 32, shared_hidden: 32, shared_gate: true)",
            "model.layer_pattern=DFD",
            "model.delta_net=(key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 3)",
            "model.output_gate=true",
            "model.qk_norm=true",
            "model.norm_offset=true",
        ],
        &["model.family=Llama"],
        Experiment,
    ),
    feature(ADAPTERS, &["adapter=Lora(rank: 4, alpha: 4)"], &[], Experiment),
    // The names are those of GPT-2 and of Llama.
    feature(
        FROZEN,
        &[
            "optimizer.frozen=[\"w?e.*\", \"embed_tokens.*\", \"h.1.*\", \"layers.1.*\", \"*.2.*layernorm*\", \"*.2.ln_?.*\"]",
        ],
        &[],
        Experiment,
    ),
    feature(
        DELTA,
        &[
            "model.layer_pattern=DFD",
            "model.delta_net=(key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 3)",
            "model.output_gate=true",
            "model.qk_norm=true",
            "model.norm_offset=true",
        ],
        &["model.family=Llama"],
        Experiment,
    ),
    feature("serial update", &["offload.update=Serial"], &[], Place),
    feature(
        "speculative update",
        &["offload.update=Speculative", "offload.speculated_fraction=1"],
        &[],
        Place,
    ),
    feature(DELAYED, &["offload.update=Delayed(after_step: 1)"], &[], Experiment),
    feature(ON_GPUS, &["offload.optimizer=Device"], &[], Place),
    feature("split optimizer", &["offload.optimizer=Split(device_fraction: 0.4)"], &[], Place),
    feature("split masters", &["offload.master=Split"], &["precision=Bf16"], Place),
    feature(BLOCKING, &["offload.transfer=Blocking"], &["offload.update=Serial"], Place),
    feature(
        "streamed parameters",
        &["offload.parameters=Host", "offload.resident_blocks=0", "offload.ring=2"],
        &["offload.first_forward=1"],
        Place,
    ),
    feature("gradient accumulation", &["batch.micro=2"], &[], Order),
    feature("sums on the host", &["offload.accumulate=Host"], &["batch.micro=2"], Place),
    feature(
        "groups of micro-batches",
        &["offload.first_forward=2"],
        &["batch.micro=2", "recompute=Block"],
        Place,
    ),
    feature("tensor parallelism", &["parallel.tensor=2"], &[], Order),
    feature("sequence parallelism", &["parallel.tensor=2", "parallel.sequence=true"], &[], Order),
    feature("data parallelism", &["parallel.data=2"], &["batch.micro=2"], Order),
    feature("selective recomputation", &["recompute=Selective"], &[], Place),
    feature("block recomputation", &["recompute=Block"], &[], Place),
    feature("host checkpoints", &["host_checkpoints=true"], &["recompute=Block"], Place),
    feature(
        "partitioned checkpoints",
        &["partition_checkpoints=true"],
        &["recompute=Block", "parallel.tensor=2"],
        Place,
    ),
    feature(
        "activation tiers",
        &["activations=Tiers(gpu_blocks: 1, host_blocks: 1, host_mlps: 2)"],
        &["recompute=Block"],
        Place,
    ),
    feature("generate", &[], &[], Command),
    feature("export", &[], &[], Command),
    feature(CUDNN, &["attention=Cudnn"], &["precision=Bf16"], Library),
    feature("timed matmuls", &["matmuls=Timed"], &["precision=Bf16"], Library),
];

pub(super) const PACKED: &str = "data.packing=Documents";
pub(super) const PADDED: &str = "data.packing=None";
pub(super) const DELAYED: &str = "delayed update";
const ON_GPUS: &str = "optimizer on GPUs";
const BLOCKING: &str = "blocking transfers";
pub(super) const CUDNN: &str = "cuDNN attention";

/// Pairs that `config check` refuses, each with a part of the message.
pub(super) const REFUSALS: &[([&str; 2], &str)] = &[
    (["fp16", "split masters"], "only a bf16 parameter is the upper half of its fp32 master"),
    ([ON_GPUS, "split masters"], "states are kept in fewer bytes on the host only"),
    (["speculative update", BLOCKING], "its update is over before the next step begins"),
    ([DELAYED, BLOCKING], "its update is over before the next step begins"),
    ([DELAYED, "streamed parameters"], "a late update overwrites the host's parameters"),
    ([ON_GPUS, BLOCKING], "`Blocking` is a way to the host, where not all updates are"),
    (["split optimizer", BLOCKING], "`Blocking` is a way to the host, where not all updates are"),
    ([ON_GPUS, "streamed parameters"], "the GPUs update some of these"),
    (["split optimizer", "streamed parameters"], "the GPUs update some of these"),
    ([BLOCKING, "streamed parameters"], "`Blocking` sends parameters up once"),
    ([ON_GPUS, "sums on the host"], "for an optimizer on the device"),
    (["groups of micro-batches", "selective recomputation"], "would have to be kept at once"),
    (["selective recomputation", "host checkpoints"], "no block is recomputed"),
    (["selective recomputation", "partitioned checkpoints"], "no block is recomputed"),
    (["sequence parallelism", "partitioned checkpoints"], "splits the checkpoints"),
    (["fp8", "experts"], "onebox has no fp8 matmuls of experts"),
    (["fp8", SIGMOID], "onebox has no fp8 matmuls of experts"),
    (["fp8", SINKS], "onebox has no fp8 matmuls of experts"),
    (["fp8", DELTA], "onebox has no fp8 matmuls of gated delta nets"),
    ([SIGMOID, DELTA], "no model has scores by sigmoid and gated delta nets"),
    ([SINKS, DELTA], "no model has attention sinks and gated delta nets"),
    (["fp8", GATED], "onebox has no fp8 matmuls of experts"),
    ([ADAPTERS, BLOCKING], "frozen weights have no blocking transfers"),
    ([FROZEN, BLOCKING], "frozen weights have no blocking transfers"),
    ([ADAPTERS, FROZEN], "adapters freeze all weights of the model"),
    ([BLOCKING, "activation tiers"], "activations move to the host beside other blocks"),
    (["selective recomputation", "activation tiers"], "no block is recomputed"),
    (["packed documents", CUDNN], "cuDNN does not compute attention within documents"),
    (["layer kinds", CUDNN], "cuDNN does not compute attention within a window"),
];

/// How a pair is covered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Coverage {
    /// Both features are values of one key.
    Alternatives,
    /// `config check` refuses the pair with this message.
    Refusal(&'static str),
    /// A test of another target runs the pair.
    Test,
    /// The run with both has the bits of the run without this feature.
    Bits(&'static Feature),
    /// The run with both is within a distance of the run without this feature.
    Distance(&'static Feature, RunDistance),
    /// The run with both has the losses of the run with this feature alone, one step late.
    Lateness(&'static Feature),
    /// The command gives the same results for the run with both as for its weights.
    Command,
    /// On GPUs, the run with both is near the run without this library.
    Library(&'static Feature),
}

/// Two features, in the order of [`FEATURES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) first: &'static Feature,
    pub(super) second: &'static Feature,
}

/// All pairs, each once.
pub(super) fn pairs() -> impl Iterator<Item = Pair> {
    let seconds = FEATURES.iter().enumerate();
    seconds.flat_map(|(i, second)| FEATURES[..i].iter().map(move |first| Pair { first, second }))
}

impl Pair {
    const fn both(self) -> [&'static Feature; 2] {
        [self.first, self.second]
    }

    /// Whether `names` are the names of this pair.
    pub(super) fn is(self, names: [&str; 2]) -> bool {
        self.both().map(|one| one.name) == names
    }

    /// Text of the pair for messages.
    pub(super) fn name(self) -> String {
        format!("{} x {}", self.first.name, self.second.name)
    }

    /// Settings of the run with both features.
    pub(super) fn settings(self) -> Vec<&'static str> {
        settings(&self.both(), None)
    }

    /// Settings of the run without the feature `without`, but with its needs.
    pub(super) fn settings_without(self, without: &Feature) -> Vec<&'static str> {
        settings(&self.both(), Some(without))
    }

    /// Whether both set one key to different values.
    fn has_alternatives(self) -> bool {
        let [first, second] = self.both().map(|one| one.sets);
        let differs =
            |one: &&str| second.iter().any(|other| key_of(one) == key_of(other) && one != other);
        first.iter().any(differs)
    }

    /// The feature of the pair for which `is` holds; the second feature if it holds for both.
    fn with(self, is: impl Fn(Effect) -> bool) -> Option<&'static Feature> {
        [self.second, self.first].into_iter().find(|one| is(one.effect))
    }

    /// How the pair is covered; `None` if nothing covers it.
    pub(super) fn coverage(self) -> Option<Coverage> {
        let refusal = REFUSALS.iter().find(|(names, _)| self.is(*names));
        let is_tested = TESTS.iter().any(|test| self.is(test.pair));
        let rounding = self.with(|effect| matches!(effect, Rounding(_)));
        let of_adapters = self.is(["fp8", ADAPTERS]);
        let near = |one: &'static Feature| match one.effect {
            Rounding(_) if of_adapters => Coverage::Distance(one, FP8_OF_ADAPTERS),
            Rounding(limit) => Coverage::Distance(one, limit),
            _ => Coverage::Distance(one, FP32),
        };
        if self.has_alternatives() {
            return Some(Coverage::Alternatives);
        }
        if let Some((_, message)) = refusal {
            return Some(Coverage::Refusal(message));
        }
        if is_tested {
            return Some(Coverage::Test);
        }
        if let Some(library) = self.with(|effect| matches!(effect, Library)) {
            return Some(Coverage::Library(library));
        }
        if self.with(|effect| matches!(effect, Command)).is_some() {
            return Some(Coverage::Command);
        }
        // An update on the GPUs is never late.
        if self.is([DELAYED, ON_GPUS]) {
            return Some(Coverage::Bits(self.first));
        }
        // Blocking transfers sum micro-batches in the storage type.
        let sums_are_rounded = self.both().iter().any(|one| one.name == BLOCKING);
        if let Some(rounding) = rounding.filter(|_| sums_are_rounded) {
            return Some(near(rounding));
        }
        if let Some(place) = self.with(|effect| matches!(effect, Place)) {
            return Some(Coverage::Bits(place));
        }
        if let Some(one) = rounding.or_else(|| self.with(|effect| matches!(effect, Order))) {
            return Some(near(one));
        }
        let other = self.both().into_iter().find(|one| one.name != DELAYED)?;
        self.both().iter().any(|one| one.name == DELAYED).then_some(Coverage::Lateness(other))
    }
}

/// Key of a setting.
pub(super) fn key_of(setting: &str) -> &str {
    setting.split_once('=').map_or(setting, |(key, _)| key)
}

/// Settings of a run with `features`, without the settings of `without`. Each key has one value.
pub(super) fn settings(
    features: &[&'static Feature],
    without: Option<&Feature>,
) -> Vec<&'static str> {
    let kept = |one: &&&Feature| without.is_none_or(|without| without.name != one.name);
    let needs = features.iter().map(|one| one.needs);
    let sets = features.iter().filter(kept).map(|one| one.sets);
    let all = [BASE].into_iter().chain(needs).chain(sets).flatten();
    let by_key: BTreeMap<&str, &'static str> = all.map(|set| (key_of(set), *set)).collect();
    by_key.into_values().collect()
}
