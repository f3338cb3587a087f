//! Names of types. A type is named by a noun of the field, and a crate does not give one name to many types.
//!
//! The last word of a name decides: `GivenConfig` is a noun, `Given` is not. A word is no noun if it is in one of the lists of
//! `words.rs` or has the ending of a participle, an adverb or an adjective, and is not in the list of nouns with
//! such an ending. A preposition with one word after it (`OnBox`) is no noun either. Traits may have verbs and
//! adjectives as names, as `Read` and `Sized` of the standard library; but not adverbs, pronouns or prepositions.

use crate::words;
use crate::workspace::Crate;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// A type that is defined in a file: a struct, enum, union, trait or alias.
#[derive(Clone, Debug)]
pub struct Definition {
    /// Its name.
    pub name: String,
    /// Its line in the file.
    pub line: usize,
    /// Whether it is a trait.
    pub is_trait: bool,
}

/// The types that a file defines, tests and function bodies included.
#[must_use]
pub fn definitions(file: &syn::File) -> Vec<Definition> {
    let mut found = Definitions(Vec::new());
    found.visit_file(file);
    found.0
}

struct Definitions(Vec<Definition>);

impl Definitions {
    fn add(&mut self, name: &syn::Ident, is_trait: bool) {
        let line = name.span().start().line;
        self.0.push(Definition { name: name.to_string(), line, is_trait });
    }
}

impl<'a> Visit<'a> for Definitions {
    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.add(&item.ident, false);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.add(&item.ident, false);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_union(&mut self, item: &'a syn::ItemUnion) {
        self.add(&item.ident, false);
        visit::visit_item_union(self, item);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.add(&item.ident, false);
        visit::visit_item_type(self, item);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.add(&item.ident, true);
        visit::visit_item_trait(self, item);
    }
}

/// The words of a name in camel case. A digit belongs to the word before it: `F16Mut` is `F16` and `Mut`.
fn split(name: &str) -> Vec<&str> {
    let starts = name.char_indices().filter(|(_, c)| c.is_ascii_uppercase());
    let starts: Vec<usize> = starts.map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([name.len()]);
    starts.iter().zip(ends).map(|(start, end)| &name[*start..end]).collect()
}

/// Whether the name of a type is no noun.
#[must_use]
pub fn is_no_noun(name: &str, is_trait: bool) -> bool {
    let words = split(name);
    let Some(last) = words.last() else { return true };
    let last = last.trim_end_matches(|c: char| c.is_ascii_digit()).to_lowercase();
    let opens = words[0].to_lowercase();
    let is_phrase = words.len() == 2 && words::is_opener(&opens);
    is_phrase || words::is_small(&last) || (!is_trait && words::is_verb_or_adjective(&last))
}

/// The names of types of a crate, and the files that define each.
#[must_use]
pub fn files_by_name(one: &Crate) -> BTreeMap<String, BTreeSet<String>> {
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in &one.sources {
        for definition in definitions(&source.syntax) {
            files.entry(definition.name).or_default().insert(source.path.clone());
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_split_at_capital_letters() {
        assert_eq!(split("F16Mut"), ["F16", "Mut"]);
        assert_eq!(split("AsOf2020"), ["As", "Of2020"]);
        assert_eq!(split("Op"), ["Op"]);
    }

    #[test]
    fn the_last_word_of_a_type_is_a_noun() {
        let none = [
            "Told",
            "Kept",
            "Looked",
            "Choosing",
            "Beside",
            "Which",
            "Largest",
            "Usable",
            "Prepare",
            "InParts",
            "BucketOf",
            "NormSaved",
            "NotFinite",
            "AsOf2020",
            "UnderWay",
            "SoFar",
        ];
        for name in none {
            assert!(is_no_noun(name, false), "{name}");
        }
        let nouns = [
            "GivenConfig",
            "Seed",
            "Speed",
            "Feed",
            "Embedding",
            "Ring",
            "Setting",
            "Recording",
            "Request",
            "Family",
            "Table",
            "ViewMut",
            "E4m3",
            "OutOfMemory",
            "Utf8",
            "Archive",
            "OffloadConfig",
        ];
        for name in nouns {
            assert!(!is_no_noun(name, false), "{name}");
        }
    }

    #[test]
    fn a_trait_may_be_a_verb_or_an_adjective_but_no_preposition() {
        for name in ["Read", "Named", "Divisible"] {
            assert!(!is_no_noun(name, true), "{name}");
        }
        for name in ["Beside", "PerStep", "Which"] {
            assert!(is_no_noun(name, true), "{name}");
        }
    }

    #[test]
    fn types_are_found_in_modules_and_functions() -> Result<(), syn::Error> {
        let text =
            "struct A;\nmod b {\n    trait B { type No; }\n}\nfn f() { enum C {} }\ntype D = u8;";
        let found = definitions(&syn::parse_file(text)?);
        let found: Vec<_> = found.iter().map(|one| (one.name.as_str(), one.line)).collect();
        assert_eq!(found, [("A", 1), ("B", 3), ("C", 5), ("D", 6)]);
        Ok(())
    }
}
