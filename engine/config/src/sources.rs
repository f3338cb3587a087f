//! Data sets of a config.

use serde::{Serialize, Serializer};

/// A data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// Its name in reports; absent: that of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// File, directory or glob, made absolute (relative to the config file, or to the working
    /// directory from `--set`).
    pub path: String,
    /// Its share of the samples, by the sum of all weights. Default 1.
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

/// Data sets. None: the config leaves them out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sources(pub Vec<Source>);

impl Sources {
    /// One of all that a text names.
    pub fn one(path: String) -> Self {
        Self(vec![Source { name: None, path, weight: 1.0 }])
    }

    /// Whether the config leaves them out.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their paths.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|source| source.path.as_str())
    }
}

impl Serialize for Sources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.as_slice() {
            [] => serializer.serialize_none(),
            // Alone it has no weight.
            [Source { name: None, path, .. }] => serializer.serialize_str(path),
            all => all.serialize(serializer),
        }
    }
}
