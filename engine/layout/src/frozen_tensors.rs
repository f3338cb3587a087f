//! The tensors that `optimizer.frozen` names by globs of their names in transformers.

use crate::decoder_parts::trained;
use crate::glob::matches;
use crate::tensor_names::{HEAD, Names, bare};
use config::Config;
use config::transformers::ModelClass;
use std::collections::BTreeSet;
use tensor_parallel::{DecoderShape, FrozenParams, TrainedParams, frozen_unit};

/// Naming schemes of the folders that a model of this shape may have.
pub(crate) fn schemes(shape: &DecoderShape) -> Vec<Names> {
    let has_delta = shape.delta.is_some() || shape.architecture.output_gate;
    let has_biases = shape.experts.is_some_and(|experts| experts.biases);
    let mut all: Vec<Names> = Vec::new();
    for class in ModelClass::ALL {
        let fits =
            class.has_delta_nets() == has_delta && has_biases == (class == ModelClass::GptOss);
        for fused in [false, true] {
            let names = Names::of(shape, class, fused);
            if fits && !all.contains(&names) {
                all.push(names);
            }
        }
    }
    all
}

/// Prefixes of the names of a decoder that is a part of another model, in folders of several versions.
const WRAPPERS: [[&str; 2]; 3] = [
    ["model.", "model.language_model."],
    ["model.", "language_model.model."],
    ["lm_head.", "language_model.lm_head."],
];

/// The names of the parameter `name` in transformers, in all schemes: each whole, without the prefix
/// of the model, and as a part of another model.
pub(crate) fn names_of(shape: &DecoderShape, schemes: &[Names], name: &str) -> Vec<String> {
    let tied = (shape.architecture.tied && name == "wte").then(|| HEAD.to_owned());
    let mut all: Vec<String> = schemes.iter().map(|names| names.whole(name)).chain(tied).collect();
    let wrapped = |whole: &String| {
        let form = |[prefix, wrapper]: [&str; 2]| {
            whole.strip_prefix(prefix).map(|rest| format!("{wrapper}{rest}"))
        };
        WRAPPERS.map(form)
    };
    let wrapped: Vec<String> = all.iter().flat_map(wrapped).flatten().collect();
    all.extend(all.clone().iter().map(|whole| bare(whole)));
    all.extend(wrapped);
    all
}

/// The parameters that a run with `config` trains; its model has the shape `whole`.
pub(crate) fn trained_of(whole: &DecoderShape, config: &Config) -> TrainedParams {
    match &config.optimizer.frozen[..] {
        [] => trained(&config.adapter, &config.model),
        globs => TrainedParams::AllBut(frozen_params(whole, globs)),
    }
}

/// The parameters that `globs` freeze in a model of this shape.
fn frozen_params(shape: &DecoderShape, globs: &[String]) -> FrozenParams {
    let schemes = schemes(shape);
    let units: BTreeSet<String> =
        shape.parameter_names().iter().map(|name| frozen_unit(name)).collect();
    let is_frozen = |unit: &String| {
        let names = names_of(shape, &schemes, unit);
        names.iter().any(|name| globs.iter().any(|glob| matches(glob, name)))
    };
    units.into_iter().filter(is_frozen).collect()
}
