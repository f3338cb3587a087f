//! A small folder of transformers, and changes to it.

use crate::common::Folder;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// Copies a fixture to `m`, next to `a.ron`, which trains it on a file of tokens.
pub(crate) fn model(name: &str) -> Folder {
    let folder = Folder::new();
    let fixture = format!("{}/../../tests/fixtures/hf-{name}-tiny", env!("CARGO_MANIFEST_DIR"));
    folder.shell(&format!("cp -r {fixture} m && rm -f m/expected.safetensors")).ok();
    let tokens: Vec<u8> = (0..4000u32).flat_map(|i| [(i * i % 61) as u8, 0]).collect();
    fs::write(folder.path("t.u16"), tokens).unwrap();
    fs::write(
        folder.path("a.ron"),
        "(model: (from: \"m\", seq_len: 8), data: (train: \"t.u16\", format: U16), device: Cpu(threads: 1),
          precision: Fp32, batch: (micro: 1, global: 2), train: (steps: 1))",
    )
    .unwrap();
    folder
}

/// Tensors of a safetensors file: name, entry in the header, and bytes.
pub(super) type Tensors = Vec<(String, Value, Vec<u8>)>;

pub(super) fn tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let tensor = |(name, of): (String, Value)| {
        let [from, to] = [0, 1].map(|i| of["data_offsets"][i].as_u64().map(|at| at as usize));
        let data = bytes[start..][from?..to?].to_vec();
        Some((name, of, data))
    };
    header.into_iter().filter_map(tensor).collect()
}

pub(super) fn write(path: &Path, all: &Tensors) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, of, bytes) in all {
        let from = data.len();
        data.extend(bytes);
        let mut of = of.clone();
        of["data_offsets"] = json!([from, data.len()]);
        header.insert(name.clone(), of);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
}

/// Changes the tensors of `m`.
pub(super) fn change(folder: &Folder, how: impl FnOnce(&mut Tensors)) {
    let path = folder.path("m/model.safetensors");
    let mut all = tensors(&path);
    how(&mut all);
    write(&path, &all);
}

pub(super) fn rename(folder: &Folder, how: impl Fn(&str) -> String) {
    change(folder, |all| all.iter_mut().for_each(|tensor| tensor.0 = how(&tensor.0)));
}

/// Divides `m` into two files; the index also names `more`.
pub(crate) fn cut(folder: &Folder, more: &[&str]) {
    let whole = folder.path("m/model.safetensors");
    let (mut map, mut all) = (Map::new(), tensors(&whole));
    let rest = all.split_off(all.len() / 2);
    for (part, number) in [all, rest].iter().zip(1..) {
        let name = format!("model-0000{number}-of-00002.safetensors");
        map.extend(part.iter().map(|tensor| (tensor.0.clone(), json!(name))));
        map.extend(more.iter().map(|tensor| ((*tensor).to_owned(), json!(name))));
        write(&folder.path("m").join(name), part);
    }
    fs::remove_file(whole).unwrap();
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.path("m/model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Writes the keys of `m/config.json` as version 4 of transformers does.
pub(super) fn write_keys_of_version_4(folder: &Folder) {
    let mut keys: Map<String, Value> = serde_json::from_str(&folder.read("m/config.json")).unwrap();
    let mut rope = keys.remove("rope_parameters").unwrap();
    if let Some(local) = rope.get("sliding_attention") {
        keys.insert("rope_local_base_freq".into(), local["rope_theta"].clone());
        keys.insert("sliding_window_pattern".into(), json!(2));
        rope = rope["full_attention"].take();
    }
    let mut rope: Map<String, Value> = serde_json::from_value(rope).unwrap();
    let kind = rope.remove("rope_type").unwrap();
    for key in ["rope_theta", "partial_rotary_factor"] {
        keys.extend(rope.remove_entry(key));
    }
    let mut name = "rope_type";
    if kind == "longrope" {
        // Files of Phi-4-mini have the older name.
        name = "type";
        keys.extend(rope.remove_entry("original_max_position_embeddings"));
    }
    let none = kind == "default";
    rope.insert(name.into(), kind);
    let scaling = if none { Value::Null } else { Value::Object(rope) };
    keys.insert("rope_scaling".into(), scaling);
    let dtype = keys.remove("dtype").unwrap();
    keys.insert("torch_dtype".into(), dtype);
    keys.insert("transformers_version".into(), json!("4.57.1"));
    keys.remove("layer_types");
    fs::write(folder.path("m/config.json"), Value::Object(keys).to_string()).unwrap();
}

pub(super) fn set(folder: &Folder, key: &str, value: Value) {
    let mut config: Value = serde_json::from_str(&folder.read("m/config.json")).unwrap();
    config[key] = value;
    fs::write(folder.path("m/config.json"), config.to_string()).unwrap();
}
