//! Compares a checkpoint's config with the resuming run's config: the effect of each changed key.

use super::manifest::DataIdentity;
use super::read::broken;
use super::{CheckpointError, Summary};
use config::{Key, LoadedConfig, ResumeEffect, UpdateMode, keys, load_stored};
use data::Dataset;
use files::foreign_text::foreign;
use layout::build::update_mode;
use std::fmt;

/// A config key whose values differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted name of the key.
    pub key: String,
    /// The values in RON: (in the checkpoint, now).
    pub values: [String; 2],
    /// The effect of the change on `--resume`.
    pub effect: ResumeEffect,
}

impl Difference {
    /// Whether checkpoints of the two runs have other tensors, since the runs train other adapters, only
    /// one trains adapters, or they freeze other tensors. Then neither run can resume from the other's
    /// checkpoint.
    pub fn changes_tensors(&self) -> bool {
        let keys = ["adapter", "adapter.rank", "adapter.targets", "optimizer.frozen"];
        keys.contains(&self.key.as_str())
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [was, is] = self.values.each_ref().map(foreign);
        write!(f, "{:<26} {was} -> {is}", self.key)
    }
}

/// First step with delayed updates; `None` if no update is delayed.
fn delayed(loaded: &LoadedConfig) -> Option<u64> {
    match update_mode(&loaded.config) {
        UpdateMode::Delayed { after_step } => Some(after_step),
        _ => None,
    }
}

impl Summary {
    /// The config of the run that wrote the checkpoint. Warns of unknown keys of another version.
    ///
    /// # Errors
    /// [`CheckpointError::Broken`] if this version cannot read the config.
    pub fn config(&self) -> Result<LoadedConfig, CheckpointError> {
        let stored = load_stored(&self.manifest.config, &[]);
        let stored = stored.map_err(|error| broken(&self.path, error.to_string()))?;
        stored.warn_of_ignored(&self.path);
        Ok(stored)
    }

    /// The differences between the checkpoint's run and a run with the config `now` and `data`.
    ///
    /// # Errors
    /// As for [`config`](Self::config).
    pub fn differences(
        &self,
        now: &LoadedConfig,
        data: &Dataset,
    ) -> Result<Vec<Difference>, CheckpointError> {
        Ok(between([&self.config()?, now], [&self.manifest.data, &DataIdentity::of(data)]))
    }

    /// The differences between this checkpoint and `other`.
    ///
    /// # Errors
    /// As for [`config`](Self::config), for either checkpoint.
    pub fn differences_from(&self, other: &Self) -> Result<Vec<Difference>, CheckpointError> {
        let data = [&self.manifest.data, &other.manifest.data];
        Ok(between([&self.config()?, &other.config()?], data))
    }
}

/// The differences between the configs of two runs on the same data.
pub fn differences_of(stored: &LoadedConfig, now: &LoadedConfig) -> Vec<Difference> {
    between([stored, now], [&DataIdentity::default(); 2])
}

/// The differences between the configs and the training data of two runs.
fn between([stored, now]: [&LoadedConfig; 2], [seen, sees]: [&DataIdentity; 2]) -> Vec<Difference> {
    let scaled = |loaded: &LoadedConfig| loaded.config.precision == config::Precision::Fp16;
    let idle = !scaled(stored) && !scaled(now);
    let find = |all: &LoadedConfig, key: &str| {
        let found = all.origins.iter().find(|(name, ..)| name == key);
        found.map_or_else(|| "absent".to_owned(), |(_, value, _)| value.clone())
    };
    let all_keys: Vec<Key> = keys();
    let mut keys: Vec<&String> = now.origins.iter().map(|(key, ..)| key).collect();
    let gone = stored.origins.iter().map(|(key, ..)| key).filter(|key| !keys.contains(key));
    let gone: Vec<&String> = gone.collect();
    keys.extend(gone);
    keys.retain(|key| !(idle && key.starts_with("loss_scale.")));
    let speculates = [stored, now].map(|all| update_mode(&all.config) == UpdateMode::Speculative);
    keys.retain(|key| speculates == [true, true] || *key != "offload.speculated_fraction");
    // If the hashes of the tokens are equal, the names of the files do not matter.
    let same = seen.is_same(sees);
    let known_same = same && seen.hashes().and(sees.hashes()).is_some();
    let difference = |key: &String| {
        let values = [find(stored, key), find(now, key)];
        // `Auto` was called `Bytes` in earlier versions.
        let text = |value: &String| ["Auto", "Bytes"].contains(&value.as_str());
        let differs = values[0] != values[1] && !(key == "data.format" && values.iter().all(text));
        let declared = || {
            let declared = all_keys.iter().find(|declared| declared.name == *key);
            let effect = declared.and_then(|key| key.resume);
            effect.unwrap_or_else(|| unreachable!("a test knows the effect of `{key}`"))
        };
        // These two keys decide which tokens form a sample, and in which step the sample is used.
        let deals = ["data.order", "data.packing"].contains(&&**key);
        let names_tokens = key.starts_with("data.") && !deals;
        let effect = if known_same && names_tokens { ResumeEffect::Harmless } else { declared() };
        differs.then(|| Difference { key: key.clone(), effect, values })
    };
    let mut found: Vec<Difference> = keys.into_iter().filter_map(difference).collect();
    // Delayed updates change the mathematics; so does a change of their first step.
    if delayed(stored) != delayed(now) {
        let decides = |key: &str| key.starts_with("offload.update") || key == "offload.optimizer";
        let those = found.iter_mut().filter(|difference| decides(&difference.key));
        those.for_each(|difference| difference.effect = ResumeEffect::Experiment);
    }
    if !same {
        let key = "data (what the files hold)".to_owned();
        let values = [seen, sees].map(ToString::to_string);
        found.push(Difference { key, values, effect: ResumeEffect::Experiment });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// If every document is shorter than a sample, each packing has the same tokens and hashes.
    #[test]
    fn the_same_tokens_in_other_samples_are_another_experiment() {
        let hash = "0123456789abcdef0123456789abcdef";
        let seen = serde_json::json!({
            "tokens": 90, "held_out_windows": 0, "train_hash": hash, "held_out_hash": hash
        });
        let seen: DataIdentity = serde_json::from_value(seen).unwrap_or_else(|e| panic!("{e}"));
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
            let found = between([&stored, &now], [&seen, &seen]).into_iter();
            let data = found.filter(|difference| difference.key.starts_with("data."));
            data.map(|difference| (difference.key, difference.effect)).collect::<Vec<_>>()
        };
        let packing = kinds("data.packing=Documents");
        assert_eq!(packing, [("data.packing".to_owned(), ResumeEffect::Experiment)]);
        let train = kinds("data.train=\"copy.jsonl\"");
        assert_eq!(train, [("data.train".to_owned(), ResumeEffect::Harmless)]);
    }

    #[test]
    fn every_key_of_a_config_says_what_a_change_of_it_means() {
        let mut effects = std::collections::BTreeMap::new();
        for key in keys().into_iter().filter(|key| !key.is_section()) {
            let effect = key.resume;
            assert!(effect.is_some(), "declare what a change of {} means for --resume", key.name);
            // Variants may have keys of the same name.
            let before = effects.insert(key.name.clone(), effect);
            assert!(before.is_none_or(|before| before == effect), "{}", key.name);
        }
        let of = |name: &str| effects[name].unwrap();
        assert_eq!(of("train.steps"), ResumeEffect::Harmless);
        assert_eq!(
            [of("device.memory"), of("offload.update.after_step")],
            [ResumeEffect::Placement; 2]
        );
        assert_eq!([of("device.count"), of("batch.micro")], [ResumeEffect::Layout; 2]);
        assert_eq!([of("data.format.text"), of("train.seed")], [ResumeEffect::Experiment; 2]);
    }
}
