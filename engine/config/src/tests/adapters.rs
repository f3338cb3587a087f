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
    // Experts have no dropout, and attention beside them has.
    let dropped = "adapter=Lora(rank: 4, dropout: 0.1)";
    refuses(&with(dropped), "adapter.dropout", &["adapters of experts have no dropout"]);
    loaded(LEAST, &with("adapter=Lora(rank: 4, dropout: 0.1, targets: [\"q_proj\"])")).unwrap();
    let without = ["model.family=Llama", named];
    refuses(&without, "adapter.targets", &["no adapter of the linear `experts.gate_up_proj`"]);
}

#[test]
fn adapters_of_linears_of_gated_delta_nets() {
    let nets = "model.delta_net=(key_heads: 2, value_heads: 2, key_dim: 8, value_dim: 6)";
    let with = |adapter: &'static str| {
        ["model.family=Llama", "model.layers=2", "model.layer_pattern=DF", nets, adapter]
    };
    let config = loaded(LEAST, &with("adapter=Lora(rank: 12)")).unwrap().config;
    let Adapter::Lora { targets, .. } = &config.adapter else { panic!("adapters") };
    let names = targets.names(&config.model);
    for linear in ["q_proj", "in_proj_qkv", "in_proj_a", "out_proj", "down_proj"] {
        assert!(names.contains(&linear), "{linear}: {names:?}");
    }
    // Both heads have 6 values; step sizes and decays, with a row for each head, set no limit.
    let expected = ["has 12 rows or columns", "at most 12", "12 channels"];
    refuses(&with("adapter=Lora(rank: 13)"), "adapter.rank", &expected);
    loaded(LEAST, &with("adapter=Lora(rank: 13, targets: [\"in_proj_b\"])")).unwrap();
    // A model of gated delta nets alone has no queries of attention, which would then train nothing.
    let alone = |adapter| ["model.family=Llama", "model.layer_pattern=D", nets, adapter];
    let queries = "adapter=Lora(rank: 4, targets: [\"q_proj\", \"o_proj\"])";
    let expected = ["no layer of the model has a linear of this list", "such as `in_proj_qkv`"];
    refuses(&alone(queries), "adapter.targets", &expected);
    loaded(LEAST, &alone("adapter=Lora(rank: 4)")).unwrap();
    loaded(LEAST, &alone("adapter=Lora(rank: 4, targets: [\"q_proj\", \"up_proj\"])")).unwrap();
    let without = ["model.family=Llama", "adapter=Lora(targets: [\"in_proj_z\"])"];
    refuses(&without, "adapter.targets", &["no adapter of the linear `in_proj_z`"]);
}

#[test]
fn keys_of_adapters_without_their_name() {
    let expected = ["found a group of keys", "the name before the keys: `Lora(dropout: ...)`"];
    refuses(&["adapter.dropout=0.1"], "adapter", &expected);
    let expected = ["the name before the keys: `Lora(rank: ..., alpha: ...)`"];
    refuses(&["adapter=(rank: 8, alpha: 16)"], "adapter", &expected);
}
