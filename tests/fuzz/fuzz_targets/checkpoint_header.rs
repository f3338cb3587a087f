//! Headers of a rank's file.
#![no_main]

use files::foreign_text::is_line;

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    assert!(checkpoint::parsers::checkpoint_header(file).unwrap_or_else(|why| is_line(&why)));
});
