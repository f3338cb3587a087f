//! Tests of the keys of adapters.

use super::super::*;
use super::refusals::refuses;
use super::{LEAST, loaded};

#[test]
fn adapters_of_linears_that_a_model_with_experts_has_not() {
    let experts = "model.experts=(count: 8, per_token: 2, ffn_hidden: 12)";
    let with = |adapter: &'static str| ["model.family=Llama", experts, adapter];
    let named = "adapter=Lora(rank: 4, targets: [\"experts.gate_up_proj\", \"q_proj\"])";
    for fitting in ["adapter=Lora(rank: 12)", named] {
        let config = loaded(LEAST, &with(fitting)).unwrap().config;
        let Adapter::Lora { targets, .. } = &config.adapter else { panic!("{fitting}") };
        let names = targets.names(&config.model);
        assert!(names.contains(&EXPERT_MATRICES[0]) && !names.contains(&"gate_proj"), "{names:?}");
    }
    let dense = "adapter=Lora(rank: 4, targets: [\"up_proj\"])";
    let expected = ["no adapter of the linear `up_proj`", "`experts.down_proj`"];
    refuses(&with(dense), "adapter.targets", &expected);
    let expected = ["has 12 rows or columns", "at most 12", "12 channels"];
    refuses(&with("adapter=Lora(rank: 13)"), "adapter.rank", &expected);
    let alone = "adapter=Lora(rank: 13, targets: [\"q_proj\"])";
    loaded(LEAST, &with(alone)).unwrap();
    let without = ["model.family=Llama", named];
    refuses(&without, "adapter.targets", &["no adapter of the linear `experts.gate_up_proj`"]);
}
