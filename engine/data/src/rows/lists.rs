//! Lists that a table holds as JSON in a text.

use files::json::Json;

/// Keys of the role and of the content of a message.
const SPELLINGS: [[&str; 2]; 2] = [["role", "content"], ["from", "value"]];

/// The value that a text holds as JSON; `name` is the column, for the message.
///
/// # Errors
/// The text is no JSON.
pub(super) fn parsed(name: &str, text: &str) -> Result<Json, String> {
    Json::read(text).map_err(|error| {
        format!(
            "{name} is a text, and that is no JSON: {error}; get the whole text, and write its list with json.dumps of Python (a \
             table that pandas writes has lists as Python prints them)"
        )
    })
}

/// The list of messages that a column holds as a text; any other value as it is. `own` has the keys
/// of the role and of the content by `data.columns`.
///
/// # Errors
/// The text begins as a list of messages, and is no JSON.
pub(super) fn of_messages(name: &str, value: Json, own: [&str; 2]) -> Result<Json, String> {
    let text = match value {
        Json::String(text) if text.trim_start().starts_with('[') => text,
        other => return Ok(other),
    };
    let spellings = spellings(own);
    match parsed(name, &text) {
        Ok(list) if is_chat(&list, &spellings) => Ok(list),
        Err(why) if begins_chat(&text, &spellings) => Err(why),
        Ok(_) | Err(_) => Ok(Json::String(text)),
    }
}

/// Whether a value is a list of messages. `own` has the keys of the role and of the content by
/// `data.columns`.
pub(super) fn is_messages(value: &Json, own: [&str; 2]) -> bool {
    is_chat(value, &spellings(own))
}

/// Keys of the role and of the content: those of known programs, and `own`.
fn spellings(own: [&str; 2]) -> [[&str; 2]; 3] {
    let [first, second] = SPELLINGS;
    [first, second, own]
}

/// Whether a value is a list that a message begins.
fn is_chat(value: &Json, spellings: &[[&str; 2]]) -> bool {
    let Json::Array(turns) = value else { return false };
    let Some(first) = turns.first() else { return false };
    let has = |key: &str| first.get(key).is_some();
    spellings.iter().any(|[role, content]| {
        has(role) && (has(content) || has("tool_calls") || has("function_call"))
    })
}

/// The rest of a text after a sign at its beginning. Blanks may precede the sign.
fn after(text: &str, sign: char) -> Option<&str> {
    text.trim_start().strip_prefix(sign)
}

/// Whether a text begins with a list of messages, as JSON or as Python prints it: with a role or a
/// content, if the text also has the other key or is cut off.
fn begins_chat(text: &str, spellings: &[[&str; 2]]) -> bool {
    let Some(object) = after(text, '[').and_then(|list| after(list, '{')) else { return false };
    ['"', '\''].into_iter().any(|quote| {
        let key = after(object, quote).and_then(|key| key.split_once(quote));
        let Some((key, rest)) = key else { return false };
        let is_there = |key: &str| text.contains(&format!("{quote}{key}{quote}"));
        let of = spellings.iter().filter(|spelling| spelling.contains(&key));
        let mut of = of.map(|spelling| spelling.iter().all(|key| is_there(key)));
        rest.trim_start().starts_with(':') && of.any(|is_whole| is_whole || !text.contains(']'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_list_of_messages_as_a_whole_or_not_at_all() {
        let read = |text: &str| {
            let value = Json::String(text.to_owned());
            of_messages("`prompt`", value, ["speaker", "said"])
                .map(|value| matches!(value, Json::Array(_)))
        };
        for list in [
            r#"[{"role": "user", "content": "a"}]"#,
            " [ {\"content\": \"a\", \"role\": \"user\"},\n{\"role\": \"assistant\", \"content\": \"b\"}]\n",
            r#"[{"from": "human", "value": "a"}]"#,
            r#"[{"id": 1, "speaker": "user", "said": "a"}]"#,
            r#"[{"role": "assistant", "tool_calls": []}]"#,
        ] {
            assert_eq!(read(list), Ok(true), "{list}");
        }
        for text in [
            "",
            "[",
            "[]",
            "[1] [2]",
            "[INST] a",
            r#"["a", "b"]"#,
            r#"[{"value": 3}, {"value": 4}]"#,
            r#"[{"value": 3}, {"value": 4}] What is the sum?"#,
            r#"{"role": "user", "content": "a"}"#,
        ] {
            assert_eq!(read(text), Ok(false), "{text}");
        }
        for text in [
            r#"[{"role": "user", "content": "a"}"#,
            r#"[{"role": "us"#,
            r#"[{"role": "user", "content": "a"}] b"#,
            "[{'role': 'user', 'content': 'a'}]",
            "[{'content': 'a', 'role': 'user'}\n {'content': 'b', 'role': 'assistant'}]",
            r#"[{"speaker": "user", "said": "a"},]"#,
        ] {
            let why = read(text).unwrap_err();
            let parts = ["`prompt` is a text, and that is no JSON: ", "json.dumps"];
            assert!(parts.iter().all(|part| why.contains(part)), "{text}: {why}");
        }
    }
}
