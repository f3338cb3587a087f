//! Boxes inside the program, so that their names work without a checkout of the repository.

use super::reading::nearest;
use std::path::Path;

/// Names and texts of files of `configs/boxes`.
macro_rules! files {
    ($folder:literal, $ending:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!("../../../configs/boxes/", $folder, $name, $ending)))),*]
    };
}

/// Bundled boxes in the order of `onebox boxes`: small boxes first.
pub const BOXES: &[(&str, &str)] = files!("", ".ron":
    "v100-32gb" "desktop-2x3090" "desktop-5060ti" "desktop-4090" "workstation-4x4090" "workstation-4x4090-512gib"
    "desktop-5090" "desktop-5090-192gib" "workstation-5090-512gib" "workstation-4xa6000" "workstation-4xpro6000" "server-4xl40s"
    "h100-128gib" "h100-256gib" "h100-512gib" "h100-1tib" "h200-256gib" "dgx1v" "dgx2" "dgx2-x8" "dgx-a100-40gb" "dgx-a100"
    "dgx-h100" "dgx-h200"
    "dgx-b200" "g6e" "a2" "p4d" "a3" "p5"
);

/// Topologies that the bundled boxes name.
const TOPOLOGIES: &[(&str, &str)] = files!("topologies/", ".xml":
    "desktop-2x3090" "workstation-tr-4xA6000" "dgx1v" "dgx2" "dgx-a100-nps4" "dgx-h100" "dgx-b200"
);

fn find(among: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    among.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Description of the box `name`.
pub(super) fn text(name: &str) -> Option<&'static str> {
    find(BOXES, name)
}

/// Topology with this path in a bundled box. The path of any other topology is absolute.
pub(super) fn topology(path: &str) -> Option<&'static str> {
    find(TOPOLOGIES, path.strip_prefix("topologies/")?.strip_suffix(".xml")?)
}

/// Hint at the bundled box with a name like the end of `path`. A path with an extension gets no
/// hint.
pub(super) fn near(path: &str) -> Option<String> {
    let name = Path::new(path).file_name()?.to_str()?;
    let near = nearest(name, BOXES.iter().map(|(name, _)| *name));
    let near = near.first().filter(|_| Path::new(name).extension().is_none())?;
    Some(format!("did you mean the box `{near}`? `onebox boxes` lists all that onebox has"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load_box;
    use std::collections::BTreeSet;

    #[test]
    fn every_box_of_the_repository_is_there_with_its_topology() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/boxes");
        let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
        let ron =
            |path: &std::path::PathBuf| path.extension().is_some_and(|ending| ending == "ron");
        let files: BTreeSet<String> = entries.filter(ron).map(|path| stem(&path)).collect();
        assert_eq!(files, BOXES.iter().map(|(name, _)| (*name).to_owned()).collect());
        let mut named = BTreeSet::new();
        for (name, _) in BOXES {
            let [bundled, file] = [name.into(), folder.join(name).with_extension("ron")]
                .map(|path: std::path::PathBuf| load_box(&path).unwrap_or_else(|e| panic!("{e}")));
            named.extend(bundled.topology.clone());
            assert_eq!((bundled.gpus, &bundled.name), (file.gpus, &file.name));
            assert_eq!(bundled.machine, file.machine);
        }
        assert_eq!(named.len(), TOPOLOGIES.len(), "{named:?}");
    }
}
