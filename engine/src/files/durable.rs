//! What a power cut leaves.

use std::fs::File;
use std::io;
use std::path::Path;

/// Makes names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    // The parent of a bare name.
    let here = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(here)?.sync_all()
}
