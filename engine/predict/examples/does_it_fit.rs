//! Checks whether a config fits: `cargo run -p predict --example does_it_fit [CONFIG]`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use layout::LocalMachine;
use layout::build::lay_out;
use predict::plan::memory_report;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let own = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/dgx2-70b.ron"));
    let path = std::env::args_os().nth(1).map_or(own, PathBuf::from);
    let config = config::load(&path, &[])?.config;
    let report = memory_report(&config, &lay_out(&config, &LocalMachine::default()));
    let verdict = if report.fits { "fits" } else { "does not fit" };
    println!("{}: {} parameters, {verdict}", report.name, report.parameters);
    println!("{} bytes of {:?} of each GPU", report.gpu.bytes, report.gpu.limit);
    for node in &report.nodes {
        println!("{node:?}");
    }
    Ok(())
}
