//! Manifests whose hash is right.
#![no_main]

use files::foreign_text::is_line;

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    assert!(checkpoint::parsers::manifest(json).unwrap_or_else(|why| is_line(&why)));
});
