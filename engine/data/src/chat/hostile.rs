//! Tests with templates that would use up a machine's memory, stack or time.

use super::{Chat, Template, message};
use files::utc::Utc;
use std::collections::BTreeMap;

fn refused(template: &str) -> String {
    let messages = [message("user", "hello"), message("assistant", "hi")];
    let made = Template::new(template, BTreeMap::new(), Utc::now())
        .and_then(|template| template.text(Chat::of(&messages), true));
    match made {
        Ok(text) => panic!("{template:.80} has a text of {} bytes", text.len()),
        Err(why) => why,
    }
}

/// Template with `first` in `n.v` of a namespace, then `step` this many times, then `last`.
fn looped(first: &str, times: usize, step: &str, last: &str) -> String {
    format!(
        "{{% set n = namespace(v={first}) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}{last}"
    )
}

/// Each template gives an error and ends no process; the step limit bounds memory and time.
#[test]
fn a_hostile_template_is_an_error() {
    let double = "{% set n.v = n.v ~ n.v %}";
    let nest = "{% set n.v = [n.v] %}";
    let twice = "{% set n.v = [n.v, n.v] %}";
    for template in [
        // Values that contain themselves.
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}".into(),
        "{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a.b }}".into(),
        "{% set ns = namespace() %}{% macro m() %}{{ ns }}{% endmacro %}{% set ns.m = m %}{{ ns.m }}".into(),
        "{% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}".into(),
        // Values that are too deep, or that never end because they share parts.
        looped("[]", 100_000, nest, "{{ n.v }}"),
        looped("[]", 100_000, nest, ""),
        looped("{}", 100_000, "{% set n.v = {'a': n.v} %}", "{{ n.v | tojson }}"),
        looped("[]", 100_000, "{% set n.v = dict(a=n.v) %}", ""),
        looped("[]", 60, twice, "{{ n.v }}"),
        looped("[]", 60, twice, "{{ n.v | tojson }}"),
        looped("missing", 60, &format!("{twice}{{% set n.w = [n.w, n.w] %}}"), "{{ n.v == n.w }}"),
        looped("()", 60, "{% set n.v = (n.v, n.v) %}", "{{ {n.v: 1} }}"),
        looped("()", 60, "{% set n.v = (n.v, n.v) %}", "{{ [n.v, n.v] | unique | list }}"),
        looped("[]", 60, twice, "{{ [n.v, [n.v]] | sort }}"),
        // Texts and lists that are too long.
        looped("'ab'", 60, double, "{{ n.v }}"),
        looped("'ab'", 60, "{% set n.v = n.v + n.v %}", ""),
        looped("'ab'", 60, "{% set n.v = [n.v, n.v] | join %}", ""),
        looped("'ab'", 60, "{% set n.v = '{}{}'.format(n.v, n.v) %}", ""),
        looped("'ab'", 60, "{% set n.v = n.v.replace('a', 'aa') %}", ""),
        looped("'ab'", 60, "{% set w %}{{ n.v }}{{ n.v }}{% endset %}{% set n.v = w %}", ""),
        looped("[0]", 60, "{% set n.v = n.v + n.v %}", ""),
        looped("'\\n'", 60, &format!("{double}{{% set w = n.v.splitlines() %}}"), ""),
        looped("' '", 60, &format!("{double}{{% set w = n.v.split(' ') %}}"), ""),
        "{{ 'a' * 1000000000000 }}".into(),
        "{{ [0] * 1000000000 }}".into(),
        "{{ 'a' | center(1000000000) }}".into(),
        "{{ 'a'.ljust(1000000000) }}".into(),
        "{{ '7'.zfill(1000000000) }}".into(),
        "{{ '{:1000000000}'.format(1) }}".into(),
        "{{ '{:.1000000000f}'.format(1.0) }}".into(),
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}".into(),
        "{{ ('a' * 1000000).join('b' * 1000000) }}".into(),
        "{{ (['a'] * 100000) | join('b' * 100000) }}".into(),
        "{{ [1] | tojson(indent=1000000000) }}".into(),
        "{{ 'a' | indent(1000000000) }}".into(),
        "{{ [1] | batch(1000000000, 'x') | list }}".into(),
        "{{ range(1000000000) }}".into(),
        "{{ 2 ** 1000000000 }}".into(),
        format!("{{% for i in range(100000) %}}{}{{% endfor %}}", "x".repeat(10_000)),
        format!("{{% set w %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}", "x".repeat(10_000)),
        // Endless loops and recursions.
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".into(),
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}".into(),
        "{% for x in [[[]]] recursive %}{{ loop([[[]]]) }}{% endfor %}".into(),
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ 1 in range(100000) }}{% endfor %}{% endfor %}".into(),
        // A source that is too deep, or too long.
        format!("{{{{ {} 1 }}}}", "not ".repeat(50_000)),
        format!("{{{{ {}1 }}}}", "- ".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "(".repeat(50_000), ")".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "[".repeat(50_000), "]".repeat(50_000)),
        format!("{{{{ {}1{} }}}}", "{1:".repeat(50_000), "}".repeat(50_000)),
        format!("{{{{ a{} }}}}", ".b".repeat(50_000)),
        format!("{{{{ a{} }}}}", "[0]".repeat(50_000)),
        format!("{{{{ a{} }}}}", "()".repeat(50_000)),
        format!("{{{{ 1{} }}}}", "|string".repeat(30_000)),
        format!("{{{{ 1{} }}}}", "~1".repeat(50_000)),
        format!("{{{{ 1{} }}}}", "**1".repeat(50_000)),
        format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
        format!("{{{{ 1{} }}}}", " or 1".repeat(40_000)),
        format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(20_000)),
        format!("{{{{ 1{} }}}}", " if 1".repeat(40_000)),
        format!("{{{{ 1{} }}}}", "<1".repeat(50_000)),
        format!("{{% if 1 %}}{}{{% endif %}}", "{% elif 1 %}".repeat(20_000)),
        format!("{}{}", "{% if 1 %}".repeat(10_000), "{% endif %}".repeat(10_000)),
        format!("{}{}", "{% for x in y %}".repeat(8_000), "{% endfor %}".repeat(8_000)),
        format!("{}{}", "{% set x %}".repeat(8_000), "{% endset %}".repeat(8_000)),
        "<|im_end|>".repeat(500_000),
        // Error messages that are too long.
        "{{ raise_exception('A' * 10000000) }}".into(),
        format!("{{{{ {} is undefined_ }}}}", "a".repeat(100_000)),
        format!("{{{{ messages.{}() }}}}", "a".repeat(100_000)),
        format!("{{% {} %}}", "a".repeat(100_000)),
        format!("{{{{ '' | {} }}}}", "a".repeat(100_000)),
        format!("{{{{ '{}' + 1 }}}}", "a".repeat(100_000)),
    ] {
        let why = refused(&template);
        assert!(why.chars().count() < 1000, "{template:.80}: {} letters", why.len());
    }
}

/// The deepest expression that onebox accepts also runs on the stack of any thread.
#[test]
fn the_deepest_expression_is_read_on_the_stack_of_a_thread() {
    let text = |template: &str| {
        let template = Template::new(template, BTreeMap::new(), Utc::now());
        template.and_then(|template| template.text(Chat::of(&[]), true))
    };
    let mut deepest = 0;
    for levels in 1..100 {
        let all = [
            format!("{{{{ {}1{} }}}}", "[".repeat(levels), "]".repeat(levels)),
            format!("{{{{ {}1 }}}}", "not ".repeat(levels)),
            format!("{{{{ '1'{} }}}}", ".strip()".repeat(levels)),
            format!("{{{{ '1'{} }}}}", "|trim".repeat(levels)),
            format!("{}1{}", "{% if 1 %}".repeat(levels), "{% endif %}".repeat(levels)),
            format!("{}1{}", "{% for x in [1] %}".repeat(levels), "{% endfor %}".repeat(levels)),
        ];
        deepest += all.iter().filter(|template| text(template).is_ok()).count();
    }
    assert!(deepest > 200, "{deepest}");
}
