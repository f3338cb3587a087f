//! Writes configs and their values as RON that [`load`](super::load()) reads back unchanged.

use ron::extensions::Extensions;
use ron::ser::{PrettyConfig, to_string_pretty};
use serde::Serialize;

/// Writes a config with one key per line.
pub(super) fn lines(config: &impl Serialize) -> String {
    // Users write values without `Some`.
    let style = PrettyConfig::new().extensions(Extensions::IMPLICIT_SOME).new_line("\n");
    text(config, style) + "\n"
}

/// Writes a value in one line, as a config has it: `Split(device_fraction: 0.2)`.
pub fn in_line(value: &impl Serialize) -> String {
    let text = text(value, PrettyConfig::new().compact_structs(true).compact_arrays(true));
    // The writer puts `r#` before a variant that is also a word of RON; users write the plain name.
    text.strip_prefix("r#").map_or(text.clone(), str::to_owned)
}

fn text(value: &impl Serialize, style: PrettyConfig) -> String {
    let text = to_string_pretty(value, style);
    // RON can express these types, and writing to a String cannot fail.
    text.unwrap_or_else(|error| unreachable!("a config that cannot be written: {error}"))
}
