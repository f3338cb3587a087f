//! Circles in which the modules of a crate use each other.
//!
//! A room is a module at the top of a crate, with all modules below it.

use crate::workspace::{self, is_test};
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// Path of a module or an item in its crate; empty for the crate itself.
type Path = Vec<String>;

/// Names and paths by which a file uses other modules.
#[derive(Debug, Default)]
struct File {
    /// Names that `use` declares, each with its path as written; `*` for a glob.
    names: Vec<(String, Path)>,
    /// Paths in its code.
    paths: Vec<Path>,
}

impl File {
    fn tree(&mut self, before: &[String], tree: &syn::UseTree) {
        let longer = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(part) => self.tree(&longer(&part.ident), &part.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|one| self.tree(before, one)),
            syn::UseTree::Name(name) if name.ident == "self" => {
                let own = before.last().cloned().unwrap_or_default();
                self.names.push((own, before.to_vec()));
            }
            syn::UseTree::Name(name) => {
                self.names.push((name.ident.to_string(), longer(&name.ident)));
            }
            syn::UseTree::Rename(name) => {
                self.names.push((name.rename.to_string(), longer(&name.ident)));
            }
            syn::UseTree::Glob(_) => self.names.push(("*".into(), before.to_vec())),
        }
    }
}

impl<'a> Visit<'a> for File {
    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.tree(&[], &item.tree);
        }
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        self.paths.push(path.segments.iter().map(|part| part.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

/// The modules of a crate, each with its file. Files of tests are left out.
#[derive(Debug)]
pub struct Modules {
    files: BTreeMap<Path, File>,
}

impl Modules {
    /// The modules of a crate.
    #[must_use]
    pub fn new(one: &workspace::Crate) -> Self {
        let own = one.sources.iter().filter(|source| !source.is_test);
        Self::of_files(own.filter_map(|file| Some((file.path.strip_prefix("src/")?, &file.syntax))))
    }

    /// The modules of files with paths from `src` on.
    fn of_files<'a>(files: impl Iterator<Item = (&'a str, &'a syn::File)>) -> Self {
        let files: Vec<_> = files.collect();
        let has_library = files.iter().any(|(path, _)| *path == "lib.rs");
        let files = files.into_iter().filter(|(path, _)| !has_library || *path != "main.rs");
        let one = |(path, syntax): (&str, &syn::File)| {
            let mut path: Path = path.trim_end_matches(".rs").split('/').map(Into::into).collect();
            if path.last().is_some_and(|last| ["lib", "main", "mod"].contains(&last.as_str())) {
                path.pop();
            }
            let mut file = File::default();
            file.visit_file(syntax);
            (path, file)
        };
        Self { files: files.map(one).collect() }
    }

    /// Number of modules.
    #[must_use]
    pub fn count(&self) -> usize {
        self.files.len()
    }

    /// The file that a path leads to if `from` writes it; none outside of the crate.
    fn meant(&self, from: &Path, written: &[String], depth: usize) -> Option<Path> {
        let (first, rest) = written.split_first()?;
        match first.as_str() {
            "crate" => self.found(rest, depth),
            "self" => self.found(&[from, rest].concat(), depth),
            "super" => {
                let above = from.split_last()?.1.to_vec();
                match rest.first() {
                    Some(next) if next == "super" => self.meant(&above, rest, depth),
                    _ => self.found(&[&above, rest].concat(), depth),
                }
            }
            _ => {
                let below = [from, std::slice::from_ref(first)].concat();
                if self.files.contains_key(&below) {
                    return self.found(&[&below, rest].concat(), depth);
                }
                let names = &self.files[from].names;
                let (_, path) = names.iter().find(|(name, _)| name == first)?;
                let whole = [path.as_slice(), rest].concat();
                (depth < 8 && path != written)
                    .then(|| self.meant(from, &whole, depth + 1))
                    .flatten()
            }
        }
    }

    /// The file of a path from the crate's root on, through what modules pass on.
    fn found(&self, path: &[String], depth: usize) -> Option<Path> {
        let known = (0..=path.len()).rev().find(|n| self.files.contains_key(&path[..*n]))?;
        let (module, rest) = (path[..known].to_vec(), &path[known..]);
        let passed_on = rest.first().filter(|_| depth < 8).and_then(|name| {
            let brought = self.files[&module].names.iter().any(|(here, _)| here == name);
            brought.then(|| self.meant(&module, rest, depth + 1)).flatten()
        });
        Some(passed_on.unwrap_or(module))
    }

    /// The modules that each module uses.
    fn uses(&self) -> impl Iterator<Item = (&Path, Path)> {
        self.files.iter().flat_map(move |(from, file)| {
            let paths = file.names.iter().map(|(_, path)| path).chain(&file.paths);
            paths.filter_map(move |path| Some((from, self.meant(from, path, 0)?)))
        })
    }

    /// The modules that each module uses, but for those above and below it.
    #[must_use]
    pub fn module_uses(&self) -> Uses {
        let mut uses: Uses =
            self.files.keys().map(|path| (path.join("/"), BTreeSet::new())).collect();
        for (from, to) in self.uses() {
            if !to.starts_with(from) && !from.starts_with(&to) {
                uses.entry(from.join("/")).or_default().insert(to.join("/"));
            }
        }
        uses
    }

    /// The rooms that each room uses.
    #[must_use]
    pub fn room_uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (from, to) in self.uses() {
            if let (Some(from), Some(to)) = (from.first(), to.first()) {
                let uses = uses.entry(from.clone()).or_default();
                if from != to {
                    uses.insert(to.clone());
                }
            }
        }
        uses
    }
}

/// What each module or room uses, by names.
pub type Uses = BTreeMap<String, BTreeSet<String>>;

/// The circles in `uses`: names that lead to each other.
#[must_use]
pub fn circles(uses: &Uses) -> Vec<BTreeSet<String>> {
    let reach: Uses = uses.keys().map(|name| (name.clone(), reached(uses, name))).collect();
    let leads = |from: &String, to: &String| reach.get(from).is_some_and(|all| all.contains(to));
    let circle = |name: &String| -> BTreeSet<String> {
        uses.keys().filter(|other| leads(name, other) && leads(other, name)).cloned().collect()
    };
    let all: BTreeSet<_> = uses.keys().map(circle).filter(|circle| circle.len() > 1).collect();
    all.into_iter().collect()
}

/// All names that `start` leads to.
fn reached(uses: &Uses, start: &str) -> BTreeSet<String> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![start]);
    while let Some(name) = next.pop() {
        for to in uses.get(name).into_iter().flatten() {
            if reached.insert(to.clone()) {
                next.push(to);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The modules of files with these paths and texts.
    fn modules(texts: &[(&str, &str)]) -> Result<Modules, syn::Error> {
        let parsed = texts.iter().map(|(path, text)| Ok((*path, syn::parse_file(text)?)));
        let parsed: Vec<_> = parsed.collect::<Result<_, syn::Error>>()?;
        Ok(Modules::of_files(parsed.iter().map(|(path, file)| (*path, file))))
    }

    fn circle(texts: &[(&str, &str)]) -> Result<Vec<String>, syn::Error> {
        Ok(circles(&modules(texts)?.module_uses()).into_iter().flatten().collect())
    }

    #[test]
    fn a_planted_circle_is_found() -> Result<(), syn::Error> {
        const STRAIGHT: [(&str, &str); 4] = [
            ("lib.rs", "mod a; mod b; mod c; pub use b::B;"),
            ("a.rs", "use crate::B; fn f() { crate::c::g() }"),
            ("b.rs", "mod below; pub struct B;"),
            ("b/below.rs", "use super::B;"),
        ];
        let with = |text| circle(&[&STRAIGHT[..], &[("c.rs", text)]].concat());
        let none: [&str; 0] = [];
        assert_eq!(with("use crate::b::below; pub fn g() {}")?, none);
        assert_eq!(with("#[cfg(test)] mod tests { use crate::a; } pub fn g() {}")?, none);
        for back in
            ["use super::a::f;", "use crate::{b, a::{self as other}};", "fn g() { super::a::f() }"]
        {
            assert_eq!(with(back)?, ["a", "c"], "{back}");
        }
        // By way of a name that the crate passes on.
        let text = [
            ("lib.rs", "mod a; mod b; pub use b::B;"),
            ("a.rs", "use crate::B;"),
            ("b.rs", "use crate::a;"),
        ];
        assert_eq!(circle(&text)?, ["a", "b"]);
        Ok(())
    }

    #[test]
    fn a_circle_of_rooms_is_found_that_no_files_close() -> Result<(), syn::Error> {
        let text = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "mod low; mod high;"),
            ("a/low.rs", "pub fn f() {}"),
            ("a/high.rs", "use crate::b;"),
            ("b.rs", "use crate::a::low; use crate::c;"),
            ("c.rs", "pub fn f() {}"),
        ];
        let none: [String; 0] = [];
        assert_eq!(circle(&text)?, none);
        let rooms = circles(&modules(&text)?.room_uses());
        assert_eq!(rooms, [BTreeSet::from(["a".to_owned(), "b".to_owned()])]);
        Ok(())
    }

    #[test]
    fn a_program_without_a_library_has_its_main_file_as_root() -> Result<(), syn::Error> {
        let text =
            [("main.rs", "mod a; mod b;"), ("a.rs", "use crate::b;"), ("b.rs", "use crate::a;")];
        assert_eq!(circle(&text)?, ["a", "b"]);
        Ok(())
    }
}
