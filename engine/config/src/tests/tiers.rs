//! Tests of the tiers of activations.

use super::super::*;
use super::refusals::refuses;
use super::{LEAST, loaded};

#[test]
fn tiers_of_activations_that_the_run_cannot_have() {
    let tiers = |numbers: &str| format!("activations=Tiers({numbers})");
    let refused = |sets: &[&str], key, parts: &[&str]| refuses(sets, key, parts);
    let one = tiers("gpu_blocks: 1, host_blocks: 1");
    loaded(LEAST, &[&one, "recompute=Block"]).unwrap();
    let expected = ["no block is recomputed", "`recompute` is None by default", "to `Block`"];
    refused(&[&one], "activations", &expected);
    refused(&[&one, "recompute=Selective"], "activations", &["leave `activations` out"]);
    let many = tiers("gpu_blocks: 2, host_blocks: 1");
    refused(
        &[&many, "recompute=Block"],
        "activations.gpu_blocks",
        &["2 blocks on the GPU and 1 block on the host are 3 blocks", "has 2 blocks", "at most 2"],
    );
    let many = tiers("gpu_blocks: 1, host_blocks: 1, host_mlps: 2");
    let keys = "choose `activations.gpu_blocks` + `activations.host_mlps` of at most 2";
    refused(&[&many, "recompute=Block"], "activations.gpu_blocks", &[keys]);
    let blocking = ["offload.transfer=Blocking", "offload.update=Serial", "recompute=Block"];
    loaded(LEAST, &[&blocking[..], &[&tiers("gpu_blocks: 2")]].concat()).unwrap();
    refused(&[&blocking[..], &[&one]].concat(), "activations", &["beside other blocks"]);
}

#[test]
fn numbers_of_the_mlp_follow_those_of_the_block() {
    let kept = |tiers: &str| {
        let sets = [&*format!("activations=Tiers({tiers})"), "recompute=Block"];
        let activations = loaded(LEAST, &sets).unwrap().config.activations;
        [activations.attention(), activations.mlp()].map(|kept| [kept.gpu, kept.host])
    };
    assert_eq!(kept("gpu_blocks: 1, host_blocks: 1"), [[1, 1]; 2]);
    assert_eq!(kept("host_blocks: 2, gpu_mlps: 1, host_mlps: 0"), [[0, 2], [1, 0]]);
    assert_eq!(kept("host_blocks: 2, host_mlps: None"), [[0, 2]; 2]);
    let plain = loaded(LEAST, &[]).unwrap().config.activations;
    assert_eq!((plain, plain.moves()), (Activations::Uniform, false));
}
