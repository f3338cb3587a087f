//! Places sixteen ranks on a DGX-2 from a description of the box. Run it with `cargo run -p
//! topology --example place_ranks`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use std::path::Path;
use topology::{Error, Machine, Request, place};

fn main() -> Result<(), Error> {
    let boxes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/boxes/topologies");
    let machine = Machine::from_xml_file(&boxes.join("dgx2.xml"))?;
    let placement = place(&machine, &Request { tp: 8, dp: 2, ..Request::default() })?;
    for rank in &placement.ranks {
        println!("{rank}");
    }
    Ok(())
}
