//! Chat template of a transformers folder: turns messages into the text that the model continues.
//! Templates are Jinja, as in `apply_chat_template` with `add_generation_prompt`.

mod arguments;
mod checks;
mod code;
mod dump;
mod expression;
mod filters;
mod format;
#[cfg(test)]
mod hostile;
mod library;
mod marks;
mod methods;
mod numbers;
mod operators;
#[cfg(test)]
mod oracle;
mod print;
mod rewrite;
mod sorting;
mod source;
mod strings;
mod subscripts;
mod turns;
mod value;

use crate::bad_rows::TOO_LONG;
use crate::model_files::ModelFiles;
use files::foreign_text::{ForeignText, foreign, reason};
use files::json::{Json as Message, shown};
use files::utc::Utc;
use minijinja::{Environment, ErrorKind, Value, context};
use rewrite::{RewrittenTemplate, rewritten};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};
pub use turns::{RenderedChat, Turn};
use value::{value, value_of_messages};

/// Step limit for an empty chat; values and bytes of a chat add steps. A step is worth 64 bytes.
const STEPS: u64 = 1_000_000;
const STEPS_OF_A_VALUE: u64 = 500;
const STEPS_OF_A_BYTE: u64 = 4;
/// Name of the template in messages of minijinja.
const NAME: &str = "chat_template";

/// Error message for files without a template.
const NO_TEMPLATE: &str = "it has no chat template: put a chat_template.jinja there";

/// Tokens that a template may name, if the folder has them.
const TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Placeholder of an answer, to find the text around the answer.
pub(crate) const ANSWER: char = '\u{FDD3}';

/// A message: `role` is `system`, `user` or `assistant`.
pub fn message(role: &str, content: &str) -> Message {
    let texts = [("role", role), ("content", content)];
    Message::Object(texts.map(|(key, text)| (key.into(), Message::String(text.into()))).into())
}

/// The messages and tools that a template turns into a text.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    pub(crate) messages: &'a [Message],
    /// A list of the tools that the assistant may call.
    pub(crate) tools: Option<&'a Message>,
}

impl<'a> Chat<'a> {
    /// A chat without tools.
    pub const fn of(messages: &'a [Message]) -> Self {
        Self { messages, tools: None }
    }
}

/// Variables that onebox gives to each template.
const GIVEN: [&str; 4] = ["messages", "add_generation_prompt", "tools", "documents"];
/// Functions that a template calls, without the functions of operators, which begin with `__`.
const FUNCTIONS: [&str; 6] =
    ["raise_exception", "strftime_now", "namespace", "range", "dict", "loop"];

/// Chat template, read once.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
    /// Source of the template, with `\n` at the end of each line.
    source: String,
    tokens: BTreeMap<&'static str, String>,
    /// Further variables, which have priority over tokens.
    variables: BTreeMap<String, Message>,
    marks: bool,
    end_of_answers: OnceLock<String>,
}

impl Template {
    /// Reads the template from the files next to a model's weights.
    ///
    /// # Errors
    /// Files without a template, and a template that is invalid.
    pub fn of(files: &ModelFiles) -> Result<Self, String> {
        Self::at(files, Utc::now())?.ok_or_else(|| NO_TEMPLATE.to_owned())
    }

    /// Reads the template with a fixed date, so that data give the same tokens on every day:
    /// templates of Llama 3 write today's date if no date is given.
    ///
    /// # Errors
    /// The same errors as [`of`](Self::of).
    pub fn of_data(files: &ModelFiles) -> Result<Self, String> {
        Self::find_for_data(files)?.ok_or_else(|| NO_TEMPLATE.to_owned())
    }

    /// Like [`of_data`](Self::of_data), but `None` if the files have no template, as those of a base
    /// model.
    ///
    /// # Errors
    /// A template that is invalid.
    pub fn find_for_data(files: &ModelFiles) -> Result<Option<Self>, String> {
        const JULY_26_2024: Duration = Duration::from_secs(1_721_952_000);
        Self::at(files, Utc::of(UNIX_EPOCH + JULY_26_2024))
    }

    fn at(files: &ModelFiles, now: Utc) -> Result<Option<Self>, String> {
        let settings = object(files, "tokenizer_config.json")?;
        let template = match files.get("chat_template.jinja") {
            Some(bytes) => String::from_utf8(bytes.to_vec())
                .map_err(|_| "chat_template.jinja is not UTF-8".to_owned())?,
            None => {
                let of_its_own = object(files, "chat_template.json")?;
                let template = [&of_its_own, &settings].map(|from| from.get(NAME));
                match template.into_iter().flatten().find_map(default_of) {
                    Some(template) => template,
                    None => return Ok(None),
                }
            }
        };
        let tokens = tokens(&settings, &object(files, "special_tokens_map.json")?);
        Self::new(&template, tokens, now).map(Some)
    }

    fn new(
        template: &str,
        tokens: BTreeMap<&'static str, String>,
        now: Utc,
    ) -> Result<Self, String> {
        let mut env = library::environment(now).map_err(|e| does_not_run(&e))?;
        // Jinja reads each end of a line as `\n`.
        let source = template.replace("\r\n", "\n").replace('\r', "\n");
        let RewrittenTemplate { text, marks } =
            rewritten(&source).map_err(|why| does_not_run(&why))?;
        env.add_template_owned(NAME, text).map_err(|e| does_not_run(&e))?;
        turns::add_filters(&mut env);
        let end_of_answers = OnceLock::new();
        Ok(Self { env, source, tokens, variables: BTreeMap::new(), marks, end_of_answers })
    }

    /// Sets variables like keyword arguments of `apply_chat_template`, such as `enable_thinking`.
    ///
    /// # Errors
    /// A variable that the template does not use, or that onebox sets itself.
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
                    !other.starts_with("__") && !own.into_iter().any(|name| name == other)
                };
                let mut others: Vec<&str> =
                    asked.iter().filter(known).map(String::as_str).collect();
                others.sort_unstable();
                let others = match &others[..] {
                    [] => "it has no variables of its own".to_owned(),
                    some => format!("it has `{}`", foreign(some.join("`, `"))),
                };
                return Err(format!("its chat template has no variable `{name}`; {others}"));
            }
            self.variables.insert(name.clone(), Message::read(&value.to_string())?);
        }
        Ok(self)
    }

    /// All inputs of the template's texts, except the messages and the date.
    pub(crate) fn identity(&self) -> String {
        format!("{}\0{:?}\0{:?}\0{}", self.source, self.tokens, self.variables, self.marks)
    }

    /// Token that ends a text, if the folder names this token.
    pub fn end_of_text(&self) -> Option<&str> {
        self.tokens.get("eos_token").map(String::as_str)
    }

    /// Whether the template has `{% generation %}` blocks.
    pub const fn has_marks(&self) -> bool {
        self.marks
    }

    /// Token that begins a text, if the folder names this token.
    pub(crate) fn beginning_of_text(&self) -> Option<&str> {
        self.tokens.get("bos_token").map(String::as_str)
    }

    /// Text between an answer and the next message, without blanks around it. If the text is empty,
    /// the token of the next role ends an answer.
    pub(crate) fn end_of_answers(&self) -> &str {
        /// Result for a template that does not show the end of an answer.
        const UNKNOWN: &str = "?";
        self.end_of_answers.get_or_init(|| {
            let answer = ANSWER.to_string();
            let turns = [("user", "a"), ("assistant", &answer), ("user", "a")];
            let chat = turns.map(|(role, content)| message(role, content));
            let Ok(rendered) = self.rendered(Chat::of(&chat), false) else { return UNKNOWN.into() };
            let turns = rendered.turns.iter().filter(|turn| turn.message == 1);
            let mut turns = turns.map(|turn| &rendered.text[turn.place.clone()]);
            let Some(turn) = turns.find(|turn| turn.contains(ANSWER)) else {
                return UNKNOWN.into();
            };
            let after = turn.rsplit(ANSWER).next().unwrap_or_default().trim();
            let next = self.beginning_of_text().filter(|begins| self.end_of_text() != Some(begins));
            let after = next.map_or(after, |begins| after.trim_end_matches(begins));
            after.trim_end().to_owned()
        })
    }

    /// Text of a chat. If `answer`, the beginning of an answer follows.
    ///
    /// # Errors
    /// The template refuses the chat, or does not end.
    pub fn text(&self, chat: Chat<'_>, answer: bool) -> Result<String, String> {
        Ok(self.rendered(chat, answer)?.text)
    }

    /// Text of a chat, with the ranges of the assistant's text and of each message.
    ///
    /// # Errors
    /// The same errors as [`text`](Self::text).
    pub(crate) fn rendered(&self, chat: Chat<'_>, answer: bool) -> Result<RenderedChat, String> {
        let mut env = self.env.clone();
        env.set_fuel(Some(steps(chat)));
        let chat = context! {
            messages => value_of_messages(chat.messages),
            add_generation_prompt => answer,
            // `tools` is defined also for a chat without tools, because a template may test it.
            tools => chat.tools.map_or_else(|| Value::from(()), value),
            documents => (),
        };
        let tokens =
            self.tokens.iter().map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())));
        let variables = self.variables.iter().map(|(name, given)| (name.clone(), value(given)));
        let others: BTreeMap<String, Value> = tokens.chain(variables).collect();
        let template = env.get_template(NAME).map_err(|e| does_not_run(&e))?;
        let written = template.render(context! { ..chat, ..Value::from(others) });
        let written = written.map_err(|e| match e.kind() {
            ErrorKind::OutOfFuel => does_not_run(&TOO_LONG),
            _ => does_not_run(&e),
        })?;
        Ok(RenderedChat::of(&written))
    }
}

/// Maximum steps of a template for a chat.
fn steps(chat: Chat<'_>) -> u64 {
    let one = |json: &Message| {
        let (values, bytes) = json.size();
        STEPS_OF_A_VALUE * values as u64 + STEPS_OF_A_BYTE * bytes as u64
    };
    STEPS + chat.messages.iter().chain(chat.tools).map(one).sum::<u64>()
}

fn does_not_run(why: &dyn fmt::Display) -> String {
    const LETTERS: usize = 600;
    let why = ForeignText::new(format_args!("{why:#}"), LETTERS).to_string();
    format!("its chat template does not run: {why}")
}

/// Template of a file: its only template, or the template named `default`.
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

/// Text of the token that ends a text, if the files next to a tokenizer name this token.
///
/// # Errors
/// A file that is no JSON.
pub fn end_of_text(files: &ModelFiles) -> Result<Option<String>, String> {
    let settings = object(files, "tokenizer_config.json")?;
    Ok(tokens(&settings, &object(files, "special_tokens_map.json")?).remove("eos_token"))
}

/// Special tokens by name. As in transformers, the map has priority over the tokenizer's settings,
/// unless the settings are of the newer kind that lists all added tokens.
fn tokens(settings: &Json, map: &Json) -> BTreeMap<&'static str, String> {
    let places =
        [map, settings].into_iter().skip(usize::from(!settings["added_tokens_decoder"].is_null()));
    let token = |name: &'static str| {
        // The token is a text, or an object with the text as `content`.
        let text = |from: &Json| {
            from[name].as_str().or_else(|| from[name]["content"].as_str()).map(str::to_owned)
        };
        Some((name, places.clone().find_map(text)?))
    };
    TOKENS.into_iter().filter_map(token).collect()
}

/// JSON value of a file; null if the file is missing.
fn object(files: &ModelFiles, name: &str) -> Result<Json, String> {
    let Some(bytes) = files.get(name) else { return Ok(Json::Null) };
    serde_json::from_slice(bytes).map_err(|e| format!("{name}: {}", reason(e)))
}

/// Tokens at which an answer ends, from the settings of generation, or else of the model.
///
/// # Errors
/// A file that is no JSON, or an `eos_token_id` that is no token.
pub fn stop_tokens(files: &ModelFiles) -> Result<Vec<i32>, String> {
    for name in ["generation_config.json", "config.json"] {
        let settings = object(files, name)?;
        let wrong = || {
            format!("{name}: `eos_token_id` is {}, not a token", shown(&settings["eos_token_id"]))
        };
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

    /// Expected values: `apply_chat_template` of transformers, in tests/fixtures/hf-chat-tiny.
    #[test]
    fn a_chat_is_the_text_that_transformers_makes_of_it() {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
        let model_files = ModelFiles::open(&folder).unwrap();
        let chats = std::fs::read(folder.join("chat.json")).unwrap();
        let chats: Vec<Json> = serde_json::from_slice(&chats).unwrap();
        assert!(chats.len() > 1);
        for one in &chats {
            let messages = one["messages"].as_array().unwrap();
            // The messages before the last answer.
            let asked: Vec<Message> = messages[..messages.len() - 1]
                .iter()
                .map(|one| Message::read(&one.to_string()).unwrap())
                .collect();
            let text = Template::of(&model_files).unwrap().text(Chat::of(&asked), true).unwrap();
            assert_eq!(text, one["prompt"].as_str().unwrap());
        }
        assert_eq!(stop_tokens(&model_files).unwrap(), [301, 302]);
    }

    fn render(
        template: &str,
        (tokens, now): (BTreeMap<&'static str, String>, Utc),
        messages: &[Message],
    ) -> Result<String, String> {
        let template = Template::new(template, tokens, now)?;
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
        let marked = marked.unwrap().rendered(Chat::of(&user), true).unwrap();
        assert_eq!(marked.text, "a b");
        let [generated] = &marked.generated[..] else { panic!("one block") };
        assert_eq!(*generated, 0..1);
    }

    /// Expected values: `apply_chat_template` of transformers on this day.
    #[test]
    fn a_template_knows_the_date_and_that_there_are_no_tools() {
        let user = [message("user", "a")];
        let now = Utc::of(UNIX_EPOCH + Duration::from_secs(1_795_219_788));
        let rendered = |template: &str| {
            let tokens = BTreeMap::from([("eos_token", "<e>".to_owned())]);
            render(template, (tokens, now), &user)
        };
        // Date as in templates of Llama 3.2 and others.
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

    /// Variables like those in `apply_chat_template(messages, enable_thinking=False)`.
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

    /// Expected values: `apply_chat_template` of transformers. Jinja reads all line ends as `\n`.
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
