//! Loads the description of a box from its file.

use super::file::read;
use super::parse::{A_BOX, parse, stem};
use super::reading::{Complaint, ConfigError, ConfigReader};
use super::{BoxConfig, box_rules, box_sources, bundled};
use std::path::Path;

/// Reads the description of a box from a file such as `configs/boxes/dgx2.ron`, or of a bundled box
/// by its name.
pub fn load_box(path: &Path) -> Result<BoxConfig, ConfigError> {
    let mut reader = ConfigReader::default();
    let described = box_of(&mut reader, "", &path.display().to_string());
    if reader.problems.is_empty() {
        return Ok(described);
    }
    Err(reader.into_error(&path.display().to_string()))
}

/// Reads the box in the file at `path`, which is the value of `key`. The reader gets the errors of
/// the file, and stores the places of the file's keys below `key`.
pub(super) fn box_of(reader: &mut ConfigReader, key: &str, path: &str) -> BoxConfig {
    let (mut inner, gpus) = (ConfigReader::default(), format!("{key}.gpus"));
    // Stand-in for a box that cannot be read.
    let mut described = BoxConfig { machines: 1, ..BoxConfig::default() };
    if reader.stored && !reader.boxless && reader.ok(&[key]) {
        reader.report_box(key, path);
    }
    if reader.boxless || !reader.ok(&[key]) {
        reader.mark_bad(&gpus);
        return described;
    }
    let (text, dir) = match bundled::text(path) {
        Some(text) => (Ok(text.to_owned()), None),
        None => (read(Path::new(path)), Some(Path::new(path).parent().unwrap_or(Path::new("")))),
    };
    match text {
        Ok(text) => {
            let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
            if let Some(root) = parse(&mut inner, text, path, dir, &A_BOX) {
                inner.report_duplicates(&root, "");
                described = inner.read(&root, "a box", |s| BoxConfig::read(s, &stem(path)));
                box_sources::join_missing(&mut inner, &described);
                box_rules::check(&mut inner, &described);
            }
        }
        Err(Complaint { message, help }) => {
            let message = format!("cannot read the box `{path}`: {message}");
            let bundled = || format!("{help}; `onebox boxes` lists the boxes that need no file");
            let help = bundled::near(path).unwrap_or_else(bundled);
            reader.mark_bad(&gpus);
            reader.refuse_value(key, Complaint { message, help });
        }
    }
    if !inner.problems.is_empty() {
        reader.mark_bad(&gpus);
    }
    reader.absorb(inner, key);
    described
}
