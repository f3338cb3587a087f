//! `config.json`: writes it for an export, and checks whether it describes the model of a config.

use config::transformers::{COMPARED, ComparedKey, FolderModel, SPECIAL, WINDOW, folder_model};
use config::{Family, ModelConfig, RopeScaling};
use files::json::Object;
use files::shell::quoted;
use layout::build::decimal;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;

/// Bytes of the longest `config.json` that an export uses; a longer file describes no model.
const LONGEST: usize = 1 << 20;

/// The `config.json` of a model that onebox has trained. If `came`, the file of the original model,
/// describes the same model, its class, special tokens and most positions are kept.
///
/// # Errors
/// The reason why no class of transformers fits the model.
pub(super) fn text(
    model: &ModelConfig,
    dtype: &str,
    came: Option<&[u8]>,
) -> Result<String, String> {
    let came = came.map(|bytes| own(bytes, model)).unwrap_or_default();
    let mut all = match model.family {
        Family::Gpt2 => gpt2(model, dtype),
        Family::Llama => llama(model, dtype, &came)?,
    };
    for key in SPECIAL {
        if let Some(value) = came.get(key) {
            all[key] = value.clone();
        }
    }
    keep_numbers(&mut all, &numbers_of(&came));
    written(&all)
}

/// The numbers of a `config.json` by key, also those in nested objects.
fn numbers_of(keys: &BTreeMap<String, Value>) -> BTreeMap<&str, &Value> {
    fn collect<'a>(key: &'a str, value: &'a Value, found: &mut BTreeMap<&'a str, &'a Value>) {
        match value {
            Value::Number(_) => drop(found.entry(key).or_insert(value)),
            Value::Object(inner) => inner.iter().for_each(|(k, v)| collect(k, v, found)),
            _ => {}
        }
    }
    let mut found = BTreeMap::new();
    keys.iter().for_each(|(key, value)| collect(key, value, &mut found));
    found
}

/// Replaces each fraction by the number of the original file that has its value in 32 bits, so that
/// `10000000` does not become `10000000.0`.
fn keep_numbers(all: &mut Value, came: &BTreeMap<&str, &Value>) {
    let single = |value: &Value| value.as_f64().map(|number| number as f32);
    for (key, value) in all.as_object_mut().into_iter().flatten() {
        match (&value, came.get(key.as_str())) {
            (Value::Object(_), _) => keep_numbers(value, came),
            (Value::Number(ours), Some(theirs))
                if ours.is_f64() && single(value) == single(theirs) =>
            {
                *value = (*theirs).clone();
            }
            _ => {}
        }
    }
}

/// The text of a `config.json`, with numbers as Python prints them.
fn written(all: &Value) -> Result<String, String> {
    let mut text = Vec::new();
    let numbers = PythonNumbers(PrettyFormatter::new());
    let mut writer = Serializer::with_formatter(&mut text, numbers);
    all.serialize(&mut writer).map_err(|error| error.to_string())?;
    text.push(b'\n');
    String::from_utf8(text).map_err(|error| error.to_string())
}

/// Indents as [`PrettyFormatter`] does, and writes `1e-05` where Rust writes `0.00001`.
struct PythonNumbers(PrettyFormatter<'static>);

impl Formatter for PythonNumbers {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        match exponent.parse::<i32>() {
            // Python writes an exponent outside of this range.
            Ok(exponent) if !(-4..16).contains(&exponent) => {
                let sign = if exponent < 0 { '-' } else { '+' };
                write!(writer, "{digits}e{sign}{:02}", exponent.unsigned_abs())
            }
            _ => write!(writer, "{value:?}"),
        }
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

/// The keys of a `config.json`, if it describes `model` except for the sample length; else empty.
fn own(bytes: &[u8], model: &ModelConfig) -> BTreeMap<String, Value> {
    let described = Some(bytes).filter(|bytes| bytes.len() <= LONGEST).map(folder_model);
    let same = |theirs: &ModelConfig| {
        let rows = COMPARED.iter().filter(|row| row.key != "model.seq_len");
        rows.map(|row| row.value).all(|value| value(theirs) == value(model))
    };
    match described {
        Some(Ok(FolderModel { model: theirs, .. })) if same(&theirs) => {
            serde_json::from_slice(bytes).map(|Object(keys)| keys).unwrap_or_default()
        }
        _ => BTreeMap::new(),
    }
}

/// Keys of the transformers class that has the model's biases and norms.
fn llama(m: &ModelConfig, dtype: &str, came: &BTreeMap<String, Value>) -> Result<Value, String> {
    let was_mistral = came.get("model_type").is_some_and(|kind| kind == "mistral");
    let (class, kind) = match (m.qk_norm, m.qkv_bias, m.proj_bias) {
        (true, biased, proj) if biased == proj => ("Qwen3ForCausalLM", "qwen3"),
        (false, true, false) => ("Qwen2ForCausalLM", "qwen2"),
        // The same mathematics; in version 5 a Llama's heads always have size hidden / heads.
        (false, false, false) if was_mistral || m.head_dim * m.heads != m.hidden => {
            ("MistralForCausalLM", "mistral")
        }
        (false, biased, proj) if biased == proj => ("LlamaForCausalLM", "llama"),
        (qk_norm, qkv_bias, proj_bias) => {
            return Err(format!(
                "transformers has no model with qk_norm {qk_norm}, qkv_bias {qkv_bias} and \
                 proj_bias {proj_bias}"
            ));
        }
    };
    if ["qwen2", "llama"].contains(&kind) && m.head_dim * m.heads != m.hidden {
        return Err(format!(
            "a {class} of transformers has heads of hidden / heads = {}, not {}",
            m.hidden / m.heads,
            m.head_dim
        ));
    }
    let theta = decimal(m.rope.theta);
    let rope = match m.rope.scaling {
        RopeScaling::None => json!({ "rope_type": "default", "rope_theta": theta }),
        RopeScaling::Linear { factor } => {
            json!({ "rope_type": "linear", "rope_theta": theta, "factor": decimal(factor) })
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_seq_len } => {
            json!({
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": decimal(factor),
                "low_freq_factor": decimal(low_freq_factor),
                "high_freq_factor": decimal(high_freq_factor),
                "original_max_position_embeddings": original_seq_len,
            })
        }
    };
    // Version 4 of transformers reads `rope_theta` and `rope_scaling`, version 5 `rope_parameters`.
    let mut scaling = rope.clone();
    match m.rope.scaling {
        RopeScaling::None => scaling = json!(null),
        _ => drop(scaling.as_object_mut().and_then(|scaling| scaling.remove("rope_theta"))),
    }
    let mut all = json!({
        "architectures": [class],
        // onebox has no dropout of attention weights alone.
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "dtype": dtype,
        "eos_token_id": null,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "hidden_size": m.hidden,
        "initializer_range": decimal(m.init_std),
        "intermediate_size": m.ffn_hidden,
        "max_position_embeddings": m.seq_len,
        "model_type": kind,
        "num_attention_heads": m.heads,
        "num_hidden_layers": m.layers,
        "num_key_value_heads": m.kv_heads,
        "rms_norm_eps": decimal(m.norm_eps),
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "rope_theta": theta,
        "tie_word_embeddings": m.tied,
        "use_cache": true,
        "vocab_size": m.vocab,
    });
    match kind {
        "llama" | "qwen3" => all["attention_bias"] = json!(m.proj_bias),
        // The default window of the class may be shorter than a sample.
        "mistral" if was_mistral => {
            let window = came.get("sliding_window").cloned();
            all["sliding_window"] = window.unwrap_or_else(|| json!(WINDOW));
        }
        "mistral" => all["sliding_window"] = json!(null),
        _ => {}
    }
    let windows = ["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"];
    let windows = windows.into_iter().filter(|_| kind.starts_with("qwen"));
    for key in windows.chain(["max_position_embeddings"]) {
        if let Some(value) = came.get(key) {
            all[key] = value.clone();
        }
    }
    Ok(all)
}

fn gpt2(model: &ModelConfig, dtype: &str) -> Value {
    // Without `..`, a new key of the model does not compile until it is written or ignored here.
    let ModelConfig {
        layers,
        hidden,
        heads,
        seq_len,
        vocab,
        ffn_hidden,
        dropout,
        init_std,
        norm_eps,
        from: _,
        weights: _,
        family: _,
        kv_heads: _,
        head_dim: _,
        rope: _,
        tied: _,
        qkv_bias: _,
        proj_bias: _,
        qk_norm: _,
    } = model;
    let dropout = decimal(*dropout);
    let inner = (*ffn_hidden != 4 * hidden).then_some(ffn_hidden);
    json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": dropout,
        "bos_token_id": null,
        "dtype": dtype,
        "embd_pdrop": dropout,
        "eos_token_id": null,
        "initializer_range": decimal(*init_std),
        "layer_norm_epsilon": decimal(*norm_eps),
        "model_type": "gpt2",
        // transformers no longer has this key; llama.cpp's converter reads the positions here.
        "n_ctx": seq_len,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": inner,
        "n_layer": layers,
        "n_positions": seq_len,
        "resid_pdrop": dropout,
        "scale_attn_by_inverse_layer_idx": false,
        "reorder_and_upcast_attn": false,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "use_cache": true,
        "vocab_size": vocab,
    })
}

/// The differences between a `config.json` and `model`, each with its remedy if one exists.
pub(crate) fn mismatches(bytes: &[u8], model: &ModelConfig) -> Vec<String> {
    let theirs = match folder_model(bytes) {
        Ok(described) => described.model,
        Err(refused) => return refused.wrong,
    };
    let of = usize::from(theirs.family == Family::Llama);
    let differs = |ComparedKey { names, key, value }: ComparedKey| {
        let (named, is, ours) = (names[of], value(&theirs), value(model));
        // A property that the class fixes has no key of its own in the file.
        let of_class = named == "model_type" && key != "model.family";
        let named = if of_class { format!("{key} of its class") } else { format!("`{named}`") };
        let set = || quoted(&format!("{key}={is}"));
        (is != ours).then(|| format!("{named} is {is}, and {key} is {ours}: --set {}", set()))
    };
    COMPARED.into_iter().filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use std::collections::BTreeSet;
    use std::path::Path;

    fn model() -> ModelConfig {
        let ron = "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, vocab: 61),
                    data: (train: \"x\", format: U16), train: (steps: 1))";
        load_str(ron, "a.ron", Path::new("/"), &["device=Cpu".into()]).unwrap().config.model
    }

    #[test]
    fn what_is_exported_is_imported() {
        let wide = ModelConfig { ffn_hidden: 96, ..model() };
        for model in [model(), wide] {
            assert!(
                mismatches(text(&model, "float32", None).unwrap().as_bytes(), &model).is_empty()
            );
        }
    }

    /// llama.cpp's converter reads `n_ctx`, which the classes of version 5 no longer write.
    #[test]
    fn a_gpt2_has_what_clients_read_and_the_numbers_that_were_written() {
        let dropping = ModelConfig { dropout: 0.1, ..model() };
        let text = text(&dropping, "float32", None).unwrap();
        let all: Value = serde_json::from_str(&text).unwrap();
        assert_eq!([&all["n_ctx"], &all["n_positions"]], [16, 16]);
        for message in ["\"initializer_range\": 0.02,", "\"resid_pdrop\": 0.1,"] {
            assert!(text.contains(message), "{text}");
        }
    }

    #[test]
    fn a_model_keeps_class_window_positions_and_special_tokens_that_it_came_with() {
        let model = |biased: bool| {
            let ron = format!(
                "(model: (family: Llama, layers: 1, hidden: 32, heads: 4, seq_len: 16, vocab: 61, qkv_bias: {biased}),
                  data: (train: \"x\", format: U16), train: (steps: 1))"
            );
            load_str(&ron, "a.ron", Path::new("."), &[]).unwrap().config.model
        };
        let write = |biased: bool, came: Option<&Value>| -> Value {
            let came = came.map(|came| came.to_string().into_bytes());
            let text = text(&model(biased), "float32", came.as_deref()).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        let mut qwen = write(true, None);
        assert_eq!(qwen["model_type"], "qwen2");
        for (key, value) in [
            ("use_sliding_window", json!(true)),
            ("sliding_window", json!(32)),
            ("max_window_layers", json!(0)),
            ("max_position_embeddings", json!(64)),
        ] {
            qwen[key] = value;
        }
        assert_eq!(write(true, Some(&qwen)), qwen);
        let read = |came: Option<&Value>| write(false, came);
        let mut came = read(None);
        assert_eq!(
            [&came["model_type"], &came["max_position_embeddings"]],
            [&json!("llama"), &json!(16)]
        );
        for (key, value) in [
            ("model_type", json!("mistral")),
            ("architectures", json!(["MistralForCausalLM"])),
            ("max_position_embeddings", json!(512)),
            ("sliding_window", json!(64)),
            ("eos_token_id", json!([3, 4])),
            ("pad_token_id", json!(5)),
        ] {
            came[key] = value;
        }
        came.as_object_mut().unwrap().remove("attention_bias");
        assert_eq!(read(Some(&came)), came);
        came.as_object_mut().unwrap().remove("sliding_window");
        assert_eq!(read(Some(&came))["sliding_window"], 4096);
        // No key of another model is kept.
        came["num_hidden_layers"] = json!(2);
        assert_eq!(read(Some(&came)), read(None));
    }

    /// Source: `json.dumps` of Python, which writes the files of transformers.
    #[test]
    fn numbers_print_as_in_the_file_that_they_came_from() {
        let ron = "(model: (family: Llama, layers: 1, hidden: 32, heads: 4, seq_len: 16, vocab: 61,
                     norm_eps: 1e-5, rope: (theta: 1e7)),
                    data: (train: \"x\", format: U16), train: (steps: 1))";
        let model = load_str(ron, "a.ron", Path::new("."), &[]).unwrap().config.model;
        let write = |came: Option<&str>| text(&model, "float32", came.map(str::as_bytes)).unwrap();
        let first = write(None);
        for message in [
            "\"rms_norm_eps\": 1e-05,",
            "\"initializer_range\": 0.02,",
            "\"rope_theta\": 10000000.0",
        ] {
            assert!(first.contains(message), "{message}: {first}");
        }
        let came = first.replace("10000000.0", "10000000");
        let came = came.replace("1e-05", "9.999999747378752e-06").replace("0.02,", "0.03,");
        let again = write(Some(&came));
        // The initial values are a key of onebox's config, which says 0.02.
        assert_eq!(again, came.replace("0.03,", "0.02,"));
    }

    #[test]
    fn every_key_of_the_model_is_compared() {
        // Keys that exist only in the config of onebox.
        let free = ["from", "weights", "dropout", "init_std"];
        let keys = config::keys();
        fn of_model(name: &str) -> Option<&str> {
            name.strip_prefix("model.")?.split('.').next()
        }
        let keys = keys.iter().filter_map(|key| of_model(&key.name));
        let compared = COMPARED.iter().filter_map(|compared| of_model(compared.key));
        let compared: BTreeSet<&str> = compared.chain(free).collect();
        assert_eq!(compared, keys.collect(), "COMPARED has each key of `model`, or it is free");
    }

    #[test]
    fn every_key_that_differs_is_named() {
        let text = |model: &ModelConfig| text(model, "float32", None).unwrap();
        let mut good: Value = serde_json::from_str(&text(&model())).unwrap();
        // `n_ctx` would contradict other positions.
        good.as_object_mut().unwrap().remove("n_ctx");
        for (key, value, message) in [
            ("n_layer", json!(3), "--set model.layers=3"),
            ("n_embd", json!(48), "--set model.hidden=48"),
            ("n_head", json!(8), "--set model.heads=8"),
            ("n_positions", json!(32), "--set model.seq_len=32"),
            ("n_ctx", json!(32), "`n_positions` is 16"),
            ("vocab_size", json!(64), "--set model.vocab=64"),
            ("n_inner", json!(64), "--set model.ffn_hidden=64"),
            ("n_layer", json!(-2), "not a whole number"),
            ("n_layer", json!("2"), "not a whole number"),
            ("n_layer", json!(1e300), "not a whole number"),
            ("vocab_size", json!(u64::MAX), "not from 2 to 16777216"),
            ("activation_function", json!("relu"), "not \"gelu_new\""),
            ("activation_function", json!("gelu"), "tanh form"),
            ("layer_norm_epsilon", json!(1e-6), "--set model.norm_eps=0.000001"),
            ("layer_norm_epsilon", json!("1e-5"), "not a number from 0"),
            ("model_type", json!("bert"), "llama"),
            ("tie_word_embeddings", json!(false), "the output of a GPT-2 is the embedding"),
            ("scale_attn_weights", json!(false), "sqrt"),
            ("scale_attn_by_inverse_layer_idx", json!(true), "layers"),
            ("reorder_and_upcast_attn", json!(true), "rounds"),
            ("add_cross_attention", json!(true), "none here"),
            ("quantization_config", json!({ "bits": "4".repeat(500) }), "codes"),
            ("auto_map", json!({ "AutoModel": "x.py" }), "not run"),
        ] {
            let mut bad = good.clone();
            bad[key] = value;
            let wrong = mismatches(bad.to_string().as_bytes(), &model());
            let one = wrong.iter().find(|w| w.contains(message));
            assert!(one.is_some_and(|one| one.len() < 200), "{key}: {message}: {wrong:?}");
        }
        for key in ["n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "model_type"] {
            let mut bad = good.clone();
            bad.as_object_mut().unwrap().remove(key);
            let wrong = mismatches(bad.to_string().as_bytes(), &model());
            assert!(wrong.iter().any(|w| w.contains(&format!("`{key}` is missing"))), "{wrong:?}");
        }
        let twice = text(&model()).replacen('{', "{\"n_layer\": 9,", 1);
        assert!(mismatches(twice.as_bytes(), &model())[0].contains("twice"));
        for bad in ["", "[]", "{", "null", "{\"n_layer\": 1e999}", &"[".repeat(100_000)] {
            assert_eq!(mismatches(bad.as_bytes(), &model()).len(), 1, "{bad:.20}");
        }
    }
}
