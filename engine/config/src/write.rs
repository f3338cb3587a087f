//! Configs and values of them as RON that [`load`](super::load()) reads as the same.

use ron::extensions::Extensions;
use ron::ser::{PrettyConfig, to_string_pretty};
use serde::Serialize;

/// A config, one key per line.
pub(super) fn lines(config: &impl Serialize) -> String {
    // Without `Some`, as people write it.
    let style = PrettyConfig::new().extensions(Extensions::IMPLICIT_SOME).new_line("\n");
    text(config, style) + "\n"
}

/// A value as a config has it, in one line: `Split(device_fraction: 0.2)`.
pub fn in_line(value: &impl Serialize) -> String {
    let text = text(value, PrettyConfig::new().compact_structs(true));
    // So the name of a variant is written that is also a word of RON; people write it plainly.
    text.strip_prefix("r#").map_or(text.clone(), str::to_owned)
}

fn text(value: &impl Serialize, style: PrettyConfig) -> String {
    let text = to_string_pretty(value, style);
    // These types hold nothing that RON cannot say, and a String takes whatever is written to it.
    text.unwrap_or_else(|error| unreachable!("a config that cannot be written: {error}"))
}
