//! Modules use each other in one direction: a reader can read the used modules before the module
//! itself. A module and its submodules may use each other. Rooms may not: a room is a top-level
//! module of a crate with all its submodules.

use super::names::{Exceptions, problems};
use house::circles::{Modules, Uses, circles};
use house::workspace::Crate;
use std::collections::BTreeSet;

/// Listed modules and rooms in circles, as `CRATE MODULE` and `CRATE room NAME`; one a line.
const IN_CIRCLES: Exceptions<'_> = Exceptions { list: include_str!("circles.txt"), length: 0 };

/// Members of all circles in `uses`, each with the prefix `before`.
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

/// Problems of the crates' circles and of the list of circles.
pub(super) fn problems_of(crates: &[Crate]) -> Vec<String> {
    problems(&in_circles(crates), IN_CIRCLES, "in a circle (see scripts/house)")
}
