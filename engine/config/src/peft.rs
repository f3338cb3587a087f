//! Reads the settings of a folder of PEFT that `adapter.from` names.

use super::adapter::{AdapterTargets, PeftSettings, known_linear};
use super::file::text_of;
use super::reading::{Complaint, ConfigReader, Section};
use files::foreign_text::foreign;
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

impl Section<'_, '_> {
    /// Reads the settings of the folder of PEFT that `adapter.from` names. A stored config has these
    /// settings itself, and opens no file.
    pub(super) fn settings_of_peft(&mut self) -> Option<PeftSettings> {
        if self.reader.stored {
            return None;
        }
        let path = self.named_path("adapter", "from")?;
        of_folder(self.reader, "adapter.from", &path)
    }
}

/// Reads the settings of the folder `path`. An error is reported at `key`.
fn of_folder(reader: &mut ConfigReader, key: &str, path: &str) -> Option<PeftSettings> {
    let file = Path::new(path).join(CONFIG_OF_ADAPTER);
    let read = text_of(&file).map_err(|failure| failure.complaint.message);
    let found = read.and_then(|text| settings(&text));
    match found {
        Ok(found) => Some(found),
        Err(why) => {
            let message = format!("{}: {why}", file.display());
            let help = "name a folder with the adapter_config.json and adapter_model.safetensors of a LoRA of PEFT";
            reader.refuse_value(key, Complaint { message, help: help.into() });
            reader.mark_bad(key);
            // The keys of the folder are then invalid, too.
            let (alpha, targets) = (32.0, AdapterTargets::All);
            Some(PeftSettings { rank: 16, alpha, rank_stabilized: false, targets })
        }
    }
}

fn settings(text: &str) -> Result<PeftSettings, String> {
    let all: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("it is no JSON object ({error})"))?;
    let get = |key: &str| all.get(key).filter(|value| !value.is_null());
    match get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        other => {
            let found = foreign(other.unwrap_or("nothing"));
            return Err(format!("its `peft_type` is {found}, and onebox reads LORA"));
        }
    }
    for (key, fitting) in NOT_BUILT {
        if let Some(value) =
            get(key).map(Value::to_string).filter(|text| !fitting.contains(&&**text))
        {
            return Err(format!("onebox has no adapters with `{key}` {}", foreign(value)));
        }
    }
    let dropout = get("lora_dropout").map_or(Some(0.0), Value::as_f64);
    if dropout.is_none() {
        return Err("its `lora_dropout` is no number".into());
    }
    let rank = get("r").and_then(Value::as_u64).filter(|rank| (1..=4096).contains(rank));
    let alpha = get("lora_alpha").and_then(Value::as_f64).map(|alpha| alpha as f32);
    let alpha = alpha.filter(|alpha| *alpha > 0.0 && *alpha <= 1e6);
    let (Some(rank), Some(alpha)) = (rank, alpha) else {
        return Err(
            "it has no rank `r` from 1 to 4,096, or no `lora_alpha` above 0 and up to 1,000,000"
                .into(),
        );
    };
    let listed = |key: &str| match get(key) {
        Some(Value::Array(names)) => linears(key, names),
        None => Ok(Vec::new()),
        Some(_) => Err(format!("its `{key}` is no list of names")),
    };
    let targets = match get("target_modules") {
        Some(Value::String(all)) if all == "all-linear" => AdapterTargets::All,
        _ => {
            let mut all = [listed("target_modules")?, listed("target_parameters")?].concat();
            if all.is_empty() {
                return Err("its `target_modules` has no names".into());
            }
            all.sort_by_key(|(place, _)| *place);
            all.dedup();
            AdapterTargets::Listed(all.into_iter().map(|(_, name)| name).collect())
        }
    };
    let rank_stabilized = get("use_rslora").and_then(Value::as_bool).unwrap_or(false);
    Ok(PeftSettings { rank: rank as usize, alpha, rank_stabilized, targets })
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
            format!("its `{key}` has {}, which is no linear of attention or an MLP", foreign(name))
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
        };
        assert_eq!(settings(&text("")), Ok(wanted.clone()));
        let plain = text(", \"use_dora\": false, \"bias\": \"none\", \"modules_to_save\": null");
        assert_eq!(settings(&plain), Ok(wanted));
        let of_experts = ["mlp.experts.gate_up_proj", "down_proj"];
        let more = format!(", \"target_parameters\": {of_experts:?}");
        let wanted = ["q_proj", "v_proj", "experts.gate_up_proj", "experts.down_proj"];
        let found = settings(&text(&more)).unwrap();
        assert_eq!(found.targets, AdapterTargets::Listed(wanted.to_vec()));
        for (more, why) in [
            (", \"use_dora\": true", "no adapters with `use_dora` true"),
            (", \"modules_to_save\": [\"lm_head\"]", "`modules_to_save` [\"lm_head\"]"),
            (", \"r\": 0", "no rank `r`"),
            (", \"lora_alpha\": 1e300", "no `lora_alpha` above 0 and up to 1,000,000"),
            (", \"lora_alpha\": 1e-60", "no `lora_alpha` above 0"),
            (", \"init_lora_weights\": \"pissa\"", "`init_lora_weights` \"pissa\""),
            (", \"alora_invocation_tokens\": [1]", "`alora_invocation_tokens` [1]"),
            (", \"peft_type\": \"IA3\"", "`peft_type` is IA3"),
            (", \"target_modules\": [\"lm_head\"]", "which is no linear"),
            (", \"target_modules\": \".*\"", "no list of names"),
            (", \"target_parameters\": [\"mlp.gate.weight\"]", "`target_parameters` has"),
            (", \"target_modules\": []", "`target_modules` has no names"),
        ] {
            let found = settings(&text(more)).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        assert!(settings("[]").unwrap_err().contains("no JSON object"));
    }
}
