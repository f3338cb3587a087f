//! Modules use each other in one direction: a reader can read what a module uses before the module itself. A module and what lies
//! below it may use each other; but rooms, which are the modules at the top of a crate with all modules below them, may not.

use super::names::{Exceptions, problems};
use house::circles::{Modules, Uses, circles};
use house::workspace::Crate;
use std::collections::BTreeSet;

/// Modules and rooms in circles, as `CRATE MODULE` and `CRATE room NAME`; one a line.
const IN_CIRCLES: Exceptions<'_> = Exceptions { list: include_str!("circles.txt"), length: 0 };

/// The members of all circles in `uses`, each after `before`.
fn members(uses: &Uses, before: &str) -> impl Iterator<Item = String> {
    circles(uses).into_iter().flatten().map(move |name| format!("{before} {name}"))
}

fn in_circles(crates: &[Crate]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for one in crates {
        let modules = Modules::new(one);
        let uses: usize = modules.module_uses().values().map(BTreeSet::len).sum();
        let count = modules.count();
        assert!(count < 16 || uses >= count, "{}: {uses} uses are too few to be all", one.name);
        all.extend(members(&modules.module_uses(), &one.name));
        all.extend(members(&modules.room_uses(), &format!("{} room", one.name)));
    }
    all
}

/// What is wrong with the circles of the crates and the list of them.
pub(super) fn problems_of(crates: &[Crate]) -> Vec<String> {
    problems(&in_circles(crates), IN_CIRCLES, "in a circle (see scripts/house)")
}
