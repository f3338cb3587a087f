//! Tensors of a file of PEFT, and the places of onebox's factors in them.

use layout::tensor_names::{HEAD, Names};
use tensor_parallel::{Decoder, FACTORS, Param};

/// Names of the factors in PEFT, in the order of [`FACTORS`].
pub(super) const PEFT_FACTORS: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
/// Prefix of all names in PEFT's files.
const PREFIX: &str = "base_model.model.";
/// The part of a name before the number of an expert.
const EXPERTS: &str = ".moe.experts.";

/// A matrix of a file of PEFT. It holds one factor of onebox, or the same factor of all experts of a layer.
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
/// `column_step` j).
#[derive(Clone, Copy, PartialEq, Debug)]
struct Place {
    row: usize,
    row_step: usize,
    column: usize,
    column_step: usize,
}

impl Place {
    /// A matrix whose rows begin at `row`, with the same columns.
    const fn below(row: usize) -> Self {
        Self { row, row_step: 1, column: 0, column_step: 1 }
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
    let mut all: Vec<PeftTensor<'_>> = Vec::new();
    let params = decoder.segments().iter().flat_map(|layout| &layout.params);
    for (number, param) in params.enumerate() {
        let (name, shape, place) = match ExpertFactor::new(&param.name) {
            None => (name_of_linear(names, param), param.global, Place::below(0)),
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
        let place = Place { row, row_step, column: self.expert, column_step: experts };
        (name, (parts * rows, columns * experts), place)
    }
}

/// Name of a factor of a linear in PEFT's file.
fn name_of_linear(names: Names, param: &Param) -> String {
    let of_factor = FACTORS.iter().zip(PEFT_FACTORS).find_map(|(ours, theirs)| {
        let linear = param.name.strip_suffix(ours)?;
        let weight = names.whole(&format!("{linear}weight"));
        Some(format!("{PREFIX}{}{theirs}", weight.strip_suffix("weight")?))
    });
    assert_ne!(param.name, HEAD, "the output projection has no adapter");
    of_factor.unwrap_or_else(|| unreachable!("{} is a factor of an adapter", param.name))
}

impl PlacedFactor<'_> {
    /// Indices of the factor's elements, in their order, in a tensor with `columns` columns.
    fn elements(&self, columns: usize) -> impl Iterator<Item = usize> {
        let (rows, own) = self.param.global;
        let Place { row, row_step, column, column_step } = self.place;
        (0..rows * own).map(move |at| {
            let (i, j) = (at / own, at % own);
            (row + row_step * i) * columns + column + column_step * j
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
