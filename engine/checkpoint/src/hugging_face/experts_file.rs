//! Form of the experts in the folder that a run started from. A run keeps it in a file, since an
//! export has the form of the import; without the file each expert has tensors of its own.

use super::folder::Folder;
use files::foreign_text::reason;
use serde::{Deserialize, Serialize};

/// Content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertsFile {
    /// Whether one tensor holds the matrices of all experts of a layer.
    fused: bool,
}

/// Whether the file that a run keeps says that experts are fused.
///
/// # Errors
/// The fault of the file.
pub(super) fn is_fused(bytes: &[u8]) -> Result<bool, String> {
    let file: ExpertsFile = serde_json::from_slice(bytes).map_err(|e| reason(e).to_string())?;
    Ok(file.fused)
}

impl Folder {
    /// The content of the file that a run keeps; `None` if experts are not fused.
    pub fn experts_file(&self) -> Option<Vec<u8>> {
        self.fuses_experts().then(|| {
            // Texts and numbers are JSON, and writing to memory cannot fail.
            let text = serde_json::to_string(&ExpertsFile { fused: true });
            (text.unwrap_or_else(|e| unreachable!("a word without a text: {e}")) + "\n")
                .into_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_form_is_refused() {
        assert_eq!(is_fused(b"{\"fused\":true}\n"), Ok(true));
        assert_eq!(is_fused(b"{\"fused\":false}"), Ok(false));
        for bad in ["", "{}", "{\"fused\":1}", "{\"fused\":true,\"more\":1}", "true"] {
            assert!(is_fused(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
