//! Tools of a row, calls of them in a message, and the form of arguments that a template accepts.

use super::pairs::is_empty;
use super::reader::{Arguments, ChatReader};
use super::{kind_of, object};
use files::json::{Json, Map};

/// Tools of a row in the form of OpenAI: `tools`, or the older `functions`.
///
/// # Errors
/// Both keys have values, or the value is no list of tools with names.
pub(super) fn of_row(row: &mut Map) -> Result<Option<Json>, String> {
    let mut take = |key| row.shift_remove(key).filter(|value| !is_empty(value));
    let (key, value) = match (take("tools"), take("functions")) {
        (None, None) => return Ok(None),
        (Some(tools), None) => ("tools", tools),
        (None, Some(functions)) => ("functions", functions),
        (Some(_), Some(_)) => {
            return Err("it has `tools` and `functions`: remove one of them".into());
        }
    };
    let is_text = value.as_str().is_some();
    let tools = match value {
        Json::String(text) => {
            Json::read(&text).map_err(|e| format!("`{key}` is a text, and that is no JSON: {e}"))?
        }
        other => other,
    };
    let mut tools = match tools {
        Json::Null => return Ok(None),
        Json::Array(tools) if tools.is_empty() => return Ok(None),
        Json::Array(tools) => tools,
        other => return Err(format!("`{key}` is {}, not a list of tools", kind_of(&other))),
    };
    for (i, tool) in tools.iter_mut().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        if function.get("name").and_then(Json::as_str).is_none() {
            return Err(format!("tool {} of `{key}` has no `name`", i + 1));
        }
        // In texts of LLaMA-Factory, and in `functions`, a tool is the function alone.
        if is_text || key == "functions" {
            *tool = of_function(std::mem::replace(tool, Json::Null));
        }
    }
    Ok(Some(Json::Array(tools)))
}

/// Calls in the content of a shared conversation: the JSON of one call, or of a list of calls.
pub(super) fn of_content(content: Option<&Json>) -> Result<Json, String> {
    let Some(Json::String(text)) = content else {
        return Err("it is a call, and its content is no text with the JSON of one".into());
    };
    let calls =
        Json::read(text).map_err(|e| format!("it is a call, and its content is no JSON: {e}"))?;
    Ok(match calls {
        Json::Array(calls) => Json::Array(calls.into_iter().map(of_function).collect()),
        call => of_one(call),
    })
}

/// List of one call.
pub(super) fn of_one(function: Json) -> Json {
    Json::Array(vec![of_function(function)])
}

/// Wraps a function as OpenAI does, `{"type": "function", "function": ..}`, if it is not wrapped.
pub(super) fn of_function(function: Json) -> Json {
    if function.get("function").is_some() {
        return function;
    }
    object([("type", Json::String("function".into())), ("function", function)])
}

/// Appends the calls of `message` to the calls of `to`.
pub(super) fn append(to: &mut Json, message: Json) {
    let (Json::Object(to), Json::Object(mut message)) = (to, message) else {
        unreachable!("messages are objects")
    };
    let more = message.shift_remove("tool_calls");
    if let (Some(Json::Array(all)), Some(Json::Array(more))) = (to.get_mut("tool_calls"), more) {
        all.extend(more);
    }
}

/// Checks calls, and converts their arguments to the form that the template accepts.
///
/// # Errors
/// A call without a name; arguments that are no object, or that the template does not accept.
pub(super) fn check(calls: &mut Json, reader: &ChatReader<'_>) -> Result<(), String> {
    let Json::Array(calls) = calls else {
        return Err(format!("`tool_calls` is {}, not a list", kind_of(calls)));
    };
    for (i, call) in calls.iter_mut().enumerate() {
        of_call(call, reader).map_err(|why| format!("call {} of `tool_calls`: {why}", i + 1))?;
    }
    Ok(())
}

fn of_call(call: &mut Json, reader: &ChatReader<'_>) -> Result<(), String> {
    let Json::Object(fields) = call else {
        return Err(format!("it is {}, not an object", kind_of(call)));
    };
    let function = match fields.get_mut("function") {
        Some(Json::Object(function)) => function,
        Some(other) => return Err(format!("`function` is {}, not an object", kind_of(other))),
        None => fields,
    };
    if function.get("name").and_then(Json::as_str).is_none() {
        return Err("it has no `name`".into());
    }
    let Some(arguments) = function.get_mut("arguments") else { return Ok(()) };
    match arguments {
        Json::Object(_) if reader.arguments() == Arguments::Texts => Err(
            "`arguments` is an object, and the chat template writes a text as it is: give the JSON of the object as a text".into(),
        ),
        Json::Object(_) => Ok(()),
        Json::String(text) => {
            if text.trim().is_empty() {
                "{}".clone_into(text);
            }
            let parsed: Json = Json::read(text)
                .map_err(|e| format!("`arguments` is a text, and that is no JSON: {e}"))?;
            if !matches!(parsed, Json::Object(_)) {
                return Err(format!("`arguments` is the JSON of {}, not of an object", kind_of(&parsed)));
            }
            if reader.arguments() == Arguments::Objects {
                *arguments = parsed;
            }
            Ok(())
        }
        other => Err(format!("`arguments` is {}, not an object", kind_of(other))),
    }
}
