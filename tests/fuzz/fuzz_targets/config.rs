//! Configs: one that is accepted means the same when it is written out and read again.
#![no_main]

use config::load_str;
use std::path::Path;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = str::from_utf8(bytes) else { return };
    // A box would be read from the disk.
    if text.contains("Sim") {
        return;
    }
    let Ok(loaded) = load_str(text, "fuzz.ron", Path::new("/"), &[]) else { return };
    let again = load_str(&loaded.config.to_ron(), "again.ron", Path::new("/"), &[]);
    assert_eq!(again.map(|again| again.config).ok(), Some(loaded.config));
});
