//! Summaries with the settings of a run: a text, and the hyperparameters of TensorBoard's HParams
//! page (`HParamsPluginData` in plugins/hparams/plugin_data.proto of tensorboard).

use super::{Content, Wire, bytes, event, key, varint};
use serde_json::Value;

/// `DataType.DT_FLOAT` and `DataType.DT_STRING`.
const FLOAT: u64 = 1;
const STRING: u64 = 7;
/// `DataClass.DATA_CLASS_TENSOR`.
const TENSOR: u64 = 2;

/// Encodes a summary with one value: `tag`, the plugin with its content, and a tensor.
fn summary(tag: &str, plugin: &str, content: &[u8], tensor: &[u8]) -> Vec<u8> {
    let (mut data, mut metadata, mut value, mut summary) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    bytes(&mut data, 1, plugin.as_bytes());
    if !content.is_empty() {
        bytes(&mut data, 2, content);
    }
    bytes(&mut metadata, 1, &data);
    number(&mut metadata, 4, TENSOR);
    bytes(&mut value, 1, tag.as_bytes());
    bytes(&mut value, 8, tensor);
    bytes(&mut value, 9, &metadata);
    bytes(&mut summary, 1, &value);
    summary
}

fn number(into: &mut Vec<u8>, field: u64, value: u64) {
    key(into, field, Wire::Varint);
    varint(into, value);
}

/// Encodes an event with the text `text` under `tag`. It stands in a code block, since TensorBoard
/// reads Markdown.
pub(super) fn text(wall_time: f64, step: u64, tag: &str, text: &str) -> Vec<u8> {
    let block: String = text.lines().map(|line| format!("    {line}\n")).collect();
    let mut tensor = Vec::new();
    number(&mut tensor, 1, STRING);
    // A shape without dimensions: one text.
    bytes(&mut tensor, 2, &[]);
    bytes(&mut tensor, 8, block.as_bytes());
    let summary = summary(&format!("{tag}/text_summary"), "text", &[], &tensor);
    event(wall_time, step, &Content { field: 5, bytes: &summary })
}

/// Encodes an event with the keys and values of `config` as hyperparameters.
pub(super) fn hyperparameters(wall_time: f64, config: &Value) -> Vec<u8> {
    let (mut start, mut content, mut tensor) = (Vec::new(), Vec::new(), Vec::new());
    each("", config, &mut |name, value| {
        let mut entry = Vec::new();
        bytes(&mut entry, 1, name.as_bytes());
        bytes(&mut entry, 2, &value_of(value));
        bytes(&mut start, 1, &entry);
    });
    key(&mut start, 5, Wire::Fixed64);
    start.extend(wall_time.to_le_bytes());
    bytes(&mut content, 3, &start);
    number(&mut tensor, 1, FLOAT);
    // A shape of one dimension without elements.
    let mut shape = Vec::new();
    bytes(&mut shape, 2, &[]);
    bytes(&mut tensor, 2, &shape);
    let summary = summary("_hparams_/session_start_info", "hparams", &content, &tensor);
    event(wall_time, 0, &Content { field: 5, bytes: &summary })
}

/// Calls `tell` with each key and its value; an inner key stands after a dot.
fn each(name: &str, value: &Value, tell: &mut dyn FnMut(&str, &Value)) {
    let Value::Object(all) = value else { return tell(name, value) };
    for (inner, value) in all {
        let dot = if name.is_empty() { "" } else { "." };
        each(&format!("{name}{dot}{inner}"), value, tell);
    }
}

/// Encodes `google.protobuf.Value`. A list is a text.
fn value_of(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    match value {
        Value::Number(number) => {
            key(&mut out, 2, Wire::Fixed64);
            out.extend(number.as_f64().unwrap_or(f64::NAN).to_le_bytes());
        }
        Value::Bool(flag) => number(&mut out, 4, u64::from(*flag)),
        Value::String(text) => bytes(&mut out, 3, text.as_bytes()),
        Value::Null => bytes(&mut out, 3, b"None"),
        other => bytes(&mut out, 3, other.to_string().as_bytes()),
    }
    out
}
