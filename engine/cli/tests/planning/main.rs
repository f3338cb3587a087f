//! Memory plans, remedies, the search of layouts and simulated steps.

#[path = "../common/mod.rs"]
mod common;

mod config_files;
mod experiments;
mod fitting;
mod plans;
mod ranges;
mod remedies;
mod search;
mod simulations;
