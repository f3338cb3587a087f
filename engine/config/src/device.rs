//! Devices of the ranks.

use super::declare::choice;
use super::reading::{Declaration, KeyDefault, Section, format_bytes};
use super::{BoxConfig, bundled, load_box};
use serde::{Serialize, Serializer};
use std::path::{Path, PathBuf};

choice! {
    /// Devices: `Cpu(count: 4, memory: "512MiB")`, `Cuda`, `Sim(box: "boxes/dgx2.ron")`.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub enum DeviceConfig, read(world: usize) {
        /// Virtual GPUs on this machine.
        Cpu["(count: 4, memory: \"512MiB\")"] {
            /// Number of virtual GPUs, one for each rank.
            count: usize = uint(1..=4096 * 4096, KeyDefault::Derived(
                world, "tensor x data", &["parallel.tensor", "parallel.data"]
            ));
            /// Size of the memory of each virtual GPU.
            #[serde(serialize_with = "size")]
            memory: u64 = bytes(1 << 60, KeyDefault::Default(2 << 30)), resume: Placement;
            /// Number of kernel threads of each virtual GPU. None: the hardware threads of this
            /// machine divided by its virtual GPUs; fewer if the sockets of the rank have fewer, or
            /// if the scratch memory of the threads does not fit into `device.memory`; at least 1.
            threads: Option<usize> = uint_or_none(1..=4096, KeyDefault::Default(None)), resume: Placement;
        },
        /// Real GPUs.
        Cuda,
        /// A described box.
        Sim["(box: \"boxes/dgx2.ron\")"] {
            /// File that describes the box, or the name of a box that `onebox boxes` lists, such as
            /// `h100-128gib`.
            #[serde(rename = "box")]
            path: PathBuf = box_path();
            /// Division of the rows of a layer between its experts, which a simulation assumes. `Even`:
            /// all have equally many. `Skewed`: expert 1, 2, 3 and so on have rows in proportion to 1,
            /// 1 / sqrt(2), 1 / sqrt(3) and so on. Memory and arithmetic do not depend on it, only the
            /// number of tiles of the matmuls.
            expert_load: LoadDistribution = choice(KeyDefault::Default(LoadDistribution::Even));
            /// Description of the box, read from `path`.
            #[serde(skip)]
            box_: Box<BoxConfig> = box_at(&path);
        },
    }
}

choice! {
    /// Divisions of the rows of a layer between its experts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum LoadDistribution {
        /// Equally many rows for each expert.
        Even,
        /// Rows in proportion to 1 / sqrt(n) for the n-th expert.
        Skewed,
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn size<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_bytes(*bytes))
}

impl Section<'_, '_> {
    /// Reads the key `box`. The field has another name, because `box` is a word of Rust.
    fn box_path(&mut self, key: Declaration) -> PathBuf {
        let key = Declaration { name: "box", ..key };
        let or = KeyDefault::Required("box: \"boxes/dgx2.ron\"");
        self.path_or_name(key, or, |name| bundled::text(name).is_some()).into()
    }

    /// Reads the description of the box at `path`. The field is not a key.
    fn box_at(&mut self, _: Declaration, path: &Path) -> Box<BoxConfig> {
        Box::new(load_box::box_of(self.reader, "device.box", &path.to_string_lossy()))
    }
}
