//! `config.json`: writes it for an export, and checks whether it describes the model of a config.

use super::decoder_json::{CLASSES, decoder_keys, takes_heads};
use config::transformers::{COMPARED, ComparedKey, ModelClass, SPECIAL, folder_model};
use config::{Family, ModelConfig};
use files::json::Object;
use files::shell::quoted;
use layout::build::decimal;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;

/// Bytes of the longest `config.json` that an export uses; a longer file describes no model.
pub(super) const LONGEST: usize = 1 << 20;

/// A `config.json` of an export.
pub(super) struct ModelDescription {
    pub(super) text: String,
    /// Class of the decoder, which decides the names of the tensors.
    pub(super) class: ModelClass,
}

/// Describes a model that onebox has trained. If `came`, the file of the original model, describes
/// the same model, its class, special tokens and most positions are kept. `with_parts`: whether
/// the export has the other parts of a wrapper, too, whose file is then `came`.
///
/// # Errors
/// The reason why no class of transformers fits the model.
pub(super) fn description(
    model: &ModelConfig,
    dtype: &str,
    came: Option<&[u8]>,
    with_parts: bool,
) -> Result<ModelDescription, String> {
    let came = came.and_then(|bytes| own(bytes, model));
    if with_parts {
        let Some(OriginalConfig { whole, class, .. }) = came else {
            return Err(
                "its config.json is not that of the folder whose other parts the run keeps".into(),
            );
        };
        return Ok(ModelDescription { text: written(&with_type(whole, dtype))?, class });
    }
    let (mut all, class) = match model.family {
        Family::Gpt2 => (gpt2(model, dtype), ModelClass::Gpt2),
        Family::Llama => described(model, dtype, came.as_ref())?,
    };
    if let Some(came) = &came {
        for key in SPECIAL {
            // A wrapper may have them outside of its decoder's keys only.
            let inner = came.keys.get(key).filter(|value| !value.is_null());
            if let Some(value) = inner.or_else(|| came.whole.get(key)) {
                all[key] = value.clone();
            }
        }
        keep_numbers(&mut all, &numbers_of(&came.keys));
    }
    Ok(ModelDescription { text: written(&all)?, class })
}

/// The class that fits the model, and its keys. A description fits if it reads back as the model.
fn described(
    model: &ModelConfig,
    dtype: &str,
    came: Option<&OriginalConfig>,
) -> Result<(Value, ModelClass), String> {
    let own = came.map(|came| came.class);
    for class in own.into_iter().chain(CLASSES) {
        let came = came.filter(|came| came.class == class).map(|came| &came.keys);
        if !takes_heads(class, model) {
            continue;
        }
        let keys = decoder_keys(model, class, dtype, came);
        let reads = folder_model(keys.to_string().as_bytes());
        if reads.is_ok_and(|read| is_same(&read.model, model)) {
            return Ok((keys, class));
        }
    }
    let value = |ComparedKey { key, value, .. }: ComparedKey| {
        let of_part = !["family", "layers", "hidden", "seq_len", "vocab", "ffn_hidden", "norm_eps"]
            .contains(&key.trim_start_matches("model."));
        of_part.then(|| format!("{key} {}", value(model)))
    };
    let parts: Vec<String> = COMPARED.into_iter().filter_map(value).collect();
    Err(format!("transformers has no class with these parts: {}", parts.join(", ")))
}

/// Whether two models are the same, except for the sample length.
fn is_same(one: &ModelConfig, other: &ModelConfig) -> bool {
    let [one, other] = [one, other].map(|model| comparable(model, other.seq_len));
    let rows = COMPARED.iter().filter(|row| row.key != "model.seq_len");
    rows.map(|row| row.value).all(|value| value(&one) == value(&other))
}

/// A model for samples of `seq_len` tokens. The inner width of MLPs counts only if a layer has one.
fn comparable(model: &ModelConfig, seq_len: usize) -> ModelConfig {
    let model = model.for_samples(seq_len);
    match &model.experts {
        Some(experts) if experts.dense_layers.is_empty() => {
            ModelConfig { ffn_hidden: experts.ffn_hidden, ..model }
        }
        _ => model,
    }
}

/// The keys of a wrapper with another type of numbers.
fn with_type(mut whole: BTreeMap<String, Value>, dtype: &str) -> Value {
    whole.remove("torch_dtype");
    whole.insert("dtype".into(), json!(dtype));
    for inner in whole.values_mut().filter_map(Value::as_object_mut) {
        for key in ["torch_dtype", "dtype"] {
            if let Some(inner) = inner.get_mut(key) {
                *inner = json!(dtype);
            }
        }
    }
    whole.into_iter().collect()
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

/// The `config.json` of the folder that a model came from.
struct OriginalConfig {
    /// All its keys.
    whole: BTreeMap<String, Value>,
    /// The keys of the decoder; in a wrapper they are in `text_config`.
    keys: BTreeMap<String, Value>,
    /// Class of the decoder.
    class: ModelClass,
}

/// The content of a `config.json`, if it describes `model` except for the sample length.
fn own(bytes: &[u8], model: &ModelConfig) -> Option<OriginalConfig> {
    let described = Some(bytes).filter(|bytes| bytes.len() <= LONGEST).map(folder_model)?.ok()?;
    if !is_same(&described.model, model) {
        return None;
    }
    let Object(whole) = serde_json::from_slice::<Object<Value>>(bytes).ok()?;
    let keys = match (described.wrapper, whole.get("text_config")) {
        (Some(_), Some(Value::Object(inner))) => inner.clone().into_iter().collect(),
        _ => whole.clone(),
    };
    Some(OriginalConfig { whole, keys, class: described.class })
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
        experts: _,
        dropout,
        init_std,
        norm_eps,
        from: _,
        weights: _,
        family: _,
        kv_heads: _,
        head_dim: _,
        rope: _,
        layer_pattern: _,
        window: _,
        window_rope: _,
        tied: _,
        qkv_bias: _,
        proj_bias: _,
        qk_norm: _,
        qk_norm_width: _,
        attention_sinks: _,
        norm_offset: _,
        norm_place: _,
        gate: _,
        attention_scale: _,
        score_cap: _,
        logit_cap: _,
        embedding_scale: _,
        residual_scale: _,
        delta_net: _,
        output_gate: _,
        logit_scale: _,
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
    // For shorter samples some windows are none.
    let [short, our] = [&theirs, model].map(|of| comparable(of, model.seq_len));
    let differs = |ComparedKey { names, key, value }: ComparedKey| {
        let (theirs, our) = if key == "model.seq_len" { (&theirs, model) } else { (&short, &our) };
        let (named, is, ours) = (names[of], value(theirs), value(our));
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

    /// The text of a decoder alone.
    fn text(model: &ModelConfig, dtype: &str, came: Option<&[u8]>) -> Result<String, String> {
        description(model, dtype, came, false).map(|described| described.text)
    }

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
            assert!(one.is_some_and(|one| one.len() < 300), "{key}: {message}: {wrong:?}");
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
