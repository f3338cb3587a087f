//! Kills, attacks, damaged and refused input: a run loses nothing.

#[path = "../common/mod.rs"]
mod common;

mod attacks;
mod crashes;
mod mutations;
mod refusals;
