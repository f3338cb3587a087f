//! Configs: one that is accepted means the same when it is written out and read again.
#![no_main]

use config::load_str;
use files::foreign_text::is_line;
use std::path::Path;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = str::from_utf8(bytes) else { return };
    // A box would be read from the disk.
    if text.contains("Sim") {
        return;
    }
    let loaded = match load_str(text, "fuzz.ron", Path::new("/"), &[]) {
        Ok(loaded) => loaded,
        Err(why) => {
            let why = why.to_string();
            assert!(why.len() < 1 << 20 && why.lines().all(is_line), "{why}");
            return;
        }
    };
    let again = load_str(&loaded.config.to_ron(), "again.ron", Path::new("/"), &[]);
    assert_eq!(again.map(|again| again.config).ok(), Some(loaded.config));
});
