//! What the ranks run on.

use super::reading::{Choice, Declaration, KeyDefault, Section, format_bytes};
use super::{BoxConfig, ResumeEffect, bundled, load_box};
use serde::{Serialize, Serializer};
use std::path::PathBuf;

/// `Cpu(count: 4, memory: "512MiB")`, `Cuda`, `Sim(box: "boxes/dgx2.ron")`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum DeviceConfig {
    /// Virtual GPUs on this machine.
    Cpu {
        /// How many: as many as ranks.
        count: usize,
        /// Bytes that each may hold.
        #[serde(serialize_with = "size")]
        memory: u64,
        /// Kernel threads of each.
        threads: Option<usize>,
    },
    /// Real GPUs.
    Cuda,
    /// A described box.
    Sim {
        /// The description as read.
        #[serde(skip)]
        box_: Box<BoxConfig>,
        /// Its file, absolute.
        #[serde(rename = "box")]
        path: PathBuf,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn size<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_bytes(*bytes))
}

impl DeviceConfig {
    /// As many virtual GPUs as ranks.
    pub(super) const fn for_ranks(count: usize) -> Self {
        Self::Cpu { count, memory: 2 << 30, threads: None }
    }
}

impl Choice for DeviceConfig {
    /// Ranks.
    type Context = usize;
    const EXAMPLES: &'static [&'static str] =
        &["Cpu(count: 4, memory: \"512MiB\")", "Cuda", "Sim(box: \"boxes/dgx2.ron\")"];

    fn name(&self) -> &'static str {
        match self {
            Self::Cpu { .. } => "Cpu",
            Self::Cuda => "Cuda",
            Self::Sim { .. } => "Sim",
        }
    }

    fn read(variant: &str, s: &mut Section<'_, '_>, world: usize) -> Self {
        match variant {
            "Cpu" => {
                let count = Declaration::new("count", "Virtual GPUs, one for each rank.");
                let memory = Declaration::new("memory", "Memory that each virtual GPU may hold.");
                let threads = Declaration::new(
                    "threads",
                    "Kernel threads of each virtual GPU. None: the cores of this machine divided by `count`, at least 1.",
                );
                Self::Cpu {
                    count: s.uint(
                        count,
                        1..=4096 * 4096,
                        KeyDefault::Derived(
                            world,
                            "tensor x data",
                            &["parallel.tensor", "parallel.data"],
                        ),
                    ),
                    memory: s.bytes(
                        memory.resume(ResumeEffect::Placement),
                        1 << 60,
                        KeyDefault::Default(2 << 30),
                    ),
                    threads: s.uint_or_none(threads.resume(ResumeEffect::Placement), 1..=4096),
                }
            }
            "Cuda" => Self::Cuda,
            _ => {
                let key = Declaration::new(
                    "box",
                    "File that describes the box, or the name of one that `onebox boxes` lists, such as `h100-128gib`.",
                );
                let or = KeyDefault::Required("box: \"boxes/dgx2.ron\"");
                let path = s.path_or_name(key, or, |name| bundled::text(name).is_some());
                let box_ = load_box::box_of(s.reader, "device.box", &path);
                Self::Sim { box_: Box::new(box_), path: path.into() }
            }
        }
    }
}
