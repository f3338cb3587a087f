//! Data sets of a config.

use serde::{Serialize, Serializer};

/// A data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// Name of the data set in reports; `None`: the name of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// File, directory or glob as an absolute path. In a config it is relative to the config file,
    /// and in `--set` to the working directory.
    pub path: String,
    /// Share of the samples, relative to the sum of all weights. Default 1.
    #[serde(skip_serializing_if = "is_one")]
    pub weight: f32,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    clippy::float_cmp,
    reason = "serde calls it; 1 is exact"
)]
fn is_one(weight: &f32) -> bool {
    *weight == 1.0
}

/// Data sets of a key; empty if the config leaves out the key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sources(pub Vec<Source>);

impl Sources {
    /// A single data set of all files that `path` names.
    pub fn one(path: String) -> Self {
        Self(vec![Source { name: None, path, weight: 1.0 }])
    }

    /// Whether the config leaves out the data sets.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Paths of the data sets.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|source| source.path.as_str())
    }
}

impl Serialize for Sources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [] => serializer.serialize_none(),
            // A single data set has no weight.
            [Source { name: None, path, .. }] => serializer.serialize_str(path),
            all => all.serialize(serializer),
        }
    }
}
