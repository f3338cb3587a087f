//! Finds the box that `--box` names: a file, or the name of a box near the config or of a bundled
//! box.

use super::bundled;
use super::file::{LARGEST, ron_files};
use super::reading::{nearest, short};
use files::foreign_text::ForeignText;
use files::input;
use files::shell::quoted_path;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Most characters of the list of all names.
const LONGEST: usize = 2000;

/// Path of the box `named` for `config`, or the name of a bundled box.
///
/// # Errors
/// There is no such box; the text suggests boxes.
pub fn find_box(named: &Path, config: &Path) -> Result<PathBuf, String> {
    // A folder may have the name of a box by chance.
    let is_there = named.symlink_metadata().is_ok();
    if is_there && !named.is_dir() {
        return Ok(named.to_owned());
    }
    let parent = config.parent().unwrap_or(Path::new(""));
    let folders = [parent.join("boxes"), parent.join("configs/boxes"), "configs/boxes".into()];
    let is_name = named.components().count() == 1 && named.extension().is_none();
    let file = |folder: &PathBuf| folder.join(named).with_extension("ron");
    if let Some(found) = folders.iter().map(file).find(|file| is_name && file.is_file()) {
        return Ok(found);
    }
    if is_there || named.to_str().is_some_and(|name| bundled::text(name).is_some()) {
        return Ok(named.to_owned());
    }
    let wanted = named.display();
    if is_name {
        let own = folders.iter().flat_map(|folder| boxes(folder));
        let own = own.map(|name| name.replace(".ron", ""));
        let bundled = bundled::BOXES.iter().map(|(name, _)| (*name).to_owned());
        let names: BTreeSet<String> = bundled.chain(own).collect();
        let near = nearest(&wanted.to_string(), names.iter().map(String::as_str));
        let help = match near.first() {
            Some(name) => format!("did you mean `--box {}`?", quoted_path(Path::new(name))),
            None => format!(
                "there are: {}",
                ForeignText::new(Vec::from_iter(names).join(", "), LONGEST)
            ),
        };
        return Err(format!("--box {wanted}: there is no such file, and no such box; {help}"));
    }
    let folder = named.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = boxes(folder);
    let file = named.file_name().map(|name| name.to_string_lossy().into_owned());
    let near = nearest(&file.unwrap_or_default(), names.iter().map(String::as_str));
    let help = match (near.first(), &names[..]) {
        (Some(name), _) => format!("did you mean `--box {}`?", quoted_path(&folder.join(name))),
        (None, []) => {
            let stem = named.file_stem().unwrap_or_default().to_string_lossy();
            let near = nearest(&stem, bundled::BOXES.iter().map(|(name, _)| *name));
            let near = near.first().map(|name| format!("did you mean `--box {name}`?"));
            near.unwrap_or_else(|| "`onebox boxes` lists the boxes that have names".into())
        }
        (None, names) => format!("boxes in {}: {}", folder.display(), short(&names.join(", "))),
    };
    Err(format!("--box {wanted}: there is no such file; {help}"))
}

/// Names of the files in `folder` that describe boxes.
fn boxes(folder: &Path) -> Vec<String> {
    let mut names = ron_files(folder).unwrap_or_default();
    let describes = |text: String| text.contains("gpu_memory:") || text.contains("node_memory:");
    names.retain(|name| input::text(&folder.join(name), LARGEST).is_ok_and(describes));
    names
}
