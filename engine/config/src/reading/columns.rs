//! Reads names of columns: `(messages: "dialog", system: "sys")`.

use super::{
    Complaint, ConfigReader, Declaration, KeyDefault, Node, NodeKind, ParseResult, Section, quoted,
    suggest, words,
};
use crate::{ChatColumns, in_line};
use files::foreign_text::foreign;

const EXAMPLE: &str = "(messages: \"dialog\")";

impl Section<'_, '_> {
    /// Reads names of columns, or `None`.
    pub(crate) fn columns(&mut self, key: Declaration) -> ChatColumns {
        let or = KeyDefault::Default(ChatColumns::default());
        let values = format!("names such as `{EXAMPLE}`, or `None`");
        self.leaf(key, or, values, in_line, columns)
    }
}

fn columns(reader: &ConfigReader, node: &Node) -> ParseResult<ChatColumns> {
    let help = || {
        let keys: Vec<&str> = ChatColumns::keys().collect();
        format!(
            "write `{EXAMPLE}` with the names of the data set; the columns are {}",
            words::ticked(&keys)
        )
    };
    let fields = match &node.kind {
        NodeKind::Word(word) if word == "None" => return Ok(ChatColumns::default()),
        NodeKind::Struct { name: None, fields } => fields,
        _ => {
            let found = reader.item(node).found();
            let message = format!("expected names of columns, found {found}");
            return Err(Complaint { message, help: help() });
        }
    };
    let mut all = ChatColumns::default();
    for field in fields {
        let Some(key) = ChatColumns::keys().find(|key| *key == field.key) else {
            let message = format!("rows of chats have no column {}", foreign(quoted(&field.key)));
            let near = suggest::nearest(&field.key, ChatColumns::keys());
            let near =
                (!near.is_empty()).then(|| format!("did you mean {}?", words::ticked(&near)));
            return Err(Complaint { message, help: near.unwrap_or_else(help) });
        };
        let name = reader.item(&field.value).string()?;
        if name.is_empty() {
            let message = format!("the name of the column `{key}` is empty");
            return Err(Complaint { message, help: "write the name that the rows have".into() });
        }
        if all.iter().any(|(_, other)| other == name) {
            let message = format!("two columns have the name {}", foreign(quoted(&name)));
            return Err(Complaint { message, help: "give each the name of its own column".into() });
        }
        all = all.with(key, &name);
    }
    match all.of_two_forms() {
        None => Ok(all),
        Some([one, other]) => Err(Complaint {
            message: format!("no row has both `{one}` and `{other}`"),
            help: "name the columns of one form: `messages`; or `prompt` and `completion`; or `instruction`, `input` and `output`".into(),
        }),
    }
}
