//! Tests against tests/fixtures/templates.json, the texts that transformers prints for templates.

use super::{Chat, Message, Template};
use files::utc::Utc;
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// Templates that transformers accepts and onebox refuses by name.
const REFUSED: [&str; 9] = [
    "{{ d.rows | map('attr', 'n') | list }}",
    "{{ 1234.5 | round(-2) }}",
    r"{{ '\N{BULLET}' }}",
    r#"{{ "%s and %s" | format('a', 1) }}"#,
    r#"{{ "%s" % 'a' }}"#,
    "{{ '%d' % 3 }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, b=3) }}",
    "{{ d.list[] }}",
    r#"{{ "\ud83d" | length }}"#,
];

/// Text that onebox prints for a template, with the data of the fixture as `d`.
fn made(template: &str, data: &str) -> Result<String, String> {
    let message = format!("{{\"role\": \"user\", \"content\": \"hi\", \"data\": {data}}}");
    let messages = [Message::read(&message).unwrap()];
    let template = "{% set d = messages[0].data %}".to_owned() + template;
    Template::new(&template, BTreeMap::new(), Utc::now())?.text(Chat::of(&messages), true)
}

/// onebox may refuse a template that transformers accepts, but never prints another text.
#[test]
fn a_template_has_the_text_that_transformers_prints_or_is_refused() {
    let fixture = include_str!("../../../../tests/fixtures/templates.json");
    let fixture: Json = serde_json::from_str(fixture).unwrap();
    let data = fixture["data"].as_str().unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    let (mut differ, mut refused) = (Vec::new(), 0);
    for case in cases {
        let template = case[0].as_str().unwrap();
        match (case[1].as_str(), made(template, data)) {
            (Some(text), Ok(made)) if text == made => {}
            (None, Err(_)) => {}
            (Some(_), Err(_)) if REFUSED.contains(&template) => refused += 1,
            (wanted, made) => differ.push(format!("{template}\n  {made:?}\n  not {wanted:?}")),
        }
    }
    assert!(cases.len() > 600);
    assert!(differ.is_empty(), "{} differ:\n{}", differ.len(), differ.join("\n"));
    assert_eq!(refused, REFUSED.len());
}
