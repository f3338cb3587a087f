//! The words for a model that no change of layout makes fit.

use super::check::count;
use crate::config::Loaded;
use crate::predict::changes::arguments;
use crate::predict::remedies::Largest;
use topology::counted;

/// When no change helps: the number of layers that fit, and what else must change, `changed` included.
pub(super) fn at_most(loaded: &Loaded, largest: Option<&Largest>, changed: &[&str]) -> String {
    let Some(Largest { layers, parameters, sets }) = largest else {
        return "no one or two changes of layout make it fit, not even with one layer".into();
    };
    // A folder says how many layers its model has.
    let of_folder = loaded.config.model.from.is_some();
    let sets = sets.iter().filter(|set| !(of_folder && set.starts_with("model.layers=")));
    let sets: Vec<String> = changed.iter().map(ToString::to_string).chain(sets.cloned()).collect();
    let with = if sets.is_empty() { String::new() } else { format!(", with {}", arguments(&sets)) };
    format!(
        "with one or two changes of layout at most {layers} of its {} fit ({} parameters){with}",
        counted(loaded.config.model.layers, "layer"),
        count(*parameters as f64),
    )
}
