//! A finding about a box, in words.

use serde::{Deserialize, Serialize};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Information only.
    Info,
    /// It costs speed.
    Warning,
    /// A run would fail, or be very slow.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// Its name. It stays the same between versions.
    pub id: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// The finding, with numbers.
    pub text: String,
    /// The action to take.
    pub remedy: String,
}
