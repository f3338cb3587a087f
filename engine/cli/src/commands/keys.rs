//! `onebox config keys`: lists the keys of a config.

use super::{CommandError, code, print};
use config::{Key, box_keys, keys};
use std::fmt::Write as _;

/// List the keys of a config, with their values, defaults and meanings.
#[derive(Debug, clap::Args)]
pub(super) struct KeysArgs {
    /// List only keys with this beginning, such as train or offload.update
    prefix: Option<String>,
    /// List the keys of a box description, such as configs/boxes/dgx2.ron
    #[arg(long = "box")]
    of_box: bool,
    /// Print the page docs/config.md: tables of the keys of a config and of a box
    #[arg(long, conflicts_with_all = ["prefix", "of_box"])]
    markdown: bool,
}

pub(super) fn run(args: &KeysArgs) -> Result<(), CommandError> {
    if args.markdown {
        return print(&page());
    }
    let all = if args.of_box { box_keys() } else { keys() };
    let prefix = args.prefix.as_deref().unwrap_or_default();
    let begins = |key: &&Key| key.name.starts_with(prefix);
    let text: String = all.iter().filter(begins).map(entry).collect();
    if text.is_empty() {
        let other = if args.of_box { "" } else { " of a config (--box lists those of a box)" };
        let why = format!("no key{other} begins with `{prefix}`");
        return Err(CommandError::new(code::CONFIG, why));
    }
    print(&text)
}

/// Text of a key: `train.steps: whole number from 1 to ..; required`, then a line with the meaning.
fn entry(key: &Key) -> String {
    let of = key.of.map_or(String::new(), |variant| format!(" (of {variant})"));
    let values = key.values.replace('`', "");
    let default = match &key.default {
        _ if key.is_section() => String::new(),
        Some(default) => format!("; default {default}"),
        None => "; required".into(),
    };
    format!("{}{of}: {values}{default}\n    {}\n", key.name, key.doc.replace('`', ""))
}

/// Text of docs/config.md, with a table for each section.
fn page() -> String {
    let mut out = String::from(HEADER);
    out += "\n## Keys of a config\n";
    tables(&mut out, &keys());
    out += "\n## Keys of a box\n";
    tables(&mut out, &box_keys());
    out
}

const HEADER: &str = "\
# Config keys

`onebox config keys --markdown` writes this page; do not edit it. A config is one RON file, see
[the guide](guide.md); a box is one too, see [the simulator](simulator.md). `onebox config show CONFIG` prints what each key
is in your config, and why.
";

fn tables(out: &mut String, all: &[Key]) {
    let section_of = |key: &Key| {
        let holder = |section: &&Key| {
            section.is_section() && key.name.starts_with(&format!("{}.", section.name))
        };
        all.iter().rev().find(holder)
    };
    let leaves: Vec<&Key> = all.iter().filter(|key| !key.is_section()).collect();
    let mut sections: Vec<Option<&Key>> = Vec::new();
    for key in &leaves {
        let section = section_of(key);
        if !sections.contains(&section) {
            sections.push(section);
        }
    }
    for section in sections {
        let title = section.map_or("top", |section| &section.name);
        let doc = section.map_or("Keys outside of any section.", |section| section.doc);
        let _ = write!(
            out,
            "\n### {title}\n\n{doc}\n\n| key | values | default | meaning |\n|---|---|---|---|\n"
        );
        for key in leaves.iter().filter(|key| section_of(key) == section) {
            let of = key.of.map_or(String::new(), |variant| format!(" (of `{variant}`)"));
            let default = match &key.default {
                Some(default) if default.contains([' ', '/']) && !default.starts_with('"') => {
                    default.clone()
                }
                Some(default) => format!("`{default}`"),
                None => "required".into(),
            };
            let cells =
                [format!("`{}`{of}", key.name), key.values.clone(), default, key.doc.into()];
            let _ = writeln!(out, "| {} |", cells.join(" | "));
        }
    }
}
