//! Environment of a template: Python's operators, and transformers' filters, tests and functions.

use super::arguments::Arguments;
use super::marks::{CLOSE, FILTER, OPEN};
use super::print::text;
use super::value::{ValueKind, name_of, refused};
use super::{checks, filters, methods, operators, subscripts};
use files::utc::Utc;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, State, Value};

/// Characters of an error message that a template raises.
const LETTERS: usize = 300;

/// An environment without a template.
pub(super) fn environment(now: Utc) -> Result<Environment<'static>, Error> {
    let mut env = Environment::empty();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_formatter(|out, state, value| {
        let text = text(state, value).map_err(refused)?;
        out.write_str(&text).map_err(Error::from)
    });
    for (name, function) in operators::FUNCTIONS.into_iter().chain(subscripts::FUNCTIONS) {
        env.add_function(name, move |state: &State<'_, '_>, all: &[Value]| {
            function(state, all).map_err(refused)
        });
    }
    for (name, filter) in filters::FILTERS {
        env.add_filter(name, of_value(name, filter));
    }
    for (name, test) in checks::TESTS {
        env.add_test(name, of_value(name, test));
    }
    env.add_test("filter", |name: &str| filters::named(name).is_some());
    env.add_filter(FILTER, |text: String| format!("{OPEN}{text}{CLOSE}"));
    env.add_function("__method", |state: &mut State<'_, '_>, all: &[Value], names: Kwargs| {
        let [of, name, arguments @ ..] = all else {
            unreachable!("a call of a method has a value and a name")
        };
        let arguments = with_names(arguments, names);
        methods::call(state, of, name.as_str().unwrap_or_default(), &arguments).map_err(refused)
    });
    env.add_function("__held", |held: &Value| held_by_a_namespace(held).map_err(refused));
    let namespace = Value::from_function(minijinja::functions::namespace);
    env.add_function(
        "namespace",
        move |state: &mut State<'_, '_>, all: &[Value], names: Kwargs| {
            let arguments = Arguments::with("namespace", all, &names).map_err(refused)?;
            for value in arguments.names.iter().map(|(_, value)| value) {
                held_by_a_namespace(value).map_err(refused)?;
            }
            namespace.call(state, &with_names(all, names))
        },
    );
    function(&mut env, "dict", methods::dict);
    function(&mut env, "range", methods::range);
    function(&mut env, "raise_exception", |state, arguments| {
        let [why] = arguments.bind(["message"])?;
        let why = text(state, &why.unwrap_or_default())?;
        Err(match why.char_indices().nth(LETTERS) {
            Some((end, _)) => format!("{}..", &why[..end]),
            None => why,
        })
    });
    env.add_function("strftime_now", move |format: String| now.format(&format).map_err(refused));
    Ok(env)
}

fn function(
    env: &mut Environment<'static>,
    name: &'static str,
    run: impl Fn(&State<'_, '_>, &Arguments) -> Result<Value, String> + Send + Sync + 'static,
) {
    env.add_function(name, move |state: &State<'_, '_>, all: &[Value], names: Kwargs| {
        Arguments::with(name, all, &names).and_then(|all| run(state, &all)).map_err(refused)
    });
}

/// A filter or a test with the signature that minijinja calls.
fn of_value<T>(
    name: &'static str,
    run: fn(&State<'_, '_>, &Value, &Arguments) -> Result<T, String>,
) -> impl Fn(&State<'_, '_>, &Value, &[Value], Kwargs) -> Result<T, Error> {
    move |state, of, all, names| {
        Arguments::with(name, all, &names).and_then(|all| run(state, of, &all)).map_err(refused)
    }
}

/// Arguments of a call in the form that an object gets: the named arguments are the last value.
fn with_names(places: &[Value], names: Kwargs) -> Vec<Value> {
    let mut all = places.to_vec();
    if names.args().next().is_some() {
        all.push(names.into());
    }
    all
}

/// Refuses a value that a namespace may not hold: it might contain the namespace.
fn held_by_a_namespace(value: &Value) -> Result<Value, String> {
    match ValueKind::of(value) {
        ValueKind::Other => {
            Err(format!("{} is kept in a namespace, which onebox does not know", name_of(value)))
        }
        _ => Ok(value.clone()),
    }
}
