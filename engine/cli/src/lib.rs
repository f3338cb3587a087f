//! The program `onebox`: its commands, measurements, generation, and what it shows.

pub mod bench;
pub mod commands;
pub mod generate;
pub mod report;
mod single_rank;
