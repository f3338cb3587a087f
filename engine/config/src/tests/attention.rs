//! Tests of the rules about the library that computes attention.

use super::refusals::refuses;
use super::{LEAST, loaded};

#[test]
fn attention_that_cudnn_does_not_compute() {
    let with = |more: &'static str| ["attention=Cudnn", more];
    loaded(LEAST, &with("precision=Bf16")).unwrap();
    loaded(LEAST, &with("precision=Fp16")).unwrap();
    for (set, parts) in [
        ("precision=Fp32", ["in 16 bits only", "set `precision` to `Bf16`"]),
        ("model.dropout=0.1", ["with dropout", "set `model.dropout` to 0"]),
        ("model.heads=8", ["heads of 8, 16, .. 128 elements", "leave `attention` out"]),
    ] {
        refuses(&with(set), "attention", &parts);
        loaded(LEAST, &[set]).unwrap();
    }
    let wide = ["model.family=Llama", "model.head_dim=136", "attention=Cudnn"];
    refuses(&wide, "attention", &["heads of 8, 16, .. 128 elements"]);
    loaded(LEAST, &["model.family=Llama", "model.head_dim=128", "attention=Cudnn"]).unwrap();
    let documents = ["attention=Cudnn", "data.format=Megatron", "data.packing=Documents"];
    refuses(&documents, "attention", &["within documents", "set `data.packing`"]);
    loaded(LEAST, &documents[1..]).unwrap();
    loaded(LEAST, &documents[..2]).unwrap();
    let parts = ["model.family=Llama", "attention=Cudnn", "model.layer_pattern=WF"];
    let window = |tokens: &'static str| [&parts[..], &[tokens]].concat();
    refuses(&window("model.window=15"), "attention", &["within a window", "leave `attention` out"]);
    loaded(LEAST, &window("model.window=16")).unwrap();
    let cap = ["model.family=Llama", "attention=Cudnn", "model.score_cap=50.0"];
    refuses(&cap, "attention", &["does not cap the scores"]);
}
