//! A [`Config`] as RON that [`load`](super::load()) reads as the same config.

use ron::extensions::Extensions;
use ron::ser::{PrettyConfig, to_string_pretty};
use serde::{Serialize, Serializer};
use std::borrow::Cow;

use super::reading::bytes::format_bytes;
use super::{Config, DeviceConfig, Speculated};

impl Config {
    /// Every key with its value, one per line, in RON. Paths are absolute, so that the text means
    /// the same wherever it is put; only `data.train` is left out where there is none.
    pub fn to_ron(&self) -> String {
        // Without `Some`, as people write it.
        let style = PrettyConfig::new().extensions(Extensions::IMPLICIT_SOME).new_line("\n");
        text(self, style) + "\n"
    }
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

/// [`DeviceConfig`] as a config writes it: a size as text, and of a box its file.
#[derive(Serialize)]
#[serde(rename = "DeviceConfig")]
enum Device<'a> {
    Cpu {
        count: usize,
        memory: String,
        threads: Option<usize>,
    },
    Cuda,
    Sim {
        #[serde(rename = "box")]
        path: Cow<'a, str>,
    },
}

impl Serialize for DeviceConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let device = match self {
            Self::Cpu { count, memory, threads } => {
                Device::Cpu { count: *count, memory: format_bytes(*memory), threads: *threads }
            }
            Self::Cuda => Device::Cuda,
            Self::Sim { path, .. } => Device::Sim { path: path.to_string_lossy() },
        };
        device.serialize(serializer)
    }
}

impl Serialize for Speculated {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_unit_variant("Speculated", 0, "Auto"),
            Self::Share(share) => serializer.serialize_f32(*share),
        }
    }
}
