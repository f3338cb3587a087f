//! Manifests whose hash is right.
#![no_main]

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    assert!(checkpoint::parsers::manifest(json).unwrap_or(true));
});
