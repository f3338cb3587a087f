//! Reads the settings of a folder of PEFT that `adapter.from` names.

use super::adapter::{AdapterTargets, PeftSettings, known_linear};
use super::file::text_of;
use super::load::adapter_of_run;
use super::reading::{Complaint, ConfigReader, Section};
use super::{Adapter, ModelConfig};
use files::foreign_text::foreign;
use files::hub::name_of_snapshot;
use files::names::CONFIG_OF_ADAPTER;
use serde_json::{Map, Value};
use std::path::Path;

/// Settings of PEFT that change what an adapter computes, with the values that onebox has.
const NOT_BUILT: [(&str, &[&str]); 17] = [
    ("use_dora", &["false"]),
    ("bias", &["\"none\""]),
    ("lora_bias", &["false"]),
    ("alpha_pattern", &["{}"]),
    ("rank_pattern", &["{}"]),
    ("layers_to_transform", &["[]"]),
    ("modules_to_save", &["[]"]),
    ("trainable_token_indices", &["[]"]),
    ("layer_replication", &["[]"]),
    ("exclude_modules", &["[]"]),
    ("use_qalora", &["false"]),
    ("use_bdlora", &["false"]),
    ("alora_invocation_tokens", &["[]"]),
    ("arrow_config", &[]),
    ("kasa_config", &[]),
    ("monteclora_config", &[]),
    // Other starts change the weights of the base, too.
    ("init_lora_weights", &["true", "false", "\"gaussian\"", "\"eva\"", "\"orthogonal\""]),
];

/// Remedy for a folder without the settings of a LoRA.
const OTHER_FOLDER: &str = "name a folder with the adapter_config.json and adapter_model.safetensors of a LoRA of PEFT; `config.ron` of a run has the settings of the \
     folder: `--set adapter.from=None` uses these";
/// Remedy for adapters that onebox does not compute.
const MERGE: &str = "merge the adapters into their base with `model.merge_and_unload()` of PEFT, save the model, and set `model.from` to its folder; \
                     or train them without this setting";
/// Remedy for a value that PEFT does not write.
const DAMAGED: &str =
    "correct adapter_config.json, or take that of `PeftModel.save_pretrained` again";

/// Settings and base of the adapters in a folder of PEFT.
#[derive(Debug, PartialEq)]
struct PeftConfig {
    settings: PeftSettings,
    /// Name or folder of the model over which the adapters were trained; empty if it has none.
    base: String,
}

impl Section<'_, '_> {
    /// Reads the settings of the folder of PEFT that `adapter.from` names, for adapters of `model`. A
    /// stored config has these settings itself, and opens no file. A resumed run has them, too.
    pub(super) fn settings_of_peft(&mut self, model: &ModelConfig) -> Option<PeftSettings> {
        if self.reader.stored {
            return None;
        }
        let path = self.named_path("adapter", "from")?;
        if let Some(Adapter::Lora { rank, alpha, rank_stabilized, targets, dropout, .. }) =
            adapter_of_run(self.reader)
        {
            let source = "that of the run";
            return Some(PeftSettings { rank, alpha, rank_stabilized, targets, dropout, source });
        }
        let PeftConfig { settings, base } = of_folder(self.reader, "adapter.from", &path)?;
        let from = model.pretrained().unwrap_or_default();
        if [&*base, from].iter().all(|name| !name.is_empty()) && last_name(&base) != last_name(from)
        {
            self.reader.warnings.push(format!(
                "adapter.from: the adapters of {} belong to the base `{}` (`base_model_name_or_path`), and model.from is {}: they fit only the weights over which they were trained; if these have moved, go on",
                foreign(&path),
                foreign(&base),
                foreign(from)
            ));
        }
        Some(settings)
    }
}

/// Last part of the name of a model or of its folder, to compare two names of one model.
fn last_name(of: &str) -> String {
    let path = Path::new(of);
    let folder = if path.ends_with("config.json") { path.parent().unwrap_or(path) } else { path };
    let name = name_of_snapshot(folder).unwrap_or_else(|| folder.to_string_lossy().into_owned());
    let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    last.split('@').next().unwrap_or_default().replace('_', "-").to_lowercase()
}

/// Reads the settings of the folder `path`. An error is reported at `key`.
fn of_folder(reader: &mut ConfigReader, key: &str, path: &str) -> Option<PeftConfig> {
    let file = Path::new(path).join(CONFIG_OF_ADAPTER);
    let read = text_of(&file).map_err(|failure| Complaint {
        message: failure.complaint.message,
        help: OTHER_FOLDER.into(),
    });
    match read.and_then(|text| settings(&text)) {
        Ok(found) => Some(found),
        Err(Complaint { message, help }) => {
            let message = format!("{}: {message}", file.display());
            reader.refuse_value(key, Complaint { message, help });
            reader.mark_bad(key);
            // The keys of the folder are then invalid, too.
            let (alpha, targets, source) = (32.0, AdapterTargets::All, CONFIG_OF_ADAPTER);
            let settings = PeftSettings {
                rank: 16,
                alpha,
                rank_stabilized: false,
                targets,
                dropout: 0.0,
                source,
            };
            Some(PeftConfig { settings, base: String::new() })
        }
    }
}

fn settings(text: &str) -> Result<PeftConfig, Complaint> {
    let refused = |message: String, help: &str| Complaint { message, help: help.into() };
    let all: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| refused(format!("it is no JSON object ({error})"), OTHER_FOLDER))?;
    let get = |key: &str| all.get(key).filter(|value| !value.is_null());
    // A value that `read` does not accept is refused with what it must be.
    let wrong = |key: &str, must_be: &str| match get(key) {
        Some(found) => {
            let found = foreign(found);
            refused(format!("its `{key}` is {found}, and must be {must_be}"), DAMAGED)
        }
        None => refused(format!("it has no `{key}`, which is {must_be}"), DAMAGED),
    };
    match get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        other => {
            let found = foreign(other.unwrap_or("nothing"));
            let message = format!("its `peft_type` is {found}, and onebox reads LORA");
            return Err(refused(message, OTHER_FOLDER));
        }
    }
    for (key, fitting) in NOT_BUILT {
        if let Some(value) =
            get(key).map(Value::to_string).filter(|text| !fitting.contains(&&**text))
        {
            let message = format!("onebox has no adapters with `{key}` {}", foreign(value));
            return Err(refused(message, MERGE));
        }
    }
    let dropout = get("lora_dropout").map_or(Some(0.0), Value::as_f64).map(|p| p as f32);
    let dropout = dropout.filter(|p| (0.0..1.0).contains(p));
    let dropout = dropout.ok_or_else(|| wrong("lora_dropout", "a number from 0 to less than 1"))?;
    let rank = get("r").and_then(Value::as_u64).filter(|rank| (1..=4096).contains(rank));
    let rank = rank.ok_or_else(|| wrong("r", "a whole number from 1 to 4,096"))?;
    let alpha = get("lora_alpha").and_then(Value::as_f64).map(|alpha| alpha as f32);
    let alpha = alpha.filter(|alpha| *alpha > 0.0 && *alpha <= 1e6);
    let alpha =
        alpha.ok_or_else(|| wrong("lora_alpha", "a number above 0 and at most 1,000,000"))?;
    let targets = targets(&get).map_err(|message| refused(message, MERGE))?;
    let rank_stabilized = get("use_rslora").map_or(Some(false), Value::as_bool);
    let rank_stabilized = rank_stabilized.ok_or_else(|| wrong("use_rslora", "true or false"))?;
    let base = get("base_model_name_or_path").and_then(Value::as_str).unwrap_or_default();
    let rank = rank as usize;
    let settings =
        PeftSettings { rank, alpha, rank_stabilized, targets, dropout, source: CONFIG_OF_ADAPTER };
    Ok(PeftConfig { settings, base: base.into() })
}

/// The linears that have an adapter, given the values of keys.
fn targets<'a>(get: &dyn Fn(&str) -> Option<&'a Value>) -> Result<AdapterTargets, String> {
    let listed = |key: &str| match get(key) {
        Some(Value::Array(names)) => linears(key, names),
        None => Ok(Vec::new()),
        Some(other) => Err(format!("its `{key}` is {}, which is no list of names", foreign(other))),
    };
    if get("target_modules").and_then(Value::as_str) == Some("all-linear") {
        return Ok(AdapterTargets::All);
    }
    let mut all = [listed("target_modules")?, listed("target_parameters")?].concat();
    if all.is_empty() {
        return Err("it has no `target_modules`, the list of the linears with adapters".into());
    }
    all.sort_by_key(|(place, _)| *place);
    all.dedup();
    Ok(AdapterTargets::Listed(all.into_iter().map(|(_, name)| name).collect()))
}

/// The linears of the list at `key`, each with its place in the order of a layer. PEFT writes the list
/// in any order.
fn linears(key: &str, names: &[Value]) -> Result<Vec<(usize, &'static str)>, String> {
    let linear = |name: &Value| {
        let last = name.as_str().and_then(|name| name.rsplit('.').next());
        let known = match key {
            "target_parameters" => last.and_then(|name| known_linear(&format!("experts.{name}"))),
            _ => last.and_then(known_linear),
        };
        known.ok_or_else(|| {
            let what = match last {
                Some("in_proj_qkvz" | "in_proj_ba") => {
                    "several linears of a gated delta net in one tensor, and onebox has an adapter for each of them"
                }
                _ => "no linear of attention, of a gated delta net or of an MLP",
            };
            format!("its `{key}` has {}, which is {what}", foreign(name))
        })
    };
    names.iter().map(linear).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_a_folder_are_those_of_peft_and_others_are_refused() {
        let text = |more: &str| {
            format!(
                "{{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"target_modules\": [\"v_proj\", \"q_proj\"]{more}}}"
            )
        };
        let wanted = PeftSettings {
            rank: 4,
            alpha: 8.0,
            rank_stabilized: false,
            targets: AdapterTargets::Listed(vec!["q_proj", "v_proj"]),
            dropout: 0.0,
            source: "adapter_config.json",
        };
        let read = |text: &str| {
            settings(text)
                .map(|of| of.settings)
                .map_err(|why| format!("{}; {}", why.message, why.help))
        };
        assert_eq!(read(&text("")), Ok(wanted.clone()));
        let plain = text(", \"use_dora\": false, \"bias\": \"none\", \"modules_to_save\": null");
        assert_eq!(read(&plain), Ok(wanted));
        let of_experts = ["mlp.experts.gate_up_proj", "down_proj"];
        let more = format!(", \"target_parameters\": {of_experts:?}");
        let wanted = ["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"];
        let found = read(&text(&more)).unwrap();
        assert_eq!(found.targets, AdapterTargets::Listed(wanted.to_vec()));
        for (more, why) in [
            (", \"use_dora\": true", "no adapters with `use_dora` true"),
            (", \"modules_to_save\": [\"lm_head\"]", "`modules_to_save` [\"lm_head\"]"),
            (", \"use_dora\": true", "merge_and_unload()"),
            (", \"r\": 0", "its `r` is 0, and must be a whole number from 1 to 4,096; correct"),
            (", \"r\": null", "it has no `r`, which is a whole number"),
            (", \"lora_alpha\": 1e300", "its `lora_alpha` is 1e+300, and must be a number above 0"),
            (", \"lora_alpha\": 1e-60", "its `lora_alpha` is 1"),
            (", \"use_rslora\": \"yes\"", "its `use_rslora` is \"yes\", and must be true or false"),
            (", \"lora_dropout\": \"x\"", "its `lora_dropout` is \"x\", and must be a number"),
            (", \"lora_dropout\": 1.0", "its `lora_dropout` is 1.0, and must be a number from 0"),
            (", \"init_lora_weights\": \"pissa\"", "`init_lora_weights` \"pissa\""),
            (", \"alora_invocation_tokens\": [1]", "`alora_invocation_tokens` [1]"),
            (", \"peft_type\": \"IA3\"", "`peft_type` is IA3"),
            (", \"target_modules\": [\"lm_head\"]", "which is no linear"),
            (", \"target_modules\": \".*\"", "no list of names"),
            (", \"target_parameters\": [\"mlp.gate.weight\"]", "`target_parameters` has"),
            (", \"target_modules\": []", "it has no `target_modules`"),
        ] {
            let found = read(&text(more)).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        let found = read("[]").unwrap_err();
        assert!(found.contains("no JSON object") && found.contains("name a folder"), "{found}");
    }

    #[test]
    fn names_of_one_model_are_alike() {
        let names = [
            "meta-llama/Llama-3.2-1B",
            "/models/llama-3.2-1b/",
            "/hub/models--meta-llama--Llama-3.2-1B/snapshots/0123",
            "/models/Llama_3.2-1B/config.json",
            "meta-llama/Llama-3.2-1B@main",
        ];
        for name in names {
            assert_eq!(last_name(name), "llama-3.2-1b", "{name}");
        }
        assert_ne!(last_name("Llama-3.2-3B"), last_name(names[0]));
    }
}
