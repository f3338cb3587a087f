//! Headers of a rank's file.
#![no_main]

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    assert!(checkpoint::parsers::checkpoint_header(file).unwrap_or(true));
});
