//! Tests of sizes that the ranks must share evenly.

use super::refusals::refuses;
use super::{LEAST, loaded};

#[test]
fn inputs_of_blocks_without_equal_shares() {
    let odd = [
        "model.family=Llama",
        "model.hidden=3",
        "model.head_dim=4",
        "model.heads=4",
        "model.seq_len=2",
        "model.ffn_hidden=4",
        "model.layers=2",
        "batch.micro=1",
        "parallel.tensor=4",
        "device.count=4",
        "recompute=Block",
    ];
    let with = |more: &[&'static str]| [&odd[..], more].concat();
    for key in ["partition_checkpoints", "host_checkpoints"] {
        let set = if key == "partition_checkpoints" {
            "partition_checkpoints=true"
        } else {
            "host_checkpoints=true"
        };
        let expected =
            ["micro 1 x seq_len 2 x hidden 3 = 6 elements", "for 4 tensor-parallel ranks", key];
        refuses(&with(&[set]), "model.hidden", &expected);
        for fits in ["model.layers=1", "model.hidden=4", "model.seq_len=4", "parallel.tensor=2"] {
            let count =
                if fits == "parallel.tensor=2" { "device.count=2" } else { "device.count=4" };
            loaded(LEAST, &with(&[set, fits, count])).unwrap();
        }
    }
    loaded(LEAST, &with(&[])).unwrap();
}
