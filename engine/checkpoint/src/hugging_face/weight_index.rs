//! The index of a folder with several files of weights.

use files::foreign_text::{foreign, reason};
use files::json::Object;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of files in an index.
const MOST_FILES: usize = 10_000;

/// The file of each tensor, from the bytes of an index.
pub(crate) fn index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Index {
        #[serde(default, rename = "metadata")]
        _metadata: Value,
        weight_map: Object<String>,
    }
    let Index { weight_map: Object(map), .. } =
        serde_json::from_slice(bytes).map_err(|e| reason(e).to_string())?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let is_file = |name: &str| {
        name.ends_with(".safetensors")
            && name.len() <= 255
            && !name.starts_with('.')
            && name.chars().all(plain)
    };
    if let Some((tensor, file)) = map.iter().find(|(_, file)| !is_file(file)) {
        let (tensor, file) = (foreign(tensor), foreign(file));
        return Err(format!("`{tensor}` is in `{file}`, which is no file of this folder"));
    }
    let files: BTreeSet<&String> = map.values().collect();
    match (map.is_empty(), files.len()) {
        (true, _) => Err("it names no tensor".into()),
        (_, n) if n > MOST_FILES => Err(format!("it names {n} files, more than {MOST_FILES}")),
        _ => Ok(map),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_files_of_the_folder_only() {
        let of = |file: &str| format!("{{\"metadata\":{{}},\"weight_map\":{{\"a\":\"{file}\"}}}}");
        assert_eq!(index(of("model-00001-of-00002.safetensors").as_bytes()).unwrap().len(), 1);
        for file in [
            "../model.safetensors",
            "/etc/x.safetensors",
            "sub/x.safetensors",
            ".safetensors",
            "..safetensors",
            "x.bin",
            "x.safetensors\\u0000",
            "x\\n.safetensors",
            "",
            &format!("{}.safetensors", "x".repeat(300)),
            &format!("{}.safetensors", "x".repeat(5000)),
        ] {
            let why = index(of(file).as_bytes()).unwrap_err();
            assert!(why.contains("no file of this folder"), "{file}: {why}");
            assert!(!why.contains(['\n', '\0']) && why.len() < 500, "{why:?}");
        }
        let twice = of("x.safetensors").replace("{\"a\"", "{\"a\":\"y.safetensors\",\"a\"");
        assert!(index(twice.as_bytes()).unwrap_err().contains("twice"));
        for bad in ["", "{}", "[]", "{\"weight_map\":{}}", "{\"weight_map\":[]}", "{\"weight_map\""]
        {
            assert!(index(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(index("[".repeat(100_000).as_bytes()).is_err());
    }
}
