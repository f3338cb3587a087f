//! The balance loss of transformers, from tests/fixtures/make_balance_fixture.py: its value and its
//! gradients, with padding and without.

use super::{Fixture, PassInputs, PassResult, T, fp32, grid, load, pass, theirs, worst};
use layout::build::shape;
use std::path::Path;

/// Factor of the balance loss in the gradients of the fixture.
const FACTOR: f64 = 0.05;

/// Layouts: (tensor, data, sequence). A micro-batch holds all samples, since the loss depends on it.
const LAYOUTS: [(usize, usize, bool); 3] = [(1, 1, false), (2, 1, false), (2, 1, true)];

fn fixture(model: &str) -> Fixture {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/balance");
    let mut all = Fixture::default();
    all.add(&std::fs::read(folder.join(format!("{model}.safetensors"))).unwrap());
    all
}

#[test]
fn a_balance_loss_is_that_of_transformers_with_padding_and_without() {
    for model in ["qwen3-moe", "olmoe", "gpt-oss"] {
        let (weights, wanted) = (load(model), fixture(model));
        for part in ["plain", "padded"] {
            let want = |name: &str| wanted.get(&format!("{part}.{name}"));
            let targets = want("targets");
            let share = targets.iter().filter(|target| **target >= 0.0).count() as f64
                / targets.len() as f64;
            for (layout, recompute) in LAYOUTS.into_iter().zip(["None", "Block", "Selective"]) {
                let mut sets = grid(layout);
                sets.push(format!("model.experts.balance=HuggingFace(factor: {FACTOR})"));
                sets.push(format!("recompute={recompute}"));
                let shape = shape(&fp32(model, &sets, 0));
                let given = PassInputs {
                    tokens: want("tokens"),
                    targets,
                    starts: (part == "padded").then(|| want("starts")),
                    param: &|name| weights.get(&theirs(model, name)),
                };
                let PassResult { loss, grads, expert_loads, .. } = pass(&shape, 1, &given);
                let difference = (loss / share - want("loss")[0]).abs();
                assert!(
                    difference < 1e-6,
                    "{model} {part} {sets:?}: the loss is {difference:e} off"
                );
                let (balance, counts) = expert_loads.split_last().unwrap();
                let difference = (balance - want("balance")[0]).abs();
                assert!(
                    difference < 2e-6,
                    "{model} {part} {sets:?}: {balance}, {difference:e} off"
                );
                // Each token of a document has k experts in each layer.
                let experts = shape.experts.unwrap();
                let padding = targets.iter().filter(|target| **target == -2.0).count();
                assert_eq!(padding, if part == "padded" { 6 * T - 48 } else { 0 });
                let pairs = (6 * T - padding) * experts.per_token * shape.expert_layers();
                assert_eq!(counts.iter().sum::<f64>(), pairs as f64);
                let mut compared = 0;
                for (name, grad) in grads.iter().filter(|(name, _)| !name.contains("experts.")) {
                    let want = want(&format!("grad.{}", theirs(model, name)));
                    let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    let whole: Vec<f64> = grad.iter().map(|x| x / share).collect();
                    let difference = worst(&whole, want);
                    assert!(
                        difference < 5e-6 * size,
                        "{model} {part} {sets:?}: {name} is {difference:e} apart of {size:e}"
                    );
                    compared += 1;
                }
                let of_part = |name: &&String| name.starts_with(&format!("{part}.grad."));
                assert_eq!(compared, wanted.0.keys().filter(of_part).count(), "{model}");
            }
        }
    }
}
