//! A finding about a box, in words.

use serde::{Deserialize, Serialize};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know.
    Info,
    /// Costs speed.
    Warning,
    /// A run would fail, or crawl.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Its name, which stays the same between versions.
    pub id: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What is found, with numbers.
    pub text: String,
    /// What to do.
    pub remedy: String,
}
