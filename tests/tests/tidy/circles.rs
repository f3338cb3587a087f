//! Files use each other in one direction: a reader can read what a file uses before the file itself. A module and what lies
//! below it may use each other; a circle that closes only through such a pair is not looked for.

use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// A module's path in its crate, or that of something in it; empty: the crate itself.
type Path = Vec<String>;

/// What a file says of others.
#[derive(Default)]
struct File {
    /// What `use` brings in: the name here, and the path as written; `*` for all of it.
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

/// Whether an item is part of tests alone.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    let is = |attribute: &syn::Attribute| {
        let arguments = attribute.parse_args::<syn::Ident>();
        attribute.path().is_ident("cfg") && arguments.is_ok_and(|what| what == "test")
    };
    attributes.iter().any(is)
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

/// The files of a crate, by module.
struct Crate {
    files: BTreeMap<Path, File>,
}

impl Crate {
    /// Of files named from the crate's `src` on, and their texts.
    fn new<'a>(sources: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let one = |(name, text): (&str, &str)| {
            let mut path: Path = name.trim_end_matches(".rs").split('/').map(Into::into).collect();
            if path.last().is_some_and(|last| ["lib", "main", "mod"].contains(&last.as_str())) {
                path.pop();
            }
            let mut file = File::default();
            file.visit_file(&syn::parse_file(text).unwrap_or_else(|e| panic!("{name}: {e}")));
            (path, file)
        };
        Self { files: sources.filter(|(name, _)| *name != "main.rs").map(one).collect() }
    }

    /// The file that a path leads to when `from` says it; none outside of the crate.
    fn meant(&self, from: &Path, said: &[String], depth: usize) -> Option<Path> {
        let (first, rest) = said.split_first()?;
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
                (depth < 8 && path != said).then(|| self.meant(from, &whole, depth + 1)).flatten()
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

    /// The files that each file uses, but for its parents and children.
    fn edges(&self) -> BTreeMap<Path, BTreeSet<Path>> {
        let used = |(from, file): (&Path, &File)| {
            let said = file.names.iter().map(|(_, path)| path).chain(&file.paths);
            let meant = said.filter_map(|path| self.meant(from, path, 0));
            let kin = |to: &Path| to.starts_with(from) || from.starts_with(to);
            (from.clone(), meant.filter(|to| !kin(to)).collect())
        };
        self.files.iter().map(used).collect()
    }

    /// Files of which each uses the next, and the last the first.
    fn circle(&self) -> Option<Vec<String>> {
        let edges = self.edges();
        edges.keys().find_map(|start| {
            let (mut before, mut next) = (BTreeMap::new(), vec![start]);
            while let Some(at) = next.pop() {
                for to in &edges[at] {
                    if to == start {
                        let way = std::iter::successors(Some(at), |at| before.get(at).copied());
                        let mut way: Vec<String> = way.map(|at| at.join("/")).collect();
                        way.reverse();
                        return Some(way);
                    }
                    if !before.contains_key(to) {
                        before.insert(to, at);
                        next.push(to);
                    }
                }
            }
            None
        })
    }
}

#[test]
fn files_do_not_use_each_other_in_circles() {
    let sources = super::sources();
    for name in ["topology", "device", "tensor-parallel", "offload", "engine"] {
        let folder = format!("{name}/src/");
        let own = sources
            .iter()
            .filter_map(|(path, text)| Some((path.strip_prefix(&folder)?, text.as_str())));
        let read = Crate::new(own);
        let edges: usize = read.edges().values().map(BTreeSet::len).sum();
        println!("{name}: {} files, {edges} uses", read.files.len());
        assert!(edges >= read.files.len(), "{name}: {edges} uses are too few to be all");
        let circle = read.circle();
        assert!(circle.is_none(), "{name}: a circle of files: {circle:?}");
    }
}

#[test]
fn a_planted_circle_is_found() {
    const STRAIGHT: [(&str, &str); 4] = [
        ("lib.rs", "mod a; mod b; mod c; pub use b::B;"),
        ("a.rs", "use crate::B; fn f() { crate::c::g() }"),
        ("b.rs", "mod below; pub struct B;"),
        ("b/below.rs", "use super::B;"),
    ];
    let with = |text| STRAIGHT.into_iter().chain([("c.rs", text)]);
    let circle = |text| Crate::new(with(text)).circle();
    assert_eq!(circle("use crate::b::below; pub fn g() {}"), None);
    assert_eq!(circle("#[cfg(test)] mod tests { use crate::a; } pub fn g() {}"), None);
    for back in
        ["use super::a::f;", "use crate::{b, a::{self as other}};", "fn g() { super::a::f() }"]
    {
        assert_eq!(circle(back).as_deref(), Some(&["a".to_owned(), "c".to_owned()][..]), "{back}");
    }
    // By way of a name that the crate passes on.
    let text = [
        ("lib.rs", "mod a; mod b; pub use b::B;"),
        ("a.rs", "use crate::B;"),
        ("b.rs", "use crate::a;"),
    ];
    assert_eq!(Crate::new(text.into_iter()).circle(), Some(vec!["a".into(), "b".into()]));
}
