//! Tests of the tiers of activations.

use super::super::*;
use super::refusals::refuses;
use super::{LEAST, loaded};

/// The setting of `activations` with these numbers of blocks.
fn tiers(numbers: &str) -> String {
    format!("activations=Tiers({numbers})")
}

#[test]
fn tiers_of_activations_that_the_run_cannot_have() {
    let one = tiers("gpu_blocks: 1, host_blocks: 1");
    let one = one.as_str();
    loaded(LEAST, &[one, "recompute=Block"]).unwrap();
    let expected = ["no block is recomputed", "`recompute` is None by default", "to `Block`"];
    refuses(&[one], "activations", &expected);
    refuses(&[one, "recompute=Selective"], "activations", &["leave `activations` out"]);
    loaded(LEAST, &["activations=Auto", "recompute=Block"]).unwrap();
    refuses(&["activations=Auto"], "activations", &["no block is recomputed"]);
    let many = tiers("gpu_blocks: 2, host_blocks: 1");
    let expected =
        ["2 blocks on the GPU and 1 block on the host are 3 blocks", "has 2 blocks", "at most 2"];
    refuses(&[many.as_str(), "recompute=Block"], "activations.gpu_blocks", &expected);
    let many = tiers("gpu_blocks: 1, host_blocks: 1, host_mlps: 2");
    let keys = "choose `activations.gpu_blocks` + `activations.host_mlps` of at most 2";
    refuses(&[many.as_str(), "recompute=Block"], "activations.gpu_blocks", &[keys]);
    let kept = tiers("gpu_blocks: 2");
    let with =
        |tiers| ["offload.transfer=Blocking", "offload.update=Serial", "recompute=Block", tiers];
    loaded(LEAST, &with(kept.as_str())).unwrap();
    refuses(&with(one), "activations", &["beside other blocks", "leave `offload.transfer` out"]);
}

#[test]
fn numbers_of_the_mlp_follow_those_of_the_block() {
    let kept = |numbers: &str| {
        let set = tiers(numbers);
        let activations = loaded(LEAST, &[set.as_str(), "recompute=Block"]);
        let activations = activations.unwrap().config.activations;
        [activations.attention(), activations.mlp()].map(|kept| [kept.gpu, kept.host])
    };
    assert_eq!(kept("gpu_blocks: 1, host_blocks: 1"), [[1, 1]; 2]);
    assert_eq!(kept("host_blocks: 2, gpu_mlps: 1, host_mlps: 0"), [[0, 2], [1, 0]]);
    assert_eq!(kept("host_blocks: 2, host_mlps: None"), [[0, 2]; 2]);
    let plain = loaded(LEAST, &[]).unwrap().config.activations;
    assert_eq!((plain, plain.moves()), (Activations::Uniform, false));
}
