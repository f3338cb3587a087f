//! The program `onebox`: its commands, measurements, text generation and output.

// Only the crate `files` opens, creates, reads and renames files.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod bench;
pub mod commands;
pub mod generate;
pub mod report;
mod single_rank;
