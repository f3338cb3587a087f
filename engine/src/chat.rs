//! The chat template of a folder of transformers: messages become the text that its model was trained to go on from. Templates
//! are Jinja as transformers runs it (`apply_chat_template` with `add_generation_prompt`).

use crate::hugging_face::Beside;
use crate::json::Json as Message;
use crate::utc::Utc;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, ErrorKind, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

/// Steps that a template may take: some thousand times those of a long chat.
const FUEL: u64 = 10_000_000;
/// Its name in messages of the library.
const NAME: &str = "chat_template";

/// Tokens that a template may name, where a folder has them.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The mark in front of what an assistant says, where a template tells it. Unicode promises that it is no character of a text.
pub(crate) const OPEN: char = '\u{FDD0}';
/// The mark behind it.
pub(crate) const CLOSE: char = '\u{FDD1}';
/// The filter that writes both, in place of `{% generation %}`.
const FILTER: &str = "generation";

/// A message: `role` is `system`, `user` or `assistant`.
pub(crate) fn message(role: &str, content: &str) -> Message {
    let texts = [("role", role), ("content", content)];
    Message::Object(texts.map(|(key, text)| (key.into(), Message::String(text.into()))).into())
}

/// What a template makes a text of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chat<'a> {
    pub(crate) messages: &'a [Message],
    /// A list of the tools that the assistant may call.
    pub(crate) tools: Option<&'a Message>,
}

impl<'a> Chat<'a> {
    /// A chat without tools.
    pub(crate) const fn of(messages: &'a [Message]) -> Self {
        Self { messages, tools: None }
    }
}

/// Variables that onebox gives a template itself.
const GIVEN: [&str; 4] = ["messages", "add_generation_prompt", "tools", "documents"];
/// Functions that a template calls.
const FUNCTIONS: [&str; 7] =
    ["raise_exception", "strftime_now", "namespace", "range", "dict", "debug", "loop"];

/// A chat template, read once.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
    tokens: BTreeMap<&'static str, String>,
    /// Further ones, which count for more than tokens.
    variables: BTreeMap<String, Json>,
    marks: bool,
}

impl Template {
    /// That of the files beside a model's weights.
    ///
    /// # Errors
    /// Files without a template, and a template that is none.
    pub fn of(beside: &Beside) -> Result<Self, String> {
        Self::at(beside, Utc::now())
    }

    /// The same on a fixed day, so that data are the same tokens on every day: templates of Llama 3 name it where they know
    /// no date.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_data(beside: &Beside) -> Result<Self, String> {
        const JULY_26_2024: Duration = Duration::from_secs(1_721_952_000);
        Self::at(beside, Utc::of(UNIX_EPOCH + JULY_26_2024))
    }

    fn at(beside: &Beside, now: Utc) -> Result<Self, String> {
        let settings = object(beside, "tokenizer_config.json")?;
        let template = match beside.get("chat_template.jinja") {
            Some(bytes) => String::from_utf8(bytes.to_vec())
                .map_err(|_| "chat_template.jinja is not UTF-8".to_owned())?,
            None => {
                let of_its_own = object(beside, "chat_template.json")?;
                let template = [&of_its_own, &settings].map(|from| from.get(NAME));
                template.into_iter().flatten().find_map(default_of).ok_or_else(|| {
                    "it has no chat template: put a chat_template.jinja there".to_owned()
                })?
            }
        };
        let tokens = tokens(&settings, &object(beside, "special_tokens_map.json")?);
        Self::new(&template, tokens, now).map_err(|e| does_not_run(&e))
    }

    fn new(
        template: &str,
        tokens: BTreeMap<&'static str, String>,
        now: Utc,
    ) -> Result<Self, minijinja::Error> {
        let mut env = Environment::new();
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(unknown_method_callback);
        let refuse = |why: String| minijinja::Error::new(ErrorKind::InvalidOperation, why);
        let raise = move |why: String| -> Result<Value, minijinja::Error> { Err(refuse(why)) };
        env.add_function("raise_exception", raise);
        let strftime_now = move |format: String| now.format(&format).map_err(refuse);
        env.add_function("strftime_now", strftime_now);
        env.add_filter("tojson", to_json);
        // Python has no way through nothing; the library has, an empty one.
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        env.add_filter(FILTER, |said: String| format!("{OPEN}{said}{CLOSE}"));
        // As Jinja reads ends of lines.
        let template = template.replace("\r\n", "\n").replace('\r', "\n");
        let marked = with_generation_as_filter(&template);
        let marks = marked != template;
        env.add_template_owned(NAME, marked)?;
        Ok(Self { env, tokens, variables: BTreeMap::new(), marks })
    }

    /// With these variables, as the keyword arguments of `apply_chat_template`: a switch such as `enable_thinking`.
    ///
    /// # Errors
    /// One that the template never asks for, or that onebox gives it itself.
    pub fn with(mut self, variables: &[(String, Json)]) -> Result<Self, String> {
        let template = self.env.get_template(NAME).map_err(|e| does_not_run(&e))?;
        let asked = template.undeclared_variables(false);
        for (name, value) in variables {
            if GIVEN.contains(&name.as_str()) {
                return Err(format!(
                    "`{name}` is a variable that onebox gives its chat template itself"
                ));
            }
            if !asked.contains(name) {
                let known = |other: &&String| {
                    let own = GIVEN.iter().chain(&FUNCTIONS).chain(&TOKENS);
                    !own.into_iter().any(|name| name == other)
                };
                let mut others: Vec<&str> =
                    asked.iter().filter(known).map(String::as_str).collect();
                others.sort_unstable();
                let others = match &others[..] {
                    [] => "it has no variables of its own".to_owned(),
                    some => format!("it has `{}`", some.join("`, `")),
                };
                return Err(format!("its chat template has no variable `{name}`; {others}"));
            }
            self.variables.insert(name.clone(), value.clone());
        }
        Ok(self)
    }

    /// Everything that its texts follow from, but for messages and the day.
    pub(crate) fn identity(&self) -> String {
        let template = self.env.get_template(NAME);
        let source = template.as_ref().map_or("", |template| template.source());
        format!("{source}\0{:?}\0{:?}\0{}", self.tokens, self.variables, self.marks)
    }

    /// The token that ends a text, where the folder names one.
    pub fn end_of_text(&self) -> Option<&str> {
        self.tokens.get("eos_token").map(String::as_str)
    }

    /// Whether the template has blocks `{% generation %}`.
    pub const fn has_marks(&self) -> bool {
        self.marks
    }

    /// The text of a chat, and of the beginning of an answer if there is to be one.
    ///
    /// # Errors
    /// The template refuses the chat, or does not end.
    pub(crate) fn text(&self, chat: Chat<'_>, answer: bool) -> Result<String, String> {
        let text = self.marked(chat, answer)?;
        Ok(if self.marks { text.replace([OPEN, CLOSE], "") } else { text })
    }

    /// The same with [`OPEN`] and [`CLOSE`] around what the template takes for an assistant's.
    pub(crate) fn marked(&self, chat: Chat<'_>, answer: bool) -> Result<String, String> {
        let chat = context! {
            messages => Value::from(Serde(chat.messages)),
            add_generation_prompt => answer,
            // Known, and none where a chat has no tools: a template may ask for them.
            tools => Value::from(Serde(chat.tools)),
            documents => (),
        };
        let tokens =
            self.tokens.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())));
        let variables =
            self.variables.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value))));
        let others: BTreeMap<String, Value> = tokens.chain(variables).collect();
        let template = self.env.get_template(NAME).map_err(|e| does_not_run(&e))?;
        template.render(context! { ..chat, ..Value::from(others) }).map_err(|e| does_not_run(&e))
    }
}

/// As Python writes JSON, and transformers with it: a blank behind each comma and colon, and no care for HTML.
#[expect(clippy::needless_pass_by_value, reason = "the form of a filter")]
fn to_json(
    value: &Value,
    indent: Option<Value>,
    named: Kwargs,
) -> Result<String, minijinja::Error> {
    let named_indent: Option<Value> = named.get("indent")?;
    let ascii: Option<bool> = named.get("ensure_ascii")?;
    named.assert_all_used()?;
    let refuse = |why: String| minijinja::Error::new(ErrorKind::InvalidOperation, why);
    if ascii == Some(true) {
        return Err(refuse("tojson: `ensure_ascii` is not known here".into()));
    }
    let indent = indent.or(named_indent).filter(|indent| !indent.is_none());
    let mut out = Vec::new();
    let wrong = |e: serde_json::Error| refuse(format!("tojson: {e}"));
    match indent.map(usize::try_from).transpose()? {
        Some(indent) if indent > 64 => return Err(refuse(format!("tojson: indent {indent} > 64"))),
        Some(indent) => {
            let indent = " ".repeat(indent);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            let mut to = serde_json::Serializer::with_formatter(&mut out, pretty);
            value.serialize(&mut to).map_err(wrong)?;
        }
        None => {
            let mut to = serde_json::Serializer::with_formatter(&mut out, Spaced);
            value.serialize(&mut to).map_err(wrong)?;
        }
    }
    String::from_utf8(out).map_err(|e| refuse(format!("tojson: {e}")))
}

/// Blanks of Python's JSON.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { to.write_all(b", ") }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}

fn does_not_run(error: &minijinja::Error) -> String {
    format!("its chat template does not run: {error:#}")
}

/// The template that is meant where a file has several.
fn default_of(template: &Json) -> Option<String> {
    fn named(one: &Json) -> Option<&str> {
        one["template"].as_str().filter(|_| one["name"] == "default")
    }
    match template {
        Json::String(text) => Some(text.clone()),
        Json::Array(several) => several.iter().find_map(named).map(str::to_owned),
        _ => None,
    }
}

/// The text of the token that ends a text, where the files beside a tokenizer name one.
///
/// # Errors
/// A file that is no JSON.
pub(crate) fn end_of_text(beside: &Beside) -> Result<Option<String>, String> {
    let settings = object(beside, "tokenizer_config.json")?;
    Ok(tokens(&settings, &object(beside, "special_tokens_map.json")?).remove("eos_token"))
}

/// Special tokens by their names. As in transformers, a map of them counts for more than the settings of the tokenizer, unless
/// these are of the newer kind that lists all added tokens.
fn tokens(settings: &Json, map: &Json) -> BTreeMap<&'static str, String> {
    let places =
        [map, settings].into_iter().skip(usize::from(!settings["added_tokens_decoder"].is_null()));
    let token = |name: &'static str| {
        // A text, or an object whose `content` it is.
        let text = |from: &Json| {
            from[name].as_str().or_else(|| from[name]["content"].as_str()).map(str::to_owned)
        };
        Some((name, places.clone().find_map(text)?))
    };
    TOKENS.into_iter().filter_map(token).collect()
}

/// `{% generation %}` marks what an assistant says, for masks. As a filter it is a block, too, whose blanks go the same way.
fn with_generation_as_filter(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut left = template;
    while let Some(start) = left.find("{%") {
        let Some(end) = left[start..].find("%}").map(|end| start + end + 2) else { break };
        let tag = &left[start..end];
        out.push_str(&left[..start]);
        out.push_str(&match tag.trim_matches(|c: char| "{}%-+".contains(c)).trim() {
            "generation" => tag.replacen("generation", "filter generation", 1),
            "endgeneration" => tag.replacen("endgeneration", "endfilter", 1),
            _ => tag.to_owned(),
        });
        left = &left[end..];
    }
    out + left
}

/// A file of JSON; null where there is none.
fn object(beside: &Beside, name: &str) -> Result<Json, String> {
    let Some(bytes) = beside.get(name) else { return Ok(Json::Null) };
    serde_json::from_slice(bytes).map_err(|e| format!("{name}: {e}"))
}

/// Tokens at which an answer ends, by the settings of generation or else of the model.
///
/// # Errors
/// A file that is no JSON, or has something else there.
pub fn stop_tokens(beside: &Beside) -> Result<Vec<i32>, String> {
    for name in ["generation_config.json", "config.json"] {
        let settings = object(beside, name)?;
        let wrong =
            || format!("{name}: `eos_token_id` is {}, not a token", settings["eos_token_id"]);
        let token =
            |json: &Json| json.as_i64().and_then(|n| i32::try_from(n).ok()).ok_or_else(wrong);
        match &settings["eos_token_id"] {
            Json::Null => {}
            Json::Array(several) => return several.iter().map(token).collect(),
            one => return Ok(vec![token(one)?]),
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The chats of tests/fixtures/hf-chat-tiny, with what `apply_chat_template` of transformers makes of them.
    #[test]
    fn a_chat_is_the_text_that_transformers_makes_of_it() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/hf-chat-tiny");
        let beside = Beside::open(&folder).unwrap();
        let chats = std::fs::read(folder.join("chat.json")).unwrap();
        let chats: Vec<Json> = serde_json::from_slice(&chats).unwrap();
        assert!(chats.len() > 1);
        for one in &chats {
            let messages = one["messages"].as_array().unwrap();
            // Up to the last answer.
            let asked: Vec<Message> =
                serde_json::from_value(messages[..messages.len() - 1].into()).unwrap();
            let text = Template::of(&beside).unwrap().text(Chat::of(&asked), true).unwrap();
            assert_eq!(text, one["prompt"].as_str().unwrap());
        }
        assert_eq!(stop_tokens(&beside).unwrap(), [301, 302]);
    }

    fn render(
        template: &str,
        (tokens, now): (BTreeMap<&'static str, String>, Utc),
        messages: &[Message],
    ) -> Result<String, String> {
        let template = Template::new(template, tokens, now).map_err(|e| does_not_run(&e))?;
        template.text(Chat::of(messages), true)
    }

    #[test]
    fn a_template_that_does_not_end_or_refuses_is_an_error() {
        let user = [message("user", "a")];
        let rendered = |template: &str| render(template, (BTreeMap::new(), Utc::now()), &user);
        let endless =
            "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}";
        assert!(rendered(endless).is_err());
        let refusal = rendered("{{ raise_exception('no ' + messages[0]['role']) }}").unwrap_err();
        assert!(refusal.contains("no user"), "{refusal}");
        let python = "{% for m in messages if m.content.strip().startswith('a') %}{{ m['content'].upper() }}{% endfor %}";
        assert_eq!(rendered(python).unwrap(), "A");
        assert_eq!(rendered("{%- generation -%} a {%- endgeneration %} b").unwrap(), "a b");
        let marked = Template::new(
            "{%- generation -%} a {%- endgeneration %} b",
            BTreeMap::new(),
            Utc::now(),
        );
        assert_eq!(
            marked.unwrap().marked(Chat::of(&user), true).unwrap(),
            format!("{OPEN}a{CLOSE} b")
        );
    }

    /// What `apply_chat_template` of transformers writes on that day.
    #[test]
    fn a_template_knows_the_date_and_that_there_are_no_tools() {
        let user = [message("user", "a")];
        let now = Utc::of(UNIX_EPOCH + Duration::from_secs(1_795_219_788));
        let rendered = |template: &str| {
            let tokens = BTreeMap::from([("eos_token", "<e>".to_owned())]);
            render(template, (tokens, now), &user)
        };
        // Llama 3.2 and others.
        let date = "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}\
            {% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}";
        assert_eq!(rendered(date).unwrap(), "21 Nov 2026");
        let why = rendered("{{ strftime_now('%Q') }}").unwrap_err();
        assert!(why.contains("`%Q`"), "{why}");
        for (template, text) in [
            ("{{ tools is defined }} {{ tools is none }}", "True True"),
            ("{{ documents is defined }} {{ documents is none }}", "True True"),
            ("{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}", ""),
            (
                "{{ tools is iterable }} {{ 'a' is iterable }} {{ messages is iterable }}",
                "False True True",
            ),
            (
                "{{ ['<b>&\u{e9}', 1.5, none, {'a': []}] | tojson }}",
                "[\"<b>&\u{e9}\", 1.5, null, {\"a\": []}]",
            ),
            ("{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"),
            ("{{ eos_token }} {{ bos_token is defined }}", "<e> False"),
        ] {
            assert_eq!(rendered(template).unwrap(), text, "{template}");
        }
    }

    /// As `apply_chat_template(messages, enable_thinking=False)` and the like.
    #[test]
    fn a_template_has_the_variables_that_it_is_given_and_no_others() {
        let text = "{{ bos_token }}{% if enable_thinking is defined and enable_thinking is false %}<none>{% endif %}\
            {% macro m() %}{{ depth }}{% endmacro %}{{ m() }}";
        let template = || {
            let tokens = BTreeMap::from([("bos_token", "<s>".to_owned())]);
            Template::new(text, tokens, Utc::now()).unwrap()
        };
        let with = |name: &str, value: Json| template().with(&[(name.to_owned(), value)]);
        let written =
            |name: &str, value: Json| with(name, value).unwrap().text(Chat::of(&[]), true).unwrap();
        assert_eq!(template().text(Chat::of(&[]), true).unwrap(), "<s>");
        assert_eq!(written("enable_thinking", false.into()), "<s><none>");
        assert_eq!(written("enable_thinking", true.into()), "<s>");
        assert_eq!(written("enable_thinking", "false".into()), "<s>");
        assert_eq!(written("depth", 3.into()), "<s>3");
        assert_eq!(written("bos_token", "<b>".into()), "<b>");
        let why = with("enable_thinkin", false.into()).unwrap_err();
        assert_eq!(
            why,
            "its chat template has no variable `enable_thinkin`; it has `depth`, `enable_thinking`"
        );
        let why = with("messages", Json::Null).unwrap_err();
        assert!(why.contains("onebox gives"), "{why}");
    }

    #[test]
    fn special_tokens_are_those_of_transformers() {
        let map = serde_json::json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" } });
        let of = |settings: Json, map: &Json| -> Vec<String> {
            tokens(&settings, map)
                .into_iter()
                .map(|(name, text)| format!("{name} {text}"))
                .collect()
        };
        let (old, new) = (
            serde_json::json!({ "bos_token": "<a>", "pad_token": "<p>", "unk_token": null }),
            serde_json::json!({ "bos_token": "<a>", "added_tokens_decoder": {} }),
        );
        assert_eq!(of(old, &map), ["bos_token <s>", "eos_token </s>", "pad_token <p>"]);
        assert_eq!(of(new, &map), ["bos_token <a>"]);
        assert!(of(Json::Null, &Json::Null).is_empty());
    }

    /// Texts as `apply_chat_template` of transformers writes them. Jinja reads every end of a line as `\n`.
    #[test]
    fn a_template_with_lines_of_windows_is_that_without() {
        let user = [message("user", "a\r\nb")];
        for (template, text) in [
            ("x\r\n{{ messages[0].content }}\r\n{{ 'y\r\nz' }}\rw\r\n", "x\na\r\nb\ny\nz\nw"),
            ("{% if true %}\r\na\r\n{% endif %}\r\nb\r\n", "a\nb"),
            ("{{ 'a %} b' }}{% generation %}c{% endgeneration %}", "a %} bc"),
        ] {
            let rendered = render(template, (BTreeMap::new(), Utc::now()), &user).unwrap();
            assert_eq!(rendered, text, "{template:?}");
        }
    }
}
