//! Functions with an anonymous tuple as an argument. A struct with named fields says more.
//!
//! An argument counts if it is a tuple of at least two, or a reference to one, or an `Option` of one; a slice of pairs does not.
//! Ranges and points do not count: plain numbers of one type that the pattern names as one of `NUMBERS`, or two of them in an
//! argument that is called one of `POINTS`.

use syn::visit::{self, Visit};

/// Names of numbers that make a range, a point or a size.
const NUMBERS: &[&[&str]] = &[
    &["begin", "end"],
    &["first", "end"],
    &["first", "last"],
    &["from", "to"],
    &["from", "until"],
    &["height", "width"],
    &["line", "column"],
    &["low", "high"],
    &["m", "n", "k"],
    &["min", "max"],
    &["row", "column"],
    &["rows", "cols"],
    &["rows", "columns"],
    &["start", "end"],
    &["top", "bottom"],
    &["width", "height"],
    &["x", "y"],
];
/// Names of a range, a point or a size of two numbers.
const POINTS: &[&str] = &[
    "at", "bounds", "from", "hole", "interval", "limits", "point", "range", "shape", "size",
    "span", "to",
];

/// A function with such an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its line in the file.
    pub line: usize,
    /// Number of such arguments.
    pub tuples: usize,
}

/// The functions of a file that have a tuple argument, tests included.
#[must_use]
pub fn functions(file: &syn::File) -> Vec<Function> {
    let mut found = Functions(Vec::new());
    found.visit_file(file);
    found.0
}

struct Functions(Vec<Function>);

impl<'a> Visit<'a> for Functions {
    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        let tuples = signature.inputs.iter().filter(|argument| is_tuple(argument)).count();
        if tuples > 0 {
            let name = &signature.ident;
            let line = name.span().start().line;
            self.0.push(Function { name: name.to_string(), line, tuples });
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !crate::workspace::is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

fn is_tuple(argument: &syn::FnArg) -> bool {
    let syn::FnArg::Typed(argument) = argument else { return false };
    let tuple = tuple_of(&argument.ty);
    tuple.is_some_and(|tuple| tuple.elems.len() > 1 && !is_range_or_point(&argument.pat, tuple))
}

/// The tuple that a type is, refers to or may have.
fn tuple_of(of: &syn::Type) -> Option<&syn::TypeTuple> {
    match of {
        syn::Type::Tuple(tuple) => Some(tuple),
        syn::Type::Reference(reference) => tuple_of(&reference.elem),
        syn::Type::Path(path) => {
            let last = path.path.segments.last().filter(|last| last.ident == "Option")?;
            let syn::PathArguments::AngleBracketed(arguments) = &last.arguments else {
                return None;
            };
            match arguments.args.first()? {
                syn::GenericArgument::Type(inner) => tuple_of(inner),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The name of a type without arguments.
fn plain(of: &syn::Type) -> Option<&syn::Ident> {
    match of {
        syn::Type::Path(path) => path.path.get_ident(),
        _ => None,
    }
}

fn is_number(name: &syn::Ident) -> bool {
    ["f32", "f64", "i32", "i64", "u8", "u16", "u32", "u64", "usize"]
        .iter()
        .any(|number| name == number)
}

fn name(pattern: &syn::Pat) -> Option<String> {
    match pattern {
        syn::Pat::Ident(name) => Some(name.ident.to_string().trim_start_matches('_').to_owned()),
        _ => None,
    }
}

fn is_range_or_point(pattern: &syn::Pat, tuple: &syn::TypeTuple) -> bool {
    let first = tuple.elems.first().and_then(plain);
    if !first.is_some_and(is_number) || tuple.elems.iter().any(|of| plain(of) != first) {
        return false;
    }
    match pattern {
        syn::Pat::Tuple(names) => {
            let names: Vec<_> = names.elems.iter().filter_map(name).collect();
            NUMBERS.iter().any(|known| names == **known)
        }
        pattern => {
            tuple.elems.len() == 2
                && name(pattern).is_some_and(|name| POINTS.contains(&name.as_str()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tuple_counts_if_it_is_the_argument() -> Result<(), syn::Error> {
        let text = "fn a((b, c): (u8, &str), d: &mut (u8, u8)) {}\nimpl A { fn e(&self, f: Option<&(u8, u8)>) {} }\n";
        let found = functions(&syn::parse_file(text)?);
        let found: Vec<_> =
            found.iter().map(|one| (one.name.as_str(), one.line, one.tuples)).collect();
        assert_eq!(found, [("a", 1, 2), ("e", 2, 1)]);
        let none = "fn a(b: (), c: impl Fn((u8, u8)) -> (u8, u8), d: &[(u8, u8)], e: [(u8, u8); 2], f: (u8,)) {}";
        assert_eq!(functions(&syn::parse_file(none)?), []);
        Ok(())
    }

    #[test]
    fn ranges_and_points_do_not_count() -> Result<(), syn::Error> {
        let none = "fn a((first, last): (usize, usize), at: (f64, f64), (m, n, k): (usize, usize, usize)) {}";
        assert_eq!(functions(&syn::parse_file(none)?), []);
        for text in [
            "fn a((first, last): (usize, u64)) {}",
            "fn a((pass, batch): (usize, usize)) {}",
            "fn a(at: (A, A)) {}",
            "fn a(at: (f64, f64, f64)) {}",
        ] {
            assert_eq!(functions(&syn::parse_file(text)?).len(), 1, "{text}");
        }
        Ok(())
    }
}
