//! Tensors of a file of PEFT, and the places of onebox's factors in them.

use super::row_place::{RowPlace, RowRuns};
use layout::tensor_names::{HEAD, Names};
use std::collections::BTreeMap;
use tensor_parallel::{Decoder, FACTORS, Param};

/// Names of the factors in PEFT, in the order of [`FACTORS`].
pub(super) const PEFT_FACTORS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
/// Prefix of all names in PEFT's files.
pub(super) const PREFIX: &str = "base_model.model.";
/// The part of a name before the number of an expert.
const EXPERTS: &str = ".moe.experts.";

/// A matrix of a file of PEFT. It holds one factor of onebox, the second factors of linears that are one
/// tensor in transformers, or the same factor of all experts of a layer.
#[derive(Debug)]
pub(super) struct PeftTensor<'a> {
    pub(super) name: String,
    /// Rows and columns.
    pub(super) shape: (usize, usize),
    pub(super) factors: Vec<PlacedFactor<'a>>,
}

/// A factor of onebox in a tensor of PEFT.
#[derive(Debug)]
pub(super) struct PlacedFactor<'a> {
    /// Number of the factor among the parameters of its model that are trained.
    pub(super) number: usize,
    pub(super) param: &'a Param,
    place: Place,
}

/// Place of a matrix in a larger one: its element (i, j) is the element (row + `row_step` i, column +
/// `column_step` j). With `runs` its rows are equally long runs, which are equally far apart.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Place {
    row: usize,
    row_step: usize,
    column: usize,
    column_step: usize,
    runs: Option<RowRuns>,
}

impl Place {
    /// A matrix whose rows begin at `row`, with the same columns.
    const fn below(row: usize) -> Self {
        Self { row, row_step: 1, column: 0, column_step: 1, runs: None }
    }

    /// Number of the row in the larger matrix of row `i` of the matrix.
    const fn row(self, i: usize) -> usize {
        self.row
            + match self.runs {
                Some(RowRuns { rows, stride }) => i / rows * stride + i % rows,
                None => self.row_step * i,
            }
    }
}

/// A factor of an expert. One tensor of PEFT holds a factor of all experts of a layer: rows of first
/// factors stand below each other, and columns of second factors alternate between the experts.
struct ExpertFactor<'a> {
    layer: &'a str,
    expert: usize,
    /// `gate_up`, `gate`, `up` or `proj`.
    matrix: &'a str,
    /// Index in [`FACTORS`].
    which: usize,
}

impl<'a> ExpertFactor<'a> {
    /// `None` for another factor.
    fn new(name: &'a str) -> Option<Self> {
        let (layer, rest) = name.split_once(EXPERTS)?;
        let mut parts = rest.split('.');
        let (expert, matrix, factor) = (parts.next()?, parts.next()?, parts.next()?);
        let which = FACTORS.iter().position(|of| *of == factor)?;
        Some(Self { layer, expert: expert.parse().ok()?, matrix, which })
    }
}

/// The tensors of PEFT for the adapters of `decoder`, in the order of their first factors.
pub(super) fn tensors(names: Names, decoder: &Decoder) -> Vec<PeftTensor<'_>> {
    let experts = decoder.shape().experts.map_or(1, |experts| experts.count);
    // PEFT puts its wrapper of gates and ups into that of the matrices back.
    let both = decoder
        .shape()
        .adapters()
        .is_some_and(|adapters| adapters.targets.experts_gate_up && adapters.targets.experts_down);
    let weights = || decoder.segments().iter().flat_map(|layout| layout.base_params());
    let rows: BTreeMap<&str, usize> =
        weights().map(|param| (param.name.as_str(), param.global.0)).collect();
    let weights: BTreeMap<&str, &Param> =
        weights().map(|param| (param.name.as_str(), param)).collect();
    let mut all: Vec<PeftTensor<'_>> = Vec::new();
    let params = decoder.segments().iter().flat_map(|layout| &layout.params);
    for (number, param) in params.enumerate() {
        let (name, shape, place) = match ExpertFactor::new(&param.name) {
            None => {
                let (weight, factor) = weight_of_factor(param);
                let weight = weights[&*weight];
                let name = name_of_linear(names, weight, factor);
                // A second factor has the rows of its weight.
                let place = RowPlace::of(names, weight, &rows);
                match factor == PEFT_FACTORS[0] {
                    true => (name, param.global, Place::below(0)),
                    false => (
                        name,
                        (place.rows, param.global.1),
                        Place { runs: place.runs, ..Place::below(place.first) },
                    ),
                }
            }
            Some(of) => {
                let (name, shape, place) = of.placed(names, param, experts, both);
                (name, shape, place)
            }
        };
        let factor = PlacedFactor { number, param, place };
        match all.iter_mut().rev().find(|tensor| tensor.name == name) {
            Some(tensor) => tensor.factors.push(factor),
            None => all.push(PeftTensor { name, shape, factors: vec![factor] }),
        }
    }
    all
}

impl ExpertFactor<'_> {
    /// Name and shape of the tensor of PEFT that holds `param`, and the place of `param` there. `both`:
    /// whether all matrices of the experts have adapters.
    fn placed(
        &self,
        names: Names,
        param: &Param,
        experts: usize,
        both: bool,
    ) -> (String, (usize, usize), Place) {
        let (rows, columns) = param.global;
        let is_back = self.matrix == "proj";
        let stack = if is_back { "proj" } else { "gate" };
        let weight = format!("{}{EXPERTS}0.{stack}.weight", self.layer);
        let alternate = names.stack_place(&weight).is_some_and(|place| place.interleaved);
        let stack = names.whole(&weight);
        let module = stack.rsplit_once('.').map_or(&*stack, |(module, _)| module);
        let inner = if both && !is_back { ".base_layer" } else { "" };
        let name = format!("{PREFIX}{module}{inner}.{}", PEFT_FACTORS[self.which]);
        if self.which == 0 {
            return (name, (experts * rows, columns), Place::below(self.expert * rows));
        }
        // Rows of gates stand above those of ups, or the rows of both alternate.
        let (part, parts) = match self.matrix {
            "gate" => (0, 2),
            "up" => (1, 2),
            _ => (0, 1),
        };
        let (row, row_step) = if alternate { (part, parts) } else { (part * rows, 1) };
        let place = Place { row, row_step, column: self.expert, column_step: experts, runs: None };
        (name, (parts * rows, columns * experts), place)
    }
}

/// Name of the weight of a factor, and the factor's last part in PEFT.
fn weight_of_factor(param: &Param) -> (String, &'static str) {
    let of_factor = FACTORS.iter().zip(PEFT_FACTORS).find_map(|(ours, theirs)| {
        Some((format!("{}weight", param.name.strip_suffix(ours)?), theirs))
    });
    of_factor.unwrap_or_else(|| unreachable!("{} is a factor of an adapter", param.name))
}

/// Name in PEFT's file of a factor of the linear with this weight.
fn name_of_linear(names: Names, weight: &Param, factor: &str) -> String {
    let theirs = names.whole(&weight.name);
    assert_ne!(theirs, HEAD, "the output projection has no adapter");
    let module = theirs.strip_suffix("weight");
    let module = module.unwrap_or_else(|| unreachable!("{} is a weight", weight.name));
    format!("{PREFIX}{module}{factor}")
}

impl PlacedFactor<'_> {
    /// Indices of the factor's elements, in their order, in a tensor with `columns` columns.
    fn elements(&self, columns: usize) -> impl Iterator<Item = usize> {
        let (rows, own) = self.param.global;
        let Place { column, column_step, .. } = self.place;
        (0..rows * own).map(move |at| {
            let (i, j) = (at / own, at % own);
            self.place.row(i) * columns + column + column_step * j
        })
    }

    /// Writes `values` of the factor to its place in the values of `tensor`.
    pub(super) fn put(&self, values: &[f32], tensor: &PeftTensor<'_>, whole: &mut [f32]) {
        for (to, value) in self.elements(tensor.shape.1).zip(values) {
            whole[to] = *value;
        }
    }

    /// Values of the factor, cut out of the values `whole` of `tensor`.
    pub(super) fn values(&self, tensor: &PeftTensor<'_>, whole: &[f32]) -> Vec<f32> {
        self.elements(tensor.shape.1).map(|from| whole[from]).collect()
    }
}
