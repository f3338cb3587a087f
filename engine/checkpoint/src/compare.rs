//! The config of a checkpoint against the one that goes on from it: what each key that differs means for the run.

use super::manifest::Seen;
use super::{Checkpoint, CheckpointError};
use config::{Loaded, UpdateMode, load_stored};
use data::Dataset;
use layout::build::update_mode;
use std::fmt;
use std::path::Path;

/// What a difference means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Nothing that training computes changes.
    Harmless,
    /// The same mathematics in the same order: parts of a step run elsewhere or at another time.
    Placement,
    /// The same mathematics: sums may add in another order, or numbers be stored otherwise.
    Layout,
    /// Another experiment.
    Experiment,
}

impl Kind {
    /// The meaning in words, for a person.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Harmless => "of no consequence for what is computed",
            Self::Placement => "same experiment, different placement (virtual GPUs keep every bit)",
            Self::Layout => "same experiment, different layout (results may differ by rounding)",
            Self::Experiment => "another experiment: --resume refuses it, --fork does not",
        }
    }
}

/// A key whose values differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted, of the config.
    pub key: String,
    /// (in the checkpoint, now), in RON.
    pub values: [String; 2],
    /// What it means.
    pub kind: Kind,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [was, is] = &self.values;
        write!(f, "{:<26} {was} -> {is}", self.key)
    }
}

/// Keys that change nothing that training computes.
const HARMLESS: &[&str] = &[
    "name",
    // Where the first step started from.
    "model.from",
    "model.weights",
    "train.steps",
    "train.epochs",
    "train.eval_every",
    "train.eval_batches",
    "train.tensorboard",
    "train.checkpoint_every",
    "train.checkpoint_minutes",
    "train.checkpoint_overhead",
    "train.checkpoint_writer",
    "train.checkpoint_keep",
    "train.weights",
    "train.stop_after_skipped",
    "train.verify_every",
    "train.rollbacks",
    "sample.prompt",
    "sample.tokens",
    "sample.temperature",
];

/// Keys of where and when parts of a step run.
const PLACEMENT: &[&str] = &[
    "device.memory",
    "device.threads",
    "offload.optimizer",
    "offload.optimizer.device_fraction",
    "offload.parameters",
    "offload.ring",
    "offload.resident_blocks",
    "offload.update",
    "offload.update.after_step",
    "offload.accumulate",
    "offload.master",
    "offload.bucket_elements",
    "offload.tile_elements",
    "offload.lookahead",
    "offload.speculated_fraction",
    "offload.keep_gradients",
    "offload.first_forward",
    "offload.sockets",
    "recompute",
    "partition_checkpoints",
    "host_checkpoints",
];

/// Keys of layout and storage.
const LAYOUT: &[&str] = &[
    "parallel.tensor",
    "parallel.data",
    "parallel.sequence",
    "parallel.reduce_fp32",
    "parallel.tensor_across_nodes",
    "device",
    "device.count",
    "device.box",
    "precision",
    "offload.transfer",
    "offload.moments",
    "batch.micro",
];

/// Keys that make another experiment.
const EXPERIMENT: &[&str] = &[
    "model.family",
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.kv_heads",
    "model.head_dim",
    "model.seq_len",
    "model.vocab",
    "model.ffn_hidden",
    "model.dropout",
    "model.init_std",
    "model.norm_eps",
    "model.rope.theta",
    "model.rope.scaling",
    "model.rope.scaling.factor",
    "model.rope.scaling.low_freq_factor",
    "model.rope.scaling.high_freq_factor",
    "model.rope.scaling.original_seq_len",
    "model.tied",
    "model.qkv_bias",
    "model.proj_bias",
    "model.qk_norm",
    "loss_scale.initial",
    "loss_scale.window",
    "loss_scale.hysteresis",
    "loss_scale.floor",
    "optimizer.kind",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip",
    "train.seed",
    "schedule.kind",
    "schedule.kind.stable_until",
    "schedule.warmup_steps",
    "schedule.decay_steps",
    "schedule.min_lr",
    "batch.global",
    "data.train",
    "data.validation",
    "data.tokenizer",
    "data.format",
    "data.validation_fraction",
    "data.order",
    "data.format.text",
    "data.packing",
    "data.truncate",
    "data.system",
    "data.control_tokens",
];

/// How far a key reaches, if one of the lists has it.
fn kind_of(key: &str) -> Option<Kind> {
    let lists: [(&[&str], Kind); 4] = [
        (HARMLESS, Kind::Harmless),
        (PLACEMENT, Kind::Placement),
        (LAYOUT, Kind::Layout),
        (EXPERIMENT, Kind::Experiment),
    ];
    lists.into_iter().find(|(keys, _)| keys.contains(&key)).map(|(_, kind)| kind)
}

/// From which update on, if from any, they are one step late.
fn delayed(loaded: &Loaded) -> Option<u64> {
    match update_mode(&loaded.config) {
        UpdateMode::Delayed { after_step } => Some(after_step),
        _ => None,
    }
}

/// What differs between the run that wrote `checkpoint` and the one that `now` and `data` describe.
///
/// # Errors
/// [`CheckpointError::Broken`] when the stored config cannot be read.
pub fn differences(
    checkpoint: &Checkpoint,
    now: &Loaded,
    data: &Dataset,
) -> Result<Vec<Difference>, CheckpointError> {
    let stored = stored_config(checkpoint.path(), checkpoint.config())?;
    Ok(between((&stored, &checkpoint.manifest().data), (now, &Seen::of(data))))
}

/// The config that a checkpoint holds. Keys of another version are ignored with a warning.
pub(super) fn stored_config(path: &Path, ron: &str) -> Result<Loaded, CheckpointError> {
    let stored = load_stored(ron, &[]).map_err(|error| CheckpointError::Broken {
        path: path.to_owned(),
        problem: error.to_string(),
    })?;
    stored.warn_of_ignored(path);
    Ok(stored)
}

/// What differs between two runs and what they are trained on.
pub(super) fn between(
    (stored, seen): (&Loaded, &Seen),
    (now, sees): (&Loaded, &Seen),
) -> Vec<Difference> {
    let scaled = |loaded: &Loaded| loaded.config.precision == config::Precision::Fp16;
    let idle = !scaled(stored) && !scaled(now);
    let find = |all: &Loaded, key: &str| {
        let found = all.origins.iter().find(|(name, ..)| name == key);
        found.map_or_else(|| "absent".to_owned(), |(_, value, _)| value.clone())
    };
    let mut keys: Vec<&String> = now.origins.iter().map(|(key, ..)| key).collect();
    let gone = stored.origins.iter().map(|(key, ..)| key).filter(|key| !keys.contains(key));
    let gone: Vec<&String> = gone.collect();
    keys.extend(gone);
    keys.retain(|key| !(idle && key.starts_with("loss_scale.")));
    let speculates = [stored, now].map(|all| update_mode(&all.config) == UpdateMode::Speculative);
    keys.retain(|key| speculates == [true, true] || *key != "offload.speculated_fraction");
    // Where the tokens are known, it does not matter which files they came from.
    let same = seen.is_same(sees);
    let known_same = same && seen.hashes().and(sees.hashes()).is_some();
    let difference = |key: &String| {
        let values = [find(stored, key), find(now, key)];
        // Earlier versions called `Bytes` what is `Auto` now.
        let text = |value: &String| ["Auto", "Bytes"].contains(&value.as_str());
        let differs = values[0] != values[1] && !(key == "data.format" && values.iter().all(text));
        let listed =
            || kind_of(key).unwrap_or_else(|| unreachable!("a test has `{key}` in a list"));
        // These two say which tokens make a sample, and in which step.
        let deals = ["data.order", "data.packing"].contains(&&**key);
        let names_tokens = key.starts_with("data.") && !deals;
        let kind = if known_same && names_tokens { Kind::Harmless } else { listed() };
        differs.then(|| Difference { key: key.clone(), kind, values })
    };
    let mut found: Vec<Difference> = keys.into_iter().filter_map(difference).collect();
    // Delayed updates are other mathematics, from another step on too.
    if delayed(stored) != delayed(now) {
        let decides = |key: &str| key.starts_with("offload.update") || key == "offload.optimizer";
        let those = found.iter_mut().filter(|difference| decides(&difference.key));
        those.for_each(|difference| difference.kind = Kind::Experiment);
    }
    if !same {
        let key = "data (what the files hold)".to_owned();
        let values = [seen, sees].map(ToString::to_string);
        found.push(Difference { key, values, kind: Kind::Experiment });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Documents that are all shorter than a sample have the same tokens and hashes however they are packed.
    #[test]
    fn the_same_tokens_in_other_samples_are_another_experiment() {
        let hash = "0123456789abcdef0123456789abcdef";
        let seen = serde_json::json!({
            "tokens": 90, "held_out_windows": 0, "train_hash": hash, "held_out_hash": hash
        });
        let seen: Seen = serde_json::from_value(seen).unwrap_or_else(|e| panic!("{e}"));
        let ron = r#"(
            model: (layers: 1, hidden: 32, heads: 4, seq_len: 16, vocab: 64),
            data: (train: "a.jsonl", format: Jsonl(), tokenizer: "t.json", packing: None),
            train: (steps: 2),
        )"#;
        let of = |set: &str| {
            let sets = [set.to_owned()];
            let loaded = config::load_str(ron, "test.ron", Path::new("."), &sets);
            loaded.unwrap_or_else(|e| panic!("{e}"))
        };
        let kinds = |set: &str| {
            let (stored, now) = (of("train.seed=1"), of(set));
            let found = between((&stored, &seen), (&now, &seen)).into_iter();
            let data = found.filter(|difference| difference.key.starts_with("data."));
            data.map(|difference| (difference.key, difference.kind)).collect::<Vec<_>>()
        };
        let packing = kinds("data.packing=Documents");
        assert_eq!(packing, [("data.packing".to_owned(), Kind::Experiment)]);
        let train = kinds("data.train=\"copy.jsonl\"");
        assert_eq!(train, [("data.train".to_owned(), Kind::Harmless)]);
    }

    #[test]
    fn every_key_of_a_config_is_in_one_list() {
        let keys = config::keys();
        let keys: BTreeSet<&str> =
            keys.iter().filter(|key| !key.is_section()).map(|key| key.name.as_str()).collect();
        let listed = [HARMLESS, PLACEMENT, LAYOUT, EXPERIMENT].concat();
        let twice = listed.len() - listed.iter().collect::<BTreeSet<_>>().len();
        assert_eq!(twice, 0, "a key is listed twice");
        let listed: BTreeSet<&str> = listed.into_iter().collect();
        let missing: Vec<_> = keys.difference(&listed).collect();
        assert!(
            missing.is_empty(),
            "say in compare.rs what a change of {missing:?} means for --resume"
        );
        let stale: Vec<_> = listed.difference(&keys).collect();
        assert!(stale.is_empty(), "compare.rs lists {stale:?}, which are no keys");
    }
}
