//! Wrong results on demand: `FAKECUDA_WRONG`.

use std::sync::LazyLock;

/// Kinds of work with wrong results, read at the first call.
static WRONG: LazyLock<Vec<String>> = LazyLock::new(|| {
    let list = std::env::var("FAKECUDA_WRONG").unwrap_or_default();
    list.split(',').map(|kind| kind.trim().to_owned()).filter(|kind| !kind.is_empty()).collect()
});

/// Whether all work of this kind has wrong results.
pub(crate) fn is_wrong(kind: &str) -> bool {
    WRONG.iter().any(|wrong| wrong == kind)
}

/// Whether a kernel has wrong results: its last block does not run. A kernel whose blocks take turns
/// at the work has right results all the same.
pub(crate) fn is_wrong_kernel(name: &str) -> bool {
    WRONG.iter().any(|wrong| wrong.strip_prefix("kernel=") == Some(name))
}
