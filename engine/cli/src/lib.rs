//! The program `onebox`: its commands, measurements, generation, and what it shows.

// Files are opened, created, read and renamed by the crate `files`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod bench;
pub mod commands;
pub mod generate;
pub mod report;
mod single_rank;
