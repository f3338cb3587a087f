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

#[test]
fn tiers_within_a_smaller_model_lose_blocks_on_the_host_first() {
    let within = |numbers: &str, layers: usize| {
        let (set, model) = (tiers(numbers), "model.layers=9");
        let loaded = loaded(LEAST, &[set.as_str(), "recompute=Block", model]).unwrap();
        let (given, fitting) =
            (loaded.config.activations, loaded.config.activations.within(layers));
        assert_eq!(given.within(9), given, "{numbers}");
        [fitting.attention(), fitting.mlp()].map(|kept| [kept.gpu, kept.host])
    };
    assert_eq!(within("gpu_blocks: 2, host_blocks: 6", 5), [[2, 3]; 2]);
    assert_eq!(within("gpu_blocks: 7, host_blocks: 2", 4), [[4, 0]; 2]);
    let mixed = "gpu_blocks: 1, host_blocks: 4, gpu_mlps: 5";
    assert_eq!(within(mixed, 6), [[1, 4], [5, 1]]);
    assert_eq!(within("gpu_blocks: 3, host_mlps: 6", 3), [[3, 0]; 2]);
    assert_eq!(Activations::Auto.within(1), Activations::Auto);
    assert_eq!(Activations::Uniform.within(1), Activations::Uniform);
}
