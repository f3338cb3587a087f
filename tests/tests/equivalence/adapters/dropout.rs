//! Dropout of the inputs of adapters, compared with PEFT that has the masks of onebox.

use super::{B, MODELS, T, base, fp32, initial_factors, load, shape_of, whole_params};
use config::Adapter;
use engine::run::{Message, RunOptions, train};
use tensor_parallel::TrainedParams;
use tests::pass::{PassInputs, PassResult, pass, worst};
use tests::{dataset_of_windows, lay_out};

/// Dropout of the inputs of adapters, with the masks of onebox.
#[test]
fn gradients_with_dropout_are_those_of_peft_with_the_same_masks_on_every_layout() {
    let dropped: Vec<_> =
        MODELS.into_iter().filter(|model| ["llama3", "qwen3-5"].contains(&model.name)).collect();
    assert_eq!(dropped.len(), 2);
    for model in dropped {
        let fixture = load(model.name);
        let params = whole_params(&model, &fixture);
        for (tp, dp, sequence, more) in [
            (1, 1, false, "Block"),
            (2, 1, true, "None"),
            (6, 1, false, "Selective"),
            (1, 2, false, "None"),
            (2, 3, false, "Block"),
        ] {
            let mut shape = shape_of(&model, (tp, dp, sequence), more);
            let TrainedParams::Adapters(adapters) = &mut shape.trained else { panic!() };
            adapters.dropout = 0.25;
            let given = PassInputs {
                tokens: fixture.get("tokens"),
                targets: fixture.get("targets"),
                starts: None,
                param: &|name| params.get(name),
            };
            let PassResult { loss, grads, .. } = pass(&shape, dp, &given);
            let case = format!("{} {tp} x {dp} {more}", model.name);
            let difference = (loss - fixture.get("dropout.loss")[0]).abs();
            assert!(difference < 1e-6, "{case}: the loss is {difference:e} off");
            let without = (loss - fixture.get("loss")[0]).abs();
            assert!(without > 1e-5, "{case}: dropout changes the loss by {without:e} only");
            for (name, grad) in &grads {
                let want = model.values(&fixture, "dropout.grad.", name);
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let difference = worst(grad, &want);
                assert!(
                    difference <= 5e-6 * size,
                    "{case}: {name} is {difference:e} apart of {size:e}"
                );
            }
        }
    }
}

/// An evaluation and `generate` drop nothing.
#[test]
fn an_evaluation_drops_no_inputs_of_adapters() {
    let model = &MODELS[0];
    let fixture = load(model.name);
    let evaluated = |p: f32| {
        let run = tempfile::tempdir().unwrap();
        let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
        let (seed, data) = dataset_of_windows(&windows, B, 61, run.path());
        // The factors stay as they are.
        let still =
            ["optimizer.kind=Sgd", "optimizer.lr=1e-30", "train.steps=1", "train.eval_every=1"];
        let sets: Vec<String> = still.iter().map(ToString::to_string).collect();
        let mut config = fp32(model, &sets, seed);
        let Adapter::Lora { dropout, .. } = &mut config.adapter else { panic!("adapters") };
        *dropout = p;
        let options = RunOptions {
            pretrained: Some(base(model)),
            initial: Some(initial_factors(model, &fixture)),
            ..RunOptions::default()
        };
        let (mut losses, mut evals) = (Vec::new(), Vec::new());
        train(&config, &lay_out(&config), &data, &options, &mut |message| match message {
            Message::Step(step) => losses.push(step.loss),
            Message::Eval { loss, .. } => evals.push(loss),
            _ => {}
        })
        .unwrap();
        (losses, evals)
    };
    let (without, half) = (evaluated(0.0), evaluated(0.5));
    assert_eq!(without.1, half.1);
    assert!(!half.1.is_empty() && without.0 != half.0, "{half:?}");
}
